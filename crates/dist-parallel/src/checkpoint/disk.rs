//! The few things that checkpoints ask of a file system.
//!
//! Tests look on before each of them, and can make it fail or end the process there.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A file system.
#[derive(Clone, Default)]
pub(super) struct Disk {
    #[cfg(test)]
    pub(super) watch: Option<std::sync::Arc<Watch>>,
}

/// What a test does before an action on a path.
#[cfg(test)]
pub(super) type Watch = dyn Fn(Act, &Path) -> io::Result<()> + Send + Sync;

/// What is asked of the file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Act {
    MakeDirectory,
    List,
    Create,
    Write,
    Sync,
    SyncDirectory,
    Rename,
    Remove,
    Open,
    Read { bytes: usize },
}

impl Disk {
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "tests look on"))]
    fn before(&self, act: Act, path: &Path) -> io::Result<()> {
        #[cfg(test)]
        if let Some(watch) = &self.watch {
            return watch(act, path);
        }
        let (_, _) = (act, path);
        Ok(())
    }

    /// Makes a directory, and those that it lies in, if there is none.
    pub(super) fn make_directory(&self, path: &Path) -> io::Result<()> {
        self.before(Act::MakeDirectory, path)?;
        fs::create_dir_all(path)
    }

    /// Makes a directory, and those that it lies in, if there is none. Returns when its name is on the disk, and those of the
    /// others that were made, each before the next was.
    pub(super) fn make_lasting_directory(&self, path: &Path) -> io::Result<()> {
        if !parent(path).exists() {
            self.make_lasting_directory(parent(path))?;
        }
        self.make_directory(path)?;
        self.sync_name(path)
    }

    /// The names of what lies in a directory; nothing if there is no such directory.
    pub(super) fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.before(Act::List, path)?;
        let entries = match fs::read_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    /// Makes a file, empty if it exists.
    pub(super) fn create(&self, path: &Path) -> io::Result<File> {
        self.before(Act::Create, path)?;
        File::create(path)
    }

    pub(super) fn write(&self, file: &mut File, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.before(Act::Write, path)?;
        file.write_all(bytes)
    }

    /// Returns when what was written to a file is on the disk.
    pub(super) fn sync(&self, file: &File, path: &Path) -> io::Result<()> {
        self.before(Act::Sync, path)?;
        file.sync_all()
    }

    /// Returns when the names in a directory are on the disk.
    pub(super) fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.before(Act::SyncDirectory, path)?;
        File::open(path)?.sync_all()
    }

    /// Returns when the name of a file or directory is on the disk, in the directory that it lies in.
    pub(super) fn sync_name(&self, path: &Path) -> io::Result<()> {
        self.sync_directory(parent(path))
    }

    pub(super) fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.before(Act::Rename, to)?;
        fs::rename(from, to)
    }

    /// Removes a directory and all that lies in it, or a file.
    pub(super) fn remove(&self, path: &Path) -> io::Result<()> {
        self.before(Act::Remove, path)?;
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
    }

    pub(super) fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.before(Act::Remove, path)?;
        fs::remove_file(path)
    }

    /// Opens a file to read it, and tells its size.
    pub(super) fn open(&self, path: &Path) -> io::Result<(File, u64)> {
        self.before(Act::Open, path)?;
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        Ok((file, size))
    }

    pub(super) fn read_at(&self, file: &File, path: &Path, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.before(Act::Read { bytes: into.len() }, path)?;
        file.read_exact_at(into, at)
    }

    /// All of a file, or nothing if it is longer than `max`.
    pub(super) fn read_all(&self, path: &Path, max: u64) -> io::Result<Option<Vec<u8>>> {
        let (file, size) = self.open(path)?;
        if size > max {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        file.take(max).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }
}

/// What the name of a file or directory lies in.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

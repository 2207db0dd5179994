//! The file-system operations of checkpoints.
//!
//! Tests hook into each of them, and can make it fail or kill the process there.

use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A file system.
#[derive(Clone, Default)]
pub(super) struct Disk {
    /// `true` if the user was warned that directories cannot be synced.
    pub(super) has_warned: Arc<AtomicBool>,
    #[cfg(test)]
    pub(super) mutation_check: Option<Arc<DiskHook>>,
}

/// A test's callback before an operation on a path.
#[cfg(test)]
pub(super) type DiskHook = dyn Fn(DiskOperation, &Path) -> io::Result<()> + Send + Sync;

/// A file-system operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum DiskOperation {
    MakeDirectory,
    List,
    Create,
    Write,
    Sync,
    SyncDirectory,
    Rename,
    Remove,
    Open,
    Lock,
    Read { bytes: usize },
}

impl fmt::Display for DiskOperation {
    /// Formats the verb for errors of the form "cannot VERB PATH".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MakeDirectory => "make the directory",
            Self::List => "list the directory",
            Self::Create => "create",
            Self::Write => "write",
            Self::Sync => "sync",
            Self::SyncDirectory => "sync the directory",
            Self::Rename => "rename a directory to",
            Self::Remove => "remove",
            Self::Open => "open",
            Self::Lock => "lock",
            Self::Read { .. } => "read",
        })
    }
}

/// An error of the operating system.
#[derive(Debug)]
pub(super) struct DiskError {
    pub(super) act: DiskOperation,
    pub(super) path: PathBuf,
    pub(super) error: io::Error,
}

impl fmt::Display for DiskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {} {}: {}", self.act, self.path.display(), self.error)
    }
}

type Result<T> = std::result::Result<T, DiskError>;

/// The result of an attempt to lock a file.
pub(super) enum Locked {
    /// This process holds the lock while the file is open.
    Ours,
    /// Another process holds it.
    Theirs,
    /// The file system has no locks.
    Unsupported,
}

impl Disk {
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "tests look on"))]
    fn before(&self, act: DiskOperation, path: &Path) -> io::Result<()> {
        #[cfg(test)]
        if let Some(mutation_check) = &self.mutation_check {
            return mutation_check(act, path);
        }
        let (_, _) = (act, path);
        Ok(())
    }

    /// Runs an operation on a path. An error names both.
    fn act<T>(&self, act: DiskOperation, path: &Path, f: impl FnOnce() -> io::Result<T>) -> Result<T> {
        let done = self.before(act, path).and_then(|()| f());
        done.map_err(|error| DiskError { act, path: path.to_owned(), error })
    }

    /// Creates a directory and its parents, if missing.
    pub(super) fn make_directory(&self, path: &Path) -> Result<()> {
        self.act(DiskOperation::MakeDirectory, path, || fs::create_dir_all(path))
    }

    /// Creates a directory and its parents, if missing. Syncs the name of each to the disk before the next is created
    /// in it.
    pub(super) fn make_lasting_directory(&self, path: &Path) -> Result<()> {
        if !parent(path).exists() {
            self.make_lasting_directory(parent(path))?;
        }
        self.make_directory(path)?;
        self.sync_name(path)
    }

    /// Returns the names in a directory, or none if there is no such directory.
    pub(super) fn list(&self, path: &Path) -> Result<Vec<String>> {
        self.act(DiskOperation::List, path, || {
            let entries = match fs::read_dir(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
                entries => entries?,
            };
            entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
        })
    }

    /// Creates a file, or empties it if it exists.
    pub(super) fn create(&self, path: &Path) -> Result<File> {
        self.act(DiskOperation::Create, path, || File::create(path))
    }

    pub(super) fn write(&self, file: &mut File, path: &Path, bytes: &[u8]) -> Result<()> {
        self.act(DiskOperation::Write, path, || file.write_all(bytes))
    }

    /// Truncates an open file.
    pub(super) fn empty(&self, file: &File, path: &Path) -> Result<()> {
        self.act(DiskOperation::Write, path, || file.set_len(0))
    }

    /// Syncs a file to the disk.
    pub(super) fn sync(&self, file: &File, path: &Path) -> Result<()> {
        self.act(DiskOperation::Sync, path, || file.sync_all())
    }

    /// Syncs the names in a directory to the disk. Some file systems cannot sync a directory. They return EINVAL
    /// (CIFS before Linux 4.17, vboxsf), ENOTSUP or ENOSYS. Then a warning is logged, once.
    pub(super) fn sync_directory(&self, path: &Path) -> Result<()> {
        use io::ErrorKind::{InvalidInput, Unsupported};
        let directory = self.act(DiskOperation::Open, path, || File::open(path))?;
        match self.act(DiskOperation::SyncDirectory, path, || directory.sync_all()) {
            Err(error) if matches!(error.error.kind(), InvalidInput | Unsupported) => {
                if !self.has_warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!("{error}; the last checkpoint may be lost if this host loses power");
                }
                Ok(())
            }
            synced => synced,
        }
    }

    /// Syncs the name of a file or directory, in its parent directory.
    pub(super) fn sync_name(&self, path: &Path) -> Result<()> {
        self.sync_directory(parent(path))
    }

    pub(super) fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.act(DiskOperation::Rename, to, || fs::rename(from, to))
    }

    /// Removes a directory with its contents, or a file.
    pub(super) fn remove(&self, path: &Path) -> Result<()> {
        self.act(DiskOperation::Remove, path, || {
            if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
        })
    }

    pub(super) fn remove_file(&self, path: &Path) -> Result<()> {
        self.act(DiskOperation::Remove, path, || fs::remove_file(path))
    }

    /// Opens a file for reading and returns its size.
    pub(super) fn open(&self, path: &Path) -> Result<(File, u64)> {
        self.act(DiskOperation::Open, path, || {
            let file = File::open(path)?;
            let size = file.metadata()?.len();
            Ok((file, size))
        })
    }

    /// Opens a file for reading and writing, creates it if missing, and tries to lock it without waiting.
    pub(super) fn open_locked(&self, path: &Path) -> Result<(File, Locked)> {
        use io::ErrorKind::{InvalidInput, Unsupported};
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(path);
        let file = self.act(DiskOperation::Open, path, open)?;
        // The error of a file system without locks. ENOLCK has no kind of its own.
        let has_none = |error: &io::Error| {
            matches!(error.kind(), InvalidInput | Unsupported) || error.raw_os_error() == Some(ENOLCK)
        };
        let locked = self.act(DiskOperation::Lock, path, || match file.try_lock() {
            Ok(()) => Ok(Locked::Ours),
            Err(TryLockError::WouldBlock) => Ok(Locked::Theirs),
            Err(TryLockError::Error(error)) => Err(error),
        });
        match locked {
            Err(error) if has_none(&error.error) => Ok((file, Locked::Unsupported)),
            locked => Ok((file, locked?)),
        }
    }

    pub(super) fn read_at(&self, file: &File, path: &Path, at: u64, into: &mut [u8]) -> Result<()> {
        self.act(DiskOperation::Read { bytes: into.len() }, path, || file.read_exact_at(into, at))
    }

    /// Returns the contents of a file, or `None` if it is longer than `max`.
    pub(super) fn read_all(&self, path: &Path, max: u64) -> Result<Option<Vec<u8>>> {
        let (file, size) = self.open(path)?;
        if size > max {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        let read = file.take(max).read_to_end(&mut bytes);
        let failed = |error| DiskError {
            act: DiskOperation::Read { bytes: bytes.len() },
            path: path.to_owned(),
            error,
        };
        read.map_err(failed)?;
        Ok(Some(bytes))
    }
}

/// Returns the parent directory of a file or directory.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// "No locks available" on Linux. On other systems this lock failure is an error.
const ENOLCK: i32 = 37;

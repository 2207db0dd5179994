//! The secret of a job: a file that only this user can read. A file that was created for the job is removed
//! after the job.
//!
//! If the launcher is killed, the front process removes the file, and vice versa.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use dist_transport::process::Secret;
use rustix::process::Pid;

use crate::Error;

/// A file with a secret. If it was created for the job, drop removes it.
#[derive(Debug)]
pub(super) struct SecretFile {
    path: PathBuf,
    secret: Secret,
    is_ours: bool,
}

impl SecretFile {
    /// Reads a secret that the user provides: from a file, or with `fd:N` from an open descriptor. A pipe can
    /// be read only once, so its content is written to a file with this name for the ranks.
    pub(super) fn given(path: &Path, name: &str) -> Result<Self, Error> {
        let Some(number) = path.as_os_str().as_bytes().strip_prefix(b"fd:") else {
            return Ok(Self { path: absolute(path)?, secret: Secret::from_file(path)?, is_ours: false });
        };
        let failed = |source| Error::Read { path: path.to_owned(), source };
        let source = File::open(Path::new("/dev/fd").join(OsStr::from_bytes(number))).map_err(failed)?;
        let mut bytes = Vec::new();
        source.take(GIVEN_BYTES_MAX).read_to_end(&mut bytes).map_err(failed)?;
        Self::create_in_one_of(folders(), name, &Secret::from_bytes(&bytes)?, &bytes)
    }

    /// Generates a secret and writes it to a file with this name.
    pub(super) fn create(name: &str) -> Result<Self, Error> {
        let (secret, text) = Secret::generate()?;
        Self::create_in_one_of(folders(), name, &secret, text.as_bytes())
    }

    /// Writes a secret of another machine to a file with this name.
    pub(super) fn received(name: &str, text: &str) -> Result<Self, Error> {
        Self::create_in_one_of(folders(), name, &Secret::from_bytes(text.as_bytes())?, text.as_bytes())
    }

    /// Creates the file in the first possible folder. If no folder is possible, returns the error of the
    /// first.
    fn create_in_one_of(
        folders: impl IntoIterator<Item = PathBuf>,
        name: &str,
        secret: &Secret,
        bytes: &[u8],
    ) -> Result<Self, Error> {
        let mut tries =
            folders.into_iter().map(|folder| Self::create_in(&folder, name, secret.clone(), bytes));
        let first = tries.next().expect("the list of folders is not empty");
        first.or_else(|error| tries.find_map(Result::ok).ok_or(error))
    }

    fn create_in(folder: &Path, name: &str, secret: Secret, bytes: &[u8]) -> Result<Self, Error> {
        let path = folder.join(format!("{name}{ENDING}"));
        let failed = |source| Error::SecretFile { path: path.clone(), source };
        // `create_new` does not follow a symbolic link of another user.
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).map_err(failed)?;
        let written = file.write_all(bytes).map_err(failed);
        let this = Self { path: path.clone(), secret, is_ours: true };
        written.map(|()| this)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn secret(&self) -> &Secret {
        &self.secret
    }
}

/// Suffix of the file names.
const ENDING: &str = ".secret";

/// Returns a unique name for a job or its file.
pub(super) fn own_name() -> String {
    format!("{}{:x}", beginning(rustix::process::getpid()), unique())
}

/// Returns the prefix of the names that a process creates.
fn beginning(process: Pid) -> String {
    format!("dist-{}-", process.as_raw_nonzero())
}

/// Returns a number that distinguishes two jobs of one process, and this process from an earlier one with the
/// same id.
fn unique() -> u128 {
    use std::time::SystemTime;
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_nanos())
}

/// Removes the secret files of a process that has ended or is about to end.
pub(super) fn remove_files_of(process: Pid) {
    let beginning = beginning(process);
    for folder in folders() {
        // A folder that cannot be read contains no file of this user.
        for file in fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = file.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(&beginning) && name.ends_with(ENDING) {
                // Removal fails if the file belongs to another user.
                let _ = fs::remove_file(file.path());
            }
        }
    }
}

/// Maximum size of a secret. Ranks do not read more either.
const GIVEN_BYTES_MAX: u64 = 4096;

/// Returns the folders for secret files: the user's runtime folder, then the common ones for temporary files.
/// Some may be owned by another user or be read-only, as in a container. Variables that are empty or hold a
/// relative path are ignored.
fn folders() -> impl Iterator<Item = PathBuf> {
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let all = own.into_iter().chain([std::env::temp_dir(), "/tmp".into(), "/dev/shm".into()]);
    all.filter(|folder| folder.is_absolute())
}

/// Returns the absolute path of a file, which stays valid if the program changes its working directory.
fn absolute(path: &Path) -> Result<PathBuf, Error> {
    std::path::absolute(path).map_err(|source| Error::SecretFile { path: path.to_owned(), source })
}

impl Drop for SecretFile {
    fn drop(&mut self) {
        if self.is_ours {
            // If another process has removed the file already, nothing is left to do.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn create_in_one_of(folders: impl IntoIterator<Item = PathBuf>) -> Result<SecretFile, Error> {
        let (secret, text) = Secret::generate()?;
        SecretFile::create_in_one_of(folders, "dist-1", &secret, text.as_bytes())
    }

    #[test]
    fn a_file_for_the_job_is_private_and_goes_away_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = create_in_one_of([folder.path().to_owned()]).unwrap();
        assert_eq!(fs::metadata(file.path()).unwrap().permissions().mode() & 0o777, 0o600);
        let given = SecretFile::given(file.path(), "dist-2").unwrap();
        assert!(given.secret() == file.secret());
        drop(given);
        assert!(file.path().exists());
        drop(file);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_for_the_job_is_in_the_first_writable_folder() {
        let folder = tempfile::tempdir().unwrap();
        let nowhere = folder.path().join("nowhere");
        let folders = [nowhere.clone(), folder.path().to_owned()];
        let file = create_in_one_of(folders).unwrap();
        assert_eq!(file.path().parent(), Some(folder.path()));
        let error = create_in_one_of([nowhere.clone(), nowhere.join("further")]).unwrap_err();
        let Error::SecretFile { path, .. } = error else { panic!("{error}") };
        assert_eq!(path.parent(), Some(&*nowhere));
    }

    #[test]
    fn an_existing_file_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("dist-1.secret"), "known to another user").unwrap();
        let error = create_in_one_of([folder.path().to_owned()]).unwrap_err();
        assert!(matches!(error, Error::SecretFile { .. }), "{error}");
    }
}

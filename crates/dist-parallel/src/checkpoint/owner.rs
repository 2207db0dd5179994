//! The ownership of a checkpoint directory: one job at a time saves to it.
//!
//! The file `owner.json` in the directory names the job. It is locked (`flock`) while the job's `Checkpoints` exist,
//! so the system unlocks it when the job dies. Some network file systems have no locks, or locks that other hosts do
//! not see. For these, the file is read again before each save and before each checkpoint gets its name. A job that
//! finds another's record there stops saving. The file is never removed; the next job overwrites the record of a dead
//! one.

use std::collections::HashSet;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::disk::{Disk, DiskError, Locked};
use super::{CheckpointError, CheckpointProblem};

/// The ownership of a directory. `None` until the first save.
#[derive(Default)]
pub(super) struct Owner(Option<DirectoryLock>);

/// The exclusive right to save to a directory.
struct DirectoryLock {
    record: OwnerRecord,
    /// The file, locked if the file system supports it.
    _file: File,
}

/// The description of the owner of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct OwnerRecord {
    /// A random number that identifies the record.
    token: u64,
    host: String,
    pid: u32,
    /// The scope of process numbers: the boot of the host and the process namespace. `None` if the system does not
    /// tell.
    pid_namespace: Option<String>,
    /// The start time of the process in ticks of the host's clock. Another process can reuse its number later.
    process_started: Option<u64>,
    job: Option<String>,
    /// Seconds since 1970.
    since: u64,
}

impl Owner {
    /// Claims the directory, which must exist, for this job. Returns a number that no other job has.
    pub(super) fn claim(&mut self, disk: &Disk, directory: &Path) -> Result<u64, CheckpointError> {
        let path = directory.join(OWNER);
        if let Some(held) = &self.0 {
            match read(disk, &path)? {
                // The directory was removed and created again.
                OwnerFile::Nothing => self.0 = None,
                found => return held.record.check(directory, found).map(|()| held.record.token),
            }
        }
        let failed = |error: DiskError| CheckpointError::unwritten(directory, &error);
        let (mut file, locked) = disk.open_locked(&path).map_err(failed)?;
        let found = read(disk, &path)?;
        let is_free = match (locked, &found) {
            (Locked::Ours, _) | (Locked::Unsupported, OwnerFile::Nothing | OwnerFile::Unreadable) => true,
            (Locked::Theirs, OwnerFile::Record(record)) => record.is_known_to_be_dead(),
            (Locked::Unsupported, OwnerFile::Record(record)) => !record.is_known_to_live(),
            (Locked::Theirs, _) => false,
        };
        if !is_free {
            return Err(in_use(directory, &found));
        }
        if let OwnerFile::Record(record) = found {
            tracing::debug!(
                directory = %directory.display(),
                "{} has already saved to the directory",
                record.describe()
            );
        }
        let record = OwnerRecord::of_this_process();
        let json = serde_json::to_vec(&record).map_err(|error| CheckpointError::malformed(&path, error))?;
        disk.empty(&file, &path).map_err(failed)?;
        disk.write(&mut file, &path, &json).map_err(failed)?;
        // Makes the record visible to other hosts.
        disk.sync(&file, &path).map_err(failed)?;
        let token = record.token;
        live_records().insert(token);
        self.0 = Some(DirectoryLock { record, _file: file });
        Ok(token)
    }

    /// Returns an error if another job has taken the directory since it was claimed.
    pub(super) fn check(&self, disk: &Disk, directory: &Path) -> Result<(), CheckpointError> {
        let Some(held) = &self.0 else { return Ok(()) };
        held.record.check(directory, read(disk, &directory.join(OWNER))?)
    }
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        live_records().remove(&self.record.token);
    }
}

impl OwnerRecord {
    fn of_this_process() -> Self {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
        let pid = std::process::id();
        Self {
            token: RandomState::new().hash_one((pid, since)),
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            pid,
            pid_namespace: pid_namespace(),
            process_started: process_started(pid),
            job: variable("DIST_JOB_ID").or_else(|| variable("TORCHELASTIC_RUN_ID")),
            since,
        }
    }

    fn check(&self, directory: &Path, found: OwnerFile) -> Result<(), CheckpointError> {
        match found {
            OwnerFile::Record(record) if record == *self => Ok(()),
            found => Err(in_use(directory, &found)),
        }
    }

    /// Returns `true` if the process is running on this host and has not released the directory.
    fn is_known_to_live(&self) -> bool {
        if !self.is_of_here() || self.process_started.is_none() {
            return false;
        }
        let is_own = self.pid == std::process::id();
        process_started(self.pid) == self.process_started && (!is_own || live_records().contains(&self.token))
    }

    /// Returns `true` if the process has ended on this host. Then a child that it left behind holds its lock.
    fn is_known_to_be_dead(&self) -> bool {
        self.is_of_here()
            && self.process_started.is_some()
            && process_started(self.pid) != self.process_started
    }

    fn is_of_here(&self) -> bool {
        self.pid_namespace.is_some() && self.pid_namespace == pid_namespace()
    }

    fn describe(&self) -> String {
        let job = self.job.as_ref().map(|job| format!(" of job {job}")).unwrap_or_default();
        let is_own = self.is_of_here() && self.pid == std::process::id();
        let of =
            if is_own { ", this same process with another trainer or another `Checkpoints`," } else { "" };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
        let since = now.saturating_sub(self.since);
        format!("process {} on host {}{job}{of} (for {since} s)", self.pid, self.host)
    }
}

/// The contents of the file.
enum OwnerFile {
    Nothing,
    /// No valid record: a process is writing it, or died while writing.
    Unreadable,
    Record(OwnerRecord),
}

fn read(disk: &Disk, path: &Path) -> Result<OwnerFile, CheckpointError> {
    let bytes = match disk.read_all(path, RECORD_BYTES_MAX) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return Ok(OwnerFile::Unreadable),
        Err(error) if error.error.kind() == std::io::ErrorKind::NotFound => return Ok(OwnerFile::Nothing),
        Err(error) => return Err(CheckpointError::unread(path, &error)),
    };
    if bytes.is_empty() {
        return Ok(OwnerFile::Nothing);
    }
    Ok(serde_json::from_slice(&bytes).map_or(OwnerFile::Unreadable, OwnerFile::Record))
}

fn in_use(directory: &Path, found: &OwnerFile) -> CheckpointError {
    let owner = match found {
        OwnerFile::Record(record) => record.describe(),
        OwnerFile::Nothing | OwnerFile::Unreadable => "another process".to_owned(),
    };
    CheckpointError::new(directory, CheckpointProblem::InUse { owner })
}

/// Returns the scope of process numbers: the boot of the host and the process namespace.
fn pid_namespace() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("{} {}", boot.trim(), namespace.display()))
}

/// Returns the start time of a process in ticks since boot. `None` if there is no such process.
fn process_started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, can contain anything. The time is the 22nd field, which is the 20th after the name.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

/// Returns the records of this process whose `Checkpoints` exist, which file systems without locks need.
fn live_records() -> MutexGuard<'static, HashSet<u64>> {
    static LIVING: LazyLock<Mutex<HashSet<u64>>> = LazyLock::new(Mutex::default);
    LIVING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The name of the file that names the owner.
pub(super) const OWNER: &str = "owner.json";

const RECORD_BYTES_MAX: u64 = 1 << 16;

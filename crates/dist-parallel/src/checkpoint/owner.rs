//! Which job saves to a directory of checkpoints: one at a time.
//!
//! The file `owner.json` in the directory names the job, and is locked (`flock`) as long as the job's `Checkpoints` exist, so
//! that the system unlocks it when the job dies. Some network file systems have no locks, or locks that other hosts do not see.
//! For these, the file is read again before each save and before each checkpoint is given its name: a job that finds another's
//! record there saves no more. The file is never removed: what a dead job has left in it is overwritten by the next.

use std::collections::HashSet;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::disk::{Disk, DiskError, Locked};
use super::{CheckpointError, CheckpointProblem};

/// What this job has of a directory: nothing until its first save.
#[derive(Default)]
pub(super) struct Owner(Option<DirectoryLock>);

/// The right to save to a directory.
struct DirectoryLock {
    record: OwnerRecord,
    /// Locked where the file system can do that.
    _file: File,
}

/// Who saves to a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct OwnerRecord {
    /// A random number, which tells this record from every other.
    token: u64,
    host: String,
    pid: u32,
    /// What its number is unique in: this start of the host, and its process namespace. `None` if the system does not say.
    pid_namespace: Option<String>,
    /// When the process started, in ticks of the host's clock: another process can have its number later.
    process_started: Option<u64>,
    job: Option<String>,
    /// Seconds since 1970.
    since: u64,
}

impl Owner {
    /// Makes sure that this job may save to the directory, which exists, and that no other may. Returns a number that no other
    /// job has.
    pub(super) fn claim(&mut self, disk: &Disk, directory: &Path) -> Result<u64, CheckpointError> {
        let path = directory.join(OWNER);
        if let Some(held) = &self.0 {
            match read(disk, &path)? {
                // The directory was removed and made again.
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
                "{} has saved to the directory before",
                record.describe()
            );
        }
        let record = OwnerRecord::of_this_process();
        let json = serde_json::to_vec(&record).map_err(|error| CheckpointError::malformed(&path, error))?;
        disk.empty(&file, &path).map_err(failed)?;
        disk.write(&mut file, &path, &json).map_err(failed)?;
        // So that other hosts see it.
        disk.sync(&file, &path).map_err(failed)?;
        let token = record.token;
        live_records().insert(token);
        self.0 = Some(DirectoryLock { record, _file: file });
        Ok(token)
    }

    /// Makes sure that no other job has taken the directory since it was claimed.
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

    /// Whether the process runs here, and has not given the directory up.
    fn is_known_to_live(&self) -> bool {
        if !self.is_of_here() || self.process_started.is_none() {
            return false;
        }
        let is_own = self.pid == std::process::id();
        process_started(self.pid) == self.process_started && (!is_own || live_records().contains(&self.token))
    }

    /// Whether the process has run here and does not any more: its lock is held by a child that it has left behind.
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
        format!("process {} on host {}{job}{of} (since {since} s)", self.pid, self.host)
    }
}

/// What is in the file.
enum OwnerFile {
    Nothing,
    /// No record: somebody writes it, or died while writing it.
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

/// What process numbers are unique in: this start of the host, and the process namespace.
fn pid_namespace() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("{} {}", boot.trim(), namespace.display()))
}

/// When a process started, in ticks since the host did; `None` if there is no such process.
fn process_started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything; the time is the 22nd field, and the 20th behind the name.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

/// The records of this process whose `Checkpoints` exist: where there are no locks, nothing else tells.
fn live_records() -> MutexGuard<'static, HashSet<u64>> {
    static LIVING: LazyLock<Mutex<HashSet<u64>>> = LazyLock::new(Mutex::default);
    LIVING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The name of the file that says who saves to a directory.
pub(super) const OWNER: &str = "owner.json";

const RECORD_BYTES_MAX: u64 = 1 << 16;

//! The directory of a training's checkpoints.
//!
//! A checkpoint is a directory `checkpoint-NUMBER-step-STEP`. The number counts all saves, so the newest checkpoint
//! is known regardless of its step. While a checkpoint is written or removed, its name ends in a number of its job
//! and `.tmp`. A rename makes it exist, and another ends it.

use std::path::{Path, PathBuf};

use super::CheckpointError;
use super::disk::{Disk, DiskError};
use super::owner::Owner;

/// One checkpoint of the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    pub(super) number: u64,
    pub(super) step: u64,
}

impl Name {
    pub(super) fn parse(name: &str) -> Option<Self> {
        let (number, step) = name.strip_prefix("checkpoint-")?.split_once("-step-")?;
        let parsed = Self { number: number.parse().ok()?, step: step.parse().ok()? };
        (parsed.directory() == name).then_some(parsed)
    }

    pub(super) fn directory(self) -> String {
        format!("checkpoint-{}-step-{}", self.number, self.step)
    }
}

/// Returns the checkpoints in a directory, oldest first.
pub(super) fn list(disk: &Disk, directory: &Path) -> Result<Vec<Name>, CheckpointError> {
    let all = disk.list(directory).map_err(|error| CheckpointError::unread(directory, &error))?;
    let mut names: Vec<Name> = all.iter().filter_map(|name| Name::parse(name)).collect();
    names.sort_unstable();
    Ok(names)
}

/// A checkpoint that is incomplete or being removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unfinished {
    pub(super) name: Name,
    /// The number of the job that writes it. Two jobs that both claim the directory therefore never write to one
    /// file.
    pub(super) owner: u64,
}

impl Unfinished {
    pub(super) fn path(self, directory: &Path) -> PathBuf {
        directory.join(format!("{}.{:016x}{TEMPORARY}", self.name.directory(), self.owner))
    }

    fn parse(name: &str) -> Option<Self> {
        let (name, owner) = name.strip_suffix(TEMPORARY)?.rsplit_once('.')?;
        Some(Self { name: Name::parse(name)?, owner: u64::from_str_radix(owner, 16).ok()? })
    }
}

/// Creates an empty directory for the next checkpoint, with a new number. Leftovers of an earlier attempt are removed
/// if possible.
pub(super) fn begin(
    disk: &Disk,
    directory: &Path,
    step: u64,
    owner: &mut Owner,
) -> Result<Unfinished, CheckpointError> {
    let failed = |error: DiskError| CheckpointError::unwritten(directory, &error);
    disk.make_lasting_directory(directory).map_err(failed)?;
    let owner = owner.claim(disk, directory)?;
    let all = disk.list(directory).map_err(failed)?;
    let mut names: Vec<Name> = all.iter().filter_map(|name| Name::parse(name)).collect();
    for left_behind in all.iter().filter_map(|name| Unfinished::parse(name)) {
        let path = left_behind.path(directory);
        if let Err(error) = disk.remove(&path) {
            // A process may be reading it. Its number is not reused, so it blocks nothing.
            tracing::warn!(%error, "leftovers of an earlier attempt could not be removed");
            names.push(left_behind.name);
        }
    }
    let latest = names.into_iter().max();
    let number = latest.map_or(0, |name| name.number).saturating_add(1);
    let unfinished = Unfinished { name: Name { number, step }, owner };
    let path = unfinished.path(directory);
    disk.make_directory(&path).map_err(|error| CheckpointError::unwritten(&path, &error))?;
    Ok(unfinished)
}

/// Makes a checkpoint exist whose files are all on the disk. If the existence cannot be confirmed, the checkpoint is
/// regarded as missing.
pub(super) fn commit(disk: &Disk, directory: &Path, unfinished: Unfinished) -> Result<(), CheckpointError> {
    let (from, to) = (unfinished.path(directory), directory.join(unfinished.name.directory()));
    let failed = |error: DiskError| CheckpointError::unwritten(&to, &error);
    disk.sync_directory(&from).map_err(failed)?;
    disk.rename(&from, &to).map_err(failed)?;
    disk.sync_directory(directory).map_err(|error| {
        if let Err(error) = disk.rename(&to, &from) {
            tracing::warn!(%error, "a checkpoint exists, but it may be lost if its host crashes");
        }
        failed(error)
    })
}

/// Removes all checkpoints but the last `keep`.
pub(super) fn prune(disk: &Disk, directory: &Path, keep: usize, owner: u64) -> Result<(), CheckpointError> {
    let names = list(disk, directory)?;
    for &name in &names[..names.len().saturating_sub(keep)] {
        // A checkpoint under its own name is always complete, so it is renamed first.
        let temporary = Unfinished { name, owner }.path(directory);
        let renamed = disk.rename(&directory.join(name.directory()), &temporary);
        renamed
            .and_then(|()| disk.sync_directory(directory))
            .and_then(|()| disk.remove(&temporary))
            .map_err(|error| CheckpointError::unwritten(&temporary, &error))?;
    }
    Ok(())
}

const TEMPORARY: &str = ".tmp";

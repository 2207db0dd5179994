//! Limits of open files: the launcher raises its limit as far as the system permits, and ranks get the
//! original limit.

use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::Error;

/// Environment variable with a rank's limit of open files.
pub(super) const FILES: &str = "DISTCTL_FILES";

/// Generous estimate of the launcher's open files besides those of its ranks.
const OTHERS: u64 = 32;

/// Returns the number of files that the launcher needs: two pipes for each of its ranks, one connection to
/// each of the `hosted` ranks whose coordinator it is, and the logs.
pub(crate) const fn needed(ranks: usize, hosted: usize, logs: usize) -> u64 {
    2 * ranks as u64 + hosted as u64 + logs as u64 + OTHERS
}

/// The limit of open files before [`raise`](Self::raise).
#[derive(Debug)]
pub(super) struct OriginalLimit(Option<u64>);

impl OriginalLimit {
    /// Raises this process's limit to the maximum.
    pub(super) fn raise() -> Self {
        let limit = getrlimit(Resource::Nofile);
        // If that is refused, the limit stays as it is.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
        Self(limit.current)
    }

    /// Passes the original limit to a rank.
    pub(super) fn set_env(&self, command: &mut Command) {
        command.envs(self.0.map(|files| (FILES, files.to_string())));
    }
}

/// Returns an error if the launcher's limit is too low for its ranks, before any rank is started.
pub(super) fn check(ranks: usize, hosted: usize, logs: usize) -> Result<(), Error> {
    let (needed, limit) = (needed(ranks, hosted, logs), getrlimit(Resource::Nofile).current);
    match limit.filter(|&limit| limit < needed) {
        Some(limit) => Err(Error::Files { ranks, needed, limit }),
        None => Ok(()),
    }
}

/// Restores the limit that the launcher had before it raised its own.
pub(super) fn restore() {
    let files = std::env::var(FILES).ok().and_then(|files| files.parse().ok());
    if let Some(current) = files {
        // A lower limit is always allowed.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(current), ..getrlimit(Resource::Nofile) });
    }
}

//! How many files may be open: in the launcher as many as the system permits, in ranks as many as before.

use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::Error;

/// Tells a rank's process how many it may have open.
pub(super) const FILES: &str = "DISTCTL_FILES";

/// Files that a launcher has open beside those of its ranks, by a generous guess.
const OTHERS: u64 = 32;

/// How many files the launcher of so many ranks may have open at once: two pipes for each of them, a connection to each
/// of those, on any machine, whose coordinator it hosts, and what keeps their output.
pub(crate) const fn needed(ranks: usize, hosted: usize, logs: usize) -> u64 {
    2 * ranks as u64 + hosted as u64 + logs as u64 + OTHERS
}

/// How many this process might have open before it asked for more.
#[derive(Debug)]
pub(super) struct Before(Option<u64>);

impl Before {
    /// Lets this process have as many open as it can.
    pub(super) fn raise() -> Self {
        let limit = getrlimit(Resource::Nofile);
        // Where that is refused, the limit stays as it is.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
        Self(limit.current)
    }

    /// Gives a rank what this process was given.
    pub(super) fn tell(&self, command: &mut Command) {
        command.envs(self.0.map(|files| (FILES, files.to_string())));
    }
}

/// Says that so many ranks are too many for one launcher, before any is started.
pub(super) fn check(ranks: usize, hosted: usize, logs: usize) -> Result<(), Error> {
    let (needed, limit) = (needed(ranks, hosted, logs), getrlimit(Resource::Nofile).current);
    match limit.filter(|&limit| limit < needed) {
        Some(limit) => Err(Error::Files { ranks, needed, limit }),
        None => Ok(()),
    }
}

/// Lets this process have as many open as the launcher might before.
pub(super) fn restore() {
    let files = std::env::var(FILES).ok().and_then(|files| files.parse().ok());
    if let Some(current) = files {
        // Less is always allowed.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(current), ..getrlimit(Resource::Nofile) });
    }
}

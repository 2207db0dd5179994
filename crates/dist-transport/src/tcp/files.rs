//! The limit of open files, compared with what a world of some size needs.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{Error, Result};

/// What a rank, or a coordinator, opens besides connections: listeners, its line to the coordinator, what wakes its threads, and
/// some handshakes.
const OWN_FILES: u64 = 24;

/// Checks that this process may open a connection to each of so many others of the world, besides what it has open. Raises the
/// limit as far as the system lets it, if it is too low.
pub(super) fn check_limit(connections: usize, world_size: usize) -> Result<()> {
    let needed = count_open().saturating_add(OWN_FILES).saturating_add(connections as u64);
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let (limit, highest) = (current.unwrap_or(u64::MAX), maximum.unwrap_or(u64::MAX));
    if needed <= limit {
        return Ok(());
    }
    if needed <= highest && setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok() {
        tracing::info!(limit, raised_to = highest, needed, "raised the limit of open files");
        return Ok(());
    }
    Err(Error::FilesLimit { limit, needed, world_size })
}

/// How many files this process may open in all.
pub(super) fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// How many files this process has open, or at least how many the system says it has.
fn count_open() -> u64 {
    let folder = if cfg!(target_os = "linux") { "/proc/self/fd" } else { "/dev/fd" };
    // One of them is the folder.
    std::fs::read_dir(folder).map_or(0, |files| files.count().saturating_sub(1) as u64)
}

//! The limit of open files, compared with the needs of a world of some size.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{Error, Result};

/// Files that a rank or a coordinator opens besides connections to ranks: listeners, the connection to the
/// coordinator, wakers, and some handshakes.
const OWN_FILES: u64 = 24;

/// Checks that this process may open this many connections, besides the files that it has open. Raises the
/// limit as far as the system allows, if it is too low.
pub(crate) fn check_limit(connections: usize, world_size: usize) -> Result<()> {
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

/// Returns how many files this process may open in all.
pub(crate) fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Returns the number of files that this process has open; `None` if the system does not report it.
fn count_open() -> u64 {
    let folder = if cfg!(target_os = "linux") { "/proc/self/fd" } else { "/dev/fd" };
    // One of them is the folder itself.
    std::fs::read_dir(folder).map_or(0, |files| files.count().saturating_sub(1) as u64)
}

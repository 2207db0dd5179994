//! The identity of this process's host, and the cores that the process may use.

use std::hash::{BuildHasher, RandomState};
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use sha2::{Digest, Sha256};

use crate::bootstrap::control::{Cores, ProcessId};

/// Returns the id of this host. Processes have equal ids if and only if they run on one host. It is derived
/// from the name that the user has set, else from Linux's boot id, else from the node name.
pub(crate) fn id(name: Option<&str>) -> u64 {
    let boot = || std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
    let system = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    let name = name.map(str::to_owned).or_else(boot).unwrap_or_else(system);
    let digest = Sha256::digest(name.trim().as_bytes());
    u64::from_le_bytes(std::array::from_fn(|index| digest[index]))
}

/// Returns a number that no other process has. A forked process has another.
pub(crate) fn process() -> u64 {
    static RANDOM: OnceLock<RandomState> = OnceLock::new();
    RANDOM.get_or_init(RandomState::new).hash_one(std::process::id())
}

/// Returns the id of this process, for others of its host.
pub(crate) fn pid() -> ProcessId {
    ProcessId { namespace: pid_namespace().unwrap_or(0), id: std::process::id() }
}

/// Returns a descriptor that becomes readable when the process ends, even if other processes have inherited
/// its descriptors. Returns `None` if this process cannot see it.
#[cfg(target_os = "linux")]
pub(crate) fn watch_process(process: ProcessId) -> Option<OwnedFd> {
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    let is_visible = process.namespace != 0 && Some(process.namespace) == pid_namespace();
    let id = Pid::from_raw(i32::try_from(process.id).ok()?).filter(|_| is_visible)?;
    pidfd_open(id, PidfdFlags::empty()).ok()
}

#[cfg(not(target_os = "linux"))]
pub(crate) const fn watch_process(_process: ProcessId) -> Option<OwnedFd> {
    None
}

/// Returns an id of this process's PID namespace, which no other namespace of any host has. Linux numbers
/// namespaces anew at every boot, so the boot id is part of it.
fn pid_namespace() -> Option<u64> {
    let namespace = std::fs::read_link("/proc/self/ns/pid").ok()?;
    let start = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digest = Sha256::digest(format!("{start}{}", namespace.display()));
    Some(u64::from_le_bytes(std::array::from_fn(|index| digest[index])))
}

/// Returns the cores that this process may run on.
pub(crate) fn cores() -> Cores {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    Cores { first: first_core(), count: u32::try_from(count).unwrap_or(u32::MAX) }
}

#[cfg(target_os = "linux")]
fn first_core() -> u32 {
    use rustix::thread::{CpuSet, sched_getaffinity};
    let allowed = sched_getaffinity(None).ok();
    let first = allowed.and_then(|allowed| (0..CpuSet::MAX_CPU).find(|&core| allowed.is_set(core)));
    first.map_or(0, |core| u32::try_from(core).unwrap_or(u32::MAX))
}

#[cfg(not(target_os = "linux"))]
const fn first_core() -> u32 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_known_by_one_number_unless_it_is_called_something() {
        assert_eq!(id(None), id(None));
        assert_eq!(id(Some("a")), id(Some("a\n")));
        assert_ne!(id(Some("a")), id(Some("b")));
        assert_ne!(id(Some("a")), id(None));
    }
}

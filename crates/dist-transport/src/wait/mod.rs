//! Wait policies: spin, yield or sleep, for links and for shared memory.

#[cfg(all(feature = "shm", target_os = "linux"))]
pub(crate) mod external_load;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub(crate) mod group_wait;
pub(crate) mod link_wait;

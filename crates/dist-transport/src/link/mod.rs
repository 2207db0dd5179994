//! Links between two processes: sockets, message framing, and message counts.

pub(crate) mod counts;
pub(crate) mod message;
pub(crate) mod peer_link;
#[cfg_attr(not(all(feature = "shm", target_os = "linux")), path = "shm/absent.rs")]
pub(crate) mod shm;
pub(crate) mod socket;
pub(crate) mod staging_buffer;
pub(crate) mod striped_socket;

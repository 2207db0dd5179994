//! Processes connected by TCP and shared memory.
//!
//! Every process joins the coordinator (on rank 0, or in the launcher) and learns the addresses of its peers.
//! It keeps its connection to the coordinator for heartbeats and for the abort. Connections between ranks are
//! opened on first use, one per pair and channel, or several over TCP if the job says so. One service thread per process owns the listener, the
//! handshakes and the connection to the coordinator. Data moves only on the caller's thread.

#[cfg(all(feature = "shm", target_os = "linux"))]
mod group_agreement;
mod matched;
mod matched_outbound;
mod process_transport;
#[cfg(all(feature = "shm", target_os = "linux"))]
mod with_shared_memory;

pub use process_transport::ProcessTransport;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub use with_shared_memory::WithSharedMemory;

pub use crate::bootstrap::auth::Secret;
pub use crate::bootstrap::config::{Config, Medium};
pub use crate::bootstrap::coordinator::Coordinator;

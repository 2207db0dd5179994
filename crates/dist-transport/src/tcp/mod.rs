//! Processes connected by TCP and shared memory.
//!
//! Every process joins the coordinator (on rank 0, or in the launcher) and learns the addresses of its peers.
//! It keeps its connection to the coordinator for heartbeats and for the abort. Connections between ranks are
//! opened on first use, one per pair and channel. One service thread per process owns the listener, the
//! handshakes and the connection to the coordinator. Data moves only on the caller's thread.

mod abort_state;
mod acceptor;
mod address;
mod channels;
mod config;
mod control;
mod coordinator;
mod counts;
mod dial;
mod files;
mod host;
mod link_wait;
mod message;
mod peer_link;
mod probe;
mod rendezvous;
mod rendezvous_server;
mod scratch;
mod service;
mod session;
mod socket;
mod threads;
mod transport;
mod user;
#[cfg(all(feature = "shm", target_os = "linux"))]
mod with_shared_memory;

pub use config::{Config, Medium};
pub use coordinator::Coordinator;
pub use transport::TcpTransport;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub use with_shared_memory::{HostAbort, WithSharedMemory};

pub use crate::auth::Secret;

pub(crate) use control::UnixSocketName;
pub(crate) use socket::is_out_of_files;

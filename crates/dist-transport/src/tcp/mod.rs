//! Processes connected by TCP.
//!
//! Every process joins the coordinator (on rank 0, or in the launcher), learns where its peers listen, and keeps
//! its line to the coordinator for signs of life and for the abort. Connections between ranks are opened on first
//! use, one per pair and channel. One service thread per process owns the listener, the handshakes and the line
//! to the coordinator; data moves on the caller's thread only.

mod address;
#[cfg(all(feature = "shm", target_os = "linux"))]
mod beside;
mod channels;
mod config;
mod control;
mod coordinator;
mod counts;
mod dial;
mod files;
mod gate;
mod host;
mod link;
mod meeting;
mod message;
mod patience;
mod probe;
mod rendezvous;
mod scratch;
mod service;
mod session;
mod socket;
mod transport;
mod user;
mod verdict;

#[cfg(all(feature = "shm", target_os = "linux"))]
pub use beside::{HostAbort, WithSharedMemory};
pub use config::{Config, Medium};
pub use coordinator::Coordinator;
pub use transport::TcpTransport;

pub use crate::auth::Secret;

pub(crate) use control::DoorName;
pub(crate) use socket::is_out_of_files;

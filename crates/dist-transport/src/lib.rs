#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(windows)]
compile_error!("dist-transport needs Unix sockets and poll: Windows is not supported");

mod abort;
pub mod announced;
#[cfg(any(feature = "tcp", feature = "sim"))]
mod bookkeeping;
#[cfg(feature = "tcp")]
mod bootstrap;
mod channel;
#[cfg(any(feature = "tcp", feature = "sim"))]
mod check;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod cpu;
mod error;
mod fingerprint;
pub mod forwarding;
#[cfg(feature = "tcp")]
#[cfg_attr(not(all(feature = "shm", target_os = "linux")), path = "host_memory/absent.rs")]
mod host_memory;
mod inbox;
#[cfg(feature = "tcp")]
mod link;
pub mod native;
mod owned;
#[cfg(feature = "tcp")]
pub mod process;
mod rank;
pub mod runtime;
pub mod shm_group;
#[cfg(feature = "sim")]
pub mod sim;
mod source;
mod started_count;
pub mod store;
mod transport;
mod version;
#[cfg(feature = "tcp")]
mod wait;
mod warning;

pub use abort::{Abort, AbortDecision, Cause, Chain, CircularWait};
pub use announced::KEPT_MESSAGE_BYTES_MAX;
pub use channel::ChannelId;
pub use error::{Activity, Error, Result};
pub use fingerprint::Fingerprint;
pub use inbox::{Inbox, Interrupt, Pause, Refusal};
pub use owned::{Allocation, Owned};
pub use rank::Rank;
pub use runtime::{Deadline, LazyDeadline, Runtime};
pub use source::ErrorSource;
#[doc(hidden)]
pub use source::show_error;
pub use started_count::StartedCount;
pub use store::{Store, StoreError};
pub use transport::{Combine, Incoming, Outgoing, Progress, Sink, Traffic, Transport};
pub use version::Version;
#[doc(hidden)]
pub use warning::show as show_warning;

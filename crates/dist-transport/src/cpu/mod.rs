//! Methods that depend on the processor: its vendor, and fast copies.

mod copy;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub(crate) mod copy_policy;
pub mod processor;

pub use copy::copy;

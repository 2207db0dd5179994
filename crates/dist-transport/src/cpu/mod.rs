//! What depends on the processor: the fastest of several correct methods, and fast copies.

mod copy;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub(crate) mod copy_policy;
mod tuning;

pub use copy::copy;
pub use tuning::{Tuning, tuning};

//! Choices that depend on the processor: the fastest of several correct methods, and fast copies.

mod cache_line;
mod copy;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub(crate) mod copy_policy;
mod tuning;

pub use cache_line::CacheLine;
pub use copy::copy;
pub use tuning::{Tuning, tuning};

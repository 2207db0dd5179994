//! Methods that depend on the processor: its vendor, and fast copies.

mod copy;
pub mod processor;

pub use copy::copy;

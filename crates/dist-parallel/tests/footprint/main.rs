//! The cost of sharded training compared with its plan: memory and bytes on the wire.
#![allow(clippy::unwrap_used, reason = "this is a test")]

#[cfg(all(feature = "tcp", target_os = "linux"))]
mod limit;
mod memory;
mod tied;
mod verified;
mod weights;
mod wire;

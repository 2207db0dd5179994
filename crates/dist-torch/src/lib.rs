#![doc = include_str!("../README.md")]

mod call;
mod error;
mod group;
mod interrupt;
mod memory;
mod messages;
mod owned_by_process;
mod stream;

use pyo3::prelude::*;

/// The part of the Python package `dist_torch` that is written in Rust.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::group::{Group, Host, PendingCall};
}

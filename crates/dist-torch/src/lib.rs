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

    /// Says whether this is a build with the profile `release`. Others are several times slower.
    #[pymodule_export]
    const IS_RELEASE: bool = !cfg!(debug_assertions);
}

#![doc = include_str!("../README.md")]

mod error;
mod group;

pub use error::{Error, Result};
pub use group::Group;

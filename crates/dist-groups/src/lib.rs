#![doc = include_str!("../README.md")]

mod by_host;
mod error;
mod group;
mod mesh;
mod shape;

pub use by_host::go_by_host;
pub use error::{Error, Result};
pub use group::Group;
pub use mesh::Mesh;

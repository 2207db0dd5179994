#![doc = include_str!("../README.md")]

mod error;
mod group;
mod hierarchical;
mod mesh;
mod shape;

pub use error::{Error, Result};
pub use group::Group;
pub use hierarchical::enable_hierarchical;
pub use mesh::Mesh;

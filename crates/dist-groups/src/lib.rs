#![doc = include_str!("../README.md")]

mod error;
mod group;
mod mesh;
mod shape;
mod topology;

pub use error::{Error, Result};
pub use group::Group;
pub use mesh::Mesh;
pub use topology::Topology;

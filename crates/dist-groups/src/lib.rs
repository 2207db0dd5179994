#![doc = include_str!("../README.md")]

mod communicator_ext;
mod error;
mod group;
mod mesh;
mod shape;

pub use communicator_ext::CommunicatorExt;
pub use error::{Error, Result};
pub use group::Group;
pub use mesh::{Mesh, Shift, dims_create};

//! Groups and meshes: over the in-process network, and in processes that are connected by TCP.

mod concurrent;
mod hierarchical;
mod hosts;
mod lists;
mod many;
mod mesh;
mod translation;
mod worlds;

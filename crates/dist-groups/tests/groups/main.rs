//! Groups and meshes: over the in-process network, in processes that are connected by TCP, and on several hosts.

mod concurrent;
mod hierarchical;
mod hosts;
mod lists;
mod many;
mod mesh;
mod network;
mod translation;
mod worlds;

//! Groups and meshes: over the in-process network, and in processes that are connected by TCP.

mod by_host;
mod concurrent;
mod lists;
mod many;
mod mesh;
mod topology;
mod translation;
mod worlds;

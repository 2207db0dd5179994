#![doc = include_str!("../README.md")]

mod algorithm;
pub mod all_to_all;
pub mod barrier;
mod binary_blocks;
pub mod binomial;
pub mod chain;
mod chunks;
pub mod circulant;
#[cfg(feature = "conformance")]
pub mod conformance;
mod cost;
pub mod direct;
mod error;
mod fold;
pub mod halving_doubling;
pub mod hierarchical;
mod hosts;
pub mod knomial;
pub mod linear;
pub mod neighbour;
mod order;
pub mod pairwise;
mod partition;
mod pieces;
pub mod recursive_doubling;
pub mod ring;
mod ring_transport;
mod run;
pub mod scan;
mod schedule;
mod scratch;
mod step;
mod validate;
pub mod verify;

pub use algorithm::{
    AllGather, AllReduce, AllToAll, Barrier, Broadcast, Choice, Gather, Phases, Reduce, ReduceScatter, Scan,
    Scatter,
};
pub use chunks::Chunks;
pub use cost::{Cost, CostModel, Messages, Placement};
pub use error::{Error, Result, RunError};
pub use hosts::Hosts;
pub use order::Order;
pub use partition::Partition;
pub use ring_transport::RingTransport;
pub use run::{Memory, run};
pub use schedule::Schedule;
pub use scratch::Scratch;
pub use step::{ChunkLocation, OnArrival, ReceiveHalf, SLOTS_MAX, SendHalf, Source, Step};

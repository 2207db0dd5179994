#![doc = include_str!("../README.md")]

mod algorithm;
pub mod barrier;
pub mod binomial;
mod chunks;
mod cost;
pub mod direct;
mod error;
mod fold;
pub mod halving_doubling;
mod order;
pub mod pairwise;
mod partition;
mod pieces;
pub mod recursive_doubling;
pub mod ring;
mod ring_transport;
mod run;
mod schedule;
mod scratch;
mod step;
mod validate;
pub mod verify;

pub use algorithm::{AllGather, AllReduce, Barrier, Broadcast, Phases, Reduce, ReduceScatter};
pub use chunks::Chunks;
pub use cost::{Cost, CostModel};
pub use error::{Error, Result, RunError};
pub use order::Order;
pub use partition::Partition;
pub use ring_transport::RingTransport;
pub use run::{Memory, run};
pub use schedule::Schedule;
pub use scratch::Scratch;
pub use step::{Place, ReceiveHalf, SLOTS_MAX, SendHalf, Source, Step, Then};

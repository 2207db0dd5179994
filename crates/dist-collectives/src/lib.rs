#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod algorithm;
mod buffer;
mod call;
mod coalesced;
mod collectives;
mod communicator;
mod cost_cache;
mod costs;
mod digest;
mod direct;
mod dtype;
mod engine;
mod error;
mod history;
mod kernel;
mod messages;
mod pending;
mod reduce_op;
mod settings;
#[cfg(feature = "ndarray")]
mod shaped;
mod start;
mod two_level;
#[cfg(feature = "serde")]
mod values;
mod variables;
mod window;
mod worker;

pub use algorithm::{
    Algorithm, AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, Reduce, ReduceScatter, Scan,
    Scatter,
};
pub use buffer::Buffer;
pub use call::{Call, Operation};
pub use communicator::{Communicator, Scoped};
pub use cost_cache::{CostCache, TopologyKey};
pub use direct::Direct;
/// What the runner of algorithms says, in [`Error::Schedule`].
#[doc(no_inline)]
pub use dist_algos::Error as AlgorithmError;
/// Forms of [`Direct`] algorithms, and whose memory they work on.
#[doc(no_inline)]
pub use dist_algos::direct::{Crossovers, CrossoversError, DirectAlgorithm, Ownership};
/// Algorithms for ranks of which some share a host, as [`Communicator::set_topology`] says, and how all_reduce is done by them.
#[doc(no_inline)]
pub use dist_algos::hierarchical::{HostParticipants, TwoLevel, TwoLevelAllReduce};
/// What algorithms are chosen by.
#[doc(no_inline)]
pub use dist_algos::{CostModel, Hosts};
/// What a transport says, in the errors of this crate.
#[doc(no_inline)]
pub use dist_transport::Error as TransportError;
#[doc(no_inline)]
#[doc(hidden)]
pub use dist_transport::error_enum;
#[cfg(feature = "tcp")]
#[doc(no_inline)]
pub use dist_transport::tcp::{Config, Medium, Secret};
pub use dist_transport::{Abort, Cause, Chain, ChannelId, Fingerprint, Runtime, Source, Traffic, Transport};
pub use dtype::{DType, Element};
pub use engine::BLOCK_BYTES_OF_RANK;
pub use error::{Error, Result};
#[doc(no_inline)]
pub use half::{bf16, f16};
pub use kernel::{combine, divide_by_count};
pub use messages::{Message, OwnedMessage};
#[cfg(feature = "ndarray")]
#[doc(no_inline)]
pub use ndarray;
pub use pending::{Failed, Pending};
pub use reduce_op::{ReduceKind, ReduceOp, ReductionOrder};
#[cfg(feature = "serde")]
pub use values::{VALUE_BYTES_MAX, ValueProblem};
pub use variables::crossovers_from_env;
pub use window::Window;

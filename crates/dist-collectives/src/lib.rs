#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod buffer;
mod call;
mod coalesced;
mod collectives;
mod communicator;
mod cost_cache;
mod costs;
mod digest;
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

pub use buffer::Buffer;
pub use call::{Call, Operation};
pub use communicator::{Communicator, Scoped};
pub use cost_cache::{CostCache, TopologyKey};
/// The records of all algorithms, each in the module of its schedule, for [`Communicator::with_algorithm`].
#[doc(no_inline)]
pub use dist_algos as algorithms;
/// The error of the runner of algorithms, in [`Error::Schedule`].
#[doc(no_inline)]
pub use dist_algos::Error as AlgorithmError;
/// The choice of algorithms on shared memory, and the kinds of memory that they work on.
#[doc(no_inline)]
pub use dist_algos::direct::{Crossovers, CrossoversError, Ownership};
/// Algorithms, and the values by which they are chosen.
#[doc(no_inline)]
pub use dist_algos::{Algorithm, CostModel, Hosts};
/// The error of a transport, as a source of errors of this crate.
#[doc(no_inline)]
pub use dist_transport::Error as TransportError;
#[doc(no_inline)]
#[doc(hidden)]
pub use dist_transport::error_enum;
#[cfg(feature = "tcp")]
#[doc(no_inline)]
pub use dist_transport::process::{Config, Medium, Secret};
pub use dist_transport::{
    Abort, Cause, Chain, ChannelId, ErrorSource, Fingerprint, Runtime, Traffic, Transport,
};
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

#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod buffer;
mod call;
mod checked;
mod coalesced;
mod collectives;
mod communicator;
mod cost_cache;
mod costs;
mod custom_op;
mod digest;
mod dtype;
mod element_type;
mod engine;
pub mod error;
mod history;
pub mod kernel;
mod level_costs;
mod logical;
mod message_stream;
mod messages;
mod operation_queue;
mod pending;
mod reduce_op;
mod settings;
#[cfg(feature = "ndarray")]
mod shaped;
mod start;
mod strided;
pub mod tuning;
mod two_level;
mod update_window;
#[cfg(feature = "serde")]
pub mod values;
mod variables;
mod vectors;
mod window;
mod window_service;
mod worker;

pub use buffer::Buffer;
#[doc(no_inline)]
pub use bytemuck;
pub use checked::Checked;
pub use communicator::Communicator;
pub use custom_op::{CustomOp, IndexedValue};
/// The records of all algorithms, each in the module of its schedule, for [`Communicator::with_algorithm`].
#[doc(no_inline)]
pub use dist_algos as algorithms;
#[doc(no_inline)]
pub use dist_transport as transport;
#[cfg(feature = "tcp")]
#[doc(no_inline)]
pub use dist_transport::process::Config;
#[doc(no_inline)]
pub use dist_transport::store::{Comparison, Store, StoreError};
pub use dtype::{DType, Element};
pub use element_type::ElementType;
pub use error::{Error, Result};
#[doc(no_inline)]
pub use half::{bf16, f16};
pub use logical::LogicalOp;
pub use messages::{Message, OwnedMessage, ProbedMessage, ReceivedMessage};
#[cfg(feature = "ndarray")]
#[doc(no_inline)]
pub use ndarray;
#[doc(no_inline)]
pub use num_complex::Complex;
pub use pending::{Failed, Pending};
pub use reduce_op::{ReduceOp, ReductionOrder};
#[cfg(feature = "ndarray")]
pub use shaped::ArrayMessage;
pub use strided::{Strided, StridedMut};
pub use update_window::{AtomicInteger, UpdateWindow};
pub use window::Window;

// Short paths for the modules of this crate.
use call::Call;
use kernel::combine;
use reduce_op::ReduceKind;
#[cfg(feature = "tcp")]
use tuning::{CostCache, crossovers_from_env};
use tuning::{Crossovers, Operation, Ownership};

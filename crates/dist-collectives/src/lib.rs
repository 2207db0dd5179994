#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod algorithm;
mod buffer;
mod call;
mod communicator;
mod dtype;
mod engine;
mod error;
mod kernel;
mod pending;
mod reduce_op;
mod settings;
mod worker;

pub use algorithm::{Algorithm, AllGather, AllReduce, Barrier, Broadcast, Reduce, ReduceScatter};
pub use buffer::Buffer;
pub use call::{Call, Operation};
pub use communicator::{Communicator, Scoped};
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use kernel::{combine, divide_by_count};
pub use pending::{Failed, Pending};
pub use reduce_op::{ReduceOp, ReductionOrder};

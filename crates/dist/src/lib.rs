#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod prelude;

pub use dist_algos as algos;
#[cfg(feature = "burn")]
pub use dist_burn as burn;
#[cfg(feature = "candle")]
pub use dist_candle as candle;
pub use dist_collectives as collectives;
pub use dist_collectives::{Communicator, ReduceOp};
pub use dist_groups as groups;
pub use dist_groups::{Group, Mesh};
pub use dist_parallel as parallel;
pub use dist_parallel::data;
pub use dist_parallel::{Ddp, DdpOptions, Fsdp, FsdpOptions};
pub use dist_transport as transport;
#[cfg(feature = "sim")]
pub use dist_transport::sim;

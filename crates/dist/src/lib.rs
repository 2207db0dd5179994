#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "tcp")]
mod init;
pub mod prelude;

#[doc(inline)]
pub use dist_algos as algos;
#[cfg(feature = "burn")]
#[doc(inline)]
pub use dist_burn as burn;
#[cfg(feature = "candle")]
#[doc(inline)]
pub use dist_candle as candle;
#[doc(inline)]
pub use dist_collectives as collectives;
#[doc(inline)]
pub use dist_collectives::{Communicator, ReduceOp};
#[doc(inline)]
pub use dist_groups as groups;
#[doc(inline)]
pub use dist_groups::{Group, Mesh};
#[cfg(feature = "mpi")]
#[doc(inline)]
pub use dist_mpi as mpi;
#[doc(inline)]
pub use dist_parallel as parallel;
#[doc(inline)]
pub use dist_parallel::data;
#[doc(inline)]
pub use dist_parallel::fsdp::{Fsdp, FsdpOptions};
#[doc(inline)]
pub use dist_parallel::trainer::{Strategy, Trainer, TrainerOptions};
#[doc(inline)]
pub use dist_parallel::{Ddp, DdpOptions};
#[doc(inline)]
pub use dist_transport as transport;
#[cfg(feature = "sim")]
#[doc(inline)]
pub use dist_transport::sim;
#[cfg(feature = "tcp")]
pub use init::{InitError, init};

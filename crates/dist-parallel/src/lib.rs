#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod abort;
mod aggregate;
mod agreement;
mod block;
mod block_range;
mod broadcast;
mod buffer_pool;
mod buffers;
mod cast;
pub mod checkpoint;
pub mod compress;
mod config;
pub mod data;
mod ddp;
mod engine;
mod error;
mod evaluation;
mod flat;
mod flat_storage;
pub mod fsdp;
mod gradients;
mod hook_worker;
pub mod local_sgd;
mod loop_steps;
mod loss;
mod materialise;
mod mean;
mod mutation_check;
mod norm;
mod number;
pub mod optim;
mod params;
mod pass;
mod picture;
pub mod pipeline;
mod plan;
mod reduce;
mod sequence;
mod shard_tensor;
mod step_consensus;
pub mod trainer;
mod tree;
mod unconnected;
mod unreported;
mod updates;
mod values;

pub use block::Block;
pub use ddp::{Ddp, DdpOptions};
#[doc(no_inline)]
pub use dist_collectives::Communicator;
pub use error::{BoxError, Error, Result};
/// The crate of the half types in [`Values`].
#[doc(no_inline)]
pub use half;
pub use loss::Loss;
pub use params::{FloatType, ParamInfo, Params};
pub use sequence::Sequence;
pub use values::{Values, ValuesMut};

/// The parts of models and blocks, besides [`Params`] and [`Block`].
pub mod model {
    pub use crate::block::{Ready, Saved};
    pub use crate::materialise::{BufferView, Materialised, Resharded, Slot};
    pub use crate::params::BufferSync;
    pub use crate::pass::Pass;
}

/// The report of a step, and the calls that the ranks compare.
pub mod step {
    pub use crate::ddp::StepReport;
    pub use crate::step_consensus::{StepDescriptor, TrainingCall};
}

/// Buckets of gradients, which are communicated together.
pub mod buckets {
    pub use crate::plan::{Bucket, BucketBytes, BucketPlace, BucketPlan};
}

/// A training loop of your own: sums and means over the ranks, without a trainer.
pub mod own_loop {
    pub use crate::aggregate::{
        Aggregation, AllReduceAggregator, GradientAggregator, GradientSlices, LocalAggregator,
        ParameterServer, train_step,
    };
    pub use crate::config::DataParallelConfig;
    pub use crate::norm::gradient_norm;
    pub use crate::reduce::reduce;
    pub use crate::shard_tensor::{TensorShard, gather_shards, shard_tensor};
}

/// Items that other crates of this workspace share.
#[doc(hidden)]
pub mod internal {
    pub use dist_collectives::transport::{Chain, error_enum};

    pub use crate::engine::delegate_shards;
    pub use crate::loop_steps::LoopSteps;
    pub use crate::picture::{Axis, Bar, BarChart, BarPanel, Chart, Curve, LineStyle, Scale, TickText};
}

// Short paths inside the crate.
pub(crate) use aggregate::*;
pub(crate) use block::{Ready, Saved};
pub(crate) use buckets::*;
pub(crate) use checkpoint::*;
pub(crate) use compress::*;
pub(crate) use model::*;
pub(crate) use optim::*;
pub(crate) use own_loop::*;
pub(crate) use step::*;

#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod abort;
mod aggregate;
mod agreement;
mod block;
mod broadcast;
mod buffers;
mod checkpoint;
mod compress;
mod config;
pub mod data;
mod ddp;
mod error;
mod flat;
mod fsdp;
mod gradients;
mod hook_worker;
mod local_sgd;
mod loop_steps;
mod loss;
mod materialise;
mod mean;
mod mutation_check;
mod norm;
mod number;
mod optim;
mod params;
pub mod pipeline;
mod plan;
mod reduce;
mod sequence;
mod shard_tensor;
mod step_consensus;
mod tree;
mod unreported;
mod updates;
mod values;

pub use aggregate::{
    Aggregation, AllReduceAggregator, GradientAggregator, GradientSlices, LocalAggregator, ParameterServer,
    train_step,
};
pub use block::{Block, Ready, Saved};
pub use checkpoint::{
    CheckpointError, CheckpointProblem, Checkpoints, Chunk, LoadedTensor, Saving, ShardMetadata, Shards,
    Slice, WeightOptions, WeightReport, load_weights,
};
pub use compress::{
    Bf16Hook, BucketGradients, BucketHook, BucketTensor, Compression, F16Hook, Int8Hook, PowerSgdHook,
    SparseGradient, TopKHook,
};
pub use config::DataParallelConfig;
pub use ddp::{Ddp, DdpOptions, StepReport};
/// The error of a communicator, in [`Error::Communication`].
#[doc(no_inline)]
pub use dist_collectives::Error as CollectiveError;
#[doc(hidden)]
pub use dist_collectives::transport::{Chain, error_enum};
#[doc(no_inline)]
pub use dist_collectives::{Communicator, Element, ReduceOp};
pub use error::{BoxError, Error, Result};
pub use fsdp::{Fsdp, FsdpOptions, MemoryEstimate, Plan, Precision, Reshard, ShardingStrategy, Units};
#[doc(no_inline)]
pub use half::{bf16, f16};
pub use local_sgd::{LocalSgd, LocalSgdOptions, LocalStep, LocalTraffic, OuterStep, SyncPoint};
#[doc(hidden)]
pub use loop_steps::LoopSteps;
pub use loss::Loss;
pub use materialise::{BufferView, Materialised, Resharded, Slot};
pub use norm::gradient_norm;
pub use optim::{
    AdamW, AdamWOptions, Lion, LionOptions, Momentum, Optimizer, OptimizerSetting, OptimizerState,
    ParamGroups, ParamOptions, Sgd, SgdOptions, SliceState, SliceStates, WeightDecay, schedule,
};
pub use params::{BufferSync, FloatType, ParamInfo, Params};
pub use plan::{Bucket, BucketBytes, BucketPlace, BucketPlan};
pub use reduce::reduce;
pub use sequence::Sequence;
pub use shard_tensor::{TensorShard, gather_shards, shard_tensor};
pub use step_consensus::{StepDescriptor, TrainingCall};
pub use values::{Values, ValuesMut};

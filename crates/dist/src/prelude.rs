//! The names that most programs need: `use dist::prelude::*`.

#[cfg(feature = "candle")]
#[doc(inline)]
pub use dist_candle::{CandleBlock, SequenceBuilder, loss_and_gradient};
#[doc(inline)]
pub use dist_collectives::{Communicator, Pending, ReduceOp, ReductionOrder};
#[doc(inline)]
pub use dist_groups::{CommunicatorExt, Group, Mesh};
#[doc(inline)]
pub use dist_parallel::{
    AdamW, AdamWOptions, Block, Checkpoints, Ddp, DdpOptions, Fsdp, FsdpOptions, Loss, Optimizer, Params,
    Sequence, Sgd, SgdOptions, ShardingStrategy, pipeline::Pipeline,
};

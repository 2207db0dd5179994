//! The names that most programs need: `use dist::prelude::*`.

#[cfg(feature = "candle")]
#[doc(inline)]
pub use dist_candle::{CandleBlock, SequenceBuilder, Tensors, loss_and_gradient};
#[doc(inline)]
pub use dist_collectives::{Communicator, Pending, ReduceOp, ReductionOrder};
#[doc(inline)]
pub use dist_groups::{CommunicatorExt, Group, Mesh};
#[doc(inline)]
pub use dist_parallel::checkpoint::Checkpoints;
#[doc(inline)]
pub use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
#[doc(inline)]
pub use dist_parallel::optim::{AdamW, AdamWOptions, Optimizer, Sgd, SgdOptions};
#[doc(inline)]
pub use dist_parallel::pipeline::Pipeline;
#[doc(inline)]
pub use dist_parallel::trainer::{Strategy, Trainer, TrainerOptions};
#[doc(inline)]
pub use dist_parallel::{Block, Ddp, DdpOptions, Loss, Params, Sequence};

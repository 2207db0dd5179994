//! Sharded training as a [`Trainer`].

use dist_collectives::Communicator;

use super::methods::trainer_methods;
use super::{Computation, Strategy, Trainer};
use crate::engine::Work;
use crate::fsdp::{Fsdp, ShardingStrategy};
use crate::{Error, Result, Sequence, StepReport, Values};

impl<A: 'static> Trainer<A> for Fsdp<A> {
    trainer_methods!(model);
    trainer_methods!(rounds Sequence::block);

    fn strategy(&self) -> Strategy {
        match self.plan().options.strategy {
            ShardingStrategy::NoShard if self.world_size() == 1 => Strategy::Single,
            ShardingStrategy::NoShard => Strategy::Ddp,
            ShardingStrategy::ShardOptimizer => Strategy::Zero1,
            ShardingStrategy::ShardGradOp => Strategy::Zero2,
            ShardingStrategy::FullShard => Strategy::Fsdp,
            ShardingStrategy::HybridShard { shard_degree } => Strategy::Hybrid { shard_degree },
        }
    }

    fn step_computation(
        &mut self,
        micro_batches: usize,
        computation: Computation<'_, Sequence<A>>,
    ) -> Result<StepReport> {
        if !self.plan().options.strategy.shards_parameters() {
            return self.engine.step::<()>(micro_batches, computation.into());
        }
        let reason =
            "the trainer runs the model's blocks itself, because it gathers and frees them unit by unit";
        Err(Error::NotWithStrategy { feature: "step_with", strategy: self.strategy(), reason })
    }

    fn for_each_parameter(&mut self, f: &mut dyn FnMut(usize, Values<'_>)) -> Result<()> {
        self.for_each_parameter(f)
    }

    fn into_parts(self: Box<Self>) -> Result<(Communicator, Vec<Sequence<A>>)> {
        let (comm, model) = (*self).into_parts()?;
        Ok((comm, vec![model]))
    }
}

//! Sharded training as a [`Trainer`].

use dist_collectives::Communicator;

use super::{Batches, Computation, Evaluation, Strategy, Trainer};
use crate::checkpoint::Shards;
use crate::fsdp::{Fsdp, ShardingStrategy};
use crate::{Error, Optimizer, ParamInfo, Params, Result, Sequence, StepReport, Values};

impl<A: 'static> Trainer<A> for Fsdp<A> {
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

    fn infos(&self) -> &[ParamInfo] {
        self.model().infos()
    }

    fn communicator(&self) -> &Communicator {
        self.communicator()
    }

    fn communicator_mut(&mut self) -> &mut Communicator {
        self.communicator_mut()
    }

    fn step_batches(&mut self, micro_batches: usize, batches: Batches<'_, A>) -> Result<StepReport> {
        self.step_batches(micro_batches, batches)
    }

    fn step_computation(
        &mut self,
        micro_batches: usize,
        computation: Computation<'_, Sequence<A>>,
    ) -> Result<StepReport> {
        if !self.plan().options.strategy.shards_parameters() {
            return self.step_work(micro_batches, computation.into());
        }
        let reason =
            "the trainer runs the model's blocks itself, because it gathers and frees them unit by unit";
        Err(Error::NotWithStrategy { feature: "step_with", strategy: self.strategy(), reason })
    }

    fn accumulate_batches(&mut self, micro_batches: usize, batches: Batches<'_, A>) -> Result<()> {
        self.accumulate_batches(micro_batches, batches)
    }

    fn join_batches(&mut self, own: usize, batches: Batches<'_, A>) -> Result<Option<StepReport>> {
        self.join_batches(own, batches)
    }

    fn evaluate_batches(
        &mut self,
        micro_batches: usize,
        evaluation: Evaluation<'_, A>,
    ) -> Result<StepReport> {
        self.evaluate_batches(micro_batches, evaluation)
    }

    fn update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        self.update(optimizer)
    }

    fn gradient_norm(&mut self) -> Result<f64> {
        self.gradient_norm()
    }

    fn clip_gradients(&mut self, max: f64) -> Result<f64> {
        self.clip_gradients(max)
    }

    fn scale_gradients(&mut self, factor: f64) {
        self.scale_gradients(factor);
    }

    fn without_gradient(&self) -> Vec<&str> {
        self.without_gradient()
    }

    fn for_each_parameter(&mut self, f: &mut dyn FnMut(usize, Values<'_>)) -> Result<()> {
        self.for_each_parameter(f)
    }

    fn train(&mut self) {
        self.train();
    }

    fn eval(&mut self) {
        self.eval();
    }

    fn model(&self) -> Result<&Sequence<A>> {
        Ok(self.model())
    }

    fn model_mut(&mut self) -> Result<&mut Sequence<A>> {
        Ok(self.model_mut())
    }

    fn shards(&mut self) -> Result<&mut dyn Shards> {
        Ok(self)
    }

    fn into_parts(self: Box<Self>) -> Result<(Communicator, Vec<Sequence<A>>)> {
        let (comm, model) = (*self).into_parts()?;
        Ok((comm, vec![model]))
    }
}

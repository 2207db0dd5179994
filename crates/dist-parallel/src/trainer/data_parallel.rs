//! Data-parallel training as a [`Trainer`].

use dist_collectives::Communicator;

use super::{Batches, Computation, Evaluation, Strategy, Trainer};
use crate::block_range::whole;
use crate::checkpoint::Shards;
use crate::engine::Work;
use crate::{Ddp, Optimizer, ParamInfo, Params, Result, Sequence, StepReport, Values};

impl<A: 'static> Trainer<A> for Ddp<Sequence<A>> {
    fn strategy(&self) -> Strategy {
        if self.world_size() == 1 { Strategy::Single } else { Strategy::Ddp }
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
        self.step_work(micro_batches, Work::of_batches(whole, batches))
    }

    fn step_computation(
        &mut self,
        micro_batches: usize,
        computation: Computation<'_, Sequence<A>>,
    ) -> Result<StepReport> {
        self.step_work(micro_batches, computation.into())
    }

    fn accumulate_batches(&mut self, micro_batches: usize, batches: Batches<'_, A>) -> Result<()> {
        self.accumulate_work(micro_batches, Work::of_batches(whole, batches))
    }

    fn join_batches(&mut self, own: usize, batches: Batches<'_, A>) -> Result<Option<StepReport>> {
        self.join_work(own, Work::of_batches(whole, batches))
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
        (*self).for_each_parameter(f)
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
        let (comm, model) = (*self).into_parts();
        Ok((comm, vec![model]))
    }
}

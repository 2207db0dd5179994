//! Local SGD and DiLoCo as a [`Trainer`]: ranks compute and update alone, and synchronise after some updates.

use std::path::Path;

use dist_collectives::Communicator;

use super::methods::trainer_methods;
use super::{Batches, Computation, Evaluation, Strategy, Trainer};
use crate::block_range::whole;
use crate::checkpoint::{Checkpoints, Saving, Shards, WeightOptions, WeightReport};
use crate::engine::Work;
use crate::local_sgd::{LocalSgd, OuterStep};
use crate::{Error, Optimizer, OptimizerState, Result, Sequence, StepReport, Values};

impl<A: 'static> Trainer<A> for LocalSgd<Sequence<A>> {
    trainer_methods!(model);

    fn strategy(&self) -> Strategy {
        Strategy::LocalSgd(self.options())
    }

    fn step_batches(&mut self, micro_batches: usize, batches: Batches<'_, A>) -> Result<StepReport> {
        self.step_work(micro_batches, Work::of_batches(whole, batches))
    }

    fn step_computation(
        &mut self,
        micro_batches: usize,
        computation: Computation<'_, Sequence<A>>,
    ) -> Result<StepReport> {
        self.step_work::<()>(micro_batches, computation.into())
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

    fn update_if_finite(&mut self, optimizer: &mut dyn Optimizer) -> Result<bool> {
        self.update_if_finite(optimizer)
    }

    fn for_each_parameter(&mut self, f: &mut dyn FnMut(usize, Values<'_>)) -> Result<()> {
        self.engine.for_each_parameter(f)
    }

    fn synchronise_parameters(&mut self) -> Result<()> {
        if self.steps() == 0 { Ok(()) } else { self.synchronise().map(drop) }
    }

    fn shards(&mut self) -> Result<&mut dyn Shards> {
        Err(Error::NotWithStrategy {
            feature: "shards",
            strategy: self.strategy(),
            reason: "the outer step has state too: use save and load of the trainer",
        })
    }

    fn save(
        &mut self,
        checkpoints: &mut Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        step: u64,
    ) -> Result<()> {
        self.save(checkpoints, optimizer, step)
    }

    fn start_save(
        &mut self,
        checkpoints: &mut Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        step: u64,
    ) -> Result<Saving> {
        self.start_save(checkpoints, optimizer, step)
    }

    fn load(
        &mut self,
        checkpoints: &mut Checkpoints,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<Option<u64>> {
        match (self.options().outer, optimizer) {
            (OuterStep::Average, None) => self.load_parameters(checkpoints),
            (_, optimizer) => self.load(checkpoints, optimizer),
        }
    }

    fn load_step(
        &mut self,
        checkpoints: &mut Checkpoints,
        step: u64,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<()> {
        match (self.options().outer, optimizer) {
            (OuterStep::Average, None) => self.load_parameters_of(checkpoints, step),
            (_, optimizer) => self.load_step(checkpoints, step, optimizer),
        }
    }

    fn load_parameters(&mut self, checkpoints: &mut Checkpoints) -> Result<Option<u64>> {
        self.load_parameters(checkpoints)
    }

    fn load_weights(&mut self, path: &Path, options: &WeightOptions) -> Result<WeightReport> {
        self.load_weights(path, options)
    }

    fn into_parts(mut self: Box<Self>) -> Result<(Communicator, Vec<Sequence<A>>)> {
        self.synchronise_parameters()?;
        let (comm, model) = (*self).into_parts();
        Ok((comm, vec![model]))
    }
}

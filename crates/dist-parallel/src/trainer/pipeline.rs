//! Pipelines as a [`Trainer`].

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;

use dist_collectives::Communicator;

use super::{BatchFn, Batches, Computation, Evaluation, StageCopies, Strategy, Trainer};
use crate::checkpoint::Shards;
use crate::fsdp::{Precision, follow};
use crate::loss::WeightedLoss;
use crate::pipeline::{Activations, Pipeline, ScheduleKind, split_into_stages};
use crate::{
    BoxError, BucketHook, Error, Optimizer, ParamInfo, Result, Sequence, StepDescriptor, StepReport,
    TrainingCall, Values,
};

/// One pipeline of all ranks, or several pipelines of neighbouring ranks.
pub(super) struct PipelineTrainer<A> {
    pipeline: Pipeline<A>,
    strategy: Strategy,
    /// The number of micro-batches of all pipelines that the schedule is for.
    micro_batches: usize,
    /// The communicator of all ranks, if there are several pipelines.
    world: Option<Communicator>,
}

/// The options of a [`PipelineTrainer`].
pub(super) struct PipelineOptions {
    pub(super) kind: ScheduleKind,
    /// The number of ranks of one pipeline. `None` for all ranks.
    pub(super) ranks: Option<usize>,
    pub(super) copies: StageCopies,
    /// The blocks of each stage. `None` for stages with equal numbers of blocks.
    pub(super) stages: Option<Vec<Range<usize>>>,
    /// The number of micro-batches of all pipelines.
    pub(super) micro_batches: usize,
    pub(super) precision: Precision,
    /// The hook that sums gradients over the pipelines.
    pub(super) hook: Option<Box<dyn BucketHook>>,
}

impl<A> PipelineTrainer<A> {
    pub(super) fn new(
        mut world: Communicator,
        model: Sequence<A>,
        options: PipelineOptions,
        activations: impl Activations<A> + 'static,
    ) -> Result<Self> {
        let PipelineOptions { kind, ranks, copies, stages, micro_batches, precision, hook } = options;
        let strategy = Strategy::Pipeline { kind, ranks, copies };
        let world_size = world.world_size();
        let ranks = ranks.unwrap_or(world_size);
        if ranks == 0 || !world_size.is_multiple_of(ranks) {
            return Err(Error::ShardDegree { shard_degree: ranks, ranks: world_size });
        }
        let pipelines = world_size / ranks;
        if !micro_batches.is_multiple_of(pipelines) {
            return Err(Error::PipelineShares { micro_batches, pipelines });
        }
        let mut schedule = kind.schedule(ranks, micro_batches / pipelines)?;
        if copies == StageCopies::Sharded {
            schedule = schedule.with_gathers(1);
        }
        let blocks = model.blocks().len();
        let stages = stages.map_or_else(|| split_into_stages(blocks, schedule.stages()), Ok)?;
        if pipelines == 1 && copies == StageCopies::Replicated && hook.is_none() {
            let pipeline = Pipeline::with_precision(world, model, schedule, &stages, activations, precision)?;
            return Ok(Self { pipeline, strategy, micro_batches, world: None });
        }
        let (pipeline, rank) = (world.rank() / ranks, world.rank() % ranks);
        let mut group = |members: Vec<usize>| {
            let group = world.subgroup(&members).map_err(Error::communication)?;
            Ok::<_, Error>(group.expect("every rank names a group that it is in"))
        };
        let of_pipeline = group((pipeline * ranks..(pipeline + 1) * ranks).collect())?;
        let with_same_stages = group((0..pipelines).map(|pipeline| pipeline * ranks + rank).collect())?;
        let mut pipeline =
            Pipeline::with_precision(of_pipeline, model, schedule, &stages, activations, precision)?;
        match copies {
            StageCopies::Replicated => pipeline.join_replicas(with_same_stages, hook)?,
            StageCopies::Sharded => pipeline.shard_over(world.fork().map_err(Error::communication)?)?,
        }
        Ok(Self { pipeline, strategy, micro_batches, world: Some(world) })
    }

    /// Returns the pipeline, with the timeout and the reduction order of the communicator of all ranks.
    fn following(&mut self) -> &mut Pipeline<A> {
        if let Some(world) = &self.world {
            follow(self.pipeline.communicator_mut(), world);
        }
        &mut self.pipeline
    }

    /// Returns the pipeline for a call with as many micro-batches as its schedule has.
    fn scheduled(&mut self, descriptor: StepDescriptor) -> Result<&mut Pipeline<A>> {
        let fits = descriptor.micro_batches == self.micro_batches;
        let pipeline = self.following();
        if fits { Ok(pipeline) } else { Err(pipeline.refuse_step(descriptor)) }
    }

    fn not_with_pipelines(&self, feature: &'static str, reason: &'static str) -> Error {
        Error::NotWithStrategy { feature, strategy: self.strategy, reason }
    }
}

impl<A: 'static> Trainer<A> for PipelineTrainer<A> {
    fn strategy(&self) -> Strategy {
        self.strategy
    }

    fn infos(&self) -> &[ParamInfo] {
        self.pipeline.infos()
    }

    fn communicator(&self) -> &Communicator {
        self.world.as_ref().unwrap_or_else(|| self.pipeline.communicator())
    }

    fn communicator_mut(&mut self) -> &mut Communicator {
        self.world.as_mut().unwrap_or_else(|| self.pipeline.communicator_mut())
    }

    fn step_batches(&mut self, micro_batches: usize, batches: Batches<'_, A>) -> Result<StepReport> {
        let (weighted, next) = (batches.weighted, RefCell::new(batches.next));
        let descriptor = StepDescriptor::new(TrainingCall::Step, micro_batches, weighted);
        self.scheduled(descriptor)?.step_micro_batches(weighted, &mut input_of(&next), &mut loss_of(&next))
    }

    fn step_computation(&mut self, _: usize, _: Computation<'_, Sequence<A>>) -> Result<StepReport> {
        Err(self.not_with_pipelines("step_with", "no rank has the whole model"))
    }

    fn accumulate_batches(&mut self, micro_batches: usize, batches: Batches<'_, A>) -> Result<()> {
        let (weighted, next) = (batches.weighted, RefCell::new(batches.next));
        let descriptor = StepDescriptor::new(TrainingCall::Accumulate, micro_batches, weighted);
        let pipeline = self.scheduled(descriptor)?;
        pipeline.accumulate_micro_batches(weighted, &mut input_of(&next), &mut loss_of(&next))
    }

    fn join_batches(&mut self, own: usize, batches: Batches<'_, A>) -> Result<Option<StepReport>> {
        let (weighted, next) = (batches.weighted, RefCell::new(batches.next));
        self.following().join_micro_batches(own, weighted, &mut input_of(&next), &mut loss_of(&next))
    }

    fn evaluate_batches(
        &mut self,
        micro_batches: usize,
        evaluation: Evaluation<'_, A>,
    ) -> Result<StepReport> {
        self.following().evaluate_batches(micro_batches, evaluation)
    }

    fn update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        self.following().update(optimizer)
    }

    fn gradient_norm(&mut self) -> Result<f64> {
        self.following().gradient_norm()
    }

    fn clip_gradients(&mut self, max: f64) -> Result<f64> {
        self.following().clip_gradients(max)
    }

    fn scale_gradients(&mut self, factor: f64) {
        self.pipeline.scale_gradients(factor);
    }

    fn without_gradient(&self) -> Vec<&str> {
        self.pipeline.without_gradient()
    }

    fn for_each_parameter(&mut self, f: &mut dyn FnMut(usize, Values<'_>)) -> Result<()> {
        self.following().for_each_parameter(f)
    }

    fn train(&mut self) {
        self.pipeline.train();
    }

    fn eval(&mut self) {
        self.pipeline.eval();
    }

    fn model(&self) -> Result<&Sequence<A>> {
        Err(self.not_with_pipelines("model", "no rank has the whole model: use pipeline_mut"))
    }

    fn model_mut(&mut self) -> Result<&mut Sequence<A>> {
        Err(self.not_with_pipelines("model_mut", "no rank has the whole model: use pipeline_mut"))
    }

    fn pipeline_mut(&mut self) -> Option<&mut Pipeline<A>> {
        Some(&mut self.pipeline)
    }

    fn shards(&mut self) -> Result<&mut dyn Shards> {
        Ok(self.following())
    }

    fn into_parts(mut self: Box<Self>) -> Result<(Communicator, Vec<Sequence<A>>)> {
        self.following();
        let Self { pipeline, world, .. } = *self;
        let (comm, stages) = pipeline.into_parts()?;
        Ok((world.unwrap_or(comm), stages))
    }
}

/// Returns the function for the inputs of these micro-batches.
fn input_of<A>(next: &RefCell<&mut BatchFn<'_, A>>) -> impl FnMut(usize) -> Result<A, BoxError> {
    |index| Ok(next.borrow_mut()(index)?.0)
}

/// Returns the function for their losses, which another rank calls.
fn loss_of<A>(
    next: &RefCell<&mut BatchFn<'_, A>>,
) -> impl FnMut(usize, A) -> Result<(WeightedLoss, A), BoxError> {
    |index, output| {
        let (_, loss) = next.borrow_mut()(index)?;
        loss(output)
    }
}

impl<A> fmt::Debug for PipelineTrainer<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pipeline.fmt(f)
    }
}

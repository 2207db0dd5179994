//! Pipelines as a [`Trainer`].

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;

use dist_collectives::Communicator;

use super::{Batches, Computation, Evaluation, StageCopies, Strategy, Trainer};
use crate::checkpoint::Shards;
use crate::engine::{StepEngine, Work, engine_methods};
use crate::fsdp::{Precision, follow};
use crate::pipeline::{Activations, Pipeline, ScheduleKind, split_into_stages};
use crate::{
    BucketHook, Error, Optimizer, ParamInfo, Result, Sequence, StepDescriptor, StepReport, TrainingCall,
    Values,
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

    /// Calls `f` with the pipeline's engine and with the computation of these micro-batches.
    fn with_work<T>(
        &mut self,
        batches: Batches<'_, A>,
        f: impl FnOnce(&mut StepEngine<Sequence<A>>, Work<'_, '_, Sequence<A>, A>) -> T,
    ) -> T {
        // Another rank calls the function of the loss than that of the input.
        let (weighted, next) = (batches.weighted, RefCell::new(batches.next));
        let mut input = |index| Ok(next.borrow_mut()(index)?.0);
        let mut loss = |index, output| {
            let (_, loss) = next.borrow_mut()(index)?;
            loss(output)
        };
        let Pipeline { engine, activations } = self.following();
        f(engine, Work::of_stages(weighted, &mut input, &mut loss, &**activations))
    }

    /// Returns an error unless a call has as many micro-batches as the schedule.
    fn check_scheduled(&mut self, call: TrainingCall, micro_batches: usize, weighted: bool) -> Result<()> {
        if micro_batches == self.micro_batches {
            return Ok(());
        }
        let requested = StepDescriptor::new(call, micro_batches, weighted);
        Err(self.following().engine.refuse_step(requested))
    }

    fn not_with_pipelines(&self, feature: &'static str, reason: &'static str) -> Error {
        Error::NotWithStrategy { feature, strategy: self.strategy, reason }
    }
}

impl<A: 'static> Trainer<A> for PipelineTrainer<A> {
    engine_methods!(gradients, |this| this.pipeline.engine, this.following().engine);
    engine_methods!(mode, |this| this.following().engine);

    fn infos(&self) -> &[ParamInfo] {
        self.pipeline.infos()
    }

    fn strategy(&self) -> Strategy {
        self.strategy
    }

    fn communicator(&self) -> &Communicator {
        self.world.as_ref().unwrap_or_else(|| self.pipeline.communicator())
    }

    fn communicator_mut(&mut self) -> &mut Communicator {
        self.world.as_mut().unwrap_or_else(|| self.pipeline.communicator_mut())
    }

    fn step_batches(&mut self, micro_batches: usize, batches: Batches<'_, A>) -> Result<StepReport> {
        self.check_scheduled(TrainingCall::Step, micro_batches, batches.weighted)?;
        self.with_work(batches, |engine, work| engine.step(micro_batches, work))
    }

    fn step_computation(&mut self, _: usize, _: Computation<'_, Sequence<A>>) -> Result<StepReport> {
        Err(self.not_with_pipelines("step_with", "no rank has the whole model"))
    }

    fn accumulate_batches(&mut self, micro_batches: usize, batches: Batches<'_, A>) -> Result<()> {
        self.check_scheduled(TrainingCall::Accumulate, micro_batches, batches.weighted)?;
        self.with_work(batches, |engine, work| engine.accumulate(micro_batches, work))
    }

    fn join_batches(&mut self, own: usize, batches: Batches<'_, A>) -> Result<Option<StepReport>> {
        self.with_work(batches, |engine, work| engine.join(own, work))
    }

    fn evaluate_batches(
        &mut self,
        micro_batches: usize,
        evaluation: Evaluation<'_, A>,
    ) -> Result<StepReport> {
        let Pipeline { engine, activations } = self.following();
        let work = Work::of_evaluation(Sequence::block, evaluation).with_activations(&**activations);
        engine.evaluate(micro_batches, work)
    }

    fn update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        self.following().update(optimizer)
    }

    fn for_each_parameter(&mut self, f: &mut dyn FnMut(usize, Values<'_>)) -> Result<()> {
        self.following().for_each_parameter(f)
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

impl<A> fmt::Debug for PipelineTrainer<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pipeline.fmt(f)
    }
}

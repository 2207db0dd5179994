//! The engine of training: the state of one rank, and the steps of every strategy.
//!
//! [`Ddp`](crate::Ddp), [`Fsdp`](crate::fsdp::Fsdp), [`Pipeline`](crate::pipeline::Pipeline) and
//! [`LocalSgd`](crate::local_sgd::LocalSgd) are its interfaces. A rank that has the whole model, or a shard of it, runs
//! rounds: in each, it computes one micro-batch or, if others need it, none. A rank that has some stages of the model runs
//! the list of a schedule, which has all micro-batches. The [`Interpreter`] executes both.

mod actions;
mod initial;
mod interpreter;
mod methods;
mod round_actions;
mod shards;
mod stage;
mod step;
mod update;
mod work;

use dist_collectives::Communicator;

pub(crate) use actions::{GatherPolicy, StageUnits, StepAction, UnitOf, step_actions};
pub(crate) use initial::{Given, InitialValues};
pub(crate) use interpreter::{Interpreter, PassInput};
pub(crate) use methods::engine_methods;
pub(crate) use round_actions::RoundActions;
#[doc(hidden)]
pub use shards::delegate_shards;
pub(crate) use stage::Stage;
pub(crate) use work::{AssignedMicroBatch, BatchSource, Work};

use crate::abort::or_abort;
use crate::broadcast::broadcast;
use crate::buffers::Buffers;
use crate::fsdp::{
    Degrees, FlatParameter, FsdpOptions, Groups, Layout, Parameters, Plan, ShardChunk, ShardingStrategy,
    Units, bytes_sent,
};
use crate::gradients::{GradientLayout, GradientMemory, Gradients};
use crate::hook_worker::HookWorker;
use crate::loss::WeightedLoss;
use crate::pass::Passes;
use crate::pipeline::PipelineState;
use crate::unreported::Unreported;
use crate::updates::Updates;
use crate::{BucketHook, BucketPlan, DdpOptions, Error, ParamInfo, Params, Pass, Result, Values, params};

/// The state of one rank of a training.
pub(crate) struct StepEngine<M> {
    /// The group of all ranks or, in a pipeline, of the ranks of this pipeline.
    pub(crate) world: Communicator,
    pub(crate) groups: Groups,
    /// This rank's stages of the model, in order. A model that is not divided into stages is one.
    pub(crate) stages: Vec<Stage<M>>,
    /// The parameters of the whole model.
    pub(crate) model_infos: Vec<ParamInfo>,
    /// The same with the types of the master values that the optimizer updates.
    master_infos: Vec<ParamInfo>,
    /// The schedule, the messages and the ties between stages. `None` if the model is not divided into stages.
    pub(crate) pipeline: Option<PipelineState>,
    agreement: Agreement,
    pub(crate) actions: RoundActions,
    /// The number of actions of the next forward that a prefetch has executed.
    pub(crate) prefetched: Option<usize>,
    /// The number of micro-batches of all ranks since the last step.
    pub(crate) micro_batches: usize,
    pub(crate) weighted: bool,
    /// The number of this rank's micro-batches since the last step, and their total weight.
    computed: usize,
    count: u64,
    /// This rank's losses since the last step, one per round.
    pub(crate) losses: Vec<f32>,
    /// The sum of this rank's losses in the last call that computed gradients, and their total weight.
    pub(crate) of_call: WeightedLoss,
    pub(crate) passes: Passes,
    pub(crate) updates: Updates,
    unreported: Unreported,
    /// `true` while this rank computes gradients. It stays `true` if the computation panics.
    computes: bool,
}

/// When the ranks agree on the step that they have called for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Agreement {
    /// Before the first round, because rounds may need all ranks of a replica.
    BeforeRounds,
    /// At the end of the step, with the counts of its micro-batches.
    AtEnd,
    /// Never: each rank has gradients, updates and parameters of its own.
    OwnRank,
}

/// The gradients of an engine, and its agreement.
pub(crate) struct GradientSetup {
    pub(crate) layout: GradientLayout,
    pub(crate) memory: GradientMemory,
    pub(crate) hook: Option<Box<dyn BucketHook>>,
    pub(crate) agreement: Agreement,
}

impl<M> StepEngine<M> {
    /// Returns the only stage of a model that is not divided into stages.
    pub(crate) fn stage(&self) -> &Stage<M> {
        &self.stages[0]
    }

    /// Returns the same stage, to change it.
    pub(crate) fn stage_mut(&mut self) -> &mut Stage<M> {
        &mut self.stages[0]
    }

    /// Ends the training. Returns the communicator and the only stage.
    pub(crate) fn into_parts(mut self) -> (Communicator, M) {
        (self.world, self.stages.swap_remove(0).model)
    }
}

impl<M: Params> StepEngine<M> {
    /// Starts the training of a model of which every rank has a replica, with the parameters of rank 0.
    pub(crate) fn replicated(
        mut world: Communicator,
        mut model: M,
        options: DdpOptions,
        hook: Option<Box<dyn BucketHook>>,
        agreement: Agreement,
    ) -> Result<Self> {
        let DdpOptions { bucket_bytes, precision } = options;
        let unsharded = FsdpOptions::new(ShardingStrategy::NoShard)
            .with_units(Units::OneForAll)
            .with_precision(precision);
        let plan = Plan::new(model.infos(), &[0, model.infos().len()], world.world_size(), &unsharded)?;
        let buckets = BucketPlan::new(model.infos(), bucket_bytes);
        let layout = GradientLayout::of_plan(model.infos(), &buckets, precision.reduce, 1);
        tracing::debug!(
            parameters = model.infos().len(),
            buckets = buckets.buckets().len(),
            "training begins"
        );
        let received = broadcast(&mut world, &mut model);
        or_abort(&mut world, received)?;
        let setup = GradientSetup { layout, memory: GradientMemory::OfEachBucket, hook, agreement };
        Self::start(world, model, plan, setup, InitialValues::Broadcast)
    }

    /// Starts the training of a model on all ranks, which have agreed on it and on the plan.
    pub(crate) fn start(
        mut world: Communicator,
        mut model: M,
        plan: Plan,
        setup: GradientSetup,
        mut first: InitialValues<'_>,
    ) -> Result<Self> {
        let (degrees, precision) = (plan.degrees, plan.options.precision);
        let reduced = match setup.agreement {
            Agreement::OwnRank => Degrees { replicas: 1, ..degrees },
            Agreement::BeforeRounds | Agreement::AtEnd => degrees,
        };
        let mut groups = Groups::new(&mut world, reduced, plan.reshard_group)?;
        let filled = first.fill_buffers(&mut world, &mut model, &plan.layout);
        let moves = !matches!(first, InitialValues::Broadcast);
        let mut fill =
            |model: &mut _, flat_param: &_, whole: &mut _| first.fill(&mut world, model, flat_param, whole);
        let parameters = filled.and_then(|()| {
            Parameters::new(&plan.layout, degrees, precision, &mut groups, &mut model, moves, &mut fill)
        });
        let parameters = or_abort(&mut world, parameters)?;
        first.check(&mut world, model.infos())?;
        let GradientSetup { layout, memory, hook, agreement } = setup;
        let keeps_residual = hook.as_ref().is_some_and(|hook| hook.keeps_residual());
        let tensors = layout.tensors(model.infos());
        let worker = hook.map(|hook| HookWorker::start(&mut groups.replicas, hook, tensors)).transpose();
        groups.hook = or_abort(&mut world, worker)?;
        let (rank, infos) = (groups.shards.rank(), model.infos().to_vec());
        let actions = RoundActions::new(&plan);
        let stage = Stage {
            number: 0,
            range: 0..infos.len(),
            parameters,
            gradients: Gradients::new(layout, degrees.scatter(), memory, keeps_residual, rank),
            buffers: Buffers::new(model.infos()),
            model,
            plan,
            tie_of: Vec::new(),
        };
        Ok(Self::of_stages(world, groups, vec![stage], infos, agreement, actions))
    }

    /// Returns the state of a rank with these stages of a model, whose parameters are `infos`.
    pub(crate) fn of_stages(
        world: Communicator,
        groups: Groups,
        stages: Vec<Stage<M>>,
        infos: Vec<ParamInfo>,
        agreement: Agreement,
        actions: RoundActions,
    ) -> Self {
        let precision = stages[0].plan.options.precision;
        let master = |info: &ParamInfo| {
            let dtype = precision.master.filter(|_| info.trainable).unwrap_or(info.dtype);
            ParamInfo { dtype, ..info.clone() }
        };
        Self {
            master_infos: infos.iter().map(master).collect(),
            groups,
            world,
            stages,
            model_infos: infos,
            pipeline: None,
            agreement,
            actions,
            prefetched: None,
            micro_batches: 0,
            weighted: false,
            computed: 0,
            count: 0,
            losses: Vec::new(),
            of_call: (0.0, 0),
            passes: Passes::default(),
            updates: Updates::new(),
            unreported: Unreported::default(),
            computes: false,
        }
    }

    /// Ends a step that was not computed by rounds. `changes_buffers` is `true` if the model has gone forward.
    pub(crate) fn end_step_outside(&mut self, changes_buffers: bool) {
        if changes_buffers {
            self.stage_mut().buffers.record_forward();
        }
        let pass = self.passes.end_step();
        self.begin_forward(pass);
    }

    /// Announces a forward to the blocks of this rank's stages.
    pub(crate) fn begin_forward(&mut self, pass: Pass) {
        self.stages.iter_mut().for_each(|stage| stage.model.begin_forward(pass));
    }

    /// Makes values that the program has written into the model the master values. A value that is still the rounded
    /// master value stays as precise as it is.
    pub(crate) fn adopt_model_values(&mut self) -> Result<()> {
        let rank = self.groups.shards.rank();
        self.stage_mut().adopt(rank)
    }

    /// Returns the chunks of this rank's shard of all parameters, each with the position of its flat parameter.
    fn chunks(&self) -> Vec<((usize, usize), ShardChunk)> {
        self.stage().chunks(self.groups.shards.rank())
    }

    /// Returns the number of parameter values in this rank's shard.
    pub(crate) fn shard_len(&self) -> usize {
        self.chunks().iter().map(|(_, chunk)| chunk.len).sum()
    }

    /// All-gathers the shards of these flat parameters after an update, if every rank's model has all parameters.
    fn all_gather_updates(&mut self, changed: impl Fn(&FlatParameter) -> bool) -> Result<()> {
        self.follow();
        // Prefetched parameters are outdated now.
        self.prefetched = None;
        let Self { stages, groups, .. } = self;
        stages.iter_mut().try_for_each(|stage| stage.publish(groups, &changed))
    }

    /// Calls `f` with the index and all values of each parameter, buffers included: unit by unit, or in order if stages
    /// are on different ranks.
    pub(crate) fn for_each_parameter(&mut self, mut f: impl FnMut(usize, Values<'_>)) -> Result<()> {
        self.begin_call("for_each")?;
        self.read_all(&mut f)
    }

    pub(crate) fn read_all(&mut self, f: &mut dyn FnMut(usize, Values<'_>)) -> Result<()> {
        let result = match self.pipeline {
            Some(_) => self.for_each_of_stages(f),
            None => self.for_each_unit(|model, layout, unit| {
                let unit = &layout.units[unit];
                let mut parameters = unit.sharded().chain(unit.buffers.iter().map(|buffer| buffer.parameter));
                parameters.try_for_each(|parameter| {
                    params::read(model, parameter, &mut |values| f(parameter, values))
                })
            }),
        };
        self.or_abort(result)
    }

    /// Gathers each unit once and calls `f` while the model has it.
    fn for_each_unit(&mut self, mut f: impl FnMut(&M, &Layout, usize) -> Result<()>) -> Result<()> {
        self.follow();
        self.prefetched = None;
        let Self { stages, groups, .. } = self;
        let stage = &mut stages[0];
        stage.parameters.forget();
        for unit in stage.units() {
            stage.gather(unit, groups)?;
            f(&stage.model, &stage.plan.layout, unit)?;
            stage.free(unit)?;
            // No rank waits while another works on all units.
            stage.parameters.close(groups)?;
        }
        stage.parameters.rest(groups)
    }

    /// Passes the communicator's timeout and reduction order to the groups.
    pub(crate) fn follow(&mut self) {
        let Self { world, groups, stages, pipeline, .. } = self;
        groups.follow(world);
        stages.iter_mut().for_each(|stage| stage.parameters.follow(world));
        pipeline.iter_mut().for_each(|pipeline| pipeline.follow(world));
    }

    /// Sets the mode of forwards outside of steps and evaluations.
    pub(crate) fn set_training(&mut self, training: bool) {
        let pass = self.passes.set_training(training);
        self.begin_forward(pass);
    }

    /// Announces a call, so that a rank in another call gets an error.
    pub(crate) fn announce(&mut self, name: &str) {
        self.follow();
        self.world.announce(name, name);
        if let Some(pipeline) = &mut self.pipeline {
            let Groups { shards, replicas, .. } = &mut self.groups;
            let groups = [shards, replicas].into_iter().chain(&mut pipeline.sharded);
            groups.for_each(|group| group.announce(name, name));
        }
    }

    /// Returns the number of bytes that this rank has sent.
    fn bytes_sent(&self) -> u64 {
        let of_pipeline = self.pipeline.as_ref().map_or(0, PipelineState::bytes_sent);
        bytes_sent(&self.world) + self.groups.bytes_sent() + of_pipeline
    }

    /// On an error that other ranks do not get, aborts the job and drops all gradients.
    pub(crate) fn or_abort<T>(&mut self, result: Result<T>) -> Result<T> {
        or_abort(&mut self.world, result).inspect_err(|error| {
            if !error.is_on_every_rank() {
                self.forget();
            }
        })
    }

    /// Returns an error if a computation of gradients has panicked, because the sums are then incomplete.
    const fn check_ended(&self) -> Result<()> {
        if self.computes { Err(Error::StepPanicked) } else { Ok(()) }
    }

    /// Drops all gradients and the gathered parameters. A hook keeps its residuals.
    pub(crate) fn forget(&mut self) {
        self.stages.iter_mut().for_each(Stage::forget);
        self.pipeline.iter_mut().for_each(PipelineState::forget);
        (self.prefetched, self.micro_batches, self.weighted) = (None, 0, false);
        (self.computed, self.count) = (0, 0);
        self.losses.clear();
    }

    /// Drops all gradients and residuals, as at the start of the training.
    pub(crate) fn reset(&mut self) -> Result<()> {
        self.forget();
        self.updates.forget();
        self.computes = false;
        self.stages.iter_mut().for_each(|stage| stage.gradients.forget_residuals());
        self.groups.hook.as_ref().map_or(Ok(()), HookWorker::forget)
    }
}

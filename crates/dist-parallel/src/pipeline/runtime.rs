//! Training of a model whose stages are on different ranks.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use dist_collectives::Communicator;

use super::activations::Activations;
use super::stage::actions_of;
use super::ties::{self, Tie};
use super::{PipelineSchedule, PipelineState, Span, Timeline};
use crate::abort::or_abort;
use crate::agreement::Setting;
use crate::engine::{Agreement, RoundActions, Stage, StepEngine, delegate_shards, engine_methods};
use crate::fsdp::{Groups, Precision};
use crate::hook_worker::HookWorker;
use crate::{
    BucketHook, BucketTensor, Error, ParamInfo, Params, Result, Sequence, Values, agreement, params,
};

/// Pipeline-parallel training: every rank has some stages of the model, and a step's micro-batches flow through them
/// in the order of a [`PipelineSchedule`].
///
/// # Reproducible sums
///
/// Gradients and losses are summed in the canonical order over the micro-batches, T(n) = T(largest power of two below
/// n) + T(rest). The order is that of their numbers, not the order in which the schedule finishes them. The bits are
/// therefore those that one process computes with the same model, for every schedule, any division into stages and
/// any number of ranks. With several pipelines ([`reduce_over`](Self::reduce_over)) this holds if each one's share is
/// a power of two.
///
/// A parameter that several stages have has a copy on each of their ranks. Its gradients are added for every
/// micro-batch, before the tree. The rank of the first such stage has the mean, updates the parameter and sends it to
/// the others.
///
/// # Buffers
///
/// [Buffers](crate::ParamInfo::buffer) are complete on the ranks of their stage, even if the stage's parameters are
/// sharded. The ranks with the same stage synchronise them at the end of every step. A buffer cannot belong to
/// several stages.
///
/// # Overlap of communication
///
/// A computation waits for the messages that it receives, not for those that it sends. One message per link is
/// received ahead. The shape of a link's activations is sent once, before the first of them. All later ones must have
/// it, and gradients have the shape of their activations. In an [evaluation](Self::evaluate) every activation is
/// preceded by its own shape. An output then waits until the one before it was received, and only shapes are received
/// ahead. The timeout of a message begins when it is sent or when its receive starts.
///
/// # Memory
///
/// A rank holds at most [`PipelineSchedule::kept_max`] activations of its stages. The sums take at most ⌈log₂ M⌉ + 1
/// buffers of the size of the stage's gradients, if the schedule finishes M micro-batches in order. If blocks report
/// gradients in both halves of a backward, each micro-batch between the halves needs one more.
///
/// # Errors
///
/// An error on one rank aborts the job, so that no other rank waits for it. These errors occur on every rank alike
/// and do not abort it: [`ZeroWeight`](Error::ZeroWeight), [`StepsDiffer`](Error::StepsDiffer),
/// [`SettingsDiffer`](Error::SettingsDiffer), [`CallsDiffer`](Error::CallsDiffer) between calls other than a step, and
/// in evaluations [`NoMicroBatches`](Error::NoMicroBatches) and [`NoSchedule`](Error::NoSchedule), and in joins
/// [`JoinsDiffer`](Error::JoinsDiffer) and [`JoinedMicroBatches`](Error::JoinedMicroBatches).
pub struct Pipeline<A> {
    pub(crate) engine: StepEngine<Sequence<A>>,
    pub(crate) activations: Box<dyn Activations<A>>,
}

impl<A> Pipeline<A> {
    /// Starts to train `model` on all ranks of the group. `stages` contains the blocks of each stage;
    /// [`split_into_stages`](super::split_into_stages) makes such a list. A rank drops the blocks of other ranks'
    /// stages. Every rank describes the whole model: blocks of other ranks can be a
    /// [`Placeholder`](super::Placeholder).
    ///
    /// A stage begins with the parameters of its rank. Parameters of several stages begin with those of the first
    /// one.
    ///
    /// # Errors
    /// The schedule is invalid or for another number of ranks; the stages are not as many as the schedule's or do not
    /// cover all blocks in order; models, schedules or stages differ between ranks: every rank gets the error.
    /// Communication fails.
    pub fn new(
        comm: Communicator,
        model: Sequence<A>,
        schedule: PipelineSchedule,
        stages: &[Range<usize>],
        activations: impl Activations<A> + 'static,
    ) -> Result<Self> {
        Self::with_precision(comm, model, schedule, stages, activations, Precision::default())
    }

    /// Starts to train like [`new`](Self::new), with master parameters and reduced gradients of these types.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new). [`CannotTie`](Error::CannotTie) on every rank if stages share a parameter and
    /// the types are not those of the model.
    pub fn with_precision(
        mut comm: Communicator,
        model: Sequence<A>,
        schedule: PipelineSchedule,
        stages: &[Range<usize>],
        activations: impl Activations<A> + 'static,
        precision: Precision,
    ) -> Result<Self> {
        let starts: Vec<_> = stages.iter().map(|stage| model.starts().get(stage.start)).collect();
        let settings = [
            as_setting(&schedule),
            agreement::setting("the blocks of the stages", stages),
            agreement::setting("the list of the stages' first parameters", starts),
            agreement::setting("the number of blocks", model.blocks().len()),
            agreement::setting("the precision", precision),
        ];
        agreement::check(&mut comm, model.infos(), &settings)?;
        params::validate(model.infos())?;
        check(&comm, &model, &schedule, stages)?;
        let infos = model.infos().to_vec();
        let mut first: Vec<usize> = stages.iter().map(|blocks| model.starts()[blocks.start]).collect();
        first.push(infos.len());
        let ties = ties::find(&infos, &first)?;
        check_precision(&infos, &ties, precision)?;
        let mut groups = Groups::alone(&mut comm)?;
        let mut own = Vec::new();
        let mut blocks = model.into_blocks().into_iter();
        for (stage, range) in stages.iter().enumerate() {
            let of_stage = blocks.by_ref().take(range.len()).collect();
            if schedule.placement()[stage] == comm.rank() {
                let parameters = first[stage]..first[stage + 1];
                own.push(Stage::of_blocks(
                    stage,
                    of_stage,
                    &infos,
                    parameters,
                    &ties,
                    precision,
                    &mut groups,
                )?);
            }
        }
        let list = &schedule.actions()[comm.rank()];
        let actions = RoundActions::of_schedule(actions_of(list, &own, schedule.stages() - 1));
        let state = PipelineState::new(&mut comm, schedule, &infos, first, ties)?;
        let mut engine = StepEngine::of_stages(comm, groups, own, infos, Agreement::AtEnd, actions);
        engine.pipeline = Some(state);
        let told = engine.broadcast_ties();
        engine.or_abort(told)?;
        Ok(Self { engine, activations: Box::new(activations) })
    }

    /// Joins this pipeline with others that have the same stages (data parallelism). `data` connects the ranks with
    /// the same stages, in the order of the pipelines.
    ///
    /// Gradients and losses are then means over the micro-batches of all pipelines. Pipeline d of D computes the d-th
    /// contiguous share. Every stage gets the parameters of pipeline 0, and the gradients of earlier steps are
    /// dropped.
    ///
    /// # Errors
    /// Models or schedules differ between pipelines: every rank gets the error. Communication fails.
    pub fn reduce_over(&mut self, data: Communicator) -> Result<()> {
        self.join_replicas(data, None)
    }

    /// Joins this pipeline with others like [`reduce_over`](Self::reduce_over), with a communication hook that sums the
    /// gradients of each stage over `data`, for example compressed, as in [`Ddp::with_hook`](crate::Ddp::with_hook).
    ///
    /// The gradients of a stage are one bucket of each type. If the stage is [sharded](Self::shard_over), each block has
    /// its own buckets, and the hook sums this rank's shard of them, which is one tensor of one dimension. The gradients of
    /// parameters of several stages are summed without the hook.
    ///
    /// # Errors
    /// The errors of [`reduce_over`](Self::reduce_over), and hooks with different names on different ranks.
    pub fn reduce_over_with_hook(
        &mut self,
        data: Communicator,
        hook: impl BucketHook + 'static,
    ) -> Result<()> {
        self.join_replicas(data, Some(Box::new(hook)))
    }

    pub(crate) fn join_replicas(
        &mut self,
        mut data: Communicator,
        hook: Option<Box<dyn BucketHook>>,
    ) -> Result<()> {
        self.engine.announce("reduce_over");
        let name = hook.as_ref().map_or_else(|| "none".to_owned(), |hook| hook.name());
        let result = self.agree(&mut data, Some(("the hook".to_owned(), name)));
        self.engine.or_abort(result)?;
        self.state_mut().call_groups.data = Some(forked(&mut self.engine.world, &mut data)?);
        self.engine.groups.replicas = data;
        let tensors = self.number_buckets(hook.as_ref().is_some_and(|hook| hook.keeps_residual()));
        let replicas = &mut self.engine.groups.replicas;
        let worker = hook.map(|hook| HookWorker::start(replicas, hook, tensors)).transpose();
        self.engine.groups.hook = self.engine.or_abort(worker)?;
        self.engine.forget();
        Ok(())
    }

    /// Numbers the buckets of all stages of this rank, and returns their tensors.
    fn number_buckets(&mut self, keeps_residual: bool) -> Vec<Vec<BucketTensor>> {
        let mut tensors = Vec::new();
        for Stage { gradients, model, .. } in &mut self.engine.stages {
            gradients.set_hook(tensors.len(), keeps_residual);
            tensors.extend(gradients.tensors(model.infos()));
        }
        tensors
    }

    /// Joins this pipeline with others like [`reduce_over`](Self::reduce_over), and shards the parameters of each
    /// stage, their gradients and the optimizer's state among the ranks that have it. `pipelines` connects all ranks
    /// of these pipelines, in the order of the pipelines: in a mesh, the slice of the axes pipeline and shard.
    ///
    /// A stage's parameters are gathered while the schedule [gathers](PipelineSchedule::with_gathers) them. If it
    /// does not gather them, they are gathered during the whole step. Parameters of several stages stay complete.
    /// This saves memory only if the model can [free](Params::reshard) its parameters.
    ///
    /// If both axes are used, the pipelines that shard their parameters are neighbours: in a mesh, the axis of
    /// the shards varies faster than that of the data. The result has the bits of one process if the number of shards
    /// is a power of two, too.
    ///
    /// # Errors
    /// The errors of [`reduce_over`](Self::reduce_over). [`PipelineRanks`](Error::PipelineRanks) if `pipelines` does
    /// not have equally many ranks of each stage.
    pub fn shard_over(&mut self, mut pipelines: Communicator) -> Result<()> {
        self.engine.announce("shard_over");
        let shards = self.with_same_stages(&mut pipelines);
        let mut shards = self.engine.or_abort(shards)?;
        let result = self.agree(&mut shards, None);
        self.engine.or_abort(result)?;
        let state = self.state_mut();
        state.sharded = Some(pipelines);
        self.state_mut().call_groups.shards = Some(forked(&mut self.engine.world, &mut shards)?);
        let StepEngine { stages, groups, world, .. } = &mut self.engine;
        groups.shards = shards;
        let rank = world.rank();
        let keeps_residual = stages.iter().any(|stage| stage.gradients.keeps_residual());
        let result = stages.iter_mut().try_for_each(|stage| stage.shard_over(groups));
        self.engine.or_abort(result)?;
        let tensors = self.number_buckets(keeps_residual);
        let reset = self.engine.groups.hook.as_ref().map_or(Ok(()), |hook| hook.set_tensors(tensors));
        self.engine.or_abort(reset)?;
        let schedule = self.schedule();
        let actions = actions_of(&schedule.actions()[rank], &self.engine.stages, schedule.stages() - 1);
        self.engine.actions = RoundActions::of_schedule(actions);
        self.engine.forget();
        Ok(())
    }

    /// Returns the group of the ranks that have the same stages in these pipelines.
    fn with_same_stages(&self, pipelines: &mut Communicator) -> Result<Communicator> {
        let (own, ranks) = (self.engine.world.rank(), self.engine.world.world_size());
        let all = agreement::gather(pipelines, [own as u64])?;
        let members = |of: usize| (0..all.len()).filter(|&rank| all[rank] == [of as u64]).collect::<Vec<_>>();
        if (0..ranks).any(|of| members(of).len() * ranks != all.len()) {
            return Err(Error::PipelineRanks { ranks, world_size: all.len() });
        }
        let group = pipelines.subgroup(&members(own)).map_err(Error::communication)?;
        Ok(group.expect("every rank names a group that it is in"))
    }

    /// Returns an error unless these ranks have the same stages, and broadcasts the parameters of rank 0.
    fn agree(&mut self, comm: &mut Communicator, setting: Option<Setting>) -> Result<()> {
        let numbers: Vec<usize> = self.engine.stages.iter().map(|stage| stage.number).collect();
        let numbers = agreement::setting("the stages that a rank has", numbers);
        let settings: Vec<Setting> =
            [as_setting(self.schedule()), numbers].into_iter().chain(setting).collect();
        let StepEngine { stages, groups, model_infos: infos, .. } = &mut self.engine;
        agreement::check(comm, infos, &settings)?;
        stages.iter_mut().try_for_each(|stage| stage.broadcast(comm, groups))
    }

    /// Returns the state that only pipelines have.
    pub(super) const fn state(&self) -> &PipelineState {
        self.engine.pipeline.as_ref().expect(IS_PIPELINE)
    }

    pub(super) const fn state_mut(&mut self) -> &mut PipelineState {
        self.engine.pipeline.as_mut().expect(IS_PIPELINE)
    }

    /// Returns the parameters of the whole model.
    pub fn infos(&self) -> &[ParamInfo] {
        &self.engine.model_infos
    }

    engine_methods!(pub gradients);
    engine_methods!(pub update);
    engine_methods!(pub mode);
    engine_methods!(pub communicator);

    /// Returns the schedule.
    pub const fn schedule(&self) -> &PipelineSchedule {
        &self.state().schedule
    }

    /// Returns this rank's stages: their numbers and their blocks. [Sharded](Self::shard_over) parameters are freed
    /// between steps; [`into_parts`](Self::into_parts) returns them complete.
    pub fn stages(&self) -> impl Iterator<Item = (usize, &Sequence<A>)> {
        self.engine.stages.iter().map(|stage| (stage.number, &stage.model))
    }

    /// Returns this rank's stages, for example to change a setting of their blocks. If you change parameters, change
    /// them alike on all ranks with the stage, and only parameters that are not sharded. With master parameters, the
    /// values become the master values.
    pub fn stages_mut(&mut self) -> impl Iterator<Item = (usize, &mut Sequence<A>)> {
        self.engine.stages.iter_mut().map(|stage| (stage.number, &mut stage.model))
    }

    /// Returns the largest number of activations of a stage that this rank held at once in the last step.
    pub const fn kept(&self) -> usize {
        self.state().kept_most
    }

    /// Returns the micro-batches that this pipeline computes in a step, of those of all pipelines.
    pub fn share(&self) -> Range<usize> {
        let (count, (pipeline, _)) = (self.schedule().micro_batches(), self.engine.replica());
        pipeline * count..(pipeline + 1) * count
    }

    /// Returns the mean gradient of a parameter, by its index in the whole model, until the next step. `None` if no
    /// micro-batch had one, if it is on another rank, or if it is sharded.
    pub fn gradient(&self, parameter: usize) -> Option<Values<'_>> {
        let original = self.infos().get(parameter)?.same_as.unwrap_or(parameter);
        let PipelineState { ties, means, .. } = self.state();
        if let Some(tie) = ties::of(ties, original) {
            let mean = means[tie].as_ref()?;
            return Some(mean.slice(0, mean.len()));
        }
        let stage = self.engine.stages.iter().find(|stage| stage.range.contains(&parameter))?;
        if stage.plan.degrees.frees {
            return None;
        }
        stage.gradients.mean(parameter - stage.range.start)
    }

    /// Returns the times of all computations of the last step on every rank of this pipeline, relative to the start
    /// of the step on that rank.
    ///
    /// # Errors
    /// Communication fails.
    pub fn timeline(&mut self) -> Result<Timeline> {
        self.engine.agree_to_call("timeline")?;
        let (state, ranks) = (self.state(), self.engine.world.world_size());
        let lists = state.schedule.actions().iter();
        let counts: Vec<usize> =
            lists.map(|list| list.iter().filter(|action| action.is_computation()).count()).collect();
        let most = counts.iter().max().copied().unwrap_or(0);
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let mut own: Vec<u64> =
            state.spans.iter().flat_map(|span| [nanos(span.start), nanos(span.end)]).collect();
        own.resize(2 * most, 0);
        let mut all = vec![0; own.len() * ranks];
        let gathered = self.engine.world.all_gather(&own, &mut all).map_err(Error::communication);
        self.engine.or_abort(gathered)?;
        let of_rank = |(list, times): (&Vec<super::Action>, &[u64])| {
            let computations = list.iter().filter(|action| action.is_computation());
            let spans = computations.zip(times.chunks_exact(2)).map(|(&action, times)| Span {
                action,
                start: Duration::from_nanos(times[0]),
                end: Duration::from_nanos(times[1]),
            });
            spans.collect()
        };
        Ok(Timeline {
            ranks: self.schedule().actions().iter().zip(all.chunks(2 * most)).map(of_rank).collect(),
        })
    }

    /// Ends the training and returns the communicator and this rank's stages with all of their parameters. Every rank
    /// calls this.
    ///
    /// # Errors
    /// Communication fails, or a block does not accept its parameters.
    pub fn into_parts(mut self) -> Result<(Communicator, Vec<Sequence<A>>)> {
        self.engine.announce("into_parts");
        let StepEngine { stages, groups, .. } = &mut self.engine;
        let gathered = stages.iter_mut().try_for_each(|stage| {
            stage.units().try_for_each(|unit| stage.gather(unit, groups))?;
            stage.parameters.rest(groups)
        });
        self.engine.or_abort(gathered)?;
        let StepEngine { world, stages, .. } = self.engine;
        Ok((world, stages.into_iter().map(|stage| stage.model).collect()))
    }
}

delegate_shards!(
    /// One pipeline has the whole model, or several that shard their stages. If there are more, the first saves.
    impl<A> Shards for Pipeline<A>, engine
);

/// Returns an error if stages share a parameter and master values or gradients have types of their own.
fn check_precision(infos: &[ParamInfo], ties: &[Tie], precision: Precision) -> Result<()> {
    let Some(tie) = ties.first().filter(|_| precision != Precision::default()) else { return Ok(()) };
    let other = infos.iter().find(|info| info.same_as == Some(tie.parameter));
    let name = other.expect("a tie has two names").name.clone();
    let reason = "stages of a pipeline with mixed precision cannot share it";
    Err(Error::CannotTie { name, same_as: infos[tie.parameter].name.clone(), reason })
}

/// Returns a fork of `group`, and aborts the job if it cannot be made. It sends nothing.
fn forked(comm: &mut Communicator, group: &mut Communicator) -> Result<Communicator> {
    let fork = group.fork().map_err(Error::communication);
    or_abort(comm, fork)
}

/// Returns a schedule as ranks compare it: a hash of its lists of actions, which are too long for a message.
fn as_setting(schedule: &PipelineSchedule) -> Setting {
    let (ranks, stages, micro_batches) = (schedule.ranks(), schedule.stages(), schedule.micro_batches());
    let hash = agreement::fingerprint(schedule);
    let text = format!("{ranks} ranks, {stages} stages, {micro_batches} micro-batches ({hash:016x})");
    ("the schedule".to_owned(), text)
}

/// Returns an error unless schedule, stages, model and ranks fit together.
fn check<A>(
    comm: &Communicator,
    model: &Sequence<A>,
    schedule: &PipelineSchedule,
    stages: &[Range<usize>],
) -> Result<()> {
    schedule.validate()?;
    let (ranks, world_size) = (schedule.ranks(), comm.world_size());
    if ranks != world_size {
        return Err(Error::PipelineRanks { ranks, world_size });
    }
    let blocks = model.blocks().len();
    let mut end = 0;
    let mut fits = |stage: &Range<usize>| {
        let follows = stage.start == end && stage.end > end;
        end = stage.end;
        follows
    };
    if stages.len() != schedule.stages() || !stages.iter().all(&mut fits) || end != blocks {
        return Err(Error::Stages { stages: schedule.stages(), blocks, given: stages.to_vec() });
    }
    Ok(())
}

impl<A> fmt::Debug for Pipeline<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (StepEngine { world, stages, .. }, of) = (&self.engine, self.schedule().stages());
        write!(f, "Pipeline({world:?}, {} of {of} stages)", stages.len())
    }
}

const IS_PIPELINE: &str = "the engine of a pipeline has its state";

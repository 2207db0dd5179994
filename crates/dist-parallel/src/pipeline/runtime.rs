//! Training of a model whose stages are on different ranks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use dist_collectives::{Communicator, ReduceOp};

use super::activations::Activations;
use super::consensus::CallGroups;
use super::links::StageLinks;
use super::stage::actions_of;
use super::ties::{self, Node, Tie};
use super::{PipelineSchedule, Span, Timeline};
use crate::abort::or_abort;
use crate::engine::{Stage, StepAction};
use crate::fsdp::{Groups, Precision, follow};
use crate::loss::WeightedLoss;
use crate::mean::Mean;
use crate::norm::{self, SquareRange, SumOfSquares};
use crate::pass::Passes;
use crate::unreported::{Unreported, without_gradient};
use crate::updates::Updates;
use crate::{Error, ParamInfo, Params, Pass, Result, Sequence, Values, agreement, params};

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
/// and do not abort it: [`ZeroWeight`](Error::ZeroWeight), [`PipelinesDiffer`](Error::PipelinesDiffer),
/// [`SettingsDiffer`](Error::SettingsDiffer), [`CallsDiffer`](Error::CallsDiffer) between calls other than a step, and
/// in evaluations [`NoMicroBatches`](Error::NoMicroBatches) and [`NoSchedule`](Error::NoSchedule).
pub struct Pipeline<A> {
    pub(super) comm: Communicator,
    /// The ranks that have the same stages: those with the other shards of them, and those in the other pipelines.
    pub(super) groups: Groups,
    /// All ranks that hold one replica of the model, if stages are sharded.
    pub(super) sharded: Option<Communicator>,
    pub(super) call_groups: CallGroups,
    pub(super) activations: Box<dyn Activations<A>>,
    pub(super) schedule: PipelineSchedule,
    pub(super) infos: Vec<ParamInfo>,
    /// The same with the types of the master values that the optimizer updates.
    pub(super) kept: Vec<ParamInfo>,
    precision: Precision,
    /// For each stage, the index of its first parameter, and the number of parameters at the end.
    pub(super) first: Vec<usize>,
    /// This rank's stages, in order.
    pub(super) stages: Vec<Stage<Sequence<A>>>,
    /// This rank's actions in a step.
    pub(super) actions: Arc<[StepAction]>,
    pub(super) links: StageLinks,
    pub(super) ties: Vec<Tie>,
    /// This rank's ends of the ties whose parameters have gradients.
    pub(super) nodes: Vec<Node>,
    /// For each tie, the mean gradient, if this rank has the first stage and a micro-batch had a gradient.
    pub(super) tied_means: Vec<Option<Mean>>,
    pub(super) spans: Vec<Span>,
    pub(super) kept_most: usize,
    pub(super) passes: Passes,
    pub(super) updates: Updates,
    pub(super) unreported: Unreported,
    /// The number of calls that have computed micro-batches since the last step, each as many as the schedule has.
    pub(super) calls: usize,
    /// `true` if these micro-batches have weights.
    pub(super) weighted: bool,
    /// This rank's losses of these micro-batches, by their numbers in this pipeline.
    pub(super) losses: Vec<(usize, WeightedLoss)>,
    /// `true` while micro-batches are computed. It stays `true` if the computation panics.
    pub(super) computes: bool,
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
        let links = StageLinks::new(&mut comm, &schedule)?;
        let list = &schedule.actions()[comm.rank()];
        let actions = actions_of(list, &own, schedule.stages() - 1).into();
        let nodes = ties::nodes(&mut comm, &schedule, &infos, &ties)?;
        let mut pipeline = Self {
            comm,
            groups,
            sharded: None,
            call_groups: CallGroups::default(),
            activations: Box::new(activations),
            schedule,
            kept: infos.iter().map(|info| master(info, precision)).collect(),
            infos,
            precision,
            first,
            stages: own,
            actions,
            links,
            tied_means: ties.iter().map(|_| None).collect(),
            ties,
            nodes,
            spans: Vec::new(),
            kept_most: 0,
            passes: Passes::default(),
            updates: Updates::new(),
            unreported: Unreported::default(),
            calls: 0,
            weighted: false,
            losses: Vec::new(),
            computes: false,
        };
        let told = pipeline.broadcast_ties();
        pipeline.or_abort(told)?;
        Ok(pipeline)
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
    pub fn reduce_over(&mut self, mut data: Communicator) -> Result<()> {
        self.announce("reduce_over");
        let result = self.agree(&mut data);
        self.or_abort(result)?;
        self.call_groups.data = Some(forked(&mut self.comm, &mut data)?);
        self.groups.replicas = data;
        self.forget();
        Ok(())
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
        self.announce("shard_over");
        let shards = self.with_same_stages(&mut pipelines);
        let mut shards = self.or_abort(shards)?;
        let result = self.agree(&mut shards);
        self.or_abort(result)?;
        self.call_groups.shards = Some(forked(&mut self.comm, &mut shards)?);
        (self.groups.shards, self.sharded) = (shards, Some(pipelines));
        let Self { stages, groups, .. } = self;
        let result = stages.iter_mut().try_for_each(|stage| stage.shard_over(groups));
        self.or_abort(result)?;
        let list = &self.schedule.actions()[self.comm.rank()];
        self.actions = actions_of(list, &self.stages, self.schedule.stages() - 1).into();
        self.forget();
        Ok(())
    }

    /// Returns the group of the ranks that have the same stages in these pipelines.
    fn with_same_stages(&mut self, pipelines: &mut Communicator) -> Result<Communicator> {
        let (own, ranks) = (self.comm.rank(), self.comm.world_size());
        let all = agreement::gather(pipelines, [own as u64])?;
        let members = |of: usize| (0..all.len()).filter(|&rank| all[rank] == [of as u64]).collect::<Vec<_>>();
        if (0..ranks).any(|of| members(of).len() * ranks != all.len()) {
            return Err(Error::PipelineRanks { ranks, world_size: all.len() });
        }
        let group = pipelines.subgroup(&members(own)).map_err(Error::communication)?;
        Ok(group.expect("every rank names a group that it is in"))
    }

    /// Returns an error unless these ranks have the same stages, and broadcasts the parameters of rank 0.
    fn agree(&mut self, comm: &mut Communicator) -> Result<()> {
        let numbers: Vec<usize> = self.stages.iter().map(|stage| stage.number).collect();
        let settings =
            [as_setting(&self.schedule), agreement::setting("the stages that a rank has", numbers)];
        agreement::check(comm, &self.infos, &settings)?;
        let Self { stages, groups, .. } = self;
        stages.iter_mut().try_for_each(|stage| stage.broadcast(comm, groups))
    }

    /// Returns the parameters of the whole model.
    pub fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    /// Sets forwards outside of steps and evaluations to training mode, which blocks receive as a [`Pass`]. A step
    /// is always in training mode, an evaluation never.
    pub fn train(&mut self) {
        let pass = self.passes.set_training(true);
        self.begin_forward(pass);
    }

    /// Sets forwards outside of steps and evaluations to evaluation mode. Every trainer begins with it.
    pub fn eval(&mut self) {
        let pass = self.passes.set_training(false);
        self.begin_forward(pass);
    }

    /// Announces a forward to the blocks of this rank's stages.
    pub(super) fn begin_forward(&mut self, pass: Pass) {
        self.stages.iter_mut().for_each(|stage| stage.model.begin_forward(pass));
    }

    /// Returns the schedule.
    pub const fn schedule(&self) -> &PipelineSchedule {
        &self.schedule
    }

    /// Returns this rank's stages: their numbers and their blocks. [Sharded](Self::shard_over) parameters are freed
    /// between steps; [`into_parts`](Self::into_parts) returns them complete.
    pub fn stages(&self) -> impl Iterator<Item = (usize, &Sequence<A>)> {
        self.stages.iter().map(|stage| (stage.number, &stage.model))
    }

    /// Returns this rank's stages, for example to change a setting of their blocks. If you change parameters, change
    /// them alike on all ranks with the stage, and only parameters that are not sharded. With master parameters, the
    /// values become the master values.
    pub fn stages_mut(&mut self) -> impl Iterator<Item = (usize, &mut Sequence<A>)> {
        self.stages.iter_mut().map(|stage| (stage.number, &mut stage.model))
    }

    /// Returns the largest number of activations of a stage that this rank held at once in the last step.
    pub const fn kept(&self) -> usize {
        self.kept_most
    }

    /// Returns the communicator between the stages.
    pub const fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// Returns the communicator between the stages, for other messages between the ranks. If you set its timeout or
    /// reduction order, every later call uses it, also between pipelines.
    pub const fn communicator_mut(&mut self) -> &mut Communicator {
        &mut self.comm
    }

    /// Returns the micro-batches that this pipeline computes in a step, of those of all pipelines.
    pub fn share(&self) -> Range<usize> {
        let (count, (pipeline, _)) = (self.schedule.micro_batches(), self.replica_position());
        pipeline * count..(pipeline + 1) * count
    }

    /// Returns the number of this pipeline and the number of all pipelines.
    pub(super) fn replica_position(&self) -> (usize, usize) {
        let Groups { shards, replicas, .. } = &self.groups;
        let count = shards.world_size();
        (replicas.rank() * count + shards.rank(), replicas.world_size() * count)
    }

    /// Returns the mean gradient of a parameter, by its index in the whole model, until the next step. `None` if no
    /// micro-batch had one, if it is on another rank, or if it is sharded.
    pub fn gradient(&self, parameter: usize) -> Option<Values<'_>> {
        let original = self.infos.get(parameter)?.same_as.unwrap_or(parameter);
        if let Some(tie) = ties::of(&self.ties, original) {
            let mean = self.tied_means[tie].as_ref()?;
            return Some(mean.slice(0, mean.len()));
        }
        let stage = self.stages.iter().find(|stage| stage.range.contains(&parameter))?;
        if stage.is_sharded() {
            return None;
        }
        stage.gradients.mean(parameter - stage.range.start)
    }

    /// Returns the names of the trained parameters of this rank's stages for which no micro-batch of the last step
    /// had a gradient in any pipeline. An update leaves them unchanged. The rank of the first stage reports a
    /// parameter of several stages. After the first step the names are logged as a warning, because a block may have
    /// forgotten to report them.
    #[doc(alias = "find_unused_parameters")]
    pub fn without_gradient(&self) -> Vec<&str> {
        without_gradient(&self.infos, |parameter| {
            let Some(stage) = self.stages.iter().find(|stage| stage.range.contains(&parameter)) else {
                return true;
            };
            match self.ties.iter().position(|tie| tie.parameter == parameter) {
                Some(tie) => self.tied_means[tie].is_some(),
                None => stage.gradients.used()[parameter - stage.range.start],
            }
        })
    }

    /// Returns the Euclidean norm of all gradients as one vector. It is rounded once, so its bits do not depend on
    /// how training is distributed. It is infinite or NaN if a gradient is. Every rank calls this, because each has
    /// the gradients of its stages.
    ///
    /// # Errors
    /// Communication fails.
    pub fn gradient_norm(&mut self) -> Result<f64> {
        self.agree_to_call("gradient_norm")?;
        self.norm()
    }

    pub(super) fn norm(&mut self) -> Result<f64> {
        let norm = self.try_gradient_norm();
        self.or_abort(norm)
    }

    fn try_gradient_norm(&mut self) -> Result<f64> {
        self.check_ended()?;
        let range =
            SquareRange::of(self.infos.iter().map(|info| self.precision.reduce.unwrap_or(info.dtype)));
        let mut sum = SumOfSquares::new(range);
        // Every shard has the parameters of several stages; the first one counts them.
        let tied = self.tied_means.iter().flatten().filter(|_| self.groups.shards.rank() == 0);
        tied.for_each(|mean| sum.add(mean.slice(0, mean.len())));
        self.stages.iter().for_each(|stage| stage.add_squares(self.groups.shards.rank(), &mut sum));
        let mut encoded = sum.encode();
        for comm in [&mut self.comm, &mut self.groups.shards] {
            comm.all_reduce(&mut encoded, ReduceOp::Sum).map_err(Error::communication)?;
        }
        Ok(SumOfSquares::root(range, &encoded))
    }

    /// Scales all gradients by one factor so that their norm is at most `max`. Returns the norm before. Nothing
    /// changes if the norm is infinite or NaN: check it before the update. Every rank calls this.
    ///
    /// # Errors
    /// Communication fails.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_gradients(&mut self, max: f64) -> Result<f64> {
        self.agree_to_call("clip_gradients")?;
        let norm = self.norm()?;
        self.updates.record_clipping(max);
        if let Some(factor) = norm::factor(norm, max) {
            self.scale_means(factor);
        }
        Ok(norm)
    }

    /// Scales all gradients by a factor, for example that of a [`LossScaler`](crate::optim::LossScaler). It needs no
    /// communication. All ranks call it with the same factor, and the next step compares it.
    pub fn scale_gradients(&mut self, factor: f64) {
        self.updates.record_scaling(factor);
        self.scale_means(factor);
    }

    fn scale_means(&mut self, factor: f64) {
        self.stages.iter_mut().for_each(|stage| stage.gradients.scale(factor));
        self.tied_means.iter_mut().flatten().for_each(|mean| mean.scale(factor));
    }

    /// Returns the times of all computations of the last step on every rank of this pipeline, relative to the start
    /// of the step on that rank.
    ///
    /// # Errors
    /// Communication fails.
    pub fn timeline(&mut self) -> Result<Timeline> {
        self.agree_to_call("timeline")?;
        let lists = self.schedule.actions().iter();
        let counts: Vec<usize> =
            lists.map(|list| list.iter().filter(|action| action.is_computation()).count()).collect();
        let most = counts.iter().max().copied().unwrap_or(0);
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let mut own: Vec<u64> =
            self.spans.iter().flat_map(|span| [nanos(span.start), nanos(span.end)]).collect();
        own.resize(2 * most, 0);
        let mut all = vec![0; own.len() * self.comm.world_size()];
        let gathered = self.comm.all_gather(&own, &mut all).map_err(Error::communication);
        self.or_abort(gathered)?;
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
            ranks: self.schedule.actions().iter().zip(all.chunks(2 * most)).map(of_rank).collect(),
        })
    }

    /// Ends the training and returns the communicator and this rank's stages with all of their parameters. Every rank
    /// calls this.
    ///
    /// # Errors
    /// Communication fails, or a block does not accept its parameters.
    pub fn into_parts(mut self) -> Result<(Communicator, Vec<Sequence<A>>)> {
        self.announce("into_parts");
        let Self { stages, groups, .. } = &mut self;
        let gathered = stages.iter_mut().try_for_each(|stage| {
            stage.units().try_for_each(|unit| stage.gather(unit, groups))?;
            stage.parameters.rest(groups)
        });
        self.or_abort(gathered)?;
        Ok((self.comm, self.stages.into_iter().map(|stage| stage.model).collect()))
    }

    /// Announces the start of a call to the ranks of this pipeline and of the others.
    pub(super) fn announce(&mut self, name: &str) {
        self.follow();
        let groups = [&mut self.comm, &mut self.groups.shards, &mut self.groups.replicas];
        groups.into_iter().chain(&mut self.sharded).for_each(|group| group.announce(name, name));
    }

    /// Passes the timeout and the reduction order of the communicator between the stages to all other communicators.
    pub(super) fn follow(&mut self) {
        let Self { comm, groups, sharded, call_groups, links, nodes, stages, .. } = self;
        groups.follow(comm);
        let others = [sharded, &mut call_groups.shards, &mut call_groups.data];
        others.into_iter().flatten().for_each(|group| follow(group, comm));
        stages.iter_mut().for_each(|stage| stage.parameters.follow(comm));
        links.follow(comm);
        nodes.iter_mut().for_each(|node| node.follow(comm));
    }

    /// Returns an error if a step has panicked, because the sums are then incomplete.
    pub(super) const fn check_ended(&self) -> Result<()> {
        if self.computes { Err(Error::StepPanicked) } else { Ok(()) }
    }

    /// Returns the error of ranks that have updated their parameters differently. All ranks of all pipelines call
    /// this.
    pub(super) fn updates_differ(&mut self) -> Error {
        let Self { comm, groups: Groups { shards, replicas, .. }, updates, infos, .. } = self;
        updates.differ(&mut [comm, shards, replicas], infos)
    }

    /// Returns an error unless all ranks of all pipelines have updated their parameters alike. All of them call this.
    pub(super) fn check_updates(&mut self) -> Result<()> {
        let Self { comm, groups: Groups { shards, replicas, .. }, updates, infos, .. } = self;
        updates.check(&mut [comm, shards, replicas], infos)
    }

    /// On an error that other ranks do not get, aborts the job and drops the unfinished step.
    pub(super) fn or_abort<T>(&mut self, result: Result<T>) -> Result<T> {
        or_abort(&mut self.comm, result).inspect_err(|error| {
            if !error.is_on_every_rank() {
                self.forget();
            }
        })
    }

    /// Drops everything except the parameters.
    pub(super) fn forget(&mut self) {
        self.links.forget();
        self.stages.iter_mut().for_each(Stage::forget);
        self.nodes.iter_mut().for_each(Node::forget);
        self.tied_means.iter_mut().for_each(|mean| *mean = None);
        self.calls = 0;
        self.losses.clear();
    }
}

/// Returns a parameter with the type of its master values.
fn master(info: &ParamInfo, precision: Precision) -> ParamInfo {
    let dtype = precision.master.filter(|_| info.trainable).unwrap_or(info.dtype);
    ParamInfo { dtype, ..info.clone() }
}

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
fn as_setting(schedule: &PipelineSchedule) -> agreement::Setting {
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
        write!(f, "Pipeline({:?}, {} of {} stages)", self.comm, self.stages.len(), self.schedule.stages())
    }
}

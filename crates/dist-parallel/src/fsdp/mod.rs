//! Fully sharded data-parallel training (FSDP, ZeRO).

mod assignment;
mod evaluate;
mod groups;
mod layout;
mod memory;
mod options;
mod order;
mod parameters;
mod plan;
mod shard_buffer;
mod shards;
mod step;

use std::fmt;
use std::ops::Range;

use dist_collectives::{Communicator, ReduceOp};

pub(crate) use assignment::share;
pub(crate) use groups::{bytes_sent, follow};
pub(crate) use layout::{FlatParameter, Layout, ShardChunk};
pub use memory::MemoryEstimate;
pub use options::{FsdpOptions, Precision, Reshard, ShardingStrategy, Units};
pub use plan::Plan;

use crate::abort::or_abort;
use crate::broadcast::{broadcast_bucket, coalesced};
use crate::buffers::Buffers;
use crate::flat::Flat;
use crate::gradients::{GradientLayout, GradientMemory, Gradients};
use crate::norm::{SquareRange, SumOfSquares};
use crate::pass::Passes;
use crate::unreported::{Unreported, without_gradient};
use crate::updates::Updates;
use crate::{
    Error, Optimizer, ParamInfo, Params, Result, Sequence, Values, ValuesMut, agreement, norm, params,
};
use groups::Groups;
use order::UnitAction;
use parameters::Parameters;

/// Sharded data-parallel training.
///
/// Every rank computes some micro-batches of a step. It keeps a shard only of the parameters, the gradients or the
/// optimizer's state, as its [`ShardingStrategy`] says.
///
/// # Gathering and resharding
///
/// Parameters lie in units of one or more blocks. If parameters are sharded, a unit is gathered, used and freed, and
/// gathered again for the backward. With [`prefetch`](FsdpOptions::prefetch), later units are gathered while the
/// current one computes. A unit's gradients are reduced as soon as all of them are final, and each rank keeps its
/// shard of the sum. This saves memory only if the model can [free](Params::reshard) its parameters. Parameters that
/// blocks of several units use stay gathered from the first forward to the last backward.
///
/// [Buffers](crate::ParamInfo::buffer) are never sharded and never freed. They are synchronised at the end of every
/// step.
///
/// Nothing is gathered if the ranks of a replica can read each other's memory and the optimizer updates parameters of
/// the model's own type. A unit is then read in place when it is used. A model that [copies](Params::fill) parameters
/// reads them into its own memory.
///
/// # Reproducible sums
///
/// Gradients and losses are summed in the canonical order, as by [`Ddp`](crate::Ddp): T(n) = T(largest power of two
/// below n) + T(rest). The strategy decides which rank computes a micro-batch.
///
/// | strategy | rank r of N computes | same bits as one process if |
/// |---|---|---|
/// | `FullShard`, `ShardGradOp` | micro-batches r, N + r, 2N + r, … | N is a power of two |
/// | `ShardOptimizer`, `NoShard` | a contiguous share | each share is the same power of two |
/// | `HybridShard` | every S-th micro-batch of its replica's contiguous share | S is a power of two, and each replica's share is the same power of two |
///
/// Otherwise, and if the ranks [join](Self::join), the bits are the same on every rank and in every run. They never
/// depend on units, prefetch, resharding, timing or transport.
///
/// # Errors
///
/// An error on one rank aborts the job, as for [`Ddp`](crate::Ddp). These errors occur on every rank alike and do not
/// abort it: [`StepsDiffer`](Error::StepsDiffer), [`SettingsDiffer`](Error::SettingsDiffer),
/// [`NoMicroBatches`](Error::NoMicroBatches) and [`ZeroWeight`](Error::ZeroWeight).
pub struct Fsdp<A> {
    parameters: Parameters,
    gradients: Gradients,
    buffers: Buffers,
    groups: Groups,
    /// The model's parameters, with the types of the master values that the optimizer updates.
    kept: Vec<ParamInfo>,
    /// The group of all ranks.
    world: Communicator,
    model: Sequence<A>,
    plan: Plan,
    forward: Vec<UnitAction>,
    backward: Vec<UnitAction>,
    /// The number of actions of the next forward that a prefetch has executed.
    prefetched: Option<usize>,
    /// The number of micro-batches of all ranks since the last step.
    micro_batches: usize,
    weighted: bool,
    /// The weight of this rank's micro-batches.
    count: u64,
    /// This rank's losses since the last step, one per round.
    losses: Vec<f32>,
    passes: Passes,
    updates: Updates,
    unreported: Unreported,
    /// `true` while this rank computes gradients. It stays `true` if the computation panics.
    computes: bool,
}

impl<A> Fsdp<A> {
    /// Starts to train `model` on all ranks, with the parameters of rank 0.
    ///
    /// # Errors
    /// Parameters or options differ between ranks, or the options cannot divide the ranks: every rank gets the error.
    /// Communication fails.
    pub fn new(comm: Communicator, model: Sequence<A>, options: &FsdpOptions) -> Result<Self> {
        Self::begin(comm, model, options, InitialValues::OfRank0)
    }

    /// Starts training like [`new`](Self::new), with initial values of which no rank ever holds more than one unit.
    ///
    /// `values` is called with the index of each parameter and the memory to fill. It must give every rank the same
    /// values. The model's own values are not read, so its parameters may be [freed](crate::Slot::freed).
    ///
    /// # Errors
    /// The errors of [`new`](Self::new). [`InitialValuesDiffer`](Error::InitialValuesDiffer) on every rank if
    /// `values` gives the ranks different values.
    pub fn with_values(
        comm: Communicator,
        model: Sequence<A>,
        options: &FsdpOptions,
        mut values: impl FnMut(usize, ValuesMut<'_>),
    ) -> Result<Self> {
        let checksums = vec![0; model.infos().len()];
        Self::begin(comm, model, options, InitialValues::Given(Given { values: &mut values, checksums }))
    }

    fn begin(
        mut world: Communicator,
        mut model: Sequence<A>,
        options: &FsdpOptions,
        mut first: InitialValues<'_>,
    ) -> Result<Self> {
        let plan = Plan::new(model.infos(), model.starts(), world.world_size(), options);
        let starts = agreement::setting("the list of the blocks' first parameters", model.starts());
        let settings = [options.settings().as_slice(), &[starts]].concat();
        agreement::check(&mut world, model.infos(), &settings)?;
        let plan = plan?;
        let mut groups = Groups::new(&mut world, plan.degrees, plan.reshard_group)?;
        let (degrees, precision) = (plan.degrees, options.precision);
        let filled = first.fill_buffers(&mut world, &mut model, &plan.layout);
        let mut fill =
            |model: &mut _, flat_param: &_, whole: &mut _| first.fill(&mut world, model, flat_param, whole);
        let parameters = filled.and_then(|()| {
            Parameters::new(&plan.layout, degrees, precision, &mut groups, &mut model, &mut fill)
        });
        let parameters = or_abort(&mut world, parameters)?;
        first.check(&mut world, model.infos())?;
        let buckets = GradientLayout::of_units(model.infos(), &plan.layout, precision);
        let kept = model.infos().iter().zip(&plan.layout.locations).map(|(info, location)| {
            let flat_param =
                location.map(|location| &plan.layout.units[location.unit].flat_params[location.flat_param]);
            let dtype = flat_param.map_or(info.dtype, |flat_param| flat_param.master_dtype(precision));
            ParamInfo { dtype, ..info.clone() }
        });
        Ok(Self {
            parameters,
            gradients: Gradients::new(buckets, degrees.scatter(), GradientMemory::shared(), false),
            buffers: Buffers::new(model.infos()),
            groups,
            kept: kept.collect(),
            world,
            model,
            forward: plan.uses().forward(&plan.layout, true),
            backward: plan.uses().backward(&plan.layout),
            plan,
            prefetched: None,
            micro_batches: 0,
            weighted: false,
            count: 0,
            losses: Vec::new(),
            passes: Passes::default(),
            updates: Updates::new(),
            unreported: Unreported::default(),
            computes: false,
        })
    }

    /// Returns this rank's shard of a parameter's mean gradient, with its range in the parameter. `None` if the rank
    /// has no shard of it, or if no micro-batch of the last step had a gradient.
    pub fn gradient(&self, parameter: usize) -> Option<(Range<usize>, Values<'_>)> {
        let location = (*self.plan.layout.locations.get(parameter)?)?;
        let flat_param = &self.plan.layout.units[location.unit].flat_params[location.flat_param];
        let chunk = flat_param.chunk(location.place, self.groups.shards.rank())?;
        let values = self.gradients.mean_of_chunk(chunk.parameter, chunk.at, chunk.len)?;
        Some((chunk.offset..chunk.offset + chunk.len, values))
    }

    /// Returns the names of the trained parameters for which no micro-batch of the last step had a gradient on any
    /// rank. An update leaves them unchanged. After the first step they are logged as a warning, because a block may
    /// have forgotten to report them.
    #[doc(alias = "find_unused_parameters")]
    pub fn without_gradient(&self) -> Vec<&str> {
        without_gradient(self.model.infos(), |parameter| self.gradients.used()[parameter])
    }

    /// Returns the Euclidean norm of all gradients as one vector. It is rounded once, so its bits do not depend on
    /// how training is distributed. It is infinite or NaN if a gradient is. Every rank calls this, because each has a
    /// shard of the gradients.
    ///
    /// # Errors
    /// Communication fails.
    pub fn gradient_norm(&mut self) -> Result<f64> {
        self.announce("gradient_norm");
        self.norm()
    }

    fn norm(&mut self) -> Result<f64> {
        let ended = self.check_ended();
        self.or_abort(ended)?;
        let precision = self.plan.options.precision;
        let range = SquareRange::of(
            self.plan.layout.flat_params().map(|(_, flat_param)| flat_param.reduce_dtype(precision)),
        );
        let mut sum = SumOfSquares::new(range);
        let rank = self.groups.shards.rank();
        for chunk in self.plan.layout.flat_params().flat_map(|(_, flat_param)| flat_param.chunks(rank)) {
            let mean = self.gradients.mean_of_chunk(chunk.parameter, chunk.at, chunk.len);
            mean.into_iter().for_each(|mean| sum.add(mean));
        }
        let mut encoded = sum.encode();
        self.follow();
        let added = self.groups.shards.all_reduce(&mut encoded, ReduceOp::Sum);
        self.or_abort(added.map_err(Error::communication))?;
        Ok(SumOfSquares::root(range, &encoded))
    }

    /// Scales all gradients by one factor so that their norm is at most `max`. Returns the norm before. Nothing
    /// changes if the norm is infinite or NaN: check it before the update. Every rank calls this.
    ///
    /// # Errors
    /// Communication fails.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_gradients(&mut self, max: f64) -> Result<f64> {
        self.announce("clip_gradients");
        let norm = self.norm()?;
        self.updates.record_clipping(max);
        if let Some(factor) = norm::factor(norm, max) {
            self.gradients.scale(factor);
        }
        Ok(norm)
    }

    /// Scales all gradients by a factor, for example that of a [`LossScaler`](crate::optim::LossScaler). It needs no
    /// communication. All ranks call it with the same factor, and the next step compares it.
    pub fn scale_gradients(&mut self, factor: f64) {
        self.updates.record_scaling(factor);
        self.gradients.scale(factor);
    }

    /// Updates the parameters by their gradients. Parameters without a gradient stay unchanged. Every rank calls
    /// this. The optimizer receives this rank's shard of each parameter as a slice, whose number is the parameter's
    /// index, and keeps state for the shard only.
    ///
    /// # Errors
    /// The optimizer or communication fails. [`StepPanicked`](Error::StepPanicked) if a step has panicked and no step
    /// has succeeded since.
    pub fn update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        self.announce("update");
        let result = self.try_update(optimizer);
        self.or_abort(result)
    }

    /// [Updates](Self::update) the parameters if the norm of the gradients is finite, and returns `true`. Otherwise
    /// changes nothing and returns `false`. The decision is the same on every rank. Every rank
    /// calls this.
    ///
    /// After [`clip_gradients`](Self::clip_gradients), which returns the norm, compare that instead.
    ///
    /// # Errors
    /// The errors of [`update`](Self::update).
    #[doc(alias = "skip_nan")]
    pub fn update_if_finite(&mut self, optimizer: &mut dyn Optimizer) -> Result<bool> {
        self.announce("update_if_finite");
        let is_finite = self.norm()?.is_finite();
        if is_finite {
            let updated = self.try_update(optimizer);
            self.or_abort(updated)?;
        }
        Ok(is_finite)
    }

    fn try_update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        self.check_ended()?;
        self.updates.record_update(optimizer);
        let Self { parameters, gradients, model, plan, groups, .. } = self;
        let rank = groups.shards.rank();
        for (place, flat_param) in plan.layout.flat_params() {
            for chunk in flat_param.chunks(rank) {
                let Some(mean) = gradients.mean_of_chunk(chunk.parameter, chunk.at, chunk.len) else {
                    continue;
                };
                parameters.change(place, chunk, model, |values| {
                    if mean.dtype() == values.dtype() {
                        return optimizer.update(chunk.parameter, values, mean);
                    }
                    let mut converted = Flat::zeros(values.dtype(), mean.len());
                    converted.slice_mut(0, mean.len()).convert_from(mean);
                    optimizer.update(chunk.parameter, values, converted.slice(0, mean.len()))
                })?;
            }
        }
        self.all_gather_updates(|flat_param| flat_param.trainable)
    }

    /// Sets this rank's shard of all parameters from one flat slice. It contains the shards of the parameters one
    /// after the other, in the order of the plan's units, without buffers. Every rank calls this.
    ///
    /// # Errors
    /// The number or the type of the values is wrong: the error says what is expected, and the job is aborted,
    /// because other ranks may already use their new values. Communication fails.
    pub fn set_shard(&mut self, values: Values<'_>) -> Result<()> {
        self.announce("set_shard");
        let result = self.try_set_shard(values).and_then(|()| self.all_gather_updates(|_| true));
        self.or_abort(result)
    }

    fn try_set_shard(&mut self, values: Values<'_>) -> Result<()> {
        let (expected_len, precision) = (self.shard_len(), self.plan.options.precision);
        let (got_len, got) = (values.len(), values.dtype());
        let mut dtypes =
            self.plan.layout.flat_params().map(|(_, flat_param)| flat_param.master_dtype(precision));
        let expected = dtypes.find(|dtype| *dtype != got).unwrap_or(got);
        if (expected, expected_len) != (got, got_len) {
            return Err(Error::ValuesDiffer { expected_len, expected, got_len, got });
        }
        let mut rest = values;
        for (place, chunk) in self.chunks() {
            self.parameters
                .change(place, chunk, &mut self.model, |mut own| own.copy_from(rest.part(0..chunk.len)))?;
            rest = rest.part(chunk.len..rest.len());
        }
        Ok(())
    }

    /// Returns the number of parameter values in this rank's shard.
    pub fn shard_len(&self) -> usize {
        self.chunks().iter().map(|(_, chunk)| chunk.len).sum()
    }

    /// Returns the bytes of parameters and gradients that this rank has sent since the training began. Values that
    /// others read in its memory are not counted.
    pub fn tensor_bytes_sent(&self) -> u64 {
        self.groups.tensor_bytes_sent()
    }

    /// Returns the chunks of this rank's shard of all parameters, each with the position of its flat parameter.
    fn chunks(&self) -> Vec<((usize, usize), ShardChunk)> {
        let rank = self.groups.shards.rank();
        let flat_params = self.plan.layout.flat_params();
        flat_params
            .flat_map(|(place, flat_param)| flat_param.chunks(rank).map(move |chunk| (place, chunk)))
            .collect()
    }

    /// All-gathers the shards of these flat parameters after an update, if every rank's model has all parameters.
    fn all_gather_updates(&mut self, changed: impl Fn(&FlatParameter) -> bool) -> Result<()> {
        self.follow();
        let Self { parameters, model, plan, groups, .. } = self;
        // Prefetched parameters are outdated now.
        self.prefetched = None;
        parameters.forget();
        let outside = |flat_param: &FlatParameter| {
            plan.degrees.shards > 1 || flat_param.master_dtype(plan.options.precision) != flat_param.dtype
        };
        let update_buffer = plan.layout.flat_params().filter(|_| !plan.degrees.frees);
        let update_buffer =
            update_buffer.filter(|(_, flat_param)| changed(flat_param) && outside(flat_param));
        let update_buffer: Vec<(usize, usize)> = update_buffer.map(|(place, _)| place).collect();
        if parameters.gathers_updates_in_place() {
            update_buffer
                .iter()
                .try_for_each(|&place| parameters.all_gather_updates(&plan.layout, place, groups, model))?;
            return parameters.rest(groups);
        }
        for (index, &place) in update_buffer.iter().enumerate() {
            parameters.start_all_gather_updates(&plan.layout, place, groups, model)?;
            if let Some(before) = index.checked_sub(1) {
                parameters.finish_all_gather_updates(&plan.layout, update_buffer[before], groups, model)?;
            }
        }
        if let Some(&last) = update_buffer.last() {
            parameters.finish_all_gather_updates(&plan.layout, last, groups, model)?;
        }
        parameters.rest(groups)
    }

    /// Calls `f` with the index and all values of each parameter, unit by unit, buffers included. Tied parameters
    /// come once. Every rank calls this and holds one unit at a time.
    ///
    /// # Errors
    /// Communication fails.
    pub fn for_each_parameter(&mut self, f: impl FnMut(usize, Values<'_>)) -> Result<()> {
        self.announce("for_each");
        self.each_parameter(f)
    }

    fn each_parameter(&mut self, mut f: impl FnMut(usize, Values<'_>)) -> Result<()> {
        let result = self.for_each_unit(|model, layout, unit| {
            let unit = &layout.units[unit];
            unit.sharded()
                .chain(unit.buffers.iter().map(|buffer| buffer.parameter))
                .try_for_each(|parameter| params::read(model, parameter, &mut |values| f(parameter, values)))
        });
        self.or_abort(result)
    }

    /// Ends the training and returns the communicator and the model, which has all of its parameters on every rank.
    /// Every rank calls this.
    ///
    /// # Errors
    /// Communication fails.
    pub fn into_parts(mut self) -> Result<(Communicator, Sequence<A>)> {
        let mut whole: Vec<Option<Flat>> = self.model.infos().iter().map(|_| None).collect();
        self.announce("into_parts");
        self.each_parameter(|parameter, values| {
            let mut copy = Flat::zeros(values.dtype(), values.len());
            copy.slice_mut(0, values.len()).convert_from(values);
            whole[parameter] = Some(copy);
        })?;
        let Self { world, mut model, .. } = self;
        for (parameter, values) in whole.into_iter().enumerate() {
            let Some(values) = values else { continue };
            params::write(&mut model, parameter, |mut own| own.copy_from(values.slice(0, values.len())))?;
        }
        Ok((world, model))
    }

    /// Sets forwards outside of steps and evaluations to training mode, which blocks receive as a [`Pass`]. A step
    /// is always in training mode, an evaluation never.
    pub fn train(&mut self) {
        let pass = self.passes.set_training(true);
        self.model.begin_forward(pass);
    }

    /// Sets forwards outside of steps and evaluations to evaluation mode. Every trainer begins with it.
    pub fn eval(&mut self) {
        let pass = self.passes.set_training(false);
        self.model.begin_forward(pass);
    }

    /// Returns the model. Its parameters may be freed.
    pub const fn model(&self) -> &Sequence<A> {
        &self.model
    }

    /// Returns the model, for example to change a setting of its blocks. If you change parameters, change them alike
    /// on every rank, and only those that the strategy does not shard.
    pub const fn model_mut(&mut self) -> &mut Sequence<A> {
        &mut self.model
    }

    /// Returns the plan of the training.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns this rank's number.
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.world.world_size()
    }

    /// Returns the communicator.
    pub const fn communicator(&self) -> &Communicator {
        &self.world
    }

    /// Returns the communicator, for other messages between the ranks. If you set its timeout or reduction order,
    /// every later call of this training uses it.
    pub const fn communicator_mut(&mut self) -> &mut Communicator {
        &mut self.world
    }

    /// Announces a call, so that a rank in another call gets an error.
    pub(super) fn announce(&mut self, name: &str) {
        self.world.announce(name, name);
    }

    /// Passes the communicator's timeout and reduction order to the groups.
    fn follow(&mut self) {
        self.groups.follow(&self.world);
        self.parameters.follow(&self.world);
    }

    /// Gathers each unit once and calls `f` while the model has it.
    fn for_each_unit(&mut self, mut f: impl FnMut(&Sequence<A>, &Layout, usize) -> Result<()>) -> Result<()> {
        self.follow();
        let Self { parameters, groups, model, plan, .. } = self;
        parameters.forget();
        self.prefetched = None;
        for unit in 0..plan.layout.units.len() {
            if plan.degrees.frees {
                parameters.gather(&plan.layout, unit, groups)?;
                parameters.materialise(&plan.layout, unit, groups, false, model)?;
            }
            f(model, &plan.layout, unit)?;
            if plan.degrees.frees {
                parameters.free(&plan.layout, unit, model)?;
                // No rank waits while another works on all units.
                parameters.close(groups)?;
            }
        }
        parameters.rest(groups)
    }

    /// On an error that other ranks do not get, aborts the job and drops all gradients.
    fn or_abort<T>(&mut self, result: Result<T>) -> Result<T> {
        or_abort(&mut self.world, result).inspect_err(|_| self.forget())
    }

    /// Starts to compute gradients. If an earlier computation panicked and the caller caught that, its unfinished
    /// gradients are dropped.
    fn begin_to_compute(&mut self) {
        if std::mem::replace(&mut self.computes, true) {
            self.forget();
        }
    }

    /// Returns an error if a computation of gradients has panicked, because the sums are then incomplete.
    const fn check_ended(&self) -> Result<()> {
        if self.computes { Err(Error::StepPanicked) } else { Ok(()) }
    }

    /// Drops all gradients and the gathered parameters.
    fn forget(&mut self) {
        self.parameters.forget();
        self.gradients.forget();
        (self.prefetched, self.micro_batches, self.count) = (None, 0, 0);
        self.losses.clear();
    }
}

/// The source of the initial values.
enum InitialValues<'a> {
    /// Rank 0's model.
    OfRank0,
    /// A function that gives every rank the same values.
    Given(Given<'a>),
}

impl InitialValues<'_> {
    /// Writes the initial values of a flat parameter into `whole`, on every rank.
    fn fill<A>(
        &mut self,
        world: &mut Communicator,
        model: &Sequence<A>,
        flat_param: &FlatParameter,
        whole: &mut Flat,
    ) -> Result<()> {
        match self {
            Self::OfRank0 => {
                if world.rank() == 0 {
                    params::pack(model, &flat_param.places, whole)?;
                }
                let len = whole.len();
                whole.slice_mut(0, len).broadcast(world, 0)
            }
            Self::Given(values) => {
                let mut places = flat_param.places.iter();
                places.try_for_each(|place| {
                    values.fill(place.parameter, whole.slice_mut(place.offset, place.len))
                })
            }
        }
    }

    /// Writes the initial values of its buffers into every rank's model.
    fn fill_buffers<A>(
        &mut self,
        world: &mut Communicator,
        model: &mut Sequence<A>,
        layout: &Layout,
    ) -> Result<()> {
        match self {
            Self::OfRank0 => {
                let plan = coalesced(model.infos(), |info| info.buffer.is_some());
                plan.buckets().iter().try_for_each(|bucket| broadcast_bucket(world, model, bucket, 0))
            }
            Self::Given(values) => layout.buffers().try_for_each(|buffer| {
                params::write(model, buffer.parameter, |memory| values.fill(buffer.parameter, memory))
            }),
        }
    }

    /// Returns an error unless all ranks have received the same initial values.
    fn check(&self, world: &mut Communicator, infos: &[ParamInfo]) -> Result<()> {
        let Self::Given(values) = self else { return Ok(()) };
        let all = agreement::gather(world, [agreement::fingerprint(&values.checksums)])?;
        if all.iter().all(|theirs| *theirs == all[0]) {
            return Ok(());
        }
        let count = values.checksums.len();
        let mut all = vec![0; count * world.world_size()];
        world.all_gather(&values.checksums, &mut all).map_err(Error::communication)?;
        let differs = |&at: &usize| all[at] != all[at % count];
        let at = (0..all.len()).find(differs).unwrap_or_default();
        Err(Error::InitialValuesDiffer { rank: at / count, parameter: infos[at % count].name.clone() })
    }
}

/// A function that returns initial values, and the checksums by parameter of the values so far.
struct Given<'a> {
    values: &'a mut dyn FnMut(usize, ValuesMut<'_>),
    checksums: Vec<u32>,
}

impl Given<'_> {
    #[expect(clippy::unnecessary_wraps, reason = "it is used where filling may fail")]
    fn fill(&mut self, parameter: usize, mut memory: ValuesMut<'_>) -> Result<()> {
        (self.values)(parameter, memory.reborrow());
        self.checksums[parameter] = crc32fast::hash(memory.as_values().as_bytes());
        Ok(())
    }
}

impl<A> fmt::Debug for Fsdp<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fsdp({:?}, {:?})", self.world, self.plan.options.strategy)
    }
}

#[cfg(test)]
mod tests;

//! Training a model of which each rank keeps only a part.

mod assignment;
mod buffer_pool;
mod evaluate;
mod gradients;
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
pub(crate) use layout::FlatParameter;
pub use memory::MemoryEstimate;
pub use options::{FsdpOptions, Precision, Reshard, ShardingStrategy, Units};
pub use plan::Plan;

use crate::abort::or_abort;
use crate::broadcast::{broadcast_bucket, coalesced};
use crate::buffers::Buffers;
use crate::flat::Flat;
use crate::norm::{SquareRange, SumOfSquares};
use crate::unreported::{Unreported, without_gradient};
use crate::updates::Updates;
use crate::{
    Error, Optimizer, ParamInfo, Params, Result, Sequence, Values, ValuesMut, agreement, norm, params,
};
use gradients::ShardedGradients;
use groups::Groups;
use layout::{Layout, ShardChunk};
use order::UnitAction;
use parameters::Parameters;

/// Sharded data parallel training: every rank computes some of a step's micro-batches, and keeps a part only of the
/// parameters, the gradients and the optimizer's state, as a [`ShardingStrategy`] says.
///
/// # When there is what
///
/// Parameters lie in units of one or more blocks. Where parameters are sharded, a unit is gathered, used, and freed,
/// and for the backward gathered again; units to come are gathered while the present one computes, if
/// [`prefetch`](FsdpOptions::prefetch) says so. A unit's gradients are added up among the ranks as soon as all of them
/// are final, and each rank keeps the sum of its part. The model must be able to [free](Params::reshard) its parameters
/// for this to save their memory. Parameters that blocks of several units use are held from the first forward to the last
/// backward.
///
/// [Buffers](crate::ParamInfo::buffer) are never sharded and never freed. They are synchronised at the end of every step.
///
/// Where the ranks that share a copy can read each other's memory, and the optimizer changes parameters of the model's own
/// type, nothing is gathered: a unit is read where ranks keep it when it is used, and a model that [copies](Params::fill)
/// parameters has them read into its own memory.
///
/// # Which sums are the same
///
/// ShardedGradients, and losses, are summed in the canonical order, as by [`Ddp`](crate::Ddp): T(n) = T(largest power of two
/// below n) + T(rest). How micro-batches are dealt depends on the strategy.
///
/// | strategy | rank r of N computes | bit for bit one process's result if |
/// |---|---|---|
/// | `FullShard`, `ShardGradOp` | micro-batches r, N + r, 2N + r, … | N is a power of two |
/// | `ShardOptimizer`, `NoShard` | a contiguous share | each share is the same power of two |
/// | `HybridShard` | of its copy's contiguous share, every S-th | S is a power of two, and each copy's share the same one |
///
/// Otherwise, and where ranks [join](Self::join), they are the same on every rank and in every run. Either way they do not depend on units, prefetch, what is
/// freed when, timing or transport.
///
/// # Errors
///
/// As for [`Ddp`](crate::Ddp): an error on one rank aborts the job, but for those that every rank gets alike:
/// [`StepsDiffer`](Error::StepsDiffer), [`SettingsDiffer`](Error::SettingsDiffer),
/// [`NoMicroBatches`](Error::NoMicroBatches) and [`ZeroWeight`](Error::ZeroWeight).
pub struct Fsdp<A> {
    parameters: Parameters,
    gradients: ShardedGradients,
    buffers: Buffers,
    groups: Groups,
    /// The model's parameters, of the types that the optimizer changes.
    kept: Vec<ParamInfo>,
    /// All ranks, for what they agree about.
    world: Communicator,
    model: Sequence<A>,
    plan: Plan,
    forward: Vec<UnitAction>,
    backward: Vec<UnitAction>,
    /// How many actions of the next forward were taken ahead of it, if it was asked for.
    prefetched: Option<usize>,
    /// Micro-batches of all ranks since the last step, and whether they say how much they count.
    micro_batches: usize,
    weighted: bool,
    /// What those of this rank count.
    count: u64,
    /// This rank's losses since then, one for each round.
    losses: Vec<f32>,
    updates: Updates,
    unreported: Unreported,
    /// While this rank computes gradients. Set afterwards, too, if that has panicked.
    computes: bool,
}

impl<A> Fsdp<A> {
    /// Begins to train `model` on all ranks, with rank 0's parameters.
    ///
    /// # Errors
    /// On every rank, if parameters or options differ between ranks; if the ranks cannot be divided as the options
    /// want; if communication fails.
    pub fn new(comm: Communicator, model: Sequence<A>, options: &FsdpOptions) -> Result<Self> {
        Self::begin(comm, model, options, InitialValues::OfRank0)
    }

    /// As [`new`](Self::new), with values of which no rank ever has more than a unit at a time: `values` is called with
    /// each parameter's index and the memory to put its values into, and gives every rank the same. The model's own
    /// values are not looked at; its parameters may be [nowhere](crate::Slot::freed).
    ///
    /// # Errors
    /// As for [`new`](Self::new), and [`InitialValuesDiffer`](Error::InitialValuesDiffer) on every rank if `values` does not give
    /// all of them the same.
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
        let names = model.infos().iter().map(|info| info.name.clone()).collect();
        let kept = model.infos().iter().zip(&plan.layout.locations).map(|(info, location)| {
            let flat_param =
                location.map(|location| &plan.layout.units[location.unit].flat_params[location.flat_param]);
            let dtype = flat_param.map_or(info.dtype, |flat_param| flat_param.master_dtype(precision));
            ParamInfo { dtype, ..info.clone() }
        });
        Ok(Self {
            parameters,
            gradients: ShardedGradients::new(&plan.layout, names, precision, degrees.each_round),
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
            updates: Updates::new(),
            unreported: Unreported::default(),
            computes: false,
        })
    }

    /// This rank's part of a parameter's mean gradient, and which of the parameter's values it is for; `None` if the
    /// rank has no part of it, or no micro-batch of the last step had a gradient.
    pub fn gradient(&self, parameter: usize) -> Option<(Range<usize>, Values<'_>)> {
        let location = (*self.plan.layout.locations.get(parameter)?)?;
        let flat_param = &self.plan.layout.units[location.unit].flat_params[location.flat_param];
        let chunk = flat_param.chunk(location.place, self.groups.shards.rank())?;
        let values = self.gradients.mean((location.unit, location.flat_param), chunk)?;
        Some((chunk.offset..chunk.offset + chunk.len, values))
    }

    /// The names of the trained parameters for which no micro-batch of the last step had a gradient, on any rank: an update leaves
    /// them as they are. After the first step of a training they are logged as a warning, because a block may have forgotten to
    /// report them.
    #[doc(alias = "find_unused_parameters")]
    pub fn without_gradient(&self) -> Vec<&str> {
        without_gradient(self.model.infos(), |parameter| self.gradients.is_used(parameter))
    }

    /// The norm of all gradients together, as if they were one vector: exact but for one rounding, and so the same bits
    /// however training is divided. Infinite or NaN if a gradient is. Every rank calls this, unlike that of
    /// [`Ddp`](crate::Ddp): each has a part of the gradients.
    ///
    /// # Errors
    /// If communication fails.
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
        for (place, flat_param) in self.plan.layout.flat_params() {
            self.gradients.means(flat_param, place, rank).for_each(|(_, mean)| sum.add(mean));
        }
        let mut encoded = sum.encode();
        self.follow();
        let added = self.groups.shards.all_reduce(&mut encoded, ReduceOp::Sum);
        self.or_abort(added.map_err(Error::communication))?;
        Ok(SumOfSquares::root(range, &encoded))
    }

    /// Multiplies all gradients by the same factor where their norm is above `max`, so that it becomes `max`; gives
    /// the norm before. A norm that is infinite or NaN changes nothing: look at it before the update. Every rank calls this.
    ///
    /// # Errors
    /// If communication fails.
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

    /// Changes the parameters by their gradients; those without a gradient are left as they are. The optimizer is given
    /// this rank's part of each parameter, of which the parameter's index is the number, and keeps its state for that. Every
    /// rank calls this.
    ///
    /// # Errors
    /// If the optimizer fails, or communication. [`StepPanicked`](Error::StepPanicked) if a step has panicked since the last one
    /// that ended.
    pub fn update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        self.announce("update");
        let result = self.try_update(optimizer);
        self.or_abort(result)
    }

    fn try_update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        self.check_ended()?;
        self.updates.record_update(optimizer);
        let Self { parameters, gradients, model, plan, groups, .. } = self;
        let rank = groups.shards.rank();
        for (place, flat_param) in plan.layout.flat_params() {
            for (chunk, mean) in gradients.means(flat_param, place, rank) {
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

    /// Sets this rank's part of all parameters from one flat slice: the parts of the parameters one after the other, in
    /// the order of the plan's units. Every rank calls this. Buffers are not among them.
    ///
    /// # Errors
    /// If there are more or fewer values, or they are of another type, naming what is expected; that ends the job, as other
    /// ranks may already count on this one. If communication fails.
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

    /// How many values of parameters this rank keeps, or changes where all ranks keep all.
    pub fn shard_len(&self) -> usize {
        self.chunks().iter().map(|(_, chunk)| chunk.len).sum()
    }

    /// Bytes of parameters and gradients that this rank has sent since the training began. What others have read in its memory
    /// was not sent.
    pub fn tensor_bytes_sent(&self) -> u64 {
        self.groups.tensor_bytes_sent()
    }

    /// This rank's part of all parameters, each piece with the place of its strip.
    fn chunks(&self) -> Vec<((usize, usize), ShardChunk)> {
        let rank = self.groups.shards.rank();
        let flat_params = self.plan.layout.flat_params();
        flat_params
            .flat_map(|(place, flat_param)| flat_param.chunks(rank).map(move |chunk| (place, chunk)))
            .collect()
    }

    /// Gives every rank's model the parts of these strips that the others have changed, where models have all parameters.
    fn all_gather_updates(&mut self, changed: impl Fn(&FlatParameter) -> bool) -> Result<()> {
        self.follow();
        let Self { parameters, model, plan, groups, .. } = self;
        // What was gathered ahead is not what it was.
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

    /// Calls `f` with each parameter's index and all of its values, unit by unit, buffers included; those that are the same
    /// as an earlier one are left out. Every rank calls this, and has one unit at a time.
    ///
    /// # Errors
    /// If communication fails.
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

    /// Ends the training and gives back what it was made of; the model has all of its parameters, on every rank. Every
    /// rank calls this.
    ///
    /// # Errors
    /// If communication fails.
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

    /// The model, whose parameters may be freed.
    pub const fn model(&self) -> &Sequence<A> {
        &self.model
    }

    /// What was decided about the training.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// How many ranks train.
    pub fn world_size(&self) -> usize {
        self.world.world_size()
    }

    /// The communicator, to be asked.
    pub const fn communicator(&self) -> &Communicator {
        &self.world
    }

    /// The communicator, for what else the ranks have to say to each other. A timeout and an order that it is given hold for
    /// every later call of this training.
    pub const fn communicator_mut(&mut self) -> &mut Communicator {
        &mut self.world
    }

    /// Announces a call that only meets others of its name.
    pub(super) fn announce(&mut self, name: &str) {
        self.world.announce(name, name);
    }

    /// Communicates from now on as the communicator says, which may have been told something since the last call.
    fn follow(&mut self) {
        self.groups.follow(&self.world);
        self.parameters.follow(&self.world);
    }

    /// Has each unit in the model once.
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
                // No rank waits for what another does with all units.
                parameters.close(groups)?;
            }
        }
        parameters.rest(groups)
    }

    /// Aborts the job if something failed that the other ranks cannot know, and forgets all gradients.
    fn or_abort<T>(&mut self, result: Result<T>) -> Result<T> {
        or_abort(&mut self.world, result).inspect_err(|_| self.forget())
    }

    /// Begins to compute gradients. What is there of a computation that has panicked, which the caller must have caught, is
    /// forgotten: nobody knows how much of it there is.
    fn begin_to_compute(&mut self) {
        if std::mem::replace(&mut self.computes, true) {
            self.forget();
        }
    }

    /// That no computation of gradients has panicked, which the caller must have caught: sums are then not those of a step.
    const fn check_ended(&self) -> Result<()> {
        if self.computes { Err(Error::StepPanicked) } else { Ok(()) }
    }

    /// Forgets all gradients, and the parameters of other ranks.
    fn forget(&mut self) {
        self.parameters.forget();
        self.gradients.forget();
        (self.prefetched, self.micro_batches, self.count) = (None, 0, 0);
        self.losses.clear();
    }
}

/// Where a training's first values come from.
enum InitialValues<'a> {
    /// From rank 0's model.
    OfRank0,
    /// From a function, which gives every rank the same.
    Given(Given<'a>),
}

impl InitialValues<'_> {
    /// Puts the first values of a strip into `whole`, on every rank.
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

    /// Gives every rank's model the first values of its buffers.
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

    /// That all ranks were given the same first values.
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

/// First values that a function gives, and by parameter the checksums of what it has given.
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

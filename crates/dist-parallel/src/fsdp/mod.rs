//! Fully sharded data-parallel training (FSDP, ZeRO).

mod assignment;
mod counted;
mod evaluate;
mod groups;
mod layout;
mod memory;
mod options;
mod parameters;
mod plan;
mod shard_buffer;
mod step;

use std::fmt;
use std::ops::Range;

use dist_collectives::Communicator;

pub(crate) use assignment::share;
pub(crate) use groups::{Groups, bytes_sent, follow};
pub(crate) use layout::{FlatParameter, Layout, ShardChunk};
pub use memory::MemoryEstimate;
pub(crate) use options::Degrees;
pub use options::{FsdpOptions, Precision, Reshard, ShardingStrategy, Units};
pub(crate) use parameters::Parameters;
pub use plan::Plan;

use crate::engine::{
    Agreement, Given, GradientSetup, InitialValues, StepEngine, delegate_shards, engine_methods,
};
use crate::flat::Flat;
use crate::gradients::{GradientLayout, GradientMemory};
use crate::{BucketHook, Error, Params, Result, Sequence, Values, ValuesMut, agreement, params};

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
    pub(crate) engine: StepEngine<Sequence<A>>,
}

impl<A> Fsdp<A> {
    /// Starts to train `model` on all ranks, with the parameters of rank 0.
    ///
    /// # Errors
    /// Parameters or options differ between ranks, or the options cannot divide the ranks: every rank gets the error.
    /// Communication fails.
    pub fn new(comm: Communicator, model: Sequence<A>, options: &FsdpOptions) -> Result<Self> {
        Self::begin(comm, model, options, None, InitialValues::OfRank0)
    }

    /// Starts training like [`new`](Self::new), with a communication hook that sums gradients over the replicas of the
    /// model, for example compressed, as in [`Ddp::with_hook`](crate::Ddp::with_hook).
    ///
    /// With [`NoShard`](ShardingStrategy::NoShard) each rank is a replica, and a bucket has the gradients of a unit. With
    /// [`HybridShard`](ShardingStrategy::HybridShard) gradients are reduce-scattered inside a replica, without the hook.
    /// The hook then sums each rank's shard of them over the replicas, once a step. A shard is one tensor of one
    /// dimension, so [`PowerSgdHook`](crate::compress::PowerSgdHook) sends it whole.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and hooks with different names on different ranks.
    /// [`HookWithShards`](Error::HookWithShards) on every rank for other strategies: they have one replica.
    pub fn with_hook(
        comm: Communicator,
        model: Sequence<A>,
        options: &FsdpOptions,
        hook: impl BucketHook + 'static,
    ) -> Result<Self> {
        Self::begin(comm, model, options, Some(Box::new(hook)), InitialValues::OfRank0)
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
        let given = InitialValues::Given(Given { values: &mut values, checksums });
        Self::begin(comm, model, options, None, given)
    }

    fn begin(
        mut world: Communicator,
        model: Sequence<A>,
        options: &FsdpOptions,
        hook: Option<Box<dyn BucketHook>>,
        first: InitialValues<'_>,
    ) -> Result<Self> {
        let plan = Plan::new(model.infos(), model.starts(), world.world_size(), options);
        let starts = agreement::setting("the list of the blocks' first parameters", model.starts());
        let name = hook.as_ref().map_or_else(|| "none".to_owned(), |hook| hook.name());
        let settings = [options.settings().as_slice(), &[starts, ("the hook".to_owned(), name)]].concat();
        agreement::check(&mut world, model.infos(), &settings)?;
        let plan = plan?;
        if hook.is_some() && !options.strategy.has_replicas() {
            return Err(Error::HookWithShards { strategy: options.strategy });
        }
        let layout = GradientLayout::of_units(model.infos(), &plan.layout, options.precision);
        let setup = GradientSetup {
            layout,
            memory: GradientMemory::shared(),
            hook,
            agreement: Agreement::BeforeRounds,
        };
        Ok(Self { engine: StepEngine::start(world, model, plan, setup, first)? })
    }

    /// Returns this rank's shard of a parameter's mean gradient, with its range in the parameter. `None` if the rank
    /// has no shard of it, or if no micro-batch of the last step had a gradient.
    pub fn gradient(&self, parameter: usize) -> Option<(Range<usize>, Values<'_>)> {
        self.engine.gradient(parameter)
    }

    engine_methods!(pub gradients);
    engine_methods!(pub update);
    engine_methods!(pub mode);
    engine_methods!(pub communicator);
    engine_methods!(pub model Sequence<A>);

    /// Sets this rank's shard of all parameters from one flat slice. It contains the shards of the parameters one
    /// after the other, in the order of the plan's units, without buffers. Every rank calls this.
    ///
    /// # Errors
    /// The number or the type of the values is wrong: the error says what is expected, and the job is aborted,
    /// because other ranks may already use their new values. Communication fails.
    pub fn set_shard(&mut self, values: Values<'_>) -> Result<()> {
        self.engine.announce("set_shard");
        self.engine.set_shard(values)
    }

    /// Returns the number of parameter values in this rank's shard.
    pub fn shard_len(&self) -> usize {
        self.engine.shard_len()
    }

    /// Returns the bytes of parameters and gradients that this rank has sent since the training began. Values that
    /// others read in its memory are not counted.
    pub fn tensor_bytes_sent(&self) -> u64 {
        self.engine.groups.tensor_bytes_sent()
    }

    /// Calls `f` with the index and all values of each parameter, unit by unit, buffers included. Tied parameters
    /// come once. Every rank calls this and holds one unit at a time.
    ///
    /// # Errors
    /// Communication fails.
    pub fn for_each_parameter(&mut self, f: impl FnMut(usize, Values<'_>)) -> Result<()> {
        self.engine.for_each_parameter(f)
    }

    /// Ends the training and returns the communicator and the model, which has all of its parameters on every rank.
    /// Every rank calls this.
    ///
    /// # Errors
    /// Communication fails.
    pub fn into_parts(mut self) -> Result<(Communicator, Sequence<A>)> {
        let mut whole: Vec<Option<Flat>> = self.model().infos().iter().map(|_| None).collect();
        self.engine.announce("into_parts");
        self.engine.read_all(&mut |parameter, values| {
            let mut copy = Flat::zeros(values.dtype(), values.len());
            copy.slice_mut(0, values.len()).convert_from(values);
            whole[parameter] = Some(copy);
        })?;
        let (world, mut model) = self.engine.into_parts();
        for (parameter, values) in whole.into_iter().enumerate() {
            let Some(values) = values else { continue };
            params::write(&mut model, parameter, |mut own| own.copy_from(values.slice(0, values.len())))?;
        }
        Ok((world, model))
    }

    /// Returns the plan of the training.
    pub fn plan(&self) -> &Plan {
        &self.engine.stage().plan
    }
}

delegate_shards!(impl<A> Shards for Fsdp<A>, engine);

impl<A> fmt::Debug for Fsdp<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fsdp({:?}, {:?})", self.engine.world, self.engine.stage().plan.options.strategy)
    }
}

#[cfg(test)]
mod tests;

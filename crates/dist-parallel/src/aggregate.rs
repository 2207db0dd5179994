//! Averaging of gradients over ranks, for a training loop of your own.

use std::fmt;

use dist_collectives::transport::Chain;
use dist_collectives::{Communicator, DType, Element, ReduceOp};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::loss::to_be_summed;
use crate::reduce::{BUCKET_BYTES_MAX, groups, reduce};
use crate::{BoxError, Error, FloatType, Loss, Result, Values, ValuesMut, agreement};

/// A way to replace every rank's gradients by the mean over the ranks.
///
/// Sums are in the canonical order of [`Communicator::all_reduce`] and divided once, so all ways give the same bits.
/// Sums of `f16` are `f32`, with twice the bytes, and the mean is rounded to `f16` once.
pub trait GradientAggregator {
    /// Replaces each slice by the mean over the ranks' slices at its place in their lists.
    ///
    /// # Errors
    /// The lists differ: every rank gets the error. Communication fails. The contents are then unspecified.
    fn aggregate(&mut self, gradients: &mut [ValuesMut<'_>]) -> Result<()>;

    /// Replaces each slice by the weighted mean over ranks: Σ slices / Σ counts. `count` is this rank's weight.
    /// Returns Σ counts.
    ///
    /// A rank with weight 0 is ignored and gets the mean too. If all weights are 0, everything becomes +0.
    ///
    /// # Errors
    /// The errors of [`aggregate`](Self::aggregate).
    fn aggregate_weighted(&mut self, gradients: &mut [ValuesMut<'_>], count: u64) -> Result<u64>;

    /// Replaces each slice by the mean over the present ranks, and returns their number. The slices of an absent rank
    /// are ignored; it gets the mean too. If no rank is present, everything becomes +0.
    ///
    /// With this, a rank that has run out of data does not delay the others.
    ///
    /// # Errors
    /// The errors of [`aggregate`](Self::aggregate).
    fn aggregate_present(&mut self, gradients: &mut [ValuesMut<'_>], present: bool) -> Result<usize> {
        let ranks = self.aggregate_weighted(gradients, present.into())?;
        Ok(usize::try_from(ranks).unwrap_or(usize::MAX))
    }

    /// Broadcasts the parameters of the server, or of rank 0 if there is none.
    ///
    /// # Errors
    /// The errors of [`aggregate`](Self::aggregate).
    fn broadcast(&mut self, parameters: &mut [ValuesMut<'_>]) -> Result<()>;

    /// Aborts the job and tells the other ranks why, so that none waits for this one.
    fn abort(&mut self, why: &dyn fmt::Display);
}

/// An aggregator for one rank that trains alone, without communication.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LocalAggregator;

/// An aggregator with all_reduce.
#[derive(Debug)]
pub struct AllReduceAggregator(Lists);

/// An aggregator with a parameter server: one rank collects the gradients, averages them and returns the mean.
#[derive(Debug)]
pub struct ParameterServer {
    lists: Lists,
    server: usize,
}

impl AllReduceAggregator {
    /// Returns an aggregator for the ranks of this group.
    pub const fn new(comm: Communicator) -> Self {
        Self(Lists { comm, agreed: None })
    }

    /// Returns the group.
    pub fn into_communicator(self) -> Communicator {
        self.0.comm
    }
}

impl ParameterServer {
    /// Returns an aggregator for the ranks of this group, with rank `server` as the server.
    ///
    /// # Errors
    /// There is no such rank.
    pub fn new(comm: Communicator, server: usize) -> Result<Self> {
        let world_size = comm.world_size();
        if server >= world_size {
            return Err(Error::NoSuchServer { server, world_size });
        }
        Ok(Self { lists: Lists { comm, agreed: None }, server })
    }

    /// Returns the group.
    pub fn into_communicator(self) -> Communicator {
        self.lists.comm
    }
}

impl GradientAggregator for LocalAggregator {
    fn aggregate(&mut self, _: &mut [ValuesMut<'_>]) -> Result<()> {
        Ok(())
    }

    fn aggregate_weighted(&mut self, gradients: &mut [ValuesMut<'_>], count: u64) -> Result<u64> {
        let count = to_be_summed(count).unsigned_abs();
        divide(gradients, count);
        Ok(count)
    }

    fn broadcast(&mut self, _: &mut [ValuesMut<'_>]) -> Result<()> {
        Ok(())
    }

    fn abort(&mut self, _why: &dyn fmt::Display) {}
}

impl GradientAggregator for AllReduceAggregator {
    fn aggregate(&mut self, gradients: &mut [ValuesMut<'_>]) -> Result<()> {
        self.0.apply(SliceCollective::AllReduce(ReduceOp::Mean), gradients)
    }

    fn aggregate_weighted(&mut self, gradients: &mut [ValuesMut<'_>], count: u64) -> Result<u64> {
        self.0.weighted_mean(SliceCollective::AllReduce(ReduceOp::Sum), gradients, count)
    }

    fn broadcast(&mut self, parameters: &mut [ValuesMut<'_>]) -> Result<()> {
        self.0.apply(SliceCollective::Broadcast(0), parameters)
    }

    fn abort(&mut self, why: &dyn fmt::Display) {
        self.0.comm.abort(why);
    }
}

impl GradientAggregator for ParameterServer {
    fn aggregate(&mut self, gradients: &mut [ValuesMut<'_>]) -> Result<()> {
        self.lists.apply(SliceCollective::ByServer(ReduceOp::Mean, self.server), gradients)
    }

    fn aggregate_weighted(&mut self, gradients: &mut [ValuesMut<'_>], count: u64) -> Result<u64> {
        let sum = SliceCollective::ByServer(ReduceOp::Sum, self.server);
        self.lists.weighted_mean(sum, gradients, count)
    }

    fn broadcast(&mut self, parameters: &mut [ValuesMut<'_>]) -> Result<()> {
        self.lists.apply(SliceCollective::Broadcast(self.server), parameters)
    }

    fn abort(&mut self, why: &dyn fmt::Display) {
        self.lists.comm.abort(why);
    }
}

/// The choice of a [`GradientAggregator`], for configuration files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Aggregation {
    /// [`LocalAggregator`].
    Local,
    /// [`AllReduceAggregator`].
    #[default]
    AllReduce,
    /// [`ParameterServer`].
    ParameterServer {
        /// The rank of the server.
        server: usize,
    },
}

impl Aggregation {
    /// Returns the aggregator of this choice for the ranks of a group.
    ///
    /// # Errors
    /// The group has no such server.
    pub fn over(self, comm: Communicator) -> Result<Box<dyn GradientAggregator>> {
        Ok(match self {
            Self::Local => Box::new(LocalAggregator),
            Self::AllReduce => Box::new(AllReduceAggregator::new(comm)),
            Self::ParameterServer { server } => Box::new(ParameterServer::new(comm, server)?),
        })
    }
}

/// Gradients for [`train_step`]: a list of slices, in the same order on every rank.
pub trait GradientSlices {
    /// Returns the slices.
    fn slices(&mut self) -> Vec<ValuesMut<'_>>;
}

macro_rules! gradient_slices {
    ($($float:ty)*) => {$(
        impl GradientSlices for Vec<$float> {
            fn slices(&mut self) -> Vec<ValuesMut<'_>> {
                vec![self.as_mut_slice().into()]
            }
        }
        impl GradientSlices for Vec<Vec<$float>> {
            fn slices(&mut self) -> Vec<ValuesMut<'_>> {
                self.iter_mut().map(|slice| slice.as_mut_slice().into()).collect()
            }
        }
    )*};
}

gradient_slices! { f32 f64 f16 bf16 }

/// Takes one step of your own loop: `compute` returns this rank's loss and gradients, `aggregator` averages the
/// gradients over the ranks, and `apply` updates the parameters. Returns this rank's loss or sum of losses.
///
/// The type of the [`Loss`] decides between a mean over ranks and a weighted mean. If the total weight is 0, `apply`
/// receives zeros.
///
/// ```
/// use dist_collectives::Communicator;
/// use dist_parallel::own_loop::{AllReduceAggregator, train_step};
/// use dist_transport::sim;
///
/// let outcome = sim::run(1, 2, |transport| {
///     let comm = Communicator::new(transport);
///     let (target, mut weight) = (comm.rank() as f32, 0.0_f32);
///     let mut aggregator = AllReduceAggregator::new(comm);
///     for _ in 0..100 {
///         let error = weight - target;
///         train_step(
///             || Ok((error * error, vec![2.0 * error])),
///             |gradient| Ok(weight -= 0.1 * gradient[0]),
///             &mut aggregator,
///         )
///         .unwrap();
///     }
///     weight
/// });
/// assert!(outcome.results.iter().all(|weight| (weight - 0.5).abs() < 1e-3));
/// ```
///
/// Each rank must compute other examples, otherwise all compute the same: [`data`](crate::data) shows how to assign
/// them.
///
/// # Errors
/// One of the three fails: the following ones are not called, and the job is aborted, so that no other rank waits.
/// The lists of gradients differ: every rank gets [`GradientsDiffer`](Error::GradientsDiffer), and the job is not
/// aborted.
pub fn train_step<C: Loss, G: GradientSlices>(
    compute: impl FnOnce() -> Result<(C, G), BoxError>,
    apply: impl FnOnce(G) -> Result<(), BoxError>,
    aggregator: &mut (impl GradientAggregator + ?Sized),
) -> Result<f32> {
    let step = || {
        let (loss, mut gradients) = compute().map_err(Error::compute)?;
        let (loss, count) = loss.weighted();
        if C::WEIGHTED {
            aggregator.aggregate_weighted(&mut gradients.slices(), count)?;
        } else {
            aggregator.aggregate(&mut gradients.slices())?;
        }
        apply(gradients).map_err(Error::Apply)?;
        Ok(loss)
    };
    let result: Result<f32> = step();
    if let Err(error) = &result
        && !error.is_on_every_rank()
    {
        aggregator.abort(&Chain(error));
    }
    result
}

/// A group of ranks with lists of slices.
#[derive(Debug)]
struct Lists {
    comm: Communicator,
    /// The types and lengths of the last list that all ranks agreed on.
    agreed: Option<Vec<(FloatType, usize)>>,
}

/// A collective operation on lists of slices.
#[derive(Debug, Clone, Copy)]
enum SliceCollective {
    AllReduce(ReduceOp),
    /// Reduces to the server and broadcasts the result.
    ByServer(ReduceOp, usize),
    Broadcast(usize),
}

impl Lists {
    /// Applies the operation to all slices, those of one type together.
    fn apply(&mut self, collective: SliceCollective, values: &mut [ValuesMut<'_>]) -> Result<()> {
        self.agree(values)?;
        self.apply_agreed(collective, values)
    }

    /// Applies the operation like [`apply`](Self::apply), to slices on which all ranks have agreed.
    fn apply_agreed(&mut self, collective: SliceCollective, values: &mut [ValuesMut<'_>]) -> Result<()> {
        let (mut f32s, mut f64s, mut f16s, mut bf16s) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for slice in values {
            match slice {
                ValuesMut::F32(slice) => f32s.push(&mut **slice),
                ValuesMut::F64(slice) => f64s.push(&mut **slice),
                ValuesMut::F16(slice) => f16s.push(&mut **slice),
                ValuesMut::Bf16(slice) => bf16s.push(&mut **slice),
            }
        }
        collective.apply(&mut self.comm, &mut f32s)?;
        collective.apply(&mut self.comm, &mut f64s)?;
        collective.apply(&mut self.comm, &mut f16s)?;
        collective.apply(&mut self.comm, &mut bf16s)
    }

    /// Computes the weighted mean and returns the total weight.
    fn weighted_mean(
        &mut self,
        sum: SliceCollective,
        gradients: &mut [ValuesMut<'_>],
        count: u64,
    ) -> Result<u64> {
        if count == 0 {
            gradients.iter_mut().for_each(ValuesMut::clear);
        }
        let mut counts = [to_be_summed(count)];
        self.comm.all_reduce(&mut counts, ReduceOp::Sum).map_err(Error::communication)?;
        self.agree(gradients)?;
        let count = counts[0].unsigned_abs();
        let mut wide: Vec<_> = gradients.iter().map(|slice| wide_copy(slice.as_values())).collect();
        let slices = gradients.iter_mut().zip(&mut wide);
        let mut sums: Vec<ValuesMut<'_>> = slices.map(|(slice, wide)| carried(slice, wide)).collect();
        self.apply_agreed(sum, &mut sums)?;
        divide(&mut sums, count);
        for (slice, wide) in gradients.iter_mut().zip(&wide) {
            wide.iter().for_each(|mean| slice.convert_from(mean[..].into()));
        }
        Ok(count)
    }

    /// Returns an error unless all ranks have slices of the same types and lengths. An unchanged list is not compared
    /// again. If only one rank's list has changed, the ranks are in different collective calls, which is an error on
    /// each.
    fn agree(&mut self, values: &[ValuesMut<'_>]) -> Result<()> {
        let list = values.iter().map(|slice| (slice.dtype(), slice.len()));
        if self.agreed.as_ref().is_some_and(|agreed| list.clone().eq(agreed.iter().copied())) {
            return Ok(());
        }
        let list: Vec<_> = list.collect();
        let mut all = vec![0; self.comm.world_size()];
        self.comm.all_gather(&[agreement::fingerprint(&list)], &mut all).map_err(Error::communication)?;
        if let Some(rank) = all.iter().position(|theirs| *theirs != all[0]) {
            return Err(Error::GradientsDiffer { rank });
        }
        self.agreed = Some(list);
        Ok(())
    }
}

impl SliceCollective {
    fn apply<T: Element>(self, comm: &mut Communicator, slices: &mut [&mut [T]]) -> Result<()> {
        if slices.is_empty() {
            return Ok(());
        }
        match self {
            Self::AllReduce(op) => reduce(comm, slices, op),
            Self::ByServer(op, server) => packed(slices, op.partial_dtype(T::DTYPE), |packed| {
                comm.reduce(packed, op, server)?;
                comm.broadcast(packed, server)
            }),
            Self::Broadcast(root) => packed(slices, T::DTYPE, |packed| comm.broadcast(packed, root)),
        }
    }
}

/// Returns a copy in the type of the sums, if it differs from the type of the gradients.
fn wide_copy(gradients: Values<'_>) -> Option<Vec<f32>> {
    matches!(gradients, Values::F16(_)).then(|| {
        let mut wide = vec![0.0; gradients.len()];
        ValuesMut::F32(&mut wide).convert_from(gradients);
        wide
    })
}

/// Returns the slice for the sum: the copy, if there is one.
fn carried<'a>(slice: &'a mut ValuesMut<'_>, wide: &'a mut Option<Vec<f32>>) -> ValuesMut<'a> {
    match wide {
        Some(wide) => ValuesMut::F32(wide),
        None => slice.reborrow(),
    }
}

/// Divides sums by their weight. With weight 0 they become +0.
fn divide(sums: &mut [ValuesMut<'_>], count: u64) {
    if count == 1 {
        return;
    }
    for sum in sums {
        match usize::try_from(count).unwrap_or(usize::MAX) {
            0 => sum.clear(),
            count => sum.divide(count),
        }
    }
}

/// Applies an operation to neighbouring slices together. Values of the type `carried` are sent.
fn packed<T: Element>(
    slices: &mut [&mut [T]],
    carried: DType,
    mut operation: impl FnMut(&mut [T]) -> dist_collectives::Result<()>,
) -> Result<()> {
    let lens: Vec<usize> = slices.iter().map(|slice| slice.len()).collect();
    for group in groups(&lens, BUCKET_BYTES_MAX / carried.size()) {
        let group = &mut slices[group];
        if let [alone] = group {
            operation(alone).map_err(Error::communication)?;
            continue;
        }
        let mut packed: Vec<T> = group.iter().flat_map(|slice| slice.iter().copied()).collect();
        operation(&mut packed).map_err(Error::communication)?;
        let mut rest = &packed[..];
        for slice in group {
            let (own, after) = rest.split_at(slice.len());
            slice.copy_from_slice(own);
            rest = after;
        }
    }
    Ok(())
}

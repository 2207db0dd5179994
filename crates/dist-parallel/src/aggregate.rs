//! Making the gradients of one rank the mean over all ranks, for people with their own loop.

use std::fmt;

use dist_collectives::transport::Chain;
use dist_collectives::{Communicator, DType, Element, ReduceOp};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::loss::to_be_summed;
use crate::reduce::{BUCKET_BYTES_MAX, groups, reduce};
use crate::{BoxError, Error, FloatType, Loss, Result, Values, ValuesMut, agreement};

/// A way to make every rank's gradients the mean over the ranks.
///
/// Sums are in the canonical order of [`Communicator::all_reduce`], and divided once: every way gives the same bits. Sums of
/// `f16` are carried as `f32`, in twice the bytes, and the mean is rounded to `f16` once.
pub trait GradientAggregator {
    /// Replaces each of these slices by its mean over the slices at its place in the other ranks' lists.
    ///
    /// # Errors
    /// If the lists differ, which every rank is told; if communication fails. The contents are then unspecified.
    fn aggregate(&mut self, gradients: &mut [ValuesMut<'_>]) -> Result<()>;

    /// Replaces each of these slices, which count so much as a rank says of its own, by the sum of the slices at its place in
    /// the other ranks' lists, divided once by what all of them count together: that is returned. What counts for nothing is
    /// ignored; its rank gets the mean too. Where nothing counts, everything becomes +0.
    ///
    /// # Errors
    /// As for [`aggregate`](Self::aggregate).
    fn aggregate_weighted(&mut self, gradients: &mut [ValuesMut<'_>], count: u64) -> Result<u64>;

    /// As [`aggregate`](Self::aggregate), but over the ranks that are present only, whose number is returned. What an
    /// absent rank brings is ignored; it gets the mean too. With nobody present, everything becomes +0.
    ///
    /// So a rank that has run out of data neither keeps the others waiting nor counts.
    ///
    /// # Errors
    /// As for [`aggregate`](Self::aggregate).
    fn aggregate_present(&mut self, gradients: &mut [ValuesMut<'_>], present: bool) -> Result<usize> {
        let ranks = self.aggregate_weighted(gradients, present.into())?;
        Ok(usize::try_from(ranks).unwrap_or(usize::MAX))
    }

    /// Gives every rank the parameters of one of them: the server's, rank 0's where there is none.
    ///
    /// # Errors
    /// As for [`aggregate`](Self::aggregate).
    fn broadcast(&mut self, parameters: &mut [ValuesMut<'_>]) -> Result<()>;

    /// Ends the job, so that no other rank waits for this one, and tells them why.
    fn abort(&mut self, why: &dyn fmt::Display);
}

/// One rank that trains alone: nothing is communicated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LocalAggregator;

/// Every rank adds its part: an all_reduce.
#[derive(Debug)]
pub struct AllReduceAggregator(Lists);

/// One rank, the server, collects the gradients, averages them, and returns the mean.
#[derive(Debug)]
pub struct ParameterServer {
    lists: Lists,
    server: usize,
}

impl AllReduceAggregator {
    /// Over the ranks of this group.
    pub const fn new(comm: Communicator) -> Self {
        Self(Lists { comm, agreed: None })
    }

    /// Gives the group back.
    pub fn into_communicator(self) -> Communicator {
        self.0.comm
    }
}

impl ParameterServer {
    /// Over the ranks of this group, with rank `server` as the server.
    ///
    /// # Errors
    /// If there is no such rank.
    pub fn new(comm: Communicator, server: usize) -> Result<Self> {
        let world_size = comm.world_size();
        if server >= world_size {
            return Err(Error::NoSuchServer { server, world_size });
        }
        Ok(Self { lists: Lists { comm, agreed: None }, server })
    }

    /// Gives the group back.
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

/// A choice of a [`GradientAggregator`]; it can be written down.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Aggregation {
    /// [`LocalAggregator`].
    Local,
    /// [`AllReduceAggregator`].
    #[default]
    AllReduce,
    /// [`ParameterServer`].
    ParameterServer {
        /// The rank that is the server.
        server: usize,
    },
}

impl Aggregation {
    /// The aggregator of this choice over the ranks of a group.
    ///
    /// # Errors
    /// If the server is no rank of the group.
    pub fn over(self, comm: Communicator) -> Result<Box<dyn GradientAggregator>> {
        Ok(match self {
            Self::Local => Box::new(LocalAggregator),
            Self::AllReduce => Box::new(AllReduceAggregator::new(comm)),
            Self::ParameterServer { server } => Box::new(ParameterServer::new(comm, server)?),
        })
    }
}

/// Gradients as [`train_step`] takes them: a list of slices, in the same order on every rank.
pub trait GradientSlices {
    /// The slices.
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

/// One step of a loop of one's own: `compute` gives this rank's loss and gradients, `aggregator` makes the gradients
/// the mean over all ranks, `apply` changes the parameters by them. Gives this rank's loss, or sum of losses, as it was
/// computed.
///
/// The [`Loss`] says what the mean is over: the ranks, or all that they count. Where that is nothing, `apply` is given zeros.
///
/// ```
/// use dist_collectives::Communicator;
/// use dist_parallel::{AllReduceAggregator, train_step};
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
/// Each rank has to compute other examples, or all compute the same: [`data`](crate::data) shows how they are dealt.
///
/// # Errors
/// If one of the three fails. Then the next is not begun, and the job is aborted, so that no other rank waits. If the lists of
/// gradients differ, every rank has [`GradientsDiffer`](Error::GradientsDiffer) and nobody waits: the job is not aborted.
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

/// A group whose ranks bring lists of slices.
#[derive(Debug)]
struct Lists {
    comm: Communicator,
    /// The types and lengths of the list that all ranks had last.
    agreed: Option<Vec<(FloatType, usize)>>,
}

/// What is done to slices of all ranks.
#[derive(Debug, Clone, Copy)]
enum SliceCollective {
    AllReduce(ReduceOp),
    /// To the server, which reduces, and back from it.
    ByServer(ReduceOp, usize),
    Broadcast(usize),
}

impl Lists {
    /// Does this to all slices, those of one type together.
    fn apply(&mut self, collective: SliceCollective, values: &mut [ValuesMut<'_>]) -> Result<()> {
        self.agree(values)?;
        self.apply_agreed(collective, values)
    }

    /// As [`apply`](Self::apply), to slices of which all ranks are known to bring the same.
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

    /// The mean over what all gradients count, and how much that is.
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

    /// Makes sure that all ranks bring slices of the same types and lengths. A list that has not changed is not
    /// compared again: where only one rank's has, the ranks are in different calls, which is an error on each.
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

/// A copy in the type that sums of these gradients are carried in, if that is another.
fn wide_copy(gradients: Values<'_>) -> Option<Vec<f32>> {
    matches!(gradients, Values::F16(_)).then(|| {
        let mut wide = vec![0.0; gradients.len()];
        ValuesMut::F32(&mut wide).convert_from(gradients);
        wide
    })
}

/// The slice that gradients are summed in: their copy, if there is one.
fn carried<'a>(slice: &'a mut ValuesMut<'_>, wide: &'a mut Option<Vec<f32>>) -> ValuesMut<'a> {
    match wide {
        Some(wide) => ValuesMut::F32(wide),
        None => slice.reborrow(),
    }
}

/// Divides sums by what they count; those of nothing are +0.
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

/// Does to neighbours together what is to be done to each. Values of the type `carried` travel.
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

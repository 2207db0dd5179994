//! Averaging of gradients over ranks, for a training loop of your own.

use std::fmt;

use dist_collectives::transport::Chain;
use dist_collectives::{Communicator, DType, Element, ReduceOp};
use serde::{Deserialize, Serialize};

use crate::reduce::{BUCKET_BYTES_MAX, groups, reduce};
use crate::{BoxError, Error, FloatType, Result, ValuesMut, agreement};

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

    fn broadcast(&mut self, _: &mut [ValuesMut<'_>]) -> Result<()> {
        Ok(())
    }

    fn abort(&mut self, _why: &dyn fmt::Display) {}
}

impl GradientAggregator for AllReduceAggregator {
    fn aggregate(&mut self, gradients: &mut [ValuesMut<'_>]) -> Result<()> {
        self.0.apply(SliceCollective::Mean, gradients)
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
        self.lists.apply(SliceCollective::MeanByServer(self.server), gradients)
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

/// A list of gradient slices for [`train_step`], in the same order on every rank.
pub trait GradientSlices {
    /// Returns the slices.
    fn slices(&mut self) -> Vec<ValuesMut<'_>>;
}

impl<T> GradientSlices for Vec<Vec<T>>
where
    for<'a> ValuesMut<'a>: From<&'a mut [T]>,
{
    fn slices(&mut self) -> Vec<ValuesMut<'_>> {
        self.iter_mut().map(|slice| slice.as_mut_slice().into()).collect()
    }
}

/// Takes one step of your own loop: `compute` returns this rank's loss and gradients, `aggregator` averages the
/// gradients over the ranks, and `apply` updates the parameters. Returns this rank's loss.
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
///             || Ok((error * error, vec![vec![2.0 * error]])),
///             |gradients| Ok(weight -= 0.1 * gradients[0][0]),
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
pub fn train_step<G: GradientSlices>(
    compute: impl FnOnce() -> Result<(f32, G), BoxError>,
    apply: impl FnOnce(G) -> Result<(), BoxError>,
    aggregator: &mut (impl GradientAggregator + ?Sized),
) -> Result<f32> {
    let step = || {
        let (loss, mut gradients) = compute().map_err(Error::compute)?;
        aggregator.aggregate(&mut gradients.slices())?;
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
    Mean,
    /// Reduces to the server and broadcasts the result.
    MeanByServer(usize),
    Broadcast(usize),
}

impl Lists {
    /// Applies the operation to all slices, those of one type together.
    fn apply(&mut self, collective: SliceCollective, values: &mut [ValuesMut<'_>]) -> Result<()> {
        self.agree(values)?;
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
            Self::Mean => reduce(comm, slices, ReduceOp::Mean),
            Self::MeanByServer(server) => packed(slices, ReduceOp::Mean.partial_dtype(T::DTYPE), |packed| {
                comm.reduce(packed, ReduceOp::Mean, server)?;
                comm.broadcast(packed, server)
            }),
            Self::Broadcast(root) => packed(slices, T::DTYPE, |packed| comm.broadcast(packed, root)),
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

//! The losses of an evaluation.

use dist_collectives::{Communicator, ReduceOp};

use crate::loss::{WeightedLoss, to_be_summed};
use crate::tree::sum_of;
use crate::{Error, Result, ValuesMut};

/// The losses of an evaluation. Each rank computes some of them.
#[derive(Debug)]
pub(crate) struct EvaluationLosses {
    /// The losses of other ranks are −0 here: the neutral element of addition, also for −0.
    losses: Vec<f32>,
    count: u64,
}

impl EvaluationLosses {
    pub(crate) fn new(micro_batches: usize) -> Self {
        Self { losses: vec![-0.0; micro_batches], count: 0 }
    }

    /// Returns the number of micro-batches.
    pub(crate) const fn len(&self) -> usize {
        self.losses.len()
    }

    /// Adds the loss of a micro-batch that this rank has computed.
    pub(crate) fn add(&mut self, index: usize, (loss, count): WeightedLoss) {
        self.losses[index] = loss;
        self.count = self.count.saturating_add(count);
    }

    /// Sums the losses in the canonical order and their weights over the ranks of these groups, which have computed all
    /// micro-batches. All of them call this.
    pub(crate) fn sum(mut self, groups: &mut [&mut Communicator]) -> Result<(f32, i64)> {
        let mut counts = [to_be_summed(self.count)];
        for group in groups {
            group.all_reduce(&mut self.losses, ReduceOp::Sum).map_err(Error::communication)?;
            group.all_reduce(&mut counts, ReduceOp::Sum).map_err(Error::communication)?;
        }
        Ok((sum_of(self.losses), counts[0]))
    }

    /// Returns the mean over the micro-batches of all ranks. All ranks call this.
    pub(crate) fn mean(self, comm: &mut Communicator) -> Result<f32> {
        let micro_batches = self.losses.len();
        let (sum, count) = self.sum(&mut [comm])?;
        mean(sum, count, micro_batches)
    }
}

/// Returns the mean of a sum over `micro_batches` micro-batches of total weight `count`.
pub(crate) fn mean(sum: f32, count: i64, micro_batches: usize) -> Result<f32> {
    let count = usize::try_from(count).unwrap_or(0);
    if count == 0 {
        return Err(Error::ZeroWeight { micro_batches });
    }
    let mut loss = [sum];
    ValuesMut::F32(&mut loss).divide(count);
    Ok(loss[0])
}

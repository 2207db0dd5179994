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

    /// Adds the loss of a micro-batch that this rank has computed.
    pub(crate) fn add(&mut self, index: usize, (loss, count): WeightedLoss) {
        self.losses[index] = loss;
        self.count = self.count.saturating_add(count);
    }

    /// Returns the mean over the micro-batches of all ranks, summed in the canonical order. All ranks call this.
    pub(crate) fn mean(self, comm: &mut Communicator) -> Result<f32> {
        let Self { mut losses, count } = self;
        let micro_batches = losses.len();
        let mut counts = [to_be_summed(count)];
        comm.all_reduce(&mut losses, ReduceOp::Sum).map_err(Error::communication)?;
        comm.all_reduce(&mut counts, ReduceOp::Sum).map_err(Error::communication)?;
        let count = usize::try_from(counts[0]).unwrap_or(0);
        if count == 0 {
            return Err(Error::ZeroWeight { micro_batches });
        }
        let mut loss = [sum_of(losses)];
        ValuesMut::F32(&mut loss).divide(count);
        Ok(loss[0])
    }
}

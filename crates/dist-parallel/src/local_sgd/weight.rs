//! The weights of ranks at a synchronisation point.

use dist_collectives::{Communicator, ReduceOp};

use crate::flat::Flat;
use crate::loss::to_be_summed;
use crate::{Error, Result, agreement};

/// The weights of a rank's steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepWeights {
    /// Every step has the same weight, so all ranks must take the same number.
    Equal = 0,
    /// A step has the weight of its micro-batches, and each counts 1.
    MicroBatches = 1,
    /// Micro-batches or steps have weights of their own.
    Given = 2,
}

impl StepWeights {
    pub(super) const fn of_micro_batches(weighted: bool) -> Self {
        if weighted { Self::Given } else { Self::MicroBatches }
    }
}

/// The weight of a rank at a synchronisation point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RankWeight {
    /// The factor of this rank's values. `None` if all ranks have the same weight.
    factor: Option<f64>,
    /// The total weight of the steps of all ranks, if they have weights.
    pub(super) total: Option<usize>,
}

impl RankWeight {
    /// Agrees on the weights of ranks with these steps. All ranks call this.
    pub(super) fn agree(
        comm: &mut Communicator,
        steps: usize,
        count: u64,
        weights: StepWeights,
    ) -> Result<Self> {
        let own = to_be_summed(count).unsigned_abs();
        let all = agreement::gather(comm, [steps as u64, own, weights as u64])?;
        if all.iter().all(|[_, _, weights]| *weights == StepWeights::Equal as u64) {
            return match all.iter().position(|[steps, ..]| *steps != all[0][0]) {
                Some(rank) => {
                    Err(Error::InnerStepsDiffer { rank, there: all[rank][0], on_rank_0: all[0][0] })
                }
                None => Ok(Self { factor: None, total: None }),
            };
        }
        let mut kinds = all.iter().filter(|[steps, ..]| *steps > 0).map(|[_, _, weights]| *weights);
        let first = kinds.next();
        if first == Some(StepWeights::Equal as u64) || kinds.any(|kind| Some(kind) != first) {
            return Err(Error::PartlyWeighted);
        }
        let total: u64 = all.iter().map(|[_, count, _]| count).sum();
        if total == 0 {
            let steps: u64 = all.iter().map(|[steps, ..]| steps).sum();
            return Err(Error::ZeroWeight { micro_batches: usize::try_from(steps).unwrap_or(usize::MAX) });
        }
        let alike = all.iter().all(|[_, count, _]| *count == own);
        let factor = (!alike).then(|| own as f64 / total as f64);
        Ok(Self { factor, total: Some(usize::try_from(total).unwrap_or(usize::MAX)) })
    }

    /// Replaces the values of all ranks by their weighted mean. They are multiplied before they are added, which
    /// could overflow in a half type. Products and sums of `f16` are `f32`, rounded to `f16` once.
    pub(super) fn mean(self, values: &mut Flat, comm: &mut Communicator) -> Result<()> {
        let Some(factor) = self.factor else { return values.all_reduce(comm, ReduceOp::Mean) };
        let (len, dtype) = (values.len(), values.dtype());
        if dtype.sum_dtype() != dtype {
            let mut sums = values.part(dtype.sum_dtype(), 0, len);
            self.mean(&mut sums, comm)?;
            values.slice_mut(0, len).convert_from(sums.slice(0, len));
            return Ok(());
        }
        let mut own = values.slice_mut(0, len);
        if factor == 0.0 {
            // Also if they are infinite or NaN.
            own.fill_neutral();
        } else {
            own.scale(factor);
        }
        values.all_reduce(comm, ReduceOp::Sum)
    }
}

//! The weights of ranks at a synchronisation point.

use dist_collectives::{Communicator, ReduceOp};

use crate::flat::Flat;
use crate::loss::to_be_summed;
use crate::{Error, Result, agreement};

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
    pub(super) fn agree(comm: &mut Communicator, steps: usize, count: u64, weighted: bool) -> Result<Self> {
        let own = to_be_summed(count).unsigned_abs();
        let all = agreement::gather(comm, [steps as u64, own, weighted.into()])?;
        if all.iter().all(|[_, _, weighted]| *weighted == 0) {
            return match all.iter().position(|[steps, ..]| *steps != all[0][0]) {
                Some(rank) => {
                    Err(Error::InnerStepsDiffer { rank, there: all[rank][0], on_rank_0: all[0][0] })
                }
                None => Ok(Self { factor: None, total: None }),
            };
        }
        if all.iter().any(|[steps, _, weighted]| *steps > 0 && *weighted == 0) {
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

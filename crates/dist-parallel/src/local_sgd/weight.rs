//! What part each rank has in a meeting: all alike, or each by what its steps count.

use dist_collectives::{Communicator, ReduceOp};

use crate::flat::Flat;
use crate::loss::to_be_summed;
use crate::{Error, Result, agreement};

/// What part a rank has in a meeting.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RankWeight {
    /// What its values are multiplied by; `None` if all ranks count alike.
    factor: Option<f64>,
    /// What the steps of all ranks count, if they say so.
    pub(super) total: Option<usize>,
}

impl RankWeight {
    /// What ranks have a part in that have taken so many steps, which count so much. All of them call this.
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

    /// Makes the values of all ranks their mean. They are multiplied before they are added, which in a half type could
    /// overflow. Products and sums of `f16` are carried as `f32`, and rounded to `f16` once.
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
            // Whatever they are.
            own.fill_neutral();
        } else {
            own.scale(factor);
        }
        values.all_reduce(comm, ReduceOp::Sum)
    }
}

//! The kinds of pipeline schedules and their properties.

use std::fmt;

use super::{Costs, PipelineSchedule, generate};
use crate::{Error, Result};

/// A kind of pipeline schedule.
///
/// P is the number of ranks, M that of micro-batches and v that of stages per rank. F is the time of a forward, I of
/// the gradient of the input and W of the gradients of the parameters, for all stages of a rank; a backward takes I +
/// W. The bubble is the waiting time of all ranks over their computation time. The last column is the largest number
/// of activations of a stage that a rank holds at once. With v stages, each has 1/v of the size.
///
/// | | bubble | activations of rank r |
/// |---|---|---|
/// | `gpipe` | (P − 1) / M | M |
/// | `1f1b` | (P − 1) / M | min(M, P − r) |
/// | `interleaved` | (P − 1) / vM, for M a multiple of P | min(vM, 2(P − r − 1) + (v − 1)P + 1) |
/// | `zb1p` | (P − 1)(F + I − W) / M(F + I + W), for F = I = W and M ≥ 2P − 1 | min(M, P) |
/// | `zbv` | (P − 1)F / 2M(F + I + W), for F = I = W and M ≥ 2P: no rank waits after its first computation | min(2M, 2P) |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScheduleKind {
    /// All forwards, then all backwards. <https://arxiv.org/abs/1811.06965>
    Gpipe,
    /// 1F1B: each backward as early as possible, then alternately one forward and one backward.
    /// <https://arxiv.org/abs/1806.03377>
    OneForwardOneBackward,
    /// 1F1B with several stages on each rank, stage s on rank s modulo P. <https://arxiv.org/abs/2104.04473>
    Interleaved {
        /// The number of stages of a rank.
        stages_per_rank: usize,
    },
    /// 1F1B whose weight gradients are delayed until they fill a bubble: ZB-H1. <https://arxiv.org/abs/2401.10241>
    Zb1p,
    /// ZB-V: `zb1p` with two stages on each rank. Rank 0 has the first and the last.
    /// <https://arxiv.org/abs/2405.15362>
    Zbv,
}

impl ScheduleKind {
    /// Every kind, interleaved with two stages per rank.
    pub const ALL: [Self; 5] = [
        Self::Gpipe,
        Self::OneForwardOneBackward,
        Self::Interleaved { stages_per_rank: 2 },
        Self::Zb1p,
        Self::Zbv,
    ];

    /// Returns the name in programs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gpipe => "gpipe",
            Self::OneForwardOneBackward => "1f1b",
            Self::Interleaved { .. } => "interleaved",
            Self::Zb1p => "zb1p",
            Self::Zbv => "zbv",
        }
    }

    /// Returns the kind with this name: `interleaved` with two stages per rank, `interleaved-3` with three.
    pub fn parse(name: &str) -> Option<Self> {
        if let Some(stages) = name.strip_prefix("interleaved-") {
            let stages_per_rank = stages.parse().ok().filter(|stages| *stages > 0)?;
            return Some(Self::Interleaved { stages_per_rank });
        }
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Returns the number of stages of a rank.
    pub const fn stages_per_rank(self) -> usize {
        match self {
            Self::Interleaved { stages_per_rank } => stages_per_rank,
            Self::Zbv => 2,
            Self::Gpipe | Self::OneForwardOneBackward | Self::Zb1p => 1,
        }
    }

    /// Returns the schedule for this number of ranks and micro-batches, at least 1 each.
    ///
    /// # Errors
    /// There are no ranks, stages or micro-batches, or more than a schedule supports.
    pub fn schedule(self, ranks: usize, micro_batches: usize) -> Result<PipelineSchedule> {
        let stages = ranks.saturating_mul(self.stages_per_rank());
        if !can_be_made(stages, micro_batches) {
            return Err(Error::NoSchedule { ranks, stages, micro_batches });
        }
        Ok(match self {
            Self::Gpipe => generate::gpipe(ranks, micro_batches),
            Self::OneForwardOneBackward => generate::one_forward_one_backward(ranks, micro_batches),
            Self::Interleaved { stages_per_rank } => {
                generate::interleaved(ranks, micro_batches, stages_per_rank)
            }
            Self::Zb1p => generate::zb1p(ranks, micro_batches),
            Self::Zbv => generate::zbv(ranks, micro_batches),
        })
    }

    /// Returns the bubble by its formula, which needs equal stages and messages that take no time. `None` without a
    /// formula.
    pub fn bubble(self, ranks: usize, micro_batches: usize, costs: &Costs) -> Option<f64> {
        let uniform = costs.uniform_stage()?;
        let [forward, input, weight] =
            [uniform.forward, uniform.input_gradient, uniform.weight_gradient].map(|time| time.as_secs_f64());
        let fill = ranks.checked_sub(1)? as f64;
        let count = micro_batches as f64;
        let equal = uniform.forward == uniform.input_gradient && uniform.forward == uniform.weight_gradient;
        match self {
            Self::Gpipe | Self::OneForwardOneBackward => Some(fill / count),
            Self::Interleaved { stages_per_rank } => {
                micro_batches.is_multiple_of(ranks).then(|| fill / (count * stages_per_rank as f64))
            }
            Self::Zb1p => (equal && micro_batches >= 2 * ranks - 1)
                .then(|| fill * (forward + input - weight) / (count * (forward + input + weight))),
            Self::Zbv => (equal && micro_batches >= 2 * ranks).then(|| fill / (6.0 * count)),
        }
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::Interleaved { stages_per_rank } if *stages_per_rank != 2 => write!(f, "-{stages_per_rank}"),
            _ => Ok(()),
        }
    }
}

/// Returns `true` for sizes that are not 0 and that can be scheduled in acceptable time. Some schedules and all
/// predictions take time that grows with the square of the stages.
pub(super) fn can_be_made(stages: usize, micro_batches: usize) -> bool {
    let steps = stages.checked_mul(micro_batches.max(stages));
    micro_batches > 0 && steps.is_some_and(|steps| (1..=STEPS_MAX).contains(&steps))
}

/// The largest number of steps to make a schedule.
const STEPS_MAX: usize = 1 << 24;

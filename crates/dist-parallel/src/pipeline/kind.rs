//! The schedules that can be made, and what is known of them beforehand.

use std::fmt;

use super::{Costs, PipelineSchedule, generate};
use crate::{Error, Result};

/// A way to order the work of a pipeline.
///
/// P ranks, M micro-batches, v stages per rank. F is the time of a forward, I of the gradient of the input, W of the
/// gradients of the parameters, all of a whole rank; a backward takes I + W. The bubble is the time in which ranks
/// wait over the time in which they compute; kept are the activations of a stage that a rank keeps at once, of 1/v of
/// the size with v stages.
///
/// | | bubble | kept by rank r |
/// |---|---|---|
/// | `gpipe` | (P − 1) / M | M |
/// | `1f1b` | (P − 1) / M | min(M, P − r) |
/// | `interleaved` | (P − 1) / vM, for M a multiple of P | min(vM, 2(P − r − 1) + (v − 1)P + 1) |
/// | `zb1p` | (P − 1)(F + I − W) / M(F + I + W), for F = I = W and M ≥ 2P − 1 | min(M, P) |
/// | `zbv` | (P − 1)F / 2M(F + I + W), for F = I = W and M ≥ 2P: nobody waits once it has begun | min(2M, 2P) |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScheduleKind {
    /// All forwards, then all backwards. <https://arxiv.org/abs/1811.06965>
    Gpipe,
    /// Each backward as early as can be; from then on, one forward and one backward in turns.
    /// <https://arxiv.org/abs/1806.03377>
    OneForwardOneBackward,
    /// The same with several stages on each rank, stage s on rank s modulo P. <https://arxiv.org/abs/2104.04473>
    Interleaved {
        /// How many stages a rank has.
        stages_per_rank: usize,
    },
    /// One forward, one backward, where the gradients of parameters wait until there is nothing better to do.
    /// <https://arxiv.org/abs/2401.10241>, where it is called ZB-H1
    Zb1p,
    /// The same with two stages on each rank: rank 0 has the first and the last. <https://arxiv.org/abs/2405.15362>
    Zbv,
}

impl ScheduleKind {
    /// Every way, with two stages per rank where several are possible.
    pub const ALL: [Self; 5] = [
        Self::Gpipe,
        Self::OneForwardOneBackward,
        Self::Interleaved { stages_per_rank: 2 },
        Self::Zb1p,
        Self::Zbv,
    ];

    /// The name as programs write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gpipe => "gpipe",
            Self::OneForwardOneBackward => "1f1b",
            Self::Interleaved { .. } => "interleaved",
            Self::Zb1p => "zb1p",
            Self::Zbv => "zbv",
        }
    }

    /// The way with this name, with two stages per rank where several are possible.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// How many stages a rank has.
    pub const fn stages_per_rank(self) -> usize {
        match self {
            Self::Interleaved { stages_per_rank } => stages_per_rank,
            Self::Zbv => 2,
            Self::Gpipe | Self::OneForwardOneBackward | Self::Zb1p => 1,
        }
    }

    /// The schedule for this many ranks and micro-batches, which are any numbers but 0.
    ///
    /// # Errors
    /// If there are no ranks, no stages or no micro-batches, or more than a schedule is made for.
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

    /// The bubble by its formula, where messages take no time and all stages the same; `None` where there is no
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
        f.write_str(self.name())
    }
}

/// Whether there is something to do, and no more than anyone waits for. Some schedules, and what is predicted of all, take
/// time that grows with the square of the stages.
pub(super) fn can_be_made(stages: usize, micro_batches: usize) -> bool {
    let steps = stages.checked_mul(micro_batches.max(stages));
    micro_batches > 0 && steps.is_some_and(|steps| (1..=STEPS_MAX).contains(&steps))
}

/// As many steps of making a schedule as anyone waits for.
const STEPS_MAX: usize = 1 << 24;

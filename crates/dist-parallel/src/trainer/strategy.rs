//! The strategies of training and their text forms.

use std::fmt;
use std::str::FromStr;

use crate::local_sgd::{LocalSgdOptions, OuterStep};
use crate::pipeline::ScheduleKind;
use crate::{Error, Result};

/// A strategy of training, with a text form.
///
/// | text | each rank has |
/// |---|---|
/// | `single` | everything: there is one rank |
/// | `ddp` | the whole model and a share of the micro-batches |
/// | `zero1` | a shard of the optimizer's state, and all else |
/// | `zero2` | a shard of the gradients and of the optimizer's state, and all parameters |
/// | `fsdp` or `zero3` | a shard of parameters, gradients and optimizer state |
/// | `hybrid:N` | the same within groups of N neighbouring ranks; each group has a copy of the model |
/// | `pipeline:KIND` | some stages of the model; KIND is a [`ScheduleKind`] |
/// | `pipeline:KIND:N` | the same in pipelines of N neighbouring ranks; each pipeline has a copy of the model |
/// | `pipeline:KIND:N:sharded` | the same, and the ranks with the same stage shard its parameters |
/// | `local_sgd:N` | the whole model; the ranks average their parameters after N steps |
/// | `diloco:N` | the same with an outer step of Nesterov momentum, also as `diloco:N:LEARNING_RATE:MOMENTUM` |
///
/// ```
/// use dist_parallel::pipeline::ScheduleKind;
/// use dist_parallel::trainer::Strategy;
///
/// let strategy: Strategy = "hybrid:4".parse()?;
/// assert_eq!(strategy, Strategy::Hybrid { shard_degree: 4 });
/// assert_eq!(Strategy::pipeline(ScheduleKind::Zb1p).to_string(), "pipeline:zb1p");
/// # Ok::<_, dist_parallel::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Strategy {
    /// One process without others.
    Single,
    /// Every rank has the whole model: [`Ddp`](crate::Ddp).
    Ddp,
    /// The optimizer's state is sharded: [`ShardOptimizer`](crate::fsdp::ShardingStrategy::ShardOptimizer).
    Zero1,
    /// Gradients and optimizer state are sharded: [`ShardGradOp`](crate::fsdp::ShardingStrategy::ShardGradOp).
    Zero2,
    /// Parameters, gradients and optimizer state are sharded: [`FullShard`](crate::fsdp::ShardingStrategy::FullShard).
    Fsdp,
    /// The same within groups of ranks: [`HybridShard`](crate::fsdp::ShardingStrategy::HybridShard).
    Hybrid {
        /// The number of ranks that share one copy of the model. It must divide the number of ranks.
        shard_degree: usize,
    },
    /// The stages of the model are on different ranks: [`Pipeline`](crate::pipeline::Pipeline).
    Pipeline {
        /// The kind of the schedule.
        kind: ScheduleKind,
        /// The number of ranks of one pipeline, which must divide the number of ranks. `None` for all ranks.
        ranks: Option<usize>,
        /// The parameters of a stage on the ranks that have the same stage.
        copies: StageCopies,
    },
    /// Ranks train alone and synchronise now and then: [`LocalSgd`](crate::local_sgd::LocalSgd).
    LocalSgd(LocalSgdOptions),
}

/// The parameters of a stage on the ranks of several pipelines that have the same stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum StageCopies {
    /// Each rank has all of them.
    #[default]
    Replicated,
    /// Each rank has a shard of them.
    Sharded,
}

impl Strategy {
    /// Returns one pipeline of all ranks.
    pub const fn pipeline(kind: ScheduleKind) -> Self {
        Self::Pipeline { kind, ranks: None, copies: StageCopies::Replicated }
    }
}

impl FromStr for Strategy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parts: Vec<&str> = text.split(':').collect();
        parse(&parts).ok_or_else(|| Error::UnknownStrategy { text: text.to_owned() })
    }
}

fn parse(parts: &[&str]) -> Option<Strategy> {
    Some(match *parts {
        ["single"] => Strategy::Single,
        ["ddp"] => Strategy::Ddp,
        ["zero1"] => Strategy::Zero1,
        ["zero2"] => Strategy::Zero2,
        ["fsdp" | "zero3"] => Strategy::Fsdp,
        ["hybrid", degree] => Strategy::Hybrid { shard_degree: degree.parse().ok()? },
        ["pipeline", kind, ref rest @ ..] => {
            let (ranks, copies) = match *rest {
                [] => (None, StageCopies::Replicated),
                ["sharded"] => (None, StageCopies::Sharded),
                [ranks] => (Some(ranks.parse().ok()?), StageCopies::Replicated),
                [ranks, "sharded"] => (Some(ranks.parse().ok()?), StageCopies::Sharded),
                _ => return None,
            };
            Strategy::Pipeline { kind: ScheduleKind::parse(kind)?, ranks, copies }
        }
        ["local_sgd", steps] => Strategy::LocalSgd(LocalSgdOptions::average(steps.parse().ok()?)),
        ["diloco", steps] => Strategy::LocalSgd(LocalSgdOptions::diloco(steps.parse().ok()?)),
        ["diloco", steps, learning_rate, momentum] => {
            let (learning_rate, momentum) = (learning_rate.parse().ok()?, momentum.parse().ok()?);
            let outer = OuterStep::Nesterov { learning_rate, momentum };
            Strategy::LocalSgd(LocalSgdOptions { inner_steps: steps.parse().ok()?, outer })
        }
        _ => return None,
    })
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Single => f.write_str("single"),
            Self::Ddp => f.write_str("ddp"),
            Self::Zero1 => f.write_str("zero1"),
            Self::Zero2 => f.write_str("zero2"),
            Self::Fsdp => f.write_str("fsdp"),
            Self::Hybrid { shard_degree } => write!(f, "hybrid:{shard_degree}"),
            Self::Pipeline { kind, ranks, copies } => {
                write!(f, "pipeline:{kind}")?;
                ranks.map_or(Ok(()), |ranks| write!(f, ":{ranks}"))?;
                f.write_str(if *copies == StageCopies::Sharded { ":sharded" } else { "" })
            }
            Self::LocalSgd(LocalSgdOptions { inner_steps, outer: OuterStep::Average }) => {
                write!(f, "local_sgd:{inner_steps}")
            }
            Self::LocalSgd(options) if *options == LocalSgdOptions::diloco(options.inner_steps) => {
                write!(f, "diloco:{}", options.inner_steps)
            }
            Self::LocalSgd(LocalSgdOptions {
                inner_steps,
                outer: OuterStep::Nesterov { learning_rate, momentum },
            }) => write!(f, "diloco:{inner_steps}:{learning_rate}:{momentum}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    fn a_strategy_is_printed_as_it_is_parsed(
        #[values(
            "single",
            "ddp",
            "zero1",
            "zero2",
            "fsdp",
            "hybrid:2",
            "pipeline:gpipe",
            "pipeline:1f1b:4",
            "pipeline:interleaved",
            "pipeline:interleaved-3:2",
            "pipeline:zb1p:sharded",
            "pipeline:zbv:2:sharded",
            "local_sgd:16",
            "diloco:500",
            "diloco:500:0.5:0.8"
        )]
        text: &str,
    ) {
        assert_eq!(text.parse::<Strategy>().unwrap().to_string(), text);
    }

    #[rstest]
    fn other_texts_are_refused(
        #[values(
            "",
            "dpp",
            "ddp:2",
            "hybrid",
            "hybrid:two",
            "pipeline",
            "pipeline:2",
            "pipeline:interleaved-0",
            "pipeline:1f1b:sharded:2",
            "local_sgd",
            "diloco:1:2"
        )]
        text: &str,
    ) {
        let refused = text.parse::<Strategy>().unwrap_err();
        assert!(matches!(&refused, Error::UnknownStrategy { text: named } if named == text), "{refused}");
    }
}

//! How a model is sharded.

use crate::agreement::{Setting, setting};
use crate::{Error, FloatType, Result};

/// Which of a model's memory each rank has only a part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ShardingStrategy {
    /// Parameters, gradients and the optimizer's state: ZeRO 3. A unit's parameters are whole only while they are
    /// used.
    #[default]
    FullShard,
    /// ShardedGradients and the optimizer's state: ZeRO 2.
    ShardGradOp,
    /// The optimizer's state: ZeRO 1. ShardedGradients are summed on each rank over its micro-batches and leave once a step.
    ShardOptimizer,
    /// Nothing; this is what [`Ddp`](crate::Ddp) does.
    NoShard,
    /// As [`FullShard`](Self::FullShard) in groups of so many neighbouring ranks, each of which has a copy of the
    /// model.
    #[doc(alias = "HSDP")]
    HybridShard {
        /// How many ranks share one copy of the model; a divisor of the number of ranks.
        shard_degree: usize,
    },
}

/// What happens to a unit's parameters between forward and backward. Only strategies that shard parameters ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Reshard {
    /// They are freed, and gathered again: the least memory.
    #[default]
    All,
    /// They are freed but for the last unit's, whose backward comes at once.
    AllButLast,
    /// They stay: the least communication.
    Nothing,
    /// Neighbouring ranks, so many of them, keep a part each and gather it among themselves. Where ranks read what others keep in
    /// their memory, nobody keeps more for that.
    ToGroup(usize),
}

/// Which blocks form units, which are gathered and freed together.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub enum Units {
    /// Each block is a unit.
    #[default]
    EachBlock,
    /// All blocks are one unit.
    OneForAll,
    /// So many blocks each, in order; together all blocks.
    Blocks(Vec<usize>),
}

/// The types in which parameters are kept and gradients are reduced. A model's own types are those in which its
/// parameters are gathered and used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Precision {
    /// Of the parameters that the optimizer changes; the model's own if nothing is said.
    pub master: Option<FloatType>,
    /// Of gradients when they are reduced, summed and given to the optimizer; the model's own if nothing is said. Sums of
    /// `f16` are carried as `f32`, and the mean is rounded to `f16` once.
    pub reduce: Option<FloatType>,
}

/// Settings of [`Fsdp`](crate::Fsdp).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub struct FsdpOptions {
    /// What is sharded.
    pub strategy: ShardingStrategy,
    /// What is gathered together.
    pub units: Units,
    /// How many units are gathered ahead while one computes: each hides communication, and occupies its memory.
    /// None by default. Where ranks read units where they lie, it is how many units one may be ahead of another, and occupies
    /// nothing.
    pub prefetch: usize,
    /// What is freed after forward.
    pub reshard: Reshard,
    /// The types of what is kept and reduced.
    pub precision: Precision,
}

impl FsdpOptions {
    /// The options of this strategy with nothing else said.
    #[must_use]
    pub fn new(strategy: ShardingStrategy) -> Self {
        Self { strategy, ..Self::default() }
    }

    /// These options with other units.
    #[must_use]
    pub fn with_units(self, units: Units) -> Self {
        Self { units, ..self }
    }

    /// These options with so many units gathered ahead.
    #[must_use]
    pub fn with_prefetch(self, prefetch: usize) -> Self {
        Self { prefetch, ..self }
    }

    /// These options with another use of the time between forward and backward.
    #[must_use]
    pub fn with_reshard(self, reshard: Reshard) -> Self {
        Self { reshard, ..self }
    }

    /// All of them, as they are compared among ranks.
    pub(crate) fn settings(&self) -> Vec<Setting> {
        let Self { strategy, units, prefetch, reshard, precision } = self;
        vec![
            setting("the strategy", strategy),
            setting("units", units),
            setting("prefetch", prefetch),
            setting("reshard", reshard),
            setting("the precision", precision),
        ]
    }

    /// These options with other types.
    #[must_use]
    pub fn with_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }
}

/// How a world is divided: ranks that share one copy of the model, and copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Degrees {
    /// Ranks that share a copy; neighbours in the world.
    pub(crate) shards: usize,
    /// Copies.
    pub(crate) replicas: usize,
    /// Whether parameters are freed between their uses.
    pub(crate) frees: bool,
    /// Whether gradients are reduced among the ranks of a copy after each round of micro-batches; else once a step.
    pub(crate) each_round: bool,
}

impl ShardingStrategy {
    /// Whether each rank of a copy has only a part of the parameters between their uses.
    pub(crate) const fn shards_parameters(self) -> bool {
        matches!(self, Self::FullShard | Self::HybridShard { .. })
    }

    pub(crate) fn degrees(self, world_size: usize) -> Result<Degrees> {
        let shards = match self {
            Self::FullShard | Self::ShardGradOp | Self::ShardOptimizer => world_size,
            Self::NoShard => 1,
            Self::HybridShard { shard_degree } => shard_degree,
        };
        if shards == 0 || !world_size.is_multiple_of(shards) {
            return Err(Error::ShardDegree { shard_degree: shards, ranks: world_size });
        }
        Ok(Degrees {
            shards,
            replicas: world_size / shards,
            frees: shards > 1 && self.shards_parameters(),
            each_round: self != Self::ShardOptimizer,
        })
    }
}

impl Reshard {
    /// How many ranks keep a part each between forward and backward, if any do.
    pub(crate) fn group(self, degrees: Degrees) -> Result<Option<usize>> {
        match self {
            Self::ToGroup(ranks) if ranks == 0 || !degrees.shards.is_multiple_of(ranks) => {
                Err(Error::ShardDegree { shard_degree: ranks, ranks: degrees.shards })
            }
            Self::ToGroup(ranks) => Ok(Some(ranks).filter(|_| degrees.frees)),
            Self::All | Self::AllButLast | Self::Nothing => Ok(None),
        }
    }
}

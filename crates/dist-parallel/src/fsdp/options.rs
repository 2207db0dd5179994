//! Options of sharded training.

use crate::agreement::{Setting, setting};
use crate::gradients::Scatter;
use crate::{Error, FloatType, Result};

/// The state of which each rank keeps only a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ShardingStrategy {
    /// Parameters, gradients and optimizer state: ZeRO 3. A unit's parameters are gathered only while they are used.
    #[default]
    FullShard,
    /// Gradients and optimizer state: ZeRO 2.
    ShardGradOp,
    /// Optimizer state: ZeRO 1. Each rank sums gradients over its micro-batches, and they are reduced once a step.
    ShardOptimizer,
    /// Nothing, as in [`Ddp`](crate::Ddp).
    NoShard,
    /// [`FullShard`](Self::FullShard) inside groups of `shard_degree` neighbouring ranks. Each group has a replica of
    /// the model.
    #[doc(alias = "HSDP")]
    HybridShard {
        /// The number of ranks that share one replica of the model. It must divide the number of ranks.
        shard_degree: usize,
    },
}

/// The treatment of a unit's parameters between forward and backward, if the strategy shards parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Reshard {
    /// They are freed and gathered again: the least memory.
    #[default]
    All,
    /// They are freed, except those of the last unit, whose backward follows at once.
    AllButLast,
    /// They stay gathered: the least communication.
    Nothing,
    /// Groups of this many neighbouring ranks keep a shard each and gather it inside the group. If ranks read each
    /// other's shards in place, this needs no extra memory.
    ToGroup(usize),
}

/// The division of blocks into units, which are gathered and freed together.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub enum Units {
    /// Each block is a unit.
    #[default]
    EachBlock,
    /// All blocks are one unit.
    OneForAll,
    /// The number of blocks of each unit, in order. Their sum is the number of all blocks.
    Blocks(Vec<usize>),
}

/// The types of master parameters and of reduced gradients. Parameters are gathered and used in the model's own
/// types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Precision {
    /// The type of the parameters that the optimizer updates. `None` for the model's own type.
    pub master: Option<FloatType>,
    /// The type in which gradients are reduced, summed and passed to the optimizer. `None` for the model's own type.
    /// Sums of `f16` are `f32`, and the mean is rounded to `f16` once.
    pub reduce: Option<FloatType>,
}

/// Settings of [`Fsdp`](crate::fsdp::Fsdp).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub struct FsdpOptions {
    /// The sharding strategy.
    pub strategy: ShardingStrategy,
    /// The units.
    pub units: Units,
    /// The number of units that are gathered ahead of the current one. 0 by default. Each hides communication and
    /// needs memory. If ranks read units in place, it is the number of units that one rank may be ahead of another,
    /// and needs no memory.
    pub prefetch: usize,
    /// The resharding after the forward.
    pub reshard: Reshard,
    /// The types of master parameters and reduced gradients.
    pub precision: Precision,
}

impl FsdpOptions {
    /// Returns the default options of this strategy.
    #[must_use]
    pub fn new(strategy: ShardingStrategy) -> Self {
        Self { strategy, ..Self::default() }
    }

    /// Returns these options with other units.
    #[must_use]
    pub fn with_units(self, units: Units) -> Self {
        Self { units, ..self }
    }

    /// Returns these options with `prefetch` units gathered ahead.
    #[must_use]
    pub fn with_prefetch(self, prefetch: usize) -> Self {
        Self { prefetch, ..self }
    }

    /// Returns these options with other resharding.
    #[must_use]
    pub fn with_reshard(self, reshard: Reshard) -> Self {
        Self { reshard, ..self }
    }

    /// Returns all options, for the comparison between ranks.
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

    /// Returns these options with other types.
    #[must_use]
    pub fn with_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }
}

/// The division of a world into replicas of the model and shards of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Degrees {
    /// The number of ranks that share a replica. They are neighbours in the world.
    pub(crate) shards: usize,
    /// The number of replicas.
    pub(crate) replicas: usize,
    /// `true` if parameters are freed between their uses.
    pub(crate) frees: bool,
    /// `true` if gradients are reduced inside a replica after each round of micro-batches, `false` if once a step.
    pub(crate) each_round: bool,
}

impl ShardingStrategy {
    /// Returns `true` if each rank of a replica keeps only a shard of the parameters between their uses.
    pub(crate) const fn shards_parameters(self) -> bool {
        matches!(self, Self::FullShard | Self::HybridShard { .. })
    }

    /// Returns `true` if there can be several replicas of the model, over which a communication hook sums gradients.
    pub(crate) const fn has_replicas(self) -> bool {
        matches!(self, Self::NoShard | Self::HybridShard { .. })
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

impl Degrees {
    /// Returns the reduce-scatter of gradients inside a replica.
    pub(crate) const fn scatter(self) -> Scatter {
        match (self.shards, self.each_round) {
            (1, _) => Scatter::Never,
            (_, true) => Scatter::EachRound,
            (_, false) => Scatter::EachStep,
        }
    }
}

impl Reshard {
    /// Returns the size of a reshard group, if there are any.
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

//! The collective operations of ranks that share memory.

use super::{PartSet, PeerSet};
use crate::{CollectiveKind, Source};

/// A collective operation, as a direct schedule executes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DirectCollective {
    /// Every rank gets the sum of all buffers.
    AllReduce,
    /// The root gets the sum of all buffers.
    Reduce {
        /// The root.
        root: usize,
    },
    /// Rank `r` gets the sum of all ranks' parts `r` as part `r` of its buffer.
    ReduceScatter {
        /// The memory that holds the parts.
        of: Source,
    },
    /// Every rank gets every part; rank `r` contributes part `r`.
    AllGather {
        /// The memory that holds the contribution.
        of: Source,
    },
    /// Every rank gets the root's buffer.
    Broadcast {
        /// The root.
        root: usize,
    },
    /// Part `s` of rank `d` becomes part `d` of the input of rank `s`.
    AllToAll,
    /// No rank leaves before all ranks have entered.
    Barrier,
}

/// The partition of the memory that an algorithm works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Division {
    /// The memory is one part.
    Whole,
    /// There is one part for each rank.
    PerRank,
}

/// A rank's use of a block that other ranks have published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockUse {
    Nothing,
    /// The rank only waits for the other ranks.
    Wait,
    /// The rank reduces this part.
    Reduce(usize),
    /// The rank copies from these ranks.
    Take(PeerSet),
}

impl DirectCollective {
    /// Returns one operation of each kind, with this root.
    pub fn all(root: usize) -> [Self; 9] {
        [
            Self::AllReduce,
            Self::Reduce { root },
            Self::ReduceScatter { of: Source::Buffer },
            Self::ReduceScatter { of: Source::Input },
            Self::AllGather { of: Source::Buffer },
            Self::AllGather { of: Source::Input },
            Self::Broadcast { root },
            Self::AllToAll,
            Self::Barrier,
        ]
    }

    /// Returns the kind of the operation.
    #[inline(always)]
    pub const fn kind(self) -> CollectiveKind {
        match self {
            Self::AllReduce => CollectiveKind::AllReduce,
            Self::Reduce { .. } => CollectiveKind::Reduce,
            Self::ReduceScatter { .. } => CollectiveKind::ReduceScatter,
            Self::AllGather { .. } => CollectiveKind::AllGather,
            Self::Broadcast { .. } => CollectiveKind::Broadcast,
            Self::AllToAll => CollectiveKind::AllToAll,
            Self::Barrier => CollectiveKind::Barrier,
        }
    }

    /// Returns the name of the operation.
    pub const fn name(self) -> &'static str {
        self.kind().name()
    }

    /// Returns the root, if the operation has one.
    pub const fn root(self) -> Option<usize> {
        match self {
            Self::Reduce { root } | Self::Broadcast { root } => Some(root),
            _ => None,
        }
    }

    /// Returns the operation with this root, if it has one.
    #[must_use]
    pub(super) const fn rooted_at(self, root: usize) -> Self {
        match self {
            Self::Reduce { .. } => Self::Reduce { root },
            Self::Broadcast { .. } => Self::Broadcast { root },
            _ => self,
        }
    }

    /// Returns the memory that holds the data for other ranks.
    #[inline]
    pub const fn source(self) -> Source {
        match self {
            Self::ReduceScatter { of } | Self::AllGather { of } => of,
            Self::AllToAll => Source::Input,
            _ => Source::Buffer,
        }
    }

    /// Returns the parts that a rank publishes of each block.
    pub(super) fn publishes(self, division: Division, rank: usize) -> Option<PartSet> {
        match self {
            Self::AllReduce if division == Division::Whole => Some(PartSet::One(0)),
            Self::Reduce { root } if division == Division::Whole => (rank != root).then_some(PartSet::One(0)),
            Self::Broadcast { root } => (rank == root).then_some(PartSet::One(0)),
            Self::AllGather { .. } => Some(PartSet::One(rank)),
            Self::AllReduce | Self::Reduce { .. } | Self::ReduceScatter { .. } | Self::AllToAll => {
                Some(PartSet::Others(rank))
            }
            Self::Barrier => None,
        }
    }

    /// Returns a rank's use of the data of other ranks, in operations of one phase.
    pub(super) fn uses(self, rank: usize) -> BlockUse {
        match self {
            Self::AllReduce => BlockUse::Reduce(0),
            Self::Reduce { root } if rank == root => BlockUse::Reduce(0),
            Self::ReduceScatter { .. } => BlockUse::Reduce(rank),
            Self::AllGather { .. } | Self::AllToAll => BlockUse::Take(PeerSet::Others),
            Self::Broadcast { root } if rank != root => BlockUse::Take(PeerSet::One(root)),
            Self::Barrier => BlockUse::Wait,
            Self::Reduce { .. } | Self::Broadcast { .. } => BlockUse::Nothing,
        }
    }

    /// Returns the part of its input that a rank copies to its own buffer.
    pub(super) fn keeps(self, rank: usize) -> Option<usize> {
        (self.source() == Source::Input).then_some(rank)
    }

    /// Returns the ranks that use the data of a rank.
    pub(super) fn users(self, rank: usize) -> Option<PeerSet> {
        match self {
            Self::AllReduce | Self::ReduceScatter { .. } | Self::AllGather { .. } | Self::AllToAll => {
                Some(PeerSet::Others)
            }
            Self::Reduce { root } => (rank != root).then_some(PeerSet::One(root)),
            Self::Broadcast { root } => (rank == root).then_some(PeerSet::Others),
            Self::Barrier => None,
        }
    }

    /// Returns the other ranks that get the sum that this rank computes of its part.
    pub(super) fn wants_sum(self, rank: usize) -> Option<PeerSet> {
        match self.root() {
            Some(root) => (rank != root).then_some(PeerSet::One(root)),
            None => Some(PeerSet::Others),
        }
    }

    /// Returns which part a rank copies from another one, and the part of its own buffer to which it is copied.
    pub(super) const fn taken(self, rank: usize, from: usize) -> (usize, usize) {
        match self {
            Self::Broadcast { .. } => (0, 0),
            Self::AllToAll => (rank, from),
            _ => (from, from),
        }
    }
}

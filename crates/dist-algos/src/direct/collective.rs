//! What ranks that share memory do together: who has something for whom.

use super::{DirectAlgorithm, PartSet, PeerSet};
use crate::Source;

/// An operation, as a direct schedule does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DirectCollective {
    /// Every rank gets the sum of all buffers.
    AllReduce,
    /// The root gets the sum of all buffers.
    Reduce {
        /// The rank that gets it.
        root: usize,
    },
    /// Rank `r` gets the sum of all ranks' parts `r` as part `r` of its buffer.
    ReduceScatter {
        /// Where the parts lie.
        of: Source,
    },
    /// Every rank gets every part, where rank `r` has part `r`.
    AllGather {
        /// Where it has it.
        of: Source,
    },
    /// Every rank gets the root's buffer.
    Broadcast {
        /// The rank that has it.
        root: usize,
    },
    /// Part `s` of rank `d` becomes what part `d` of the input of rank `s` is.
    AllToAll,
    /// Nobody leaves before all have come.
    Barrier,
}

/// What a rank does with what others have published of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockUse {
    Nothing,
    /// It waits for them, no more.
    Wait,
    /// It reduces this part.
    Reduce(usize),
    /// It copies from these ranks.
    Take(PeerSet),
}

impl DirectCollective {
    /// One of each kind, with this root.
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

    /// The name of the operation.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::Reduce { .. } => "reduce",
            Self::ReduceScatter { .. } => "reduce_scatter",
            Self::AllGather { .. } => "all_gather",
            Self::Broadcast { .. } => "broadcast",
            Self::AllToAll => "all_to_all",
            Self::Barrier => "barrier",
        }
    }

    /// The rank that differs from the others.
    pub const fn root(self) -> Option<usize> {
        match self {
            Self::Reduce { root } | Self::Broadcast { root } => Some(root),
            _ => None,
        }
    }

    /// The same with this root, if it has one.
    #[must_use]
    pub(super) const fn rooted_at(self, root: usize) -> Self {
        match self {
            Self::Reduce { .. } => Self::Reduce { root },
            Self::Broadcast { .. } => Self::Broadcast { root },
            _ => self,
        }
    }

    /// The memory that others get something of.
    #[inline]
    pub const fn source(self) -> Source {
        match self {
            Self::ReduceScatter { of } | Self::AllGather { of } => of,
            Self::AllToAll => Source::Input,
            _ => Source::Buffer,
        }
    }

    /// Into how many parts memory is cut.
    #[inline]
    pub const fn parts(self, algorithm: DirectAlgorithm, world_size: usize) -> usize {
        match (self, algorithm) {
            (Self::Broadcast { .. } | Self::Barrier, _) => 1,
            (Self::AllReduce | Self::Reduce { .. }, DirectAlgorithm::OneShot) => 1,
            _ => world_size,
        }
    }

    /// Places in a slot. If there is one, every part goes there; else every part has its own.
    #[inline]
    pub const fn places(self, algorithm: DirectAlgorithm, world_size: usize) -> usize {
        match self {
            Self::AllGather { .. } => 1,
            _ => self.parts(algorithm, world_size),
        }
    }

    /// What a rank publishes of each block.
    pub(super) fn publishes(self, algorithm: DirectAlgorithm, rank: usize) -> Option<PartSet> {
        match self {
            Self::AllReduce if algorithm == DirectAlgorithm::OneShot => Some(PartSet::One(0)),
            Self::Reduce { root } if algorithm == DirectAlgorithm::OneShot => {
                (rank != root).then_some(PartSet::One(0))
            }
            Self::Broadcast { root } => (rank == root).then_some(PartSet::One(0)),
            Self::AllGather { .. } => Some(PartSet::One(rank)),
            Self::AllReduce | Self::Reduce { .. } | Self::ReduceScatter { .. } | Self::AllToAll => {
                Some(PartSet::Others(rank))
            }
            Self::Barrier => None,
        }
    }

    /// What a rank does with what the others have for it, all in one go.
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

    /// The part of its input that a rank has for itself.
    pub(super) fn keeps(self, rank: usize) -> Option<usize> {
        (self.source() == Source::Input).then_some(rank)
    }

    /// Who uses what a rank has.
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

    /// Who gets the sum that this rank computes of its part, beside itself.
    pub(super) fn wants_sum(self, rank: usize) -> Option<PeerSet> {
        match self.root() {
            Some(root) => (rank != root).then_some(PeerSet::One(root)),
            None => Some(PeerSet::Others),
        }
    }

    /// What a rank copies from another one: which of its parts, and what it becomes.
    pub(super) const fn taken(self, rank: usize, from: usize) -> (usize, usize) {
        match self {
            Self::Broadcast { .. } => (0, 0),
            Self::AllToAll => (rank, from),
            _ => (from, from),
        }
    }
}

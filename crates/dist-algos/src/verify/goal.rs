//! The goals of schedules.

use crate::cost::log2_ceil;
use crate::scan::Extent;
use crate::{Chunks, CollectiveKind, MessageAlgorithm, Source};

/// The result that the schedules of all ranks must achieve together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Goal {
    /// Every rank has the finished sum of every chunk.
    AllReduce,
    /// Rank `r` has the sum of chunk `r`.
    ReduceScatter,
    /// Every rank has every chunk; rank `r` had chunk `r` at the start.
    AllGather,
    /// Every rank has every chunk; the root had all chunks at the start.
    Broadcast {
        /// The root.
        root: usize,
    },
    /// The root has the sum of every chunk.
    Reduce {
        /// The root.
        root: usize,
    },
    /// The root has every chunk; rank `r` had chunk `r` at the start, in its input and in its buffer.
    Gather {
        /// The root.
        root: usize,
    },
    /// Every other rank `r` has chunk `r` of the root's input.
    Scatter {
        /// The root.
        root: usize,
    },
    /// Chunk `s` of rank `d` is chunk `d` of the input of rank `s`; chunk `r` of rank `r` is there at the start.
    /// Every message has the same length on both ends for any sizes of chunks.
    AllToAll,
    /// Chunk `j` of rank `r`, which was for rank `r + j`, is from rank `r − j`, modulo the world size.
    AllToAllRotated,
    /// Rank `r` has the sum of the ranks up to it.
    Scan(Extent),
    /// No rank ends before every rank has begun.
    Barrier,
}

/// The lower bounds for any schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LowerBound {
    /// The length of the longest chain of messages.
    pub rounds: usize,
    /// The data that the busiest rank sends or receives, in units of `buffer / world_size`.
    pub moved: usize,
}

/// The data of one rank for one chunk. If sums are compared between chunks, all data belongs to chunk 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Piece {
    pub(super) rank: usize,
    pub(super) chunk: usize,
}

/// The content that a chunk of a rank must have at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequiredContent {
    Anything,
    /// The data of one rank.
    Piece(Piece),
    /// The sum of this many ranks, from rank 0 on.
    Sum(usize),
    /// The sum of all ranks, after its owner has finished it.
    Finished,
}

impl Goal {
    /// Returns the goal of an algorithm in a world of this size, for this root. The root is ignored if the operation
    /// has none.
    pub fn of(algorithm: &MessageAlgorithm, world_size: usize, root: usize) -> Self {
        match (algorithm.collective, algorithm.sends_from(world_size)) {
            (CollectiveKind::AllToAll, Source::Buffer) => Self::AllToAllRotated,
            (collective, _) => Self::of_collective(collective, root),
        }
    }

    /// Returns the goal of an operation, for this root. An all_to_all sends from the input.
    pub const fn of_collective(collective: CollectiveKind, root: usize) -> Self {
        match collective {
            CollectiveKind::AllReduce => Self::AllReduce,
            CollectiveKind::ReduceScatter => Self::ReduceScatter,
            CollectiveKind::AllGather => Self::AllGather,
            CollectiveKind::Broadcast => Self::Broadcast { root },
            CollectiveKind::Reduce => Self::Reduce { root },
            CollectiveKind::Gather => Self::Gather { root },
            CollectiveKind::Scatter => Self::Scatter { root },
            CollectiveKind::AllToAll => Self::AllToAll,
            CollectiveKind::Scan => Self::Scan(Extent::Inclusive),
            CollectiveKind::ExclusiveScan => Self::Scan(Extent::Exclusive),
            CollectiveKind::Barrier => Self::Barrier,
        }
    }

    /// Returns the least number of rounds and of bytes for this goal. No schedule need reach both at once. The rounds
    /// assume that a rank sends one message at a time.
    pub const fn lower_bound(self, world_size: usize) -> LowerBound {
        let peers = world_size.saturating_sub(1);
        let moved = match self {
            Self::AllReduce => 2 * peers,
            Self::ReduceScatter | Self::AllGather | Self::AllToAll | Self::AllToAllRotated => peers,
            Self::Gather { .. } | Self::Scatter { .. } => peers,
            Self::Broadcast { .. } | Self::Reduce { .. } | Self::Scan(_) if peers > 0 => world_size,
            Self::Broadcast { .. } | Self::Reduce { .. } | Self::Scan(_) | Self::Barrier => 0,
        };
        LowerBound { rounds: log2_ceil(world_size), moved }
    }

    /// Returns `true` if data is reduced, so that the order matters.
    pub const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce { .. } | Self::Scan(_))
    }

    /// Returns `true` if ranks have an input besides the buffer.
    pub(super) const fn has_input(self) -> bool {
        matches!(self, Self::Gather { .. } | Self::Scatter { .. } | Self::AllToAll)
    }

    /// Returns the data in a chunk of a rank's buffer at the start.
    pub(super) fn begins(self, world_size: usize, rank: usize, chunk: usize) -> Option<Piece> {
        let own = Piece { rank, chunk };
        match self {
            _ if self.reduces() => Some(Piece { rank, chunk: 0 }),
            Self::AllGather | Self::Gather { .. } | Self::AllToAll => (rank == chunk).then_some(own),
            Self::Broadcast { root } => (rank == root).then_some(own),
            Self::AllToAllRotated => Some(Piece { rank, chunk: (rank + chunk) % world_size }),
            _ => None,
        }
    }

    /// Returns the data in a chunk of a rank's input.
    pub(super) fn input(self, rank: usize, chunk: usize) -> Option<Piece> {
        let own = Piece { rank, chunk };
        match self {
            Self::Gather { .. } => (rank == chunk).then_some(own),
            Self::Scatter { root } => (rank == root).then_some(own),
            Self::AllToAll => Some(own),
            _ => None,
        }
    }

    pub(super) fn ends(self, world_size: usize, rank: usize, chunk: usize) -> RequiredContent {
        let piece = |rank, chunk| RequiredContent::Piece(Piece { rank, chunk });
        match self {
            Self::AllReduce => RequiredContent::Finished,
            Self::ReduceScatter if rank == chunk => RequiredContent::Sum(world_size),
            Self::Reduce { root } if rank == root => RequiredContent::Sum(world_size),
            Self::Scan(Extent::Inclusive) => RequiredContent::Sum(rank + 1),
            Self::Scan(Extent::Exclusive) if rank > 0 => RequiredContent::Sum(rank),
            Self::AllGather => piece(chunk, chunk),
            Self::Broadcast { root } => piece(root, chunk),
            Self::Gather { root } if rank == root => piece(chunk, chunk),
            Self::Scatter { root } if rank == chunk && rank != root => piece(root, chunk),
            Self::AllToAll => piece(chunk, rank),
            Self::AllToAllRotated => piece((rank + world_size - chunk) % world_size, rank),
            _ => RequiredContent::Anything,
        }
    }

    /// Returns `true` if a message has the chunks that its receiver expects, with the same length. In an all_to_all,
    /// chunk `d` of the input of rank `s` is as long as chunk `s` of the buffer of rank `d`. Otherwise chunks with
    /// the same number have the same length.
    pub(super) fn agree(
        self,
        sender: usize,
        receiver: usize,
        sent: (Source, Chunks),
        expected: Chunks,
    ) -> bool {
        match (self, sent) {
            (Self::AllToAll, (Source::Input, sent)) => {
                sent == Chunks::one(receiver) && expected == Chunks::one(sender)
            }
            (_, (_, sent)) => sent == expected,
        }
    }
}

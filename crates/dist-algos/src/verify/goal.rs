//! What schedules are to achieve.

use crate::cost::log2_ceil;
use crate::scan::Extent;
use crate::{Chunks, Source};

/// What schedules are to achieve together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Goal {
    /// Every rank has the finished sum of every chunk.
    AllReduce,
    /// Rank `r` has the sum of chunk `r`.
    ReduceScatter,
    /// Every rank has every chunk, where rank `r` had chunk `r`.
    AllGather,
    /// Every rank has every chunk, where the root had all.
    Broadcast {
        /// The rank that has something to begin with.
        root: usize,
    },
    /// The root has the sum of every chunk.
    Reduce {
        /// The rank that gets the result.
        root: usize,
    },
    /// The root has every chunk, where rank `r` had chunk `r`, in its input and in its buffer.
    Gather {
        /// The rank that gets the result.
        root: usize,
    },
    /// Every other rank `r` has chunk `r` of the root's input.
    Scatter {
        /// The rank that has something to begin with.
        root: usize,
    },
    /// Chunk `s` of rank `d` is what chunk `d` of the input of rank `s` was; chunk `r` of rank `r` is there to begin
    /// with. No message is longer on one end than on the other, whatever the sizes of the chunks.
    AllToAll,
    /// Chunk `j` of rank `r`, which was for rank `r + j`, is from rank `r − j`, modulo the world size.
    AllToAllTurned,
    /// Rank `r` has the sum of the ranks up to it.
    Scan(Extent),
    /// No rank ends before every rank has begun.
    Barrier,
}

/// What no schedule can do better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LowerBound {
    /// Messages that follow one another.
    pub rounds: usize,
    /// What the busiest rank sends, or receives, at least; in units of `buffer / world_size`.
    pub moved: usize,
}

/// What one rank brought for one chunk. Where sums are compared between chunks, all are of chunk 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Piece {
    pub(super) rank: usize,
    pub(super) chunk: usize,
}

/// What a rank has to have in a chunk in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequiredContent {
    Anything,
    /// What one rank brought.
    Piece(Piece),
    /// The sum of so many ranks, from rank 0 on.
    Sum(usize),
    /// The sum of all ranks, after its owner has finished it.
    Finished,
}

impl Goal {
    /// The fewest rounds and bytes for this goal, which one schedule may not be able to have together. Rounds are
    /// those of ranks that send one message at a time: where several are under way at once, there can be fewer.
    pub const fn lower_bound(self, world_size: usize) -> LowerBound {
        let peers = world_size.saturating_sub(1);
        let moved = match self {
            Self::AllReduce => 2 * peers,
            Self::ReduceScatter | Self::AllGather | Self::AllToAll | Self::AllToAllTurned => peers,
            Self::Gather { .. } | Self::Scatter { .. } => peers,
            Self::Broadcast { .. } | Self::Reduce { .. } | Self::Scan(_) if peers > 0 => world_size,
            Self::Broadcast { .. } | Self::Reduce { .. } | Self::Scan(_) | Self::Barrier => 0,
        };
        LowerBound { rounds: log2_ceil(world_size), moved }
    }

    /// Whether anything is reduced, so that it matters in which order.
    pub(super) const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce { .. } | Self::Scan(_))
    }

    /// Whether there is an input.
    pub(super) const fn has_input(self) -> bool {
        matches!(self, Self::Gather { .. } | Self::Scatter { .. } | Self::AllToAll)
    }

    /// What a rank has in a chunk of its buffer to begin with.
    pub(super) fn begins(self, world_size: usize, rank: usize, chunk: usize) -> Option<Piece> {
        let own = Piece { rank, chunk };
        match self {
            _ if self.reduces() => Some(Piece { rank, chunk: 0 }),
            Self::AllGather | Self::Gather { .. } | Self::AllToAll => (rank == chunk).then_some(own),
            Self::Broadcast { root } => (rank == root).then_some(own),
            Self::AllToAllTurned => Some(Piece { rank, chunk: (rank + chunk) % world_size }),
            _ => None,
        }
    }

    /// What a rank has in a chunk of its input.
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
            Self::AllToAllTurned => piece((rank + world_size - chunk) % world_size, rank),
            _ => RequiredContent::Anything,
        }
    }

    /// Whether a message is what its receiver expects, and as long. Of an input of an all_to_all, chunk `d` of rank
    /// `s` is as long as chunk `s` of the buffer of rank `d`; otherwise chunks of the same number are equally long.
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

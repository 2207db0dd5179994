//! Algorithms of scatter.

use dist_transport::Rank;

use super::named;
use crate::{Chunks, Cost, Schedule, binomial, linear};

/// An algorithm of scatter. Every other rank `r` ends with chunk `r` of the root's input. There are as many chunks
/// as ranks, of any sizes.
///
/// A rank needs a buffer for the chunks that [`held`](Self::held) returns and no others (see
/// [`Partition::among`](crate::Partition::among)). The root has an input and no buffer.
#[doc(alias = "MPI_Scatter")]
#[doc(alias = "ncclScatter")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scatter {
    /// The root sends to every rank; see [`linear`].
    Linear,
    /// Down a tree; see [`binomial`].
    Binomial,
}

named!("scatter", Scatter {
    Linear => "linear",
    Binomial => "binomial",
});

impl Scatter {
    /// Returns `true` if there is a schedule for a world of this size.
    pub const fn supports(self, world_size: usize) -> bool {
        world_size > 0
    }

    /// Returns the number of chunks of the memory.
    pub const fn chunks(self, world_size: usize) -> usize {
        world_size
    }

    /// Returns the chunks that pass through the buffer of a rank; they are consecutive. A root outside the world is
    /// taken modulo its size.
    pub fn held(self, rank: Rank, root: usize) -> Chunks {
        let root = root % rank.world_size();
        match self {
            Self::Linear if rank.index() == root => Chunks::NONE,
            Self::Linear => Chunks::one(rank.index()),
            Self::Binomial => binomial::scatter_held(rank, root),
        }
    }

    /// Returns the cost, for the most expensive root.
    pub const fn cost(self, world_size: usize) -> Cost {
        if world_size <= 1 {
            return Cost::NOTHING;
        }
        match self {
            Self::Linear => linear::cost(world_size),
            Self::Binomial => binomial::rooted_cost(world_size),
        }
    }

    /// Returns the schedule of a rank. A root outside the world is taken modulo its size.
    pub const fn schedule(self, rank: Rank, root: usize) -> Schedule {
        match self {
            Self::Linear => linear::scatter(rank, root),
            Self::Binomial => binomial::scatter(rank, root),
        }
    }
}

//! Algorithms of gather.

use dist_transport::Rank;

use super::named;
use crate::{Chunks, Cost, Schedule, binomial, linear};

/// An algorithm of gather. The root ends with chunk `r` of every rank `r`. There are as many chunks as ranks, of
/// any sizes.
///
/// A rank needs a buffer for the chunks that [`held`](Self::held) returns and no others (see
/// [`Partition::among`](crate::Partition::among)). Its own chunk must be in its place at the start. A rank that
/// holds no chunks has its chunk in its input.
#[doc(alias = "MPI_Gather")]
#[doc(alias = "ncclGather")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Gather {
    /// Every rank sends to the root; see [`linear`].
    Linear,
    /// Up a tree; see [`binomial`].
    Binomial,
}

named!("gather", Gather {
    Linear => "linear",
    Binomial => "binomial",
});

impl Gather {
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
            Self::Linear if rank.index() == root => Chunks::all(rank.world_size()),
            Self::Linear => Chunks::NONE,
            Self::Binomial => binomial::gather_held(rank, root),
        }
    }

    /// Returns the cost, for the most expensive root.
    pub const fn cost(self, world_size: usize) -> Cost {
        if world_size <= 1 {
            return Cost::NOTHING;
        }
        match self {
            Self::Linear => Cost { sent_max: 1, ..linear::cost(world_size) },
            Self::Binomial => {
                Cost { sent_max: world_size.next_power_of_two() / 2, ..binomial::rooted_cost(world_size) }
            }
        }
    }

    /// Returns the schedule of a rank. A root outside the world is taken modulo its size.
    pub const fn schedule(self, rank: Rank, root: usize) -> Schedule {
        match self {
            Self::Linear => linear::gather(rank, root),
            Self::Binomial => binomial::gather(rank, root),
        }
    }
}

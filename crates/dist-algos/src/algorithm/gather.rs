//! Algorithms of gather.

use dist_transport::Rank;

use super::named;
use crate::{Chunks, Cost, Schedule, binomial, linear};

/// How a gather can be done: the root ends with chunk `r` of every rank `r`, of as many chunks as there are ranks.
/// Chunks can have any sizes.
///
/// A rank needs a buffer for the chunks that [`held`](Self::held) says and no others (see
/// [`Partition::among`](crate::Partition::among)); its own is in its place to begin with. A rank that holds none has its
/// chunk in its input.
#[doc(alias = "MPI_Gather")]
#[doc(alias = "ncclGather")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Gather {
    /// Every rank to the root; see [`linear`].
    Linear,
    /// Up a tree; see [`binomial`].
    Binomial,
}

named!("gather", Gather {
    Linear => "linear",
    Binomial => "binomial",
});

impl Gather {
    /// Whether there is a schedule for a world of this size.
    pub const fn supports(self, world_size: usize) -> bool {
        world_size > 0
    }

    /// Into how many chunks the memory is cut.
    pub const fn chunks(self, world_size: usize) -> usize {
        world_size
    }

    /// The chunks that pass through the buffer of a rank: neighbours. A root outside the world is taken modulo its
    /// size.
    pub fn held(self, rank: Rank, root: usize) -> Chunks {
        let root = root % rank.world_size();
        match self {
            Self::Linear if rank.index() == root => Chunks::all(rank.world_size()),
            Self::Linear => Chunks::NONE,
            Self::Binomial => binomial::gather_held(rank, root),
        }
    }

    /// What it costs, for the root that makes most of it.
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

    /// The schedule of a rank. A root outside the world is taken modulo its size.
    pub const fn schedule(self, rank: Rank, root: usize) -> Schedule {
        match self {
            Self::Linear => linear::gather(rank, root),
            Self::Binomial => binomial::gather(rank, root),
        }
    }
}

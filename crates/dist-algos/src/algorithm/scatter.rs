//! Algorithms of scatter.

use dist_transport::Rank;

use super::named;
use crate::{Chunks, Cost, Schedule, binomial, linear};

/// How a scatter can be done: every other rank `r` ends with chunk `r` of the root's input, of as many chunks as there
/// are ranks. Chunks can have any sizes.
///
/// A rank needs a buffer for the chunks that [`held`](Self::held) says and no others (see
/// [`Partition::among`](crate::Partition::among)); the root has no buffer, but an input.
#[doc(alias = "MPI_Scatter")]
#[doc(alias = "ncclScatter")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scatter {
    /// The root to every rank; see [`linear`].
    Linear,
    /// Down a tree; see [`binomial`].
    Binomial,
}

named!("scatter", Scatter {
    Linear => "linear",
    Binomial => "binomial",
});

impl Scatter {
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
            Self::Linear if rank.index() == root => Chunks::NONE,
            Self::Linear => Chunks::one(rank.index()),
            Self::Binomial => binomial::scatter_held(rank, root),
        }
    }

    /// What it costs, for the root that makes most of it.
    pub const fn cost(self, world_size: usize) -> Cost {
        if world_size <= 1 {
            return Cost::NOTHING;
        }
        match self {
            Self::Linear => linear::cost(world_size),
            Self::Binomial => binomial::rooted_cost(world_size),
        }
    }

    /// The schedule of a rank. A root outside the world is taken modulo its size.
    pub const fn schedule(self, rank: Rank, root: usize) -> Schedule {
        match self {
            Self::Linear => linear::scatter(rank, root),
            Self::Binomial => binomial::scatter(rank, root),
        }
    }
}

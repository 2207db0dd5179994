//! Algorithms of barrier.

use dist_transport::Rank;

use super::named;
use crate::cost::log2_ceil;
use crate::{Cost, Messages, Schedule, barrier};

/// How a barrier can be done: no rank leaves before every rank has come. Its messages have no bytes.
#[doc(alias = "MPI_Barrier")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Barrier {
    /// A token goes round twice; see [`barrier::ring`].
    Ring,
    /// Everybody tells ranks at distance 1, 2, 4, …; see [`barrier::dissemination`].
    Dissemination,
}

named!("barrier", Barrier {
    Ring => "ring",
    Dissemination => "dissemination",
});

impl Barrier {
    /// Whether there is a schedule for a world of this size.
    pub const fn supports(self, world_size: usize) -> bool {
        world_size > 0
    }

    /// Into how many chunks the memory is cut: one, which has no bytes.
    pub const fn chunks(self, _world_size: usize) -> usize {
        1
    }

    /// What it costs.
    pub const fn cost(self, world_size: usize) -> Cost {
        if world_size <= 1 {
            return Cost::NOTHING;
        }
        match self {
            Self::Ring => {
                let rounds = Messages::new(2 * world_size - 1, 0);
                Cost { rounds: rounds.count, all: rounds, depth: rounds, ..Cost::NOTHING }
            }
            Self::Dissemination => Cost::alike(world_size, log2_ceil(world_size), 0, 0),
        }
    }

    /// The schedule of a rank.
    pub const fn schedule(self, rank: Rank) -> Schedule {
        match self {
            Self::Ring => barrier::ring(rank),
            Self::Dissemination => barrier::dissemination(rank),
        }
    }
}

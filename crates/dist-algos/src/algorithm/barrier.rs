//! Algorithms of barrier.

use dist_transport::Rank;

use super::named;
use crate::cost::log2_ceil;
use crate::{Cost, Messages, Schedule, barrier};

/// An algorithm of barrier. No rank leaves before every rank has entered. Its messages are empty.
#[doc(alias = "MPI_Barrier")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Barrier {
    /// Passes a token around the ring twice; see [`barrier::ring`].
    Ring,
    /// Every rank signals ranks at distance 1, 2, 4, …; see [`barrier::dissemination`].
    Dissemination,
}

named!("barrier", Barrier {
    Ring => "ring",
    Dissemination => "dissemination",
});

impl Barrier {
    /// Returns `true` if there is a schedule for a world of this size.
    pub const fn supports(self, world_size: usize) -> bool {
        world_size > 0
    }

    /// Returns the number of chunks: one, which is empty.
    pub const fn chunks(self, _world_size: usize) -> usize {
        1
    }

    /// Returns the cost.
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

    /// Returns the schedule of a rank.
    pub const fn schedule(self, rank: Rank) -> Schedule {
        match self {
            Self::Ring => barrier::ring(rank),
            Self::Dissemination => barrier::dissemination(rank),
        }
    }
}

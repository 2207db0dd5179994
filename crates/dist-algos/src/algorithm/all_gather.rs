//! Algorithms of all_gather.

use dist_transport::Rank;

use super::named;
use crate::cost::log2_ceil;
use crate::{Cost, Schedule, circulant, neighbour, recursive_doubling, ring};

/// An algorithm of all_gather. Every rank ends with every chunk; rank `r` has chunk `r` at the start. There are as
/// many chunks as ranks.
#[doc(alias = "MPI_Allgather")]
#[doc(alias = "allgather")]
#[doc(alias = "ncclAllGather")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AllGather {
    /// Sends everything gathered so far to ranks at distance 1, 2, 4, …, for powers of two; see
    /// [`recursive_doubling`].
    RecursiveDoubling,
    /// The same for any number of ranks, with smaller messages in the last round; see [`circulant::bruck`].
    Bruck,
    /// ⌈log₂ p⌉ rounds over distances …, p/4, p/2; see [`circulant`].
    Circulant,
    /// Two chunks to the left and to the right in turn, for even numbers of ranks; see [`neighbour`].
    NeighbourExchange,
    /// Once around the ring; see [`ring`].
    Ring,
}

named!("all_gather", AllGather {
    RecursiveDoubling => "recursive_doubling",
    Bruck => "bruck",
    Circulant => "circulant",
    NeighbourExchange => "neighbour_exchange",
    Ring => "ring",
});

impl AllGather {
    /// Returns `true` if there is a schedule for a world of this size.
    pub const fn supports(self, world_size: usize) -> bool {
        match self {
            Self::RecursiveDoubling => world_size.is_power_of_two(),
            Self::NeighbourExchange => world_size > 0 && world_size.is_multiple_of(2),
            Self::Bruck | Self::Circulant | Self::Ring => world_size > 0,
        }
    }

    /// Returns the number of chunks of the buffer.
    pub const fn chunks(self, world_size: usize) -> usize {
        world_size
    }

    /// Returns the cost in a supported world.
    pub const fn cost(self, world_size: usize) -> Cost {
        if world_size <= 1 {
            return Cost::NOTHING;
        }
        let peers = world_size - 1;
        let rounds = match self {
            Self::RecursiveDoubling | Self::Bruck | Self::Circulant => log2_ceil(world_size),
            Self::NeighbourExchange => world_size / 2,
            Self::Ring => peers,
        };
        Cost::alike(world_size, rounds, peers, 0)
    }

    /// Returns the schedule of a rank, if the world is supported.
    pub const fn schedule(self, rank: Rank) -> Option<Schedule> {
        match self {
            Self::RecursiveDoubling => recursive_doubling::all_gather(rank),
            Self::Bruck => Some(circulant::bruck(rank)),
            Self::Circulant => Some(circulant::all_gather(rank)),
            Self::NeighbourExchange => neighbour::all_gather(rank),
            Self::Ring => Some(ring::all_gather(rank)),
        }
    }
}

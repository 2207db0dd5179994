//! Algorithms of all_gather.

use dist_transport::Rank;

use super::named;
use crate::cost::log2_ceil;
use crate::{Cost, Schedule, circulant, neighbour, recursive_doubling, ring};

/// How an all_gather can be done: every rank ends with every chunk, where rank `r` has chunk `r` to begin with,
/// of as many chunks as there are ranks.
#[doc(alias = "MPI_Allgather")]
#[doc(alias = "allgather")]
#[doc(alias = "ncclAllGather")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AllGather {
    /// What has been gathered so far to ranks at distance 1, 2, 4, …, for powers of two; see
    /// [`recursive_doubling`].
    RecursiveDoubling,
    /// The same over any number of ranks, who then give each other less in the last round; see [`circulant::bruck`].
    Bruck,
    /// ⌈log₂ p⌉ rounds over distances …, p/4, p/2; see [`circulant`].
    Circulant,
    /// Two chunks to the left and to the right in turn, for even worlds; see [`neighbour`].
    NeighbourExchange,
    /// Once round the ring; see [`ring`].
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
    /// Whether there is a schedule for a world of this size.
    pub const fn supports(self, world_size: usize) -> bool {
        match self {
            Self::RecursiveDoubling => world_size.is_power_of_two(),
            Self::NeighbourExchange => world_size > 0 && world_size.is_multiple_of(2),
            Self::Bruck | Self::Circulant | Self::Ring => world_size > 0,
        }
    }

    /// Into how many chunks the buffer is cut.
    pub const fn chunks(self, world_size: usize) -> usize {
        world_size
    }

    /// What it costs in a world that it supports.
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

    /// The schedule of a rank, if the world is supported.
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

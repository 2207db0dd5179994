//! Algorithms of all_to_all.

use dist_transport::Rank;

use super::named;
use crate::cost::log2_ceil;
use crate::{Cost, Messages, Schedule, Source, all_to_all};

/// An algorithm of all_to_all. Rank `d` ends with one chunk of every rank `s`, which has a chunk for every `d`.
/// There are as many chunks as ranks.
///
/// [`Windowed`](Self::Windowed) and [`Pairwise`](Self::Pairwise) send chunk `d` of the input to rank `d` and
/// receive chunk `s` of the buffer from rank `s`. A rank's own chunk must be in its place at the start. Chunks can
/// have any sizes.
///
/// [`Bruck`](Self::Bruck) has no input. Chunk `j` of its buffer is at first the one for rank
/// [`before`](Self::before)`(rank, j)`, and at the end the one from rank [`after`](Self::after)`(rank, j)`. All
/// chunks have the same size.
#[doc(alias = "MPI_Alltoall")]
#[doc(alias = "alltoall")]
#[doc(alias = "ncclAlltoAll")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AllToAll {
    /// Sends every chunk to its rank, with several in flight at once; see [`all_to_all::windowed`].
    Windowed,
    /// Sends every chunk to its rank, one after the other; see [`all_to_all::pairwise`].
    Pairwise,
    /// Sends half of all chunks in each of few rounds; see [`all_to_all::bruck`].
    Bruck,
}

named!("all_to_all", AllToAll {
    Windowed => "windowed",
    Pairwise => "pairwise",
    Bruck => "bruck",
});

impl AllToAll {
    /// Returns `true` if there is a schedule for a world of this size.
    pub const fn supports(self, world_size: usize) -> bool {
        world_size > 0
    }

    /// Returns the number of chunks of the memory.
    pub const fn chunks(self, world_size: usize) -> usize {
        world_size
    }

    /// Returns the memory that the schedules send from.
    pub const fn source(self) -> Source {
        match self {
            Self::Windowed | Self::Pairwise => Source::Input,
            Self::Bruck => Source::Buffer,
        }
    }

    /// Returns the rank that a chunk is for, at the start.
    pub const fn before(self, rank: Rank, chunk: usize) -> usize {
        match self {
            Self::Windowed | Self::Pairwise => chunk,
            Self::Bruck => rank.plus(chunk).index(),
        }
    }

    /// Returns the rank that a chunk is from, at the end.
    pub const fn after(self, rank: Rank, chunk: usize) -> usize {
        match self {
            Self::Windowed | Self::Pairwise => chunk,
            Self::Bruck => rank.minus(chunk).index(),
        }
    }

    /// Returns the cost.
    pub const fn cost(self, world_size: usize) -> Cost {
        if world_size <= 1 {
            return Cost::NOTHING;
        }
        let peers = world_size - 1;
        match self {
            Self::Windowed => {
                let rounds = peers.div_ceil(all_to_all::WINDOW);
                let cost = Cost::alike(world_size, peers, peers, 0);
                Cost { rounds, depth: Messages::new(rounds, rounds), ..cost }
            }
            Self::Pairwise => Cost::alike(world_size, peers, peers, 0),
            Self::Bruck => {
                let rounds = log2_ceil(world_size);
                let (mut round, mut path) = (0, 0);
                while round < rounds {
                    path += all_to_all::moved(world_size, round).len();
                    round += 1;
                }
                Cost::alike(world_size, rounds, path, 0)
            }
        }
    }

    /// Returns the schedule of a rank.
    pub const fn schedule(self, rank: Rank) -> Schedule {
        match self {
            Self::Windowed => all_to_all::windowed(rank),
            Self::Pairwise => all_to_all::pairwise(rank),
            Self::Bruck => all_to_all::bruck(rank),
        }
    }

    /// The cheapest algorithm for chunks of any sizes.
    pub const UNEVEN: Self = Self::Windowed;
}

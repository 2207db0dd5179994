//! Algorithms of broadcast.

use dist_transport::Rank;

use super::named;
use crate::cost::log2_ceil;
use crate::{Cost, Schedule, binomial, chain, circulant, knomial};

/// How a broadcast can be done: every rank ends with the root's buffer.
#[doc(alias = "MPI_Bcast")]
#[doc(alias = "bcast")]
#[doc(alias = "ncclBroadcast")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Broadcast {
    /// The whole buffer down a tree; see [`binomial`].
    Binomial,
    /// The whole buffer down a tree of half the depth; see [`knomial`].
    Knomial,
    /// Chunk by chunk from rank to rank; see [`chain`].
    Chain,
    /// A [`circulant`] scatter, then a circulant all_gather.
    ScatterCirculant,
}

named!("broadcast", Broadcast {
    Binomial => "binomial",
    Knomial => "knomial",
    Chain => "chain",
    ScatterCirculant => "scatter_circulant",
});

impl Broadcast {
    /// Whether there is a schedule for a world of this size.
    pub const fn supports(self, world_size: usize) -> bool {
        world_size > 0
    }

    /// Into how many chunks the buffer is cut.
    pub const fn chunks(self, world_size: usize) -> usize {
        match self {
            Self::Binomial | Self::Knomial => 1,
            Self::Chain => chain::CHUNKS,
            Self::ScatterCirculant => world_size,
        }
    }

    /// What it costs, for the root that makes most of it.
    pub const fn cost(self, world_size: usize) -> Cost {
        if world_size <= 1 {
            return Cost::NOTHING;
        }
        let (depth, peers) = (log2_ceil(world_size), world_size - 1);
        match self {
            Self::Binomial => Cost { rounds: depth, path: depth, sent_max: depth, reduced_max: 0 },
            Self::Knomial => {
                let rounds = knomial::rounds(world_size);
                Cost { rounds, path: rounds, sent_max: rounds, reduced_max: 0 }
            }
            Self::Chain => {
                let rounds = chain::CHUNKS + world_size - 2;
                Cost { rounds, path: rounds, sent_max: chain::CHUNKS, reduced_max: 0 }
            }
            Self::ScatterCirculant => {
                Cost { rounds: 2 * depth, path: 2 * peers, sent_max: 2 * peers, reduced_max: 0 }
            }
        }
    }

    /// The schedule of a rank: two parts, one after the other. A root outside the world is taken modulo its size.
    pub fn schedule(self, rank: Rank, root: usize) -> impl Iterator<Item = crate::Step> + Clone + use<> {
        let [first, second] = self.parts(rank, root);
        first.chain(second)
    }

    /// The two parts of a rank's schedule.
    pub(crate) fn parts(self, rank: Rank, root: usize) -> [Schedule; 2] {
        match self {
            Self::Binomial => [binomial::broadcast(rank, root), Schedule::nothing(rank)],
            Self::Knomial => [knomial::broadcast(rank, root), Schedule::nothing(rank)],
            Self::Chain => [chain::broadcast(rank, root), Schedule::nothing(rank)],
            Self::ScatterCirculant => [circulant::scatter(rank, root), circulant::all_gather(rank)],
        }
    }
}

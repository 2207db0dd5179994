//! Algorithms of broadcast.

use dist_transport::Rank;

use super::named;
use crate::cost::log2_ceil;
use crate::{Cost, Messages, Schedule, binomial, chain, circulant, knomial};

/// An algorithm of broadcast. Every rank ends with the root's buffer.
#[doc(alias = "MPI_Bcast")]
#[doc(alias = "bcast")]
#[doc(alias = "ncclBroadcast")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Broadcast {
    /// Sends the whole buffer down a tree; see [`binomial`].
    Binomial,
    /// Sends the whole buffer down a tree of half the depth; see [`knomial`].
    Knomial,
    /// Sends chunk by chunk from rank to rank; see [`chain`].
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
    /// Returns `true` if there is a schedule for a world of this size.
    pub const fn supports(self, world_size: usize) -> bool {
        world_size > 0
    }

    /// Returns the number of chunks of the buffer.
    pub const fn chunks(self, world_size: usize) -> usize {
        match self {
            Self::Binomial | Self::Knomial => 1,
            Self::Chain => chain::CHUNKS,
            Self::ScatterCirculant => world_size,
        }
    }

    /// Returns the cost, for the most expensive root.
    pub const fn cost(self, world_size: usize) -> Cost {
        if world_size <= 1 {
            return Cost::NOTHING;
        }
        let (depth, peers) = (log2_ceil(world_size), world_size - 1);
        match self {
            Self::Binomial => Self::tree(peers, depth, depth),
            Self::Knomial => Self::tree(peers, knomial::rounds(world_size), knomial::depth(world_size)),
            Self::Chain => {
                let rounds = chain::CHUNKS + world_size - 2;
                let all = Messages::new(chain::CHUNKS * peers, chain::CHUNKS * peers);
                let depth = Messages::new(peers, peers);
                Cost { rounds, path: rounds, sent_max: chain::CHUNKS, all, depth, ..Cost::NOTHING }
            }
            Self::ScatterCirculant => {
                let gather = Cost::alike(world_size, depth, peers, 0);
                circulant::rooted_cost(world_size).then(gather)
            }
        }
    }

    /// Returns the cost of a tree whose root sends in this many rounds.
    const fn tree(peers: usize, rounds: usize, depth: usize) -> Cost {
        let (all, depth) = (Messages::new(peers, peers), Messages::new(depth, depth));
        Cost { rounds, path: rounds, sent_max: rounds, all, depth, ..Cost::NOTHING }
    }

    /// Returns the schedule of a rank: two parts, one after the other. A root outside the world is taken modulo its
    /// size.
    pub fn schedule(self, rank: Rank, root: usize) -> impl Iterator<Item = crate::Step> + Clone + use<> {
        let [first, second] = self.parts(rank, root);
        first.chain(second)
    }

    /// Returns the two parts of a rank's schedule.
    pub(crate) fn parts(self, rank: Rank, root: usize) -> [Schedule; 2] {
        match self {
            Self::Binomial => [binomial::broadcast(rank, root), Schedule::nothing(rank)],
            Self::Knomial => [knomial::broadcast(rank, root), Schedule::nothing(rank)],
            Self::Chain => [chain::broadcast(rank, root), Schedule::nothing(rank)],
            Self::ScatterCirculant => [circulant::scatter(rank, root), circulant::all_gather(rank)],
        }
    }
}

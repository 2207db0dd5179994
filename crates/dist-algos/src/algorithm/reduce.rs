//! Algorithms of reduce.

use dist_transport::Rank;

use super::named;
use crate::cost::log2_ceil;
use crate::{Cost, Messages, Order, Schedule, Step, binomial, circulant, pairwise};

/// An algorithm of reduce. The root ends with the sum of all buffers. The content of the other buffers is lost.
#[doc(alias = "MPI_Reduce")]
#[doc(alias = "ncclReduce")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduce {
    /// Reduces the whole buffer up a tree; see [`binomial`].
    Binomial,
    /// A [`pairwise`] reduce_scatter, then a [`circulant`] gather.
    PairwiseGather,
}

named!("reduce", Reduce {
    Binomial => "binomial",
    PairwiseGather => "pairwise_gather",
});

impl Reduce {
    /// Returns `true` if there is a schedule for a world of this size.
    pub const fn supports(self, world_size: usize) -> bool {
        world_size > 0
    }

    /// Returns the number of chunks of the buffer.
    pub const fn chunks(self, world_size: usize) -> usize {
        match self {
            Self::Binomial => 1,
            Self::PairwiseGather => world_size,
        }
    }

    /// Returns the order in which it reduces, which does not depend on the root.
    pub const fn order(self, _world_size: usize) -> Order {
        match self {
            Self::Binomial | Self::PairwiseGather => Order::Canonical,
        }
    }

    /// Returns the cost, for the most expensive root.
    pub const fn cost(self, world_size: usize) -> Cost {
        if world_size <= 1 {
            return Cost::NOTHING;
        }
        let (depth, peers) = (log2_ceil(world_size), world_size - 1);
        match self {
            Self::Binomial => Cost {
                rounds: depth,
                path: depth,
                sent_max: 1,
                reduced_max: depth,
                all: Messages::new(peers, peers),
                depth: Messages::new(depth, depth),
                reduced: peers,
            },
            Self::PairwiseGather => {
                let reduce = Cost::alike(world_size, peers, peers, peers);
                let gather = Cost { sent_max: world_size / 2, ..circulant::rooted_cost(world_size) };
                reduce.then(gather)
            }
        }
    }

    /// Returns the schedule of a rank: two parts, one after the other. A root outside the world is taken modulo its
    /// size.
    pub fn schedule(self, rank: Rank, root: usize) -> impl Iterator<Item = Step> + Clone + use<> {
        let [first, second] = self.parts(rank, root);
        first.chain(second)
    }

    /// Returns the two parts of a rank's schedule.
    pub(crate) fn parts(self, rank: Rank, root: usize) -> [Schedule; 2] {
        match self {
            Self::Binomial => [binomial::reduce(rank, root), Schedule::nothing(rank)],
            Self::PairwiseGather => [pairwise::reduce_scatter(rank), circulant::gather(rank, root)],
        }
    }
}

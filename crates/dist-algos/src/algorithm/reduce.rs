//! Algorithms of reduce.

use dist_transport::Rank;

use super::named;
use crate::cost::log2_ceil;
use crate::{Cost, Messages, Order, Schedule, Step, binomial, circulant, pairwise};

/// How a reduce can be done: the root ends with the sum of all buffers. What other buffers held is lost.
#[doc(alias = "MPI_Reduce")]
#[doc(alias = "ncclReduce")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduce {
    /// The whole buffer up a tree; see [`binomial`].
    Binomial,
    /// A [`pairwise`] reduce_scatter, then a [`circulant`] gather.
    PairwiseGather,
}

named!("reduce", Reduce {
    Binomial => "binomial",
    PairwiseGather => "pairwise_gather",
});

impl Reduce {
    /// Whether there is a schedule for a world of this size.
    pub const fn supports(self, world_size: usize) -> bool {
        world_size > 0
    }

    /// Into how many chunks the buffer is cut.
    pub const fn chunks(self, world_size: usize) -> usize {
        match self {
            Self::Binomial => 1,
            Self::PairwiseGather => world_size,
        }
    }

    /// In which order it reduces, whatever the root.
    pub const fn order(self, _world_size: usize) -> Order {
        match self {
            Self::Binomial | Self::PairwiseGather => Order::Canonical,
        }
    }

    /// What it costs, for the root that makes most of it.
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

    /// The schedule of a rank: two parts, one after the other. A root outside the world is taken modulo its size.
    pub fn schedule(self, rank: Rank, root: usize) -> impl Iterator<Item = Step> + Clone + use<> {
        let [first, second] = self.parts(rank, root);
        first.chain(second)
    }

    /// The two parts of a rank's schedule.
    pub(crate) fn parts(self, rank: Rank, root: usize) -> [Schedule; 2] {
        match self {
            Self::Binomial => [binomial::reduce(rank, root), Schedule::nothing(rank)],
            Self::PairwiseGather => [pairwise::reduce_scatter(rank), circulant::gather(rank, root)],
        }
    }
}

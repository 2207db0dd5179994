//! Algorithms of all_reduce.

use dist_transport::Rank;

use super::named;
use crate::cost::log2_ceil;
use crate::fold::Fold;
use crate::{
    Chunks, Cost, Messages, Order, Schedule, binomial, circulant, halving_doubling, pairwise,
    recursive_doubling, ring,
};

/// An algorithm of all_reduce. Every rank ends with the sum of all buffers.
#[doc(alias = "MPI_Allreduce")]
#[doc(alias = "allreduce")]
#[doc(alias = "ncclAllReduce")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AllReduce {
    /// Sends the whole buffer to ranks at distance 1, 2, 4, …; see [`recursive_doubling`].
    RecursiveDoubling,
    /// Halves, quarters, eighths, … and back, in blocks of powers of two; see [`halving_doubling`].
    HalvingDoubling,
    /// Twice ⌈log₂ p⌉ rounds over distances p/2, p/4, …; see [`circulant`].
    Circulant,
    /// A reduction to rank 0 and a broadcast from it; see [`binomial`].
    Binomial,
    /// Twice around the ring; see [`ring`].
    Ring,
    /// A [`pairwise`] reduce_scatter, then a [`circulant`] all_gather.
    PairwiseCirculant,
}

named!("all_reduce", AllReduce {
    RecursiveDoubling => "recursive_doubling",
    HalvingDoubling => "halving_doubling",
    Circulant => "circulant",
    Binomial => "binomial",
    Ring => "ring",
    PairwiseCirculant => "pairwise_circulant",
});

/// The two halves of an all_reduce. Between them, the owner of each chunk completes its sum once, for example by
/// the division of a mean. If all ranks own a chunk, each of them completes it.
#[derive(Clone, Debug)]
pub struct Phases<S = Schedule> {
    /// Brings the sum of every chunk to its owners.
    pub reduce: S,
    /// The chunks that this rank then owns.
    pub owned: Chunks,
    /// Brings every chunk from its owners to the other ranks.
    pub gather: S,
}

impl AllReduce {
    /// Returns `true` if there is a schedule for a world of this size.
    pub const fn supports(self, world_size: usize) -> bool {
        world_size > 0
    }

    /// Returns the number of chunks of the buffer.
    pub const fn chunks(self, world_size: usize) -> usize {
        match self {
            Self::RecursiveDoubling | Self::Binomial => 1,
            Self::HalvingDoubling => halving_doubling::chunks(world_size),
            Self::Circulant | Self::Ring | Self::PairwiseCirculant => world_size,
        }
    }

    /// Returns the order in which it reduces.
    pub const fn order(self, world_size: usize) -> Order {
        match self {
            Self::HalvingDoubling | Self::Binomial | Self::PairwiseCirculant => Order::Canonical,
            Self::RecursiveDoubling => Fold::new(world_size).order(),
            Self::Circulant | Self::Ring if world_size <= 2 => Order::Canonical,
            Self::Circulant if world_size.is_power_of_two() => Order::Uniform,
            Self::Circulant | Self::Ring => Order::Any,
        }
    }

    /// Returns the cost.
    pub const fn cost(self, world_size: usize) -> Cost {
        if world_size <= 1 {
            return Cost::NOTHING;
        }
        let fold = Fold::new(world_size);
        let (doublings, folded) = (fold.rounds(), if fold.spare > 0 { 1 } else { 0 });
        let depth = log2_ceil(world_size);
        match self {
            Self::RecursiveDoubling => {
                let (rounds, all) = (doublings + 2 * folded, fold.core * doublings + 2 * fold.spare);
                // If there are many inactive ranks, a rank that waits for one in every round also releases one.
                let waits = doublings + folded + if 2 * fold.spare > fold.core { 1 } else { 0 };
                Cost {
                    rounds,
                    path: rounds,
                    sent_max: doublings + folded,
                    reduced_max: doublings + folded,
                    all: Messages::new(all, all),
                    depth: Messages::new(waits, waits),
                    reduced: fold.core * doublings + fold.spare,
                }
            }
            Self::HalvingDoubling => halving_doubling::cost(world_size),
            Self::Binomial => {
                let (peers, waits) = (world_size - 1, 2 * world_size.ilog2() as usize);
                Cost {
                    rounds: 2 * depth,
                    path: 2 * depth,
                    sent_max: depth,
                    reduced_max: depth,
                    all: Messages::new(2 * peers, 2 * peers),
                    depth: Messages::new(waits, waits),
                    reduced: peers,
                }
            }
            Self::Circulant => Self::lean(world_size, 2 * depth),
            Self::Ring => Self::lean(world_size, 2 * (world_size - 1)),
            Self::PairwiseCirculant => Self::lean(world_size, world_size - 1 + depth),
        }
    }

    /// Returns the cost of a schedule in which every rank sends and reduces as little as possible.
    const fn lean(world_size: usize, rounds: usize) -> Cost {
        let peers = world_size - 1;
        Cost::alike(world_size, rounds, 2 * peers, peers)
    }

    /// Returns the schedules of a rank.
    pub fn phases(self, rank: Rank) -> Phases {
        let own = Chunks::one(rank.index());
        match self {
            Self::RecursiveDoubling => Phases {
                reduce: recursive_doubling::reduce(rank),
                owned: recursive_doubling::owned(rank),
                gather: recursive_doubling::release(rank),
            },
            Self::HalvingDoubling => Phases {
                reduce: halving_doubling::reduce(rank),
                owned: halving_doubling::owned(rank),
                gather: halving_doubling::gather(rank),
            },
            Self::Binomial => Phases {
                reduce: binomial::reduce(rank, 0),
                owned: if rank.index() == 0 { Chunks::one(0) } else { Chunks::NONE },
                gather: binomial::broadcast(rank, 0),
            },
            Self::Circulant => Phases {
                reduce: circulant::reduce_scatter(rank),
                owned: own,
                gather: circulant::all_gather(rank),
            },
            Self::Ring => {
                Phases { reduce: ring::reduce_scatter(rank), owned: own, gather: ring::all_gather(rank) }
            }
            Self::PairwiseCirculant => Phases {
                reduce: pairwise::reduce_scatter(rank),
                owned: own,
                gather: circulant::all_gather(rank),
            },
        }
    }
}

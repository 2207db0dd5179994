//! Algorithms of reduce_scatter.

use dist_transport::Rank;

use super::named;
use crate::cost::log2_ceil;
use crate::{Cost, Order, Schedule, circulant, halving_doubling, pairwise, ring};

/// An algorithm of reduce_scatter. Rank `r` ends with chunk `r` of the sum; the other chunks of its buffer are
/// lost. There are as many chunks as ranks.
#[doc(alias = "MPI_Reduce_scatter_block")]
#[doc(alias = "ncclReduceScatter")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceScatter {
    /// Halves, quarters, eighths, …, in blocks of powers of two; see [`halving_doubling`].
    HalvingDoubling,
    /// ⌈log₂ p⌉ rounds over distances p/2, p/4, …; see [`circulant`].
    Circulant,
    /// Once around the ring; see [`ring`].
    Ring,
    /// Every rank sends to every rank; see [`pairwise`].
    Pairwise,
}

named!("reduce_scatter", ReduceScatter {
    HalvingDoubling => "halving_doubling",
    Circulant => "circulant",
    Ring => "ring",
    Pairwise => "pairwise",
});

impl ReduceScatter {
    /// Returns `true` if there is a schedule for a world of this size.
    pub const fn supports(self, world_size: usize) -> bool {
        world_size > 0
    }

    /// Returns the number of chunks of the buffer.
    pub const fn chunks(self, world_size: usize) -> usize {
        world_size
    }

    /// Returns the order in which it reduces.
    pub const fn order(self, world_size: usize) -> Order {
        match self {
            Self::HalvingDoubling | Self::Pairwise => Order::Canonical,
            Self::Circulant | Self::Ring if world_size <= 2 => Order::Canonical,
            Self::Circulant if world_size.is_power_of_two() => Order::Uniform,
            Self::Circulant | Self::Ring => Order::Any,
        }
    }

    /// Returns the cost in a supported world.
    pub const fn cost(self, world_size: usize) -> Cost {
        if world_size <= 1 {
            return Cost::NOTHING;
        }
        let peers = world_size - 1;
        let rounds = match self {
            Self::HalvingDoubling => return halving_doubling::reduce_scatter_cost(world_size),
            Self::Circulant => log2_ceil(world_size),
            Self::Ring | Self::Pairwise => peers,
        };
        Cost::alike(world_size, rounds, peers, peers)
    }

    /// Returns `true` if ranks send only their own data and no sums. Then
    /// [`Step::from_input`](crate::Step::from_input) can send it from memory that does not change, and the buffer
    /// only needs to hold the rank's own chunk. Circulant among three ranks also has this property, but the result
    /// is `false` for it.
    pub const fn sends_no_sums(self, world_size: usize) -> bool {
        matches!(self, Self::Pairwise) || world_size <= 2
    }

    /// Returns the schedule of a rank, if the world is supported.
    pub fn schedule(self, rank: Rank) -> Option<Schedule> {
        match self {
            Self::HalvingDoubling => Some(halving_doubling::reduce_scatter(rank)),
            Self::Circulant => Some(circulant::reduce_scatter(rank)),
            Self::Ring => Some(ring::reduce_scatter(rank)),
            Self::Pairwise => Some(pairwise::reduce_scatter(rank)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ChunkLocation, Step};

    /// Returns `true` if no rank sends a chunk that it has received into.
    fn no_sums_are_sent(algorithm: ReduceScatter, world_size: usize) -> bool {
        (0..world_size).filter_map(|index| Rank::new(index, world_size)).all(|rank| {
            let mut sums = Vec::new();
            algorithm.schedule(rank).into_iter().flatten().all(|step| {
                let Step::Exchange { send, receive } = step else { return true };
                let sent = send.is_none_or(|send| send.chunks.indices().all(|chunk| !sums.contains(&chunk)));
                let received = receive.filter(|receive| receive.place == ChunkLocation::Buffer);
                sums.extend(received.into_iter().flat_map(|receive| receive.chunks.indices()));
                sent
            })
        })
    }

    #[test]
    fn those_that_say_so_send_no_sums() {
        for &algorithm in ReduceScatter::ALL {
            for world_size in 1..=17 {
                let told = algorithm.sends_no_sums(world_size);
                let sent_none = no_sums_are_sent(algorithm, world_size);
                assert!(sent_none || !told, "{algorithm}, {world_size} ranks");
            }
        }
        assert!(!no_sums_are_sent(ReduceScatter::HalvingDoubling, 4));
    }
}

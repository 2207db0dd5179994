//! Algorithms of reduce_scatter.

use dist_transport::Rank;

use super::named;
use crate::cost::log2_ceil;
use crate::{Cost, Order, Schedule, circulant, halving_doubling, pairwise, ring};

/// How a reduce_scatter can be done: rank `r` ends with chunk `r` of the sum, of as many chunks as there are
/// ranks. The other chunks of its buffer are lost.
#[doc(alias = "MPI_Reduce_scatter_block")]
#[doc(alias = "ncclReduceScatter")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceScatter {
    /// Halves, quarters, eighths, …, in blocks of powers of two; see [`halving_doubling`].
    HalvingDoubling,
    /// ⌈log₂ p⌉ rounds over distances p/2, p/4, …; see [`circulant`].
    Circulant,
    /// Once round the ring; see [`ring`].
    Ring,
    /// From every rank to every rank; see [`pairwise`].
    Pairwise,
}

named!("reduce_scatter", ReduceScatter {
    HalvingDoubling => "halving_doubling",
    Circulant => "circulant",
    Ring => "ring",
    Pairwise => "pairwise",
});

impl ReduceScatter {
    /// Whether there is a schedule for a world of this size.
    pub const fn supports(self, world_size: usize) -> bool {
        world_size > 0
    }

    /// Into how many chunks the buffer is cut.
    pub const fn chunks(self, world_size: usize) -> usize {
        world_size
    }

    /// In which order it reduces.
    pub const fn order(self, world_size: usize) -> Order {
        match self {
            Self::HalvingDoubling | Self::Pairwise => Order::Canonical,
            Self::Circulant | Self::Ring if world_size <= 2 => Order::Canonical,
            Self::Circulant if world_size.is_power_of_two() => Order::Uniform,
            Self::Circulant | Self::Ring => Order::Any,
        }
    }

    /// What it costs in a world that it supports.
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

    /// Whether ranks send only what they had to begin with, and no sums: then
    /// [`Step::from_input`](crate::Step::from_input) can send it from memory that stays as it is, and the buffer need hold
    /// no more than the rank's own chunk. Circulant among three ranks does so too, which is not told.
    pub const fn sends_no_sums(self, world_size: usize) -> bool {
        matches!(self, Self::Pairwise) || world_size <= 2
    }

    /// The schedule of a rank, if the world is supported.
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

    /// Whether no rank sends a chunk that it has received something into.
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

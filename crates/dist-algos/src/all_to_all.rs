//! Total exchanges: every rank has a chunk for every rank.
//!
//! [`pairwise`] and [`windowed`] send every chunk to where it belongs, out of the input. [`bruck`] lets chunks that go
//! the same way travel together, which takes few rounds, but more bytes and three passes over the memory: Bruck, Ho,
//! Kipnis, Upfal, Weathersby, "Efficient algorithms for all-to-all communications in multiport message-passing
//! systems", 1997.

use dist_transport::Rank;

use crate::cost::log2_ceil;
use crate::schedule::Kind;
use crate::{Chunks, ReceiveHalf, Schedule, SendHalf, Step};

/// Distances that [`windowed`] has under way at once: enough to hide one another's latency, few enough to leave a
/// receiver some room.
pub const WINDOW: usize = 4;

/// Chunk `d` of the input of rank `s` becomes chunk `s` of the buffer of rank `d`, for every other rank: one peer
/// after the other, in p − 1 rounds. At powers of two a rank sends to whom it receives from.
pub const fn pairwise(rank: Rank) -> Schedule {
    Schedule::new(rank, rank.world_size() - 1, Kind::PairwiseAllToAll)
}

/// As [`pairwise`], with [`WINDOW`] peers at a time.
pub const fn windowed(rank: Rank) -> Schedule {
    Schedule::new(rank, (rank.world_size() - 1).div_ceil(WINDOW), Kind::WindowedAllToAll)
}

/// Chunk `j` of the buffer of rank `r`, which is for rank `r + j` to begin with, is from rank `r − j` in the end,
/// modulo the world size. ⌈log₂ p⌉ rounds of at most half the buffer; all chunks have to be equally long.
pub const fn bruck(rank: Rank) -> Schedule {
    Schedule::new(rank, log2_ceil(rank.world_size()), Kind::BruckAllToAll)
}

pub(crate) fn pairwise_step(rank: Rank, index: usize) -> Step {
    let distance = index + 1;
    let (to, from) = if rank.world_size().is_power_of_two() {
        (rank.index() ^ distance, rank.index() ^ distance)
    } else {
        (rank.plus(distance).index(), rank.minus(distance).index())
    };
    Step::exchange(SendHalf::input(to, Chunks::one(to)), ReceiveHalf::replace(from, Chunks::one(from)))
}

pub(crate) fn windowed_step(rank: Rank, index: usize) -> Step {
    let first = index * WINDOW + 1;
    Step::Window { first, last: (first + WINDOW).min(rank.world_size()) - 1 }
}

/// A chunk that has j places to go takes the steps that the digits of j say.
pub(crate) fn bruck_step(rank: Rank, round: usize) -> Step {
    let (to, from) = (rank.plus(1 << round).index(), rank.minus(1 << round).index());
    let chunks = moved(rank.world_size(), round);
    Step::exchange(SendHalf::buffer(to, chunks), ReceiveHalf::replace(from, chunks))
}

/// The chunks that [`bruck`] moves in a round.
pub(crate) const fn moved(world_size: usize, round: usize) -> Chunks {
    Chunks::with_bit(round, world_size)
}

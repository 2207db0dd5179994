//! Schedules of all_to_all: every rank has a chunk for every rank.
//!
//! [`pairwise`] and [`windowed`] send every chunk from the input directly to its destination. [`bruck`] lets chunks
//! with a common direction travel together. It takes few rounds, but more bytes and three passes over the memory:
//! Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for all-to-all communications in multiport
//! message-passing systems", 1997.

use dist_transport::Rank;

use crate::cost::log2_ceil;
use crate::{
    Chunks, CollectiveKind, Cost, MessageAlgorithm, Messages, Phases, ReceiveHalf, Schedule, SendHalf,
    Source, Step,
};

/// Sends every chunk to its rank, with several in flight at once: [`windowed`]. It is the cheapest algorithm for chunks
/// of any sizes.
pub static WINDOWED: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::AllToAll,
    name: "windowed",
    about: "Every chunk is sent to its rank, four at once.",
    chunks: |world_size| world_size,
    cost: |world_size| {
        let rounds = (world_size - 1).div_ceil(WINDOW);
        Cost { rounds, depth: Messages::new(rounds, rounds), ..pairwise_cost(world_size) }
    },
    sends_from: |_| Source::Input,
    phases: |rank, _| Phases::one(rank, windowed(rank)),
    ..MessageAlgorithm::NOTHING
};

/// Sends every chunk to its rank, one after the other: [`pairwise`].
pub static PAIRWISE: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::AllToAll,
    name: "pairwise",
    about: "Every chunk is sent to its rank, one after the other. For powers of two, pairs of ranks exchange chunks.",
    chunks: |world_size| world_size,
    cost: pairwise_cost,
    sends_from: |_| Source::Input,
    phases: |rank, _| Phases::one(rank, pairwise(rank)),
    ..MessageAlgorithm::NOTHING
};

/// Sends half of all chunks in each of few rounds: [`bruck`].
pub static BRUCK: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::AllToAll,
    name: "bruck",
    about: "Chunk j of the buffer moves j ranks to the right, in steps of the binary digits of j.",
    chunks: |world_size| world_size,
    cost: bruck_cost,
    phases: |rank, _| Phases::one(rank, bruck(rank)),
    ..MessageAlgorithm::NOTHING
};

/// Returns the cost of [`pairwise`].
const fn pairwise_cost(world_size: usize) -> Cost {
    Cost::alike(world_size, world_size - 1, world_size - 1, 0)
}

/// Returns the cost of [`bruck`].
const fn bruck_cost(world_size: usize) -> Cost {
    let rounds = log2_ceil(world_size);
    let (mut round, mut path) = (0, 0);
    while round < rounds {
        path += moved(world_size, round).len();
        round += 1;
    }
    Cost::alike(world_size, rounds, path, 0)
}

/// The number of distances that [`windowed`] has in flight at once. It is large enough to hide latency and small
/// enough to leave a receiver some buffer space.
pub const WINDOW: usize = 4;

/// Returns an all_to_all with one peer after the other, in p − 1 rounds. Chunk `d` of the input of rank `s` becomes
/// chunk `s` of the buffer of rank `d`; a rank's own chunk is not copied. If p is a power of two, a rank sends to the
/// rank from which it receives.
pub const fn pairwise(rank: Rank) -> Schedule {
    Schedule::new(rank, rank.world_size() - 1, |rank, _, index| Some(pairwise_step(rank, index)))
}

/// Returns an all_to_all like [`pairwise`], with [`WINDOW`] peers at a time.
pub const fn windowed(rank: Rank) -> Schedule {
    Schedule::new(rank, (rank.world_size() - 1).div_ceil(WINDOW), |rank, _, index| {
        Some(windowed_step(rank, index))
    })
}

/// Returns Bruck's schedule. Chunk `j` of the buffer of rank `r` is for rank `r + j` at first; at the end it is from
/// rank `r − j`, modulo the world size. It takes ⌈log₂ p⌉ rounds of at most half the buffer. All chunks must have the
/// same length.
pub const fn bruck(rank: Rank) -> Schedule {
    Schedule::new(rank, log2_ceil(rank.world_size()), |rank, _, round| Some(bruck_step(rank, round)))
}

fn pairwise_step(rank: Rank, index: usize) -> Step {
    let distance = index + 1;
    let (to, from) = if rank.world_size().is_power_of_two() {
        (rank.index() ^ distance, rank.index() ^ distance)
    } else {
        (rank.plus(distance).index(), rank.minus(distance).index())
    };
    Step::exchange(SendHalf::input(to, Chunks::one(to)), ReceiveHalf::replace(from, Chunks::one(from)))
}

fn windowed_step(rank: Rank, index: usize) -> Step {
    let first = index * WINDOW + 1;
    Step::Window { first, last: (first + WINDOW).min(rank.world_size()) - 1 }
}

/// A chunk at distance `j` takes the steps of the binary digits of `j`.
fn bruck_step(rank: Rank, round: usize) -> Step {
    let (to, from) = (rank.plus(1 << round).index(), rank.minus(1 << round).index());
    let chunks = moved(rank.world_size(), round);
    Step::exchange(SendHalf::buffer(to, chunks), ReceiveHalf::replace(from, chunks))
}

/// Returns the chunks that [`bruck`] moves in a round.
const fn moved(world_size: usize, round: usize) -> Chunks {
    Chunks::with_bit(round, world_size)
}

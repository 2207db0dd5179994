//! Barriers: messages of no bytes, after which every rank knows that every other has come.
//!
//! Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.

use dist_transport::Rank;

use crate::cost::log2_ceil;
use crate::schedule::Kind;
use crate::{Chunks, ReceiveHalf, Schedule, SendHalf, Step};

/// A token goes round twice: back at rank 0 it says that all have come, and the second time it tells everybody,
/// ending on the last rank. 2p − 1 rounds.
pub const fn ring(rank: Rank) -> Schedule {
    let steps = match (rank.index(), rank.world_size()) {
        (_, 1) => 0,
        (0, _) => 3,
        (index, world_size) if index == world_size - 1 => 3,
        _ => 4,
    };
    Schedule::new(rank, steps, Kind::RingBarrier)
}

/// In round k every rank tells the one 2^k to its right all that it knows. ⌈log₂ p⌉ rounds.
pub const fn dissemination(rank: Rank) -> Schedule {
    Schedule::new(rank, log2_ceil(rank.world_size()), Kind::DisseminationBarrier)
}

pub(crate) const fn ring_step(rank: Rank, index: usize) -> Step {
    let sends_first = rank.index() == 0;
    if index.is_multiple_of(2) == sends_first {
        Step::send(rank.right().index(), Chunks::NONE)
    } else {
        Step::receive(ReceiveHalf::replace(rank.left().index(), Chunks::NONE))
    }
}

pub(crate) const fn dissemination_step(rank: Rank, round: usize) -> Step {
    let (to, from) = (rank.plus(1 << round).index(), rank.minus(1 << round).index());
    Step::exchange(SendHalf::buffer(to, Chunks::NONE), ReceiveHalf::replace(from, Chunks::NONE))
}

//! Schedules of barriers: empty messages, after which every rank knows that all others have entered.
//!
//! Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.

use dist_transport::Rank;

use crate::cost::log2_ceil;
use crate::{
    Chunks, CollectiveKind, Cost, MessageAlgorithm, Messages, Phases, ReceiveHalf, Schedule, SendHalf, Step,
};

/// Passes a token around the ring twice: [`ring`].
pub static RING: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::Barrier,
    name: "ring",
    about: "A token goes twice around the ring.",
    cost: |world_size| {
        let rounds = Messages::new(2 * world_size - 1, 0);
        Cost { rounds: rounds.count, all: rounds, depth: rounds, ..Cost::NOTHING }
    },
    phases: |rank, _| Phases::one(rank, ring(rank)),
    ..MessageAlgorithm::NOTHING
};

/// Every rank signals ranks at distance 1, 2, 4, …: [`dissemination`].
pub static DISSEMINATION: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::Barrier,
    name: "dissemination",
    about: "Every rank tells ranks at distance 1, 2, 4, … which ranks have entered.",
    cost: |world_size| Cost::alike(world_size, log2_ceil(world_size), 0, 0),
    phases: |rank, _| Phases::one(rank, dissemination(rank)),
    ..MessageAlgorithm::NOTHING
};

/// Returns a barrier that passes a token around the ring twice, in 2p − 1 rounds. When the token returns to rank 0,
/// all ranks have entered. The second time it releases every rank.
pub const fn ring(rank: Rank) -> Schedule {
    let steps = match (rank.index(), rank.world_size()) {
        (_, 1) => 0,
        (0, _) => 3,
        (index, world_size) if index == world_size - 1 => 3,
        _ => 4,
    };
    Schedule::new(rank, steps, |rank, _, index| Some(ring_step(rank, index)))
}

/// Returns the dissemination barrier. In round `k` every rank sends an empty message to the rank 2^k to its right,
/// which then knows of all ranks that had entered. It takes ⌈log₂ p⌉ rounds.
pub const fn dissemination(rank: Rank) -> Schedule {
    Schedule::new(rank, log2_ceil(rank.world_size()), |rank, _, round| Some(dissemination_step(rank, round)))
}

const fn ring_step(rank: Rank, index: usize) -> Step {
    let sends_first = rank.index() == 0;
    if index.is_multiple_of(2) == sends_first {
        Step::send(rank.right().index(), Chunks::NONE)
    } else {
        Step::receive(ReceiveHalf::replace(rank.left().index(), Chunks::NONE))
    }
}

const fn dissemination_step(rank: Rank, round: usize) -> Step {
    let (to, from) = (rank.plus(1 << round).index(), rank.minus(1 << round).index());
    Step::exchange(SendHalf::buffer(to, Chunks::NONE), ReceiveHalf::replace(from, Chunks::NONE))
}

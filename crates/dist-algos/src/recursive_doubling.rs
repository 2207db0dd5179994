//! Recursive doubling: ranks at distance 1, 2, 4, … exchange everything that they have.
//!
//! It takes the fewest rounds, with the whole buffer in each: it is for small messages. Worlds that are no power of
//! two are folded to one, which costs two more rounds.

use dist_transport::Rank;

use crate::cost::log2_ceil;
use crate::fold::Fold;
use crate::{
    Chunks, CollectiveKind, Cost, MessageAlgorithm, Messages, Phases, ReceiveHalf, Schedule, SendHalf, Step,
};

/// All_reduce: [`reduce`], then [`release`].
pub static ALL_REDUCE: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::AllReduce,
    name: "recursive_doubling",
    about: "Ranks at distance 1, 2, 4, … exchange the whole buffer. Of a world that is no power of two, some ranks give \
            their buffers to a neighbour first and get the result last.",
    order: |world_size| Some(Fold::new(world_size).order()),
    cost,
    phases: |rank, _| Phases { first: reduce(rank), owned: owned(rank), second: release(rank) },
    ..MessageAlgorithm::NOTHING
};

/// All_gather, for powers of two.
pub static ALL_GATHER: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::AllGather,
    name: "recursive_doubling",
    about: "Ranks at distance 1, 2, 4, … exchange all that they have.",
    supports: usize::is_power_of_two,
    chunks: |world_size| world_size,
    cost: |world_size| Cost::alike(world_size, log2_ceil(world_size), world_size - 1, 0),
    phases: |rank, _| Phases::one(rank, all_gather(rank).unwrap_or(Schedule::nothing(rank))),
    ..MessageAlgorithm::NOTHING
};

/// The buffer is one chunk.
const WHOLE: Chunks = Chunks::one(0);

/// Returns the cost of [`reduce`] and [`release`] together.
const fn cost(world_size: usize) -> Cost {
    let fold = Fold::new(world_size);
    let (doublings, folded) = (fold.rounds(), if fold.spare > 0 { 1 } else { 0 });
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

/// Returns the first phase of an all_reduce: every rank gets the sum of the whole buffer, which is one chunk, except
/// the ranks that [`owned`] reports as inactive.
pub const fn reduce(rank: Rank) -> Schedule {
    let fold = Fold::new(rank.world_size());
    Schedule::new(rank, 1 + fold.rounds(), |rank, _, index| reduce_step(rank, index))
}

/// Returns the chunks of a rank after [`reduce`]: all, or none if it was inactive.
pub const fn owned(rank: Rank) -> Chunks {
    match Fold::new(rank.world_size()).in_core(rank) {
        Some(_) => WHOLE,
        None => Chunks::NONE,
    }
}

/// Returns the second phase of an all_reduce: the inactive ranks receive the result.
pub const fn release(rank: Rank) -> Schedule {
    Schedule::new(rank, 1, |rank, _, _| Fold::new(rank.world_size()).release(rank, WHOLE))
}

/// Copies chunk `r` of rank `r` to every rank, in log₂ p rounds. Returns `None` if the world size is no power of
/// two.
pub const fn all_gather(rank: Rank) -> Option<Schedule> {
    if !rank.world_size().is_power_of_two() {
        return None;
    }
    Some(Schedule::new(rank, rank.world_size().ilog2() as usize, |rank, _, round| {
        Some(all_gather_step(rank, round))
    }))
}

fn reduce_step(rank: Rank, index: usize) -> Option<Step> {
    let fold = Fold::new(rank.world_size());
    let Some(round) = index.checked_sub(1) else { return fold.fold_in(rank, WHOLE) };
    let place = fold.in_core(rank)?;
    Some(Step::exchange_in_place(fold.rank_at(place ^ (1 << round)), WHOLE))
}

const fn all_gather_step(rank: Rank, round: usize) -> Step {
    let size = 1 << round;
    let peer = rank.index() ^ size;
    let ours = Chunks::range(rank.index() & !(size - 1), size);
    let theirs = Chunks::range(peer & !(size - 1), size);
    Step::exchange(SendHalf::buffer(peer, ours), ReceiveHalf::replace(peer, theirs))
}

//! Recursive doubling: ranks at distance 1, 2, 4, … exchange everything that they have.
//!
//! It takes the fewest rounds, with the whole buffer in each: it is for small messages. Worlds that are no power of
//! two are folded to one, which costs two more rounds.

use dist_transport::Rank;

use crate::fold::Fold;
use crate::schedule::Kind;
use crate::{Chunks, ReceiveHalf, Schedule, SendHalf, Step};

/// The buffer is one chunk.
const WHOLE: Chunks = Chunks::one(0);

/// Moves the sum of the whole buffer, which is one chunk, to every rank, except those that [`owned`] reports as
/// inactive.
pub const fn reduce(rank: Rank) -> Schedule {
    let fold = Fold::new(rank.world_size());
    Schedule::new(rank, 1 + fold.rounds(), Kind::DoublingReduce)
}

/// Returns the chunks of a rank after [`reduce`]: all, or none if it was inactive.
pub const fn owned(rank: Rank) -> Chunks {
    match Fold::new(rank.world_size()).in_core(rank) {
        Some(_) => WHOLE,
        None => Chunks::NONE,
    }
}

/// Sends the result to the inactive ranks.
pub const fn release(rank: Rank) -> Schedule {
    Schedule::new(rank, 1, Kind::DoublingRelease)
}

/// Copies chunk `r` of rank `r` to every rank, in log₂ p rounds. Returns `None` if the world size is no power of
/// two.
pub const fn all_gather(rank: Rank) -> Option<Schedule> {
    if !rank.world_size().is_power_of_two() {
        return None;
    }
    Some(Schedule::new(rank, rank.world_size().ilog2() as usize, Kind::DoublingAllGather))
}

pub(crate) fn reduce_step(rank: Rank, index: usize) -> Option<Step> {
    let fold = Fold::new(rank.world_size());
    let Some(round) = index.checked_sub(1) else { return fold.fold_in(rank, WHOLE) };
    let place = fold.in_core(rank)?;
    Some(Step::exchange_in_place(fold.rank_at(place ^ (1 << round)), WHOLE))
}

pub(crate) fn release_step(rank: Rank) -> Option<Step> {
    Fold::new(rank.world_size()).release(rank, WHOLE)
}

pub(crate) const fn all_gather_step(rank: Rank, round: usize) -> Step {
    let size = 1 << round;
    let peer = rank.index() ^ size;
    let ours = Chunks::range(rank.index() & !(size - 1), size);
    let theirs = Chunks::range(peer & !(size - 1), size);
    Step::exchange(SendHalf::buffer(peer, ours), ReceiveHalf::replace(peer, theirs))
}

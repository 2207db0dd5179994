//! Halving-doubling: ranks at distance 1, 2, 4, … exchange a half, a quarter, an eighth, … and back again.
//!
//! The fewest bytes in the fewest rounds, at powers of two; there it reduces in canonical order, because
//! neighbours are added first. Rabenseifner, "Optimization of collective reduction operations", 2004, with
//! vector halving and distance doubling. Other worlds are folded, at the price of two messages of the whole
//! buffer for some ranks.

use dist_transport::Rank;

use crate::fold::Fold;
use crate::schedule::Kind;
use crate::{Chunks, ReceiveHalf, Schedule, SendHalf, Step};

/// Into how many chunks [`reduce`] and [`gather`] cut the buffer: the largest power of two in the world.
pub const fn chunks(world_size: usize) -> usize {
    Fold::new(world_size).core
}

/// Every chunk of the sum ends on the rank that [`owned`] says. The sets of chunks are contiguous, because
/// chunks are dealt in bit-reversed order.
pub const fn reduce(rank: Rank) -> Schedule {
    let fold = Fold::new(rank.world_size());
    Schedule::new(rank, 1 + fold.rounds(), Kind::HalvingReduce)
}

/// What a rank has after [`reduce`]: one chunk, or nothing if it sat out.
pub const fn owned(rank: Rank) -> Chunks {
    let fold = Fold::new(rank.world_size());
    match fold.in_core(rank) {
        Some(place) => Chunks::one(bit_reversed(place, fold)),
        None => Chunks::NONE,
    }
}

/// Every rank gets every chunk, where it has the chunk that [`owned`] says.
pub const fn gather(rank: Rank) -> Schedule {
    let fold = Fold::new(rank.world_size());
    Schedule::new(rank, fold.rounds() + 1, Kind::HalvingGather)
}

/// Chunk `r` of the sum ends on rank `r`, of as many chunks as there are ranks. `None` unless the world size is
/// a power of two.
pub const fn reduce_scatter(rank: Rank) -> Option<Schedule> {
    if !rank.world_size().is_power_of_two() {
        return None;
    }
    Some(Schedule::new(rank, rank.world_size().ilog2() as usize, Kind::HalvingReduceScatter))
}

/// Before round k a rank has sums of the chunks that agree with it in the lowest k bits; the peer across bit k
/// gets those that agree with the peer.
pub(crate) const fn reduce_scatter_step(rank: Rank, round: usize) -> Step {
    let (index, stride) = (rank.index(), 2 << round);
    let peer = index ^ (1 << round);
    let count = rank.world_size() / stride;
    let sent = Chunks { start: peer % stride, stride, count };
    let received = Chunks { start: index % stride, stride, count };
    Step::exchange(SendHalf { to: peer, chunks: sent }, ReceiveHalf::reduce(peer, received))
}

pub(crate) fn reduce_step(rank: Rank, index: usize) -> Option<Step> {
    let fold = Fold::new(rank.world_size());
    let Some(round) = index.checked_sub(1) else { return fold.fold_in(rank, Chunks::all(fold.core)) };
    let (peer, kept, given) = halves(rank, fold, round)?;
    Some(Step::exchange(SendHalf { to: peer, chunks: given }, ReceiveHalf::reduce(peer, kept)))
}

pub(crate) fn gather_step(rank: Rank, index: usize) -> Option<Step> {
    let fold = Fold::new(rank.world_size());
    if index == fold.rounds() {
        return fold.release(rank, Chunks::all(fold.core));
    }
    let (peer, kept, given) = halves(rank, fold, fold.rounds() - 1 - index)?;
    Some(Step::exchange(SendHalf { to: peer, chunks: kept }, ReceiveHalf::replace(peer, given)))
}

/// The peer of a halving round, the half of the rank's chunks that the rank keeps, and the half that it gives.
fn halves(rank: Rank, fold: Fold, round: usize) -> Option<(usize, Chunks, Chunks)> {
    let place = fold.in_core(rank)?;
    let half = fold.core >> (round + 1);
    let kept = bit_reversed(place, fold) & !(half - 1);
    let peer = fold.rank_at(place ^ (1 << round));
    Some((peer, Chunks::range(kept, half), Chunks::range(kept ^ half, half)))
}

/// Round k decides bit k of the place and bit (rounds − 1 − k) of the chunk.
const fn bit_reversed(place: usize, fold: Fold) -> usize {
    match fold.core.ilog2() {
        0 => 0,
        bits => place.reverse_bits() >> (usize::BITS - bits),
    }
}

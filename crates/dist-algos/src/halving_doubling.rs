//! Halving-doubling: ranks at distance 1, 2, 4, … exchange a half, a quarter, an eighth, … and back again.
//!
//! The fewest bytes in few rounds, in canonical order, because neighbours are added first. Rabenseifner,
//! "Optimization of collective reduction operations", 2004, with vector halving and distance doubling.
//!
//! Other worlds than powers of two are cut into blocks that are: the binary digits of the world size, the largest
//! first, which is how T(p) is cut. Every block halves by itself; then the smallest adds its sums to the next
//! larger one's, and so on up. On the way back the largest block, where some ranks have the same chunks, lets one of
//! them serve each rank of the smaller ones. A small block beside a large one is served badly: its ranks send and
//! receive much of the buffer in many messages.

use dist_transport::Rank;

use crate::schedule::Kind;
use crate::{Chunks, Cost, ReceiveHalf, Schedule, SendHalf, Step};

/// Into how many chunks [`reduce`] and [`gather`] cut the buffer: the largest power of two in the world.
pub const fn chunks(world_size: usize) -> usize {
    1 << levels(world_size)
}

/// Every chunk of the sum ends on the rank of the largest block that [`owned`] says. The sets of chunks are
/// contiguous, because chunks are dealt in bit-reversed order.
pub const fn reduce(rank: Rank) -> Schedule {
    let block = Block::of(rank);
    let fed = match block.larger(rank) {
        Some(larger) => 1 << (larger.bits - block.bits),
        None => 0,
    };
    Schedule::new(rank, block.bits + 1 + fed, Kind::HalvingReduce)
}

/// What a rank has after [`reduce`]: one chunk, or nothing outside of the largest block.
pub const fn owned(rank: Rank) -> Chunks {
    if rank.index() < chunks(rank.world_size()) {
        held(rank, levels(rank.world_size()))
    } else {
        Chunks::NONE
    }
}

/// Every rank gets every chunk, where it has the chunk that [`owned`] says.
pub const fn gather(rank: Rank) -> Schedule {
    Schedule::new(rank, 2 * levels(rank.world_size()) + 1, Kind::HalvingGather)
}

/// What [`reduce`] and [`gather`] cost together.
pub(crate) const fn cost(world_size: usize) -> Cost {
    let (levels, chunks) = (levels(world_size), chunks(world_size));
    // From the smallest block to the largest: when the last of its ranks has the sum of all blocks so far.
    let (mut rounds, mut path) = (0, 0);
    let mut smaller: Option<usize> = None;
    let mut bits = 0;
    while bits <= levels {
        if world_size >> bits & 1 == 1 {
            let halved = chunks - (chunks >> bits);
            rounds = if rounds > bits { rounds } else { bits };
            path = if path > halved { path } else { halved };
            if let Some(smaller) = smaller {
                rounds += 1 << (bits - smaller);
                path += chunks >> smaller;
            }
            smaller = Some(bits);
        }
        bits += 1;
    }
    let moved = chunks - 1;
    let (served, message) =
        if world_size == chunks { (0, 0) } else { (1, chunks >> world_size.trailing_zeros()) };
    Cost {
        rounds: rounds + levels + served,
        path: path + moved + message,
        sent_max: 2 * moved + message,
        reduced_max: moved + served,
    }
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
    let sent = Chunks::strided(peer % stride, stride, count);
    let received = Chunks::strided(index % stride, stride, count);
    Step::exchange(SendHalf::buffer(peer, sent), ReceiveHalf::reduce(peer, received))
}

/// A block's rounds of halving, what comes from the next smaller block, and what goes to the next larger one.
pub(crate) fn reduce_step(rank: Rank, index: usize) -> Option<Step> {
    let block = Block::of(rank);
    if index < block.bits {
        let peer = rank.index() ^ 1 << index;
        let (kept, given) = halves(rank, index);
        return Some(Step::exchange(SendHalf::buffer(peer, given), ReceiveHalf::reduce(peer, kept)));
    }
    let place = rank.index() - block.start;
    let Some(part) = index.checked_sub(block.bits + 1) else {
        let smaller = block.smaller(rank)?;
        let from = smaller.start + place % smaller.size();
        return Some(Step::receive(ReceiveHalf::reduce(from, held(rank, block.bits))));
    };
    let larger = block.larger(rank)?;
    let to = larger.start + place + part * block.size();
    let to_rank = Rank::new(to, rank.world_size())?;
    Some(Step::send(to, held(to_rank, larger.bits)))
}

/// From single chunks back to all: at every level one message between the largest block and a smaller one that
/// begins there, then one round of doubling.
pub(crate) fn gather_step(rank: Rank, index: usize) -> Option<Step> {
    let block = Block::of(rank);
    let level = levels(rank.world_size()) - index / 2;
    if level > block.bits {
        return None;
    }
    if index.is_multiple_of(2) {
        return serve(rank, block, level);
    }
    let level = level - 1;
    let peer = rank.index() ^ 1 << level;
    let (kept, given) = halves(rank, level);
    Some(Step::exchange(SendHalf::buffer(peer, kept), ReceiveHalf::replace(peer, given)))
}

/// The ranks of the largest block from 2^level up to the next power of two serve the block of that level.
fn serve(rank: Rank, block: Block, level: usize) -> Option<Step> {
    let (size, chunks) = (1 << level, held(rank, level));
    if block.start > 0 {
        let from = rank.index() - block.start + size;
        return (level == block.bits).then(|| Step::receive(ReceiveHalf::replace(from, chunks)));
    }
    let place = rank.index().checked_sub(size).filter(|&place| place < size)?;
    let served = Block::at(rank, level)?;
    Some(Step::send(served.start + place, chunks))
}

/// The ranks from `start`, 2^bits of them: one binary digit of the world size.
#[derive(Clone, Copy, Debug)]
struct Block {
    start: usize,
    bits: usize,
}

impl Block {
    /// The block of a rank: the highest digit in which the world size and the rank differ.
    const fn of(rank: Rank) -> Self {
        let bits = (rank.index() ^ rank.world_size()).ilog2() as usize;
        Self { start: rank.index() >> bits << bits, bits }
    }

    /// The block of 2^bits ranks, if the world is not smaller and has one.
    const fn at(rank: Rank, bits: usize) -> Option<Self> {
        let digits = rank.world_size() >> bits;
        if digits % 2 == 1 { Some(Self { start: (digits - 1) << bits, bits }) } else { None }
    }

    const fn size(self) -> usize {
        1 << self.bits
    }

    const fn larger(self, rank: Rank) -> Option<Self> {
        if self.start == 0 { None } else { Self::at(rank, self.start.trailing_zeros() as usize) }
    }

    const fn smaller(self, rank: Rank) -> Option<Self> {
        match (rank.world_size() % self.size()).checked_ilog2() {
            Some(bits) => Self::at(rank, bits as usize),
            None => None,
        }
    }
}

/// Rounds of halving in the largest block. A world of no ranks is one of a single rank.
const fn levels(world_size: usize) -> usize {
    match world_size.checked_ilog2() {
        Some(levels) => levels as usize,
        None => 0,
    }
}

/// The chunks that a rank has after as many rounds of halving: those that begin like the digits of its place in
/// its block, the lowest first.
const fn held(rank: Rank, rounds: usize) -> Chunks {
    let levels = levels(rank.world_size());
    let size = 1 << (levels - rounds);
    let start = match levels {
        0 => 0,
        _ => rank.index().reverse_bits() >> (usize::BITS as usize - levels) & !(size - 1),
    };
    Chunks::range(start, size)
}

/// The half of its chunks that a rank keeps in a round, and the half that it gives.
const fn halves(rank: Rank, round: usize) -> (Chunks, Chunks) {
    let kept = held(rank, round + 1);
    (kept, Chunks::range(kept.first() ^ kept.len(), kept.len()))
}

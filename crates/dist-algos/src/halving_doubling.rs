//! Halving-doubling: ranks at distance 1, 2, 4, … exchange a half, a quarter, an eighth, … and back again.
//!
//! It sends the fewest bytes in few rounds, in canonical order, because neighbours are added first. Rabenseifner,
//! "Optimization of collective reduction operations", 2004, with vector halving and distance doubling.
//!
//! A world that is no power of two is divided into blocks: the binary digits of its size, the largest first, as
//! T(p) is split. Every block halves by itself. Then the smallest block adds its sums to those of the next larger
//! one, and so on upwards. On the way back, some ranks of the largest block have the same chunks, and one of them
//! serves each rank of the smaller blocks. A small block beside a large one is slow: its ranks send and receive
//! much of the buffer in many messages.

use dist_transport::Rank;

use crate::binary_blocks::{BlockAssignment, RankBlock, levels, strided_count};
use crate::{
    Chunks, CollectiveKind, Cost, MessageAlgorithm, Messages, Order, Phases, ReceiveHalf, Schedule, SendHalf,
    Source, Step,
};

/// All_reduce: [`reduce`], then [`gather`].
pub static ALL_REDUCE: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::AllReduce,
    name: "halving_doubling",
    about: "A half, a quarter, an eighth, … of the buffer, and back. A world that is no power of two is divided into blocks \
            that are; smaller blocks give their sums to larger ones.",
    chunks,
    order: |_| Some(Order::Canonical),
    cost,
    phases: |rank, _| Phases { first: reduce(rank), owned: owned(rank), second: gather(rank) },
    ..MessageAlgorithm::NOTHING
};

/// Reduce_scatter: the first half of the all_reduce, in other chunks.
pub static REDUCE_SCATTER: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::ReduceScatter,
    name: "halving_doubling",
    about: "Ranks at distance 1, 2, 4, … exchange the halves of their sums that the other rank needs.",
    chunks: |world_size| world_size,
    order: |_| Some(Order::Canonical),
    cost: reduce_scatter_cost,
    sends_from: |world_size| if world_size <= 2 { Source::Input } else { Source::Buffer },
    phases: |rank, _| Phases::one(rank, reduce_scatter(rank)),
    ..MessageAlgorithm::NOTHING
};

/// Returns the number of chunks for [`reduce`] and [`gather`]: the largest power of two in the world.
pub const fn chunks(world_size: usize) -> usize {
    1 << levels(world_size)
}

/// Returns the first phase of an all_reduce: every chunk of the sum is computed on one rank of the largest block,
/// which [`owned`] returns. The chunks of a message are contiguous, because chunks are assigned in bit-reversed
/// order.
pub const fn reduce(rank: Rank) -> Schedule {
    Schedule::new(rank, reduce_steps(rank), |rank, _, index| reduce_step(rank, BlockAssignment::Runs, index))
}

/// Returns the chunks of a rank after [`reduce`]: one, or none outside of the largest block.
pub const fn owned(rank: Rank) -> Chunks {
    if rank.index() < chunks(rank.world_size()) {
        BlockAssignment::Runs.held(rank, levels(rank.world_size()))
    } else {
        Chunks::NONE
    }
}

/// Returns the second phase of an all_reduce: every chunk is copied from the rank that [`owned`] returns to every
/// rank.
pub const fn gather(rank: Rank) -> Schedule {
    Schedule::new(rank, 2 * levels(rank.world_size()) + 1, |rank, _, index| gather_step(rank, index))
}

/// Returns the cost of [`reduce`] and [`gather`] together.
const fn cost(world_size: usize) -> Cost {
    let (levels, chunks) = (levels(world_size), chunks(world_size));
    // From the smallest block to the largest: the time at which the last of its ranks has the sum of all blocks so
    // far.
    let (mut rounds, mut path) = (0, 0);
    let (mut all, mut depth) = (Messages::new(0, 0), Messages::new(0, 0));
    let mut smaller: Option<usize> = None;
    let mut bits = 0;
    while bits <= levels {
        if world_size >> bits & 1 == 1 {
            let halved = chunks - (chunks >> bits);
            rounds = if rounds > bits { rounds } else { bits };
            path = if path > halved { path } else { halved };
            all = all.and(Messages::new(2 * bits, 2 * halved).times(1 << bits));
            if let Some(smaller) = smaller {
                rounds += 1 << (bits - smaller);
                path += chunks >> smaller;
                depth = depth.and(Messages::new(1, chunks >> bits));
                // One message to each rank of this block, and one back to each rank of the smaller block.
                all = all.and(Messages::new((1 << bits) + (1 << smaller), 2 * chunks));
            }
            depth = depth.at_least(Messages::new(bits, halved));
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
        all,
        depth: depth.and(Messages::new(levels + served, moved + message)),
        reduced: (world_size - 1) * chunks,
    }
}

/// Returns a reduce_scatter by halving. There are as many chunks as ranks, and rank `r` ends with the sum of chunk
/// `r`.
///
/// The largest block computes all sums. Ranks of that block that have a counterpart in a smaller block compute two,
/// and send the counterpart its sum in the last step.
pub const fn reduce_scatter(rank: Rank) -> Schedule {
    Schedule::new(rank, reduce_steps(rank) + 1, |rank, _, index| reduce_scatter_step(rank, index))
}

/// Returns the cost of [`reduce_scatter`].
const fn reduce_scatter_cost(world_size: usize) -> Cost {
    let levels = levels(world_size);
    let (mut rounds, mut path) = (0, 0);
    let (mut all, mut depth) = (Messages::new(0, 0), Messages::new(0, 0));
    let mut smaller: Option<usize> = None;
    let mut bits = 0;
    while bits <= levels {
        if world_size >> bits & 1 == 1 {
            rounds = if rounds > bits { rounds } else { bits };
            // Each round halves the chunks of all ranks of the block.
            all = all.and(Messages::new(bits << bits, ((1 << bits) - 1) * world_size));
            match smaller {
                None => path = halved(world_size, 0, bits),
                Some(smaller) => {
                    // The last rank of the block gets its data first.
                    let ready = halved(world_size, (1 << bits) - (1 << smaller), bits);
                    path = if path > ready { path } else { ready };
                    path += strided_count(world_size, 0, smaller);
                    rounds += 1 << (bits - smaller);
                    depth = depth.and(Messages::new(1, strided_count(world_size, 0, bits)));
                    all = all.and(Messages::new(1 << bits, world_size));
                }
            }
            depth = depth.at_least(Messages::new(bits, halved(world_size, 0, bits)));
            smaller = Some(bits);
        }
        bits += 1;
    }
    let (halved, reduced) = (halved(world_size, 0, levels), (world_size - 1) * world_size);
    if world_size.is_power_of_two() {
        return Cost { rounds, path, sent_max: world_size - 1, reduced_max: halved, all, depth, reduced };
    }
    let handed_over = world_size - chunks(world_size);
    Cost {
        rounds: rounds + 1,
        path: path + 1,
        sent_max: world_size,
        reduced_max: halved + strided_count(world_size, 0, levels),
        all: all.and(Messages::new(handed_over, handed_over)),
        depth: depth.and(Messages::new(1, 1)),
        reduced,
    }
}

/// Returns the number of chunks on the longest path to a position of a block with this many rounds of halving.
const fn halved(world_size: usize, place: usize, rounds: usize) -> usize {
    let (mut path, mut round) = (0, 0);
    while round < rounds {
        path += strided_count(world_size, place % (1 << round), round + 1);
        round += 1;
    }
    path
}

/// Returns the number of steps until the largest block has the sums.
const fn reduce_steps(rank: Rank) -> usize {
    let block = RankBlock::of(rank);
    block.bits + 1 + block.feeds(rank)
}

fn reduce_scatter_step(rank: Rank, index: usize) -> Option<Step> {
    let steps = reduce_steps(rank);
    if index < steps {
        return reduce_step(rank, BlockAssignment::Strided, index);
    }
    let largest = chunks(rank.world_size());
    match rank.index().checked_sub(largest) {
        Some(from) => Some(Step::receive(ReceiveHalf::replace(from, Chunks::one(rank.index())))),
        None => {
            let to = Some(rank.index() + largest).filter(|&to| to < rank.world_size())?;
            Some(Step::send(to, Chunks::one(to)))
        }
    }
}

/// Returns a step of the first phase. A rank first halves with ranks of its block. Then it receives a message of the
/// next smaller block, and sends messages to the next larger block, whose last rank gets its data first.
fn reduce_step(rank: Rank, deal: BlockAssignment, index: usize) -> Option<Step> {
    let block = RankBlock::of(rank);
    if index < block.bits {
        let peer = across(rank, index);
        let (kept, given) = (deal.held(rank, index + 1), deal.held(peer, index + 1));
        let send = SendHalf::buffer(peer.index(), given);
        return Some(Step::exchange(send, ReceiveHalf::reduce(peer.index(), kept)));
    }
    let place = rank.index() - block.start;
    let Some(part) = index.checked_sub(block.bits + 1) else {
        let smaller = block.smaller(rank)?;
        let from = smaller.start + place % smaller.size();
        return Some(Step::receive(ReceiveHalf::reduce(from, deal.held(rank, block.bits))));
    };
    let larger = block.larger(rank)?;
    let to = larger.start + place + (block.feeds(rank) - 1 - part) * block.size();
    let chunks = deal.held(rank.plus(rank.world_size() + to - rank.index()), larger.bits);
    Some(Step::send(to, chunks))
}

/// Returns a step of the second phase, from single chunks to all chunks. At each level a rank of the largest block
/// sends a message to a smaller block that begins at this level, then one round of doubling follows.
fn gather_step(rank: Rank, index: usize) -> Option<Step> {
    let block = RankBlock::of(rank);
    let level = levels(rank.world_size()) - index / 2;
    if level > block.bits {
        return None;
    }
    if index.is_multiple_of(2) {
        return serve(rank, block, level);
    }
    let peer = across(rank, level - 1);
    let (ours, theirs) = (BlockAssignment::Runs.held(rank, level), BlockAssignment::Runs.held(peer, level));
    let send = SendHalf::buffer(peer.index(), ours);
    Some(Step::exchange(send, ReceiveHalf::replace(peer.index(), theirs)))
}

/// The ranks of the largest block from 2^level up to the next power of two serve the block of that level.
fn serve(rank: Rank, block: RankBlock, level: usize) -> Option<Step> {
    let (size, chunks) = (1 << level, BlockAssignment::Runs.held(rank, level));
    if block.start > 0 {
        let from = rank.index() - block.start + size;
        return (level == block.bits).then(|| Step::receive(ReceiveHalf::replace(from, chunks)));
    }
    let place = rank.index().checked_sub(size).filter(|&place| place < size)?;
    let served = RankBlock::at(rank, level)?;
    Some(Step::send(served.start + place, chunks))
}

/// Returns the rank of the same block whose number differs in one binary digit.
const fn across(rank: Rank, digit: usize) -> Rank {
    let distance = 1 << digit;
    if rank.index() & distance == 0 { rank.plus(distance) } else { rank.minus(distance) }
}

//! A k-nomial tree with k = 4: broadcast with half the depth of a [binomial](crate::binomial) tree.
//!
//! A rank has up to three children on every level, so the root sends more messages than in a binomial tree. The
//! cost model counts them one after the other. The tree is faster if the latency of a message is long compared to
//! the time to send it, as for small messages.

use dist_transport::Rank;

use crate::cost::log2_ceil;
use crate::{Chunks, CollectiveKind, Cost, MessageAlgorithm, Phases, ReceiveHalf, Schedule, Step};

/// Broadcast: the whole buffer down the tree.
pub static BROADCAST: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::Broadcast,
    name: "knomial",
    about: "Down a flatter tree, in which a rank has up to three children on a level.",
    cost: |world_size| Cost::tree(world_size, rounds(world_size), depth(world_size)),
    phases: |rank, root| Phases::one(rank, broadcast(rank, root)),
    ..MessageAlgorithm::NOTHING
};

/// The buffer is one chunk.
const WHOLE: Chunks = Chunks::one(0);

/// Ranks are numbered from the root. Each digit of the number has two bits.
const BITS: usize = 2;

/// The number of a parent's children on one level.
const CHILDREN: usize = (1 << BITS) - 1;

/// Returns a broadcast along a k-nomial tree: the buffer of `root`, which is one chunk, is copied to every rank. A
/// root outside the world is taken modulo its size.
pub const fn broadcast(rank: Rank, root: usize) -> Schedule {
    Schedule::rooted(rank, root, levels(rank.world_size()) * CHILDREN, broadcast_step)
}

/// Returns the number of messages that the root sends: one to each child on the highest level, and three on every
/// other level. The longest chain of messages has the same length.
const fn rounds(world_size: usize) -> usize {
    match levels(world_size) {
        0 => 0,
        levels => ((world_size - 1) >> ((levels - 1) * BITS)) + (levels - 1) * CHILDREN,
    }
}

/// Returns the longest chain of messages in which each must arrive before the next can leave. It is the maximum
/// number of non-zero digits of a rank's number.
const fn depth(world_size: usize) -> usize {
    let (mut depth, mut ones) = (0, 1);
    while ones < world_size {
        (depth, ones) = (depth + 1, (ones << BITS) + 1);
    }
    depth
}

/// Sends from the parent of a group to the first rank of each other part of the group, from the highest level
/// down.
fn broadcast_step(rank: Rank, root: usize, index: usize) -> Option<Step> {
    let level = levels(rank.world_size()) - 1 - index / CHILDREN;
    let distance = (index % CHILDREN + 1) << (level * BITS);
    let place = rank.index() + if rank.index() < root { rank.world_size() } else { 0 } - root;
    match place % (1 << ((level + 1) * BITS)) {
        0 if place + distance < rank.world_size() => Some(Step::send(rank.plus(distance).index(), WHOLE)),
        low if low == distance => {
            Some(Step::receive(ReceiveHalf::replace(rank.minus(distance).index(), WHOLE)))
        }
        _ => None,
    }
}

/// Returns the number of digits of the last rank's number.
const fn levels(world_size: usize) -> usize {
    log2_ceil(world_size).div_ceil(BITS)
}

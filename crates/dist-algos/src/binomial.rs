//! Binomial trees: whole buffers to or from one rank in ⌈log₂ p⌉ rounds.
//!
//! The tree is T(p) for every root: a subtree's sum is kept by the root if the root is in it, else by the
//! subtree's first rank. So `reduce` is canonical at any root, with no more messages (p − 1) or rounds than a
//! tree that is turned to begin at the root, which would not be. `broadcast` is its mirror.

use dist_transport::Rank;

use crate::cost::log2_ceil;
use crate::schedule::Kind;
use crate::{Chunks, ReceiveHalf, Schedule, Step};

/// The buffer is one chunk.
const WHOLE: Chunks = Chunks::one(0);

/// The sum of the whole buffer, which is one chunk, ends on `root`; on others the buffer holds a partial sum.
/// A root outside the world is taken modulo its size.
pub const fn reduce(rank: Rank, root: usize) -> Schedule {
    let root = root % rank.world_size();
    Schedule::new(rank, log2_ceil(rank.world_size()), Kind::BinomialReduce { root })
}

/// The buffer of `root`, which is one chunk, ends on every rank.
/// A root outside the world is taken modulo its size.
pub const fn broadcast(rank: Rank, root: usize) -> Schedule {
    let root = root % rank.world_size();
    Schedule::new(rank, log2_ceil(rank.world_size()), Kind::BinomialBroadcast { root })
}

pub(crate) fn reduce_step(rank: Rank, root: usize, level: usize) -> Option<Step> {
    match edge(rank, root, level)? {
        Edge::Up(parent) => Some(Step::send(parent, WHOLE)),
        Edge::Down(child) => Some(Step::receive(ReceiveHalf::reduce(child, WHOLE))),
    }
}

pub(crate) fn broadcast_step(rank: Rank, root: usize, index: usize) -> Option<Step> {
    let level = log2_ceil(rank.world_size()) - 1 - index;
    match edge(rank, root, level)? {
        Edge::Up(parent) => Some(Step::receive(ReceiveHalf::replace(parent, WHOLE))),
        Edge::Down(child) => Some(Step::send(child, WHOLE)),
    }
}

/// The one edge of the tree that a rank can have at a level, seen from the rank.
enum Edge {
    Up(usize),
    Down(usize),
}

/// At a level, a block of ranks is made of two halves, and the keeper of one half's sum is the block's keeper.
fn edge(rank: Rank, root: usize, level: usize) -> Option<Edge> {
    let half = 1 << level;
    let start = rank.index() / half / 2 * half * 2;
    let middle = start + half;
    if middle >= rank.world_size() {
        return None;
    }
    let left = if (start..middle).contains(&root) { root } else { start };
    let right = if (middle..middle + half).contains(&root) { root } else { middle };
    let (parent, child) = if right == root { (right, left) } else { (left, right) };
    match rank.index() {
        index if index == parent => Some(Edge::Down(child)),
        index if index == child => Some(Edge::Up(parent)),
        _ => None,
    }
}

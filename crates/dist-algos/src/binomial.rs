//! Binomial trees: buffers to or from one rank in ⌈log₂ p⌉ rounds.
//!
//! The tree is T(p) for every root. The root keeps the sum of a subtree that contains it; otherwise the first rank
//! of the subtree keeps it. So `reduce` is canonical for any root, with the same p − 1 messages and the same rounds
//! as a tree that is rotated to begin at the root, which would not be canonical. `broadcast` is the mirror image.
//! In `gather` and `scatter` the ranks of every subtree are consecutive, so its chunks are one piece of memory.

use dist_transport::Rank;

use crate::cost::{halvings, log2_ceil};
use crate::{
    Chunks, CollectiveKind, Cost, MessageAlgorithm, Messages, Order, Phases, ReceiveHalf, Schedule, SendHalf,
    Step,
};

/// All_reduce: [`reduce`] to rank 0, then [`broadcast`] from it.
pub static ALL_REDUCE: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::AllReduce,
    name: "binomial",
    about: "A reduce to rank 0 and a broadcast from it, along one tree.",
    order: |_| Some(Order::Canonical),
    cost: all_reduce_cost,
    phases: |rank, _| Phases {
        first: reduce(rank, 0),
        owned: if rank.index() == 0 { WHOLE } else { Chunks::NONE },
        second: broadcast(rank, 0),
    },
    ..MessageAlgorithm::NOTHING
};

/// Broadcast: the whole buffer down the tree.
pub static BROADCAST: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::Broadcast,
    name: "binomial",
    about: "Down the canonical tree: each rank that has the buffer sends it on, and their number doubles every round.",
    cost: |world_size| Cost::tree(world_size, log2_ceil(world_size), log2_ceil(world_size)),
    phases: |rank, root| Phases::one(rank, broadcast(rank, root)),
    ..MessageAlgorithm::NOTHING
};

/// Reduce: the whole buffer up the tree.
pub static REDUCE: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::Reduce,
    name: "binomial",
    about: "Up the canonical tree, whichever rank is the root.",
    order: |_| Some(Order::Canonical),
    cost: |world_size| {
        let (rounds, peers) = (log2_ceil(world_size), world_size - 1);
        let tree = Cost::tree(world_size, rounds, rounds);
        Cost { sent_max: 1, reduced_max: rounds, reduced: peers, ..tree }
    },
    phases: |rank, root| Phases::one(rank, reduce(rank, root)),
    ..MessageAlgorithm::NOTHING
};

/// Gather: chunks up the tree.
pub static GATHER: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::Gather,
    name: "binomial",
    about: "Up a tree whose subtrees are neighbours.",
    chunks: |world_size| world_size,
    cost: |world_size| Cost { sent_max: world_size.next_power_of_two() / 2, ..rooted_cost(world_size) },
    held: gather_held,
    phases: |rank, root| Phases::one(rank, gather(rank, root)),
    ..MessageAlgorithm::NOTHING
};

/// Scatter: chunks down the tree.
pub static SCATTER: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::Scatter,
    name: "binomial",
    about: "Down a tree whose subtrees are neighbours.",
    chunks: |world_size| world_size,
    cost: rooted_cost,
    held: scatter_held,
    phases: |rank, root| Phases::one(rank, scatter(rank, root)),
    ..MessageAlgorithm::NOTHING
};

/// Returns the cost of [`reduce`] to rank 0 and [`broadcast`] from it.
const fn all_reduce_cost(world_size: usize) -> Cost {
    let (depth, peers, waits) = (log2_ceil(world_size), world_size - 1, 2 * world_size.ilog2() as usize);
    Cost {
        rounds: 2 * depth,
        path: 2 * depth,
        sent_max: depth,
        reduced_max: depth,
        all: Messages::new(2 * peers, 2 * peers),
        depth: Messages::new(waits, waits),
        reduced: peers,
    }
}

/// The buffer is one chunk.
const WHOLE: Chunks = Chunks::one(0);

/// Returns a reduce along a binomial tree: `root` gets the sum of the whole buffer, which is one chunk. On other
/// ranks the buffer holds a partial sum afterwards. A root outside the world is taken modulo its size.
pub const fn reduce(rank: Rank, root: usize) -> Schedule {
    Schedule::rooted(rank, root, log2_ceil(rank.world_size()), reduce_step)
}

/// Returns a broadcast along a binomial tree: the buffer of `root`, which is one chunk, is copied to every rank. A
/// root outside the world is taken modulo its size.
pub const fn broadcast(rank: Rank, root: usize) -> Schedule {
    Schedule::rooted(rank, root, log2_ceil(rank.world_size()), broadcast_step)
}

/// Returns a gather: chunk `r` of rank `r` is copied to the root's buffer. Ranks that forward chunks of others have
/// their own chunk in the buffer. The other ranks send from their input ([`MessageAlgorithm::held`]). A root outside
/// the world is taken modulo its size.
pub const fn gather(rank: Rank, root: usize) -> Schedule {
    Schedule::rooted(rank, root, log2_ceil(rank.world_size()), gather_step)
}

/// Returns a scatter along a binomial tree: chunk `r` of the root's input is sent to every other rank `r`. A root
/// outside the world is taken modulo its size.
pub const fn scatter(rank: Rank, root: usize) -> Schedule {
    Schedule::rooted(rank, root, log2_ceil(rank.world_size()), scatter_step)
}

/// Returns the chunks that pass through the buffer of a rank in [`gather`]: those that it forwards, and its own if it
/// forwards any.
fn gather_held(rank: Rank, root: usize) -> Chunks {
    if rank.index() == root {
        return Chunks::all(rank.world_size());
    }
    let subtree = subtree(rank, root);
    if subtree.len() > 1 { subtree } else { Chunks::NONE }
}

/// Returns the chunks that pass through the buffer of a rank in [`scatter`]; none on the root, which sends from its
/// input.
fn scatter_held(rank: Rank, root: usize) -> Chunks {
    if rank.index() == root { Chunks::NONE } else { subtree(rank, root) }
}

/// Returns the cost of [`scatter`]. It is also the cost of [`gather`], except for the chunks that the rank with the
/// most traffic sends: the root of a scatter. The most expensive root is in the smallest block, because larger blocks
/// are sent as a whole.
const fn rooted_cost(world_size: usize) -> Cost {
    let (peers, rounds, whole_tree) = (world_size - 1, log2_ceil(world_size), world_size.next_power_of_two());
    let mut moved = world_size - (1 << world_size.trailing_zeros());
    let mut bit = 0;
    while bit < rounds + 1 {
        if world_size >> bit & 1 == 1 {
            moved += halvings(1 << bit);
        }
        bit += 1;
    }
    Cost {
        rounds,
        path: whole_tree - 1,
        sent_max: peers,
        all: Messages::new(peers, moved),
        depth: Messages::new(rounds, whole_tree - 1),
        ..Cost::NOTHING
    }
}

fn reduce_step(rank: Rank, root: usize, level: usize) -> Option<Step> {
    match edge(rank, root, level)? {
        Edge::Up(parent, _) => Some(Step::send(parent, WHOLE)),
        Edge::Down(child, _) => Some(Step::receive(ReceiveHalf::reduce(child, WHOLE))),
    }
}

fn broadcast_step(rank: Rank, root: usize, index: usize) -> Option<Step> {
    let level = log2_ceil(rank.world_size()) - 1 - index;
    match edge(rank, root, level)? {
        Edge::Up(parent, _) => Some(Step::receive(ReceiveHalf::replace(parent, WHOLE))),
        Edge::Down(child, _) => Some(Step::send(child, WHOLE)),
    }
}

fn gather_step(rank: Rank, root: usize, level: usize) -> Option<Step> {
    match edge(rank, root, level)? {
        Edge::Up(parent, chunks) if chunks.len() == 1 => {
            Some(Step::send_half(SendHalf::input(parent, chunks)))
        }
        Edge::Up(parent, chunks) => Some(Step::send(parent, chunks)),
        Edge::Down(child, chunks) => Some(Step::receive(ReceiveHalf::replace(child, chunks))),
    }
}

fn scatter_step(rank: Rank, root: usize, index: usize) -> Option<Step> {
    let level = log2_ceil(rank.world_size()) - 1 - index;
    match edge(rank, root, level)? {
        Edge::Up(parent, chunks) => Some(Step::receive(ReceiveHalf::replace(parent, chunks))),
        Edge::Down(child, chunks) if rank.index() == root => {
            Some(Step::send_half(SendHalf::input(child, chunks)))
        }
        Edge::Down(child, chunks) => Some(Step::send(child, chunks)),
    }
}

/// The only edge of the tree that a rank can have at a level, and the ranks below the edge.
enum Edge {
    Up(usize, Chunks),
    Down(usize, Chunks),
}

/// Returns the edge that a rank has in the tree at a level, if it has one. The edge connects the two halves of a
/// block of ranks, each represented by one rank: the root, if the half contains it, and otherwise the first rank of
/// the half.
fn edge(rank: Rank, root: usize, level: usize) -> Option<Edge> {
    let half = 1 << level;
    let start = rank.index() / half / 2 * half * 2;
    let middle = start + half;
    if middle >= rank.world_size() {
        return None;
    }
    let (low, high) =
        (Chunks::range(start, half), Chunks::range(middle, half.min(rank.world_size() - middle)));
    let left = if low.contains(root) { root } else { start };
    let right = if high.contains(root) { root } else { middle };
    let (parent, child, below) = if right == root { (right, left, low) } else { (left, right, high) };
    match rank.index() {
        index if index == parent => Some(Edge::Down(child, below)),
        index if index == child => Some(Edge::Up(parent, below)),
        _ => None,
    }
}

/// Returns the ranks below the upward edge of a rank other than the root.
fn subtree(rank: Rank, root: usize) -> Chunks {
    let up = (0..log2_ceil(rank.world_size())).find_map(|level| match edge(rank, root, level) {
        Some(Edge::Up(_, below)) => Some(below),
        _ => None,
    });
    up.unwrap_or(Chunks::NONE)
}

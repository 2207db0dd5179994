//! Linear schedules: the root communicates with every other rank, one after the other.
//!
//! The root moves the fewest bytes, in p − 1 rounds, and the other ranks need no extra memory.

use dist_transport::Rank;

use crate::{
    Chunks, CollectiveKind, Cost, MessageAlgorithm, Messages, Phases, ReceiveHalf, Schedule, SendHalf,
    Source, Step,
};

/// Gather: every rank sends to the root.
pub static GATHER: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::Gather,
    name: "linear",
    about: "Every rank to the root, one after the other.",
    chunks: |world_size| world_size,
    cost: |world_size| Cost { sent_max: 1, ..cost(world_size) },
    held: |rank, root| if rank.index() == root { Chunks::all(rank.world_size()) } else { Chunks::NONE },
    phases: |rank, root| Phases::one(rank, gather(rank, root)),
    ..MessageAlgorithm::NOTHING
};

/// Scatter: the root sends to every rank.
pub static SCATTER: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::Scatter,
    name: "linear",
    about: "The root to every rank, one after the other.",
    chunks: |world_size| world_size,
    cost,
    held: |rank, root| if rank.index() == root { Chunks::NONE } else { Chunks::one(rank.index()) },
    phases: |rank, root| Phases::one(rank, scatter(rank, root)),
    ..MessageAlgorithm::NOTHING
};

/// Returns a scatter in which the root sends chunk `r` of its input to every other rank `r`, one after the other. A
/// root outside the world is taken modulo its size.
pub const fn scatter(rank: Rank, root: usize) -> Schedule {
    Schedule::rooted(rank, root, rank.world_size() - 1, scatter_step)
}

/// Returns a gather in which the root receives chunk `r` from every other rank `r`, one after the other. A root
/// outside the world is taken modulo its size.
pub const fn gather(rank: Rank, root: usize) -> Schedule {
    Schedule::rooted(rank, root, rank.world_size() - 1, gather_step)
}

/// Returns the cost of [`scatter`]. It is also the cost of [`gather`], except for the chunks that the rank with the
/// most traffic sends: the root of a scatter.
const fn cost(world_size: usize) -> Cost {
    let peers = world_size - 1;
    Cost {
        rounds: peers,
        path: peers,
        sent_max: peers,
        all: Messages::new(peers, peers),
        depth: Messages::new(1, 1),
        ..Cost::NOTHING
    }
}

fn scatter_step(rank: Rank, root: usize, index: usize) -> Option<Step> {
    let peer = (root + 1 + index) % rank.world_size();
    let chunks = Chunks::one(peer);
    if rank.index() == root {
        return Some(Step::send_half(SendHalf { to: peer, chunks, of: Source::Input }));
    }
    (rank.index() == peer).then(|| Step::receive(ReceiveHalf::replace(root, chunks)))
}

fn gather_step(rank: Rank, root: usize, index: usize) -> Option<Step> {
    let peer = (root + 1 + index) % rank.world_size();
    let chunks = Chunks::one(peer);
    if rank.index() == root {
        return Some(Step::receive(ReceiveHalf::replace(peer, chunks)));
    }
    (rank.index() == peer).then(|| Step::send_half(SendHalf { to: root, chunks, of: Source::Input }))
}

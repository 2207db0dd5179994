//! A pipelined chain: every rank forwards one chunk while it receives the next.
//!
//! Every rank sends the buffer once; with a scatter and a ring it would be twice. The last rank waits until the
//! chain is filled, so the chain is for large buffers in worlds of fewer ranks than chunks.

use dist_transport::Rank;

use crate::{
    Chunks, CollectiveKind, Cost, MessageAlgorithm, Messages, Phases, ReceiveHalf, Schedule, SendHalf, Step,
};

/// Broadcast: chunk by chunk from rank to rank.
pub static BROADCAST: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::Broadcast,
    name: "chain",
    about: "Every rank forwards 32 chunks to its right neighbour, one after the other.",
    chunks: |_| CHUNKS,
    cost,
    phases: |rank, root| Phases::one(rank, broadcast(rank, root)),
    ..MessageAlgorithm::NOTHING
};

const fn cost(world_size: usize) -> Cost {
    let (rounds, peers) = (CHUNKS + world_size - 2, world_size - 1);
    Cost {
        rounds,
        path: rounds,
        sent_max: CHUNKS,
        all: Messages::new(CHUNKS * peers, CHUNKS * peers),
        depth: Messages::new(peers, peers),
        ..Cost::NOTHING
    }
}

/// The number of chunks of the buffer.
const CHUNKS: usize = 32;

/// Returns a broadcast along a chain of ranks, which begins at the root and goes to the right. The buffer is sent in
/// the chunks of [`BROADCAST`]. A root outside the world is taken modulo its size.
pub const fn broadcast(rank: Rank, root: usize) -> Schedule {
    let steps = if rank.world_size() == 1 { 0 } else { CHUNKS + 1 };
    Schedule::rooted(rank, root, steps, broadcast_step)
}

/// Receives a chunk while the previous one is sent.
fn broadcast_step(rank: Rank, root: usize, index: usize) -> Option<Step> {
    let (left, right) = (rank.left().index(), rank.right().index());
    let send = index.checked_sub(1).filter(|_| right != root);
    let send = send.map(|chunk| SendHalf::buffer(right, Chunks::one(chunk)));
    let receives = rank.index() != root && index < CHUNKS;
    let receive = receives.then(|| ReceiveHalf::replace(left, Chunks::one(index)));
    (send.is_some() || receive.is_some()).then_some(Step::Exchange { send, receive })
}

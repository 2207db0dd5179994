//! A pipelined chain: every rank forwards one chunk while it receives the next.
//!
//! Every rank sends the buffer once; with a scatter and a ring it would be twice. The last rank waits until the
//! chain is filled, so the chain is for large buffers in worlds of fewer ranks than chunks.

use dist_transport::Rank;

use crate::schedule::Kind;
use crate::{Chunks, ReceiveHalf, Schedule, SendHalf, Step};

/// The number of chunks of the buffer.
pub(crate) const CHUNKS: usize = 32;

/// Copies the buffer of `root`, in the chunks of [`Broadcast::Chain`](crate::Broadcast::chunks), to every rank. The
/// chain begins at the root and goes to the right. A root outside the world is taken modulo its size.
pub const fn broadcast(rank: Rank, root: usize) -> Schedule {
    let root = root % rank.world_size();
    let steps = if rank.world_size() == 1 { 0 } else { CHUNKS + 1 };
    Schedule::new(rank, steps, Kind::ChainBroadcast { root })
}

/// Receives a chunk while the previous one is sent.
pub(crate) fn broadcast_step(rank: Rank, root: usize, index: usize) -> Option<Step> {
    let (left, right) = (rank.left().index(), rank.right().index());
    let send = index.checked_sub(1).filter(|_| right != root);
    let send = send.map(|chunk| SendHalf::buffer(right, Chunks::one(chunk)));
    let receives = rank.index() != root && index < CHUNKS;
    let receive = receives.then(|| ReceiveHalf::replace(left, Chunks::one(index)));
    (send.is_some() || receive.is_some()).then_some(Step::Exchange { send, receive })
}

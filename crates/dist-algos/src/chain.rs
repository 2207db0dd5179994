//! A pipelined chain: every rank sends one chunk on while it receives the next.
//!
//! Every rank sends the buffer once, not twice as by a scatter and a ring, but the last one waits until the chain is
//! filled: it is for large buffers in worlds of fewer ranks than there are chunks.

use dist_transport::Rank;

use crate::schedule::Kind;
use crate::{Chunks, ReceiveHalf, Schedule, SendHalf, Step};

/// Into how many chunks the buffer is cut.
pub(crate) const CHUNKS: usize = 32;

/// The buffer of `root`, in the chunks of [`Broadcast::Chain`](crate::Broadcast::chunks), ends on every rank; the chain
/// begins there and goes on to the right.
/// A root outside the world is taken modulo its size.
pub const fn broadcast(rank: Rank, root: usize) -> Schedule {
    let root = root % rank.world_size();
    let steps = if rank.world_size() == 1 { 0 } else { CHUNKS + 1 };
    Schedule::new(rank, steps, Kind::ChainBroadcast { root })
}

/// Receives a chunk while the one before goes on.
pub(crate) fn broadcast_step(rank: Rank, root: usize, index: usize) -> Option<Step> {
    let (left, right) = (rank.left().index(), rank.right().index());
    let send = index.checked_sub(1).filter(|_| right != root);
    let send = send.map(|chunk| SendHalf::buffer(right, Chunks::one(chunk)));
    let receives = rank.index() != root && index < CHUNKS;
    let receive = receives.then(|| ReceiveHalf::replace(left, Chunks::one(index)));
    (send.is_some() || receive.is_some()).then_some(Step::Exchange { send, receive })
}

//! Linear schedules: the root communicates with every other rank, one after the other.
//!
//! The root moves the fewest bytes, in p − 1 rounds, and the other ranks need no extra memory.

use dist_transport::Rank;

use crate::schedule::Kind;
use crate::{Chunks, Cost, Messages, ReceiveHalf, Schedule, SendHalf, Source, Step};

/// Moves chunk `r` of the root's input to the buffer of every other rank `r`. A root outside the world is taken
/// modulo its size.
pub const fn scatter(rank: Rank, root: usize) -> Schedule {
    let root = root % rank.world_size();
    Schedule::new(rank, rank.world_size() - 1, Kind::LinearScatter { root })
}

/// Moves chunk `r` of the input of every other rank `r` to the root's buffer. A root outside the world is taken
/// modulo its size.
pub const fn gather(rank: Rank, root: usize) -> Schedule {
    let root = root % rank.world_size();
    Schedule::new(rank, rank.world_size() - 1, Kind::LinearGather { root })
}

/// Returns the cost of [`scatter`]. It is also the cost of [`gather`], except for the chunks sent by the busiest
/// rank, which is the root of a scatter.
pub(crate) const fn cost(world_size: usize) -> Cost {
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

pub(crate) fn scatter_step(rank: Rank, root: usize, index: usize) -> Option<Step> {
    let peer = (root + 1 + index) % rank.world_size();
    let chunks = Chunks::one(peer);
    if rank.index() == root {
        return Some(Step::send_half(SendHalf { to: peer, chunks, of: Source::Input }));
    }
    (rank.index() == peer).then(|| Step::receive(ReceiveHalf::replace(root, chunks)))
}

pub(crate) fn gather_step(rank: Rank, root: usize, index: usize) -> Option<Step> {
    let peer = (root + 1 + index) % rank.world_size();
    let chunks = Chunks::one(peer);
    if rank.index() == root {
        return Some(Step::receive(ReceiveHalf::replace(peer, chunks)));
    }
    (rank.index() == peer).then(|| Step::send_half(SendHalf { to: root, chunks, of: Source::Input }))
}

//! Linear schedules: the root talks to every other rank, one after the other.
//!
//! The root moves the fewest bytes, in p − 1 rounds, and nobody else needs memory for them.

use dist_transport::Rank;

use crate::schedule::Kind;
use crate::{Chunks, Cost, Messages, ReceiveHalf, Schedule, SendHalf, Source, Step};

/// Every other rank `r` gets chunk `r` of the root's input into its buffer. A root outside the world is taken modulo
/// its size.
pub const fn scatter(rank: Rank, root: usize) -> Schedule {
    let root = root % rank.world_size();
    Schedule::new(rank, rank.world_size() - 1, Kind::LinearScatter { root })
}

/// The root's buffer gets chunk `r` of the input of every other rank `r`. A root outside the world is taken modulo
/// its size.
pub const fn gather(rank: Rank, root: usize) -> Schedule {
    let root = root % rank.world_size();
    Schedule::new(rank, rank.world_size() - 1, Kind::LinearGather { root })
}

/// What [`scatter`] costs, and [`gather`], but for what the busiest rank sends, which is the root of the one.
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

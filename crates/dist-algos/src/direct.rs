//! Schedules in which the root talks to every other rank, one after the other.
//!
//! The root moves the fewest bytes, in p − 1 rounds. They are one half of large broadcasts and reductions.

use dist_transport::Rank;

use crate::schedule::Kind;
use crate::{Chunks, ReceiveHalf, Schedule, Step};

/// Every rank `r` gets chunk `r` of the root's buffer. A root outside the world is taken modulo its size.
pub const fn scatter(rank: Rank, root: usize) -> Schedule {
    let root = root % rank.world_size();
    Schedule::new(rank, rank.world_size() - 1, Kind::Scatter { root })
}

/// The root gets chunk `r` of every rank `r`. A root outside the world is taken modulo its size.
pub const fn gather(rank: Rank, root: usize) -> Schedule {
    let root = root % rank.world_size();
    Schedule::new(rank, rank.world_size() - 1, Kind::Gather { root })
}

pub(crate) fn scatter_step(rank: Rank, root: usize, index: usize) -> Option<Step> {
    let peer = (root + 1 + index) % rank.world_size();
    if rank.index() == root {
        return Some(Step::send(peer, Chunks::one(peer)));
    }
    (rank.index() == peer).then(|| Step::receive(ReceiveHalf::replace(root, Chunks::one(peer))))
}

pub(crate) fn gather_step(rank: Rank, root: usize, index: usize) -> Option<Step> {
    let peer = (root + 1 + index) % rank.world_size();
    if rank.index() == root {
        return Some(Step::receive(ReceiveHalf::replace(peer, Chunks::one(peer))));
    }
    (rank.index() == peer).then(|| Step::send(root, Chunks::one(peer)))
}

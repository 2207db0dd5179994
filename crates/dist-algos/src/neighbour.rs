//! Neighbour exchange: ranks talk to their left and right neighbours in turn, two chunks at a time.
//!
//! Half the rounds of a ring over the same two connections, in worlds of an even number of ranks. Chen, Zhang, Zhang,
//! Yuan, "Performance evaluation of allgather algorithms on terascale Linux cluster with fast Ethernet", 2005.

use dist_transport::Rank;

use crate::schedule::Kind;
use crate::{Chunks, ReceiveHalf, Schedule, SendHalf, Step};

/// Every rank gets every chunk, where rank `r` has chunk `r` to begin with, in p/2 rounds. `None` unless the world
/// size is even.
pub const fn all_gather(rank: Rank) -> Option<Schedule> {
    let pairs = rank.world_size() / 2;
    if rank.world_size().is_multiple_of(2) {
        Some(Schedule::new(rank, pairs, Kind::NeighbourAllGather))
    } else {
        None
    }
}

/// At first the two ranks of a pair exchange their chunks. Then every rank sends on the two chunks that it got last.
pub(crate) const fn all_gather_step(rank: Rank, round: usize) -> Step {
    let even = rank.index().is_multiple_of(2);
    let peer = if even == round.is_multiple_of(2) { rank.right().index() } else { rank.left().index() };
    if round == 0 {
        let (own, theirs) = (Chunks::one(rank.index()), Chunks::one(peer));
        return Step::exchange(SendHalf::buffer(peer, own), ReceiveHalf::replace(peer, theirs));
    }
    let (sent, received) = (pair(rank, round - 1), pair(rank, round));
    Step::exchange(SendHalf::buffer(peer, sent), ReceiveHalf::replace(peer, received))
}

/// The pair of chunks that a rank has after a round and had not before: from pairs to the left and to the right in
/// turn, farther and farther. Even ranks begin on the left.
const fn pair(rank: Rank, round: usize) -> Chunks {
    let (pairs, own, distance) = (rank.world_size() / 2, rank.index() / 2, round.div_ceil(2));
    let to_the_left = rank.index().is_multiple_of(2) != round.is_multiple_of(2);
    let pair = if to_the_left { (own + pairs - distance) % pairs } else { (own + distance) % pairs };
    Chunks::range(2 * pair, 2)
}

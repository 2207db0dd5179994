//! Neighbour exchange: ranks communicate with their left and right neighbours in turn, two chunks at a time.
//!
//! It takes half the rounds of a ring over the same two connections, for an even number of ranks. Chen, Zhang,
//! Zhang, Yuan, "Performance evaluation of allgather algorithms on terascale Linux cluster with fast Ethernet",
//! 2005.

use dist_transport::Rank;

use crate::{Chunks, CollectiveKind, Cost, MessageAlgorithm, Phases, ReceiveHalf, Schedule, SendHalf, Step};

/// All_gather, for even numbers of ranks.
pub static ALL_GATHER: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::AllGather,
    name: "neighbour_exchange",
    about: "Ranks exchange with the left and the right neighbour in turn, two chunks at a time.",
    supports: |world_size| world_size.is_multiple_of(2),
    chunks: |world_size| world_size,
    cost: |world_size| Cost::alike(world_size, world_size / 2, world_size - 1, 0),
    phases: |rank, _| Phases::one(rank, all_gather(rank).unwrap_or(Schedule::nothing(rank))),
    ..MessageAlgorithm::NOTHING
};

/// Copies chunk `r` of rank `r` to every rank, in p/2 rounds. Returns `None` if the world size is odd.
pub const fn all_gather(rank: Rank) -> Option<Schedule> {
    let pairs = rank.world_size() / 2;
    if rank.world_size().is_multiple_of(2) {
        Some(Schedule::new(rank, pairs, |rank, _, round| Some(all_gather_step(rank, round))))
    } else {
        None
    }
}

/// Exchanges the chunks of the two ranks of a pair first. Then every rank forwards the two chunks that it
/// received last.
const fn all_gather_step(rank: Rank, round: usize) -> Step {
    let even = rank.index().is_multiple_of(2);
    let peer = if even == round.is_multiple_of(2) { rank.right().index() } else { rank.left().index() };
    if round == 0 {
        let (own, theirs) = (Chunks::one(rank.index()), Chunks::one(peer));
        return Step::exchange(SendHalf::buffer(peer, own), ReceiveHalf::replace(peer, theirs));
    }
    let (sent, received) = (pair(rank, round - 1), pair(rank, round));
    Step::exchange(SendHalf::buffer(peer, sent), ReceiveHalf::replace(peer, received))
}

/// Returns the pair of chunks that a rank receives in a round. Pairs come alternately from the left and the right, at
/// increasing distances. Even ranks begin with the left.
const fn pair(rank: Rank, round: usize) -> Chunks {
    let (pairs, own, distance) = (rank.world_size() / 2, rank.index() / 2, round.div_ceil(2));
    let to_the_left = rank.index().is_multiple_of(2) != round.is_multiple_of(2);
    let pair = if to_the_left { (own + pairs - distance) % pairs } else { (own + distance) % pairs };
    Chunks::range(2 * pair, 2)
}

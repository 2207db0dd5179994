//! Ring schedules: each rank sends to its right neighbour while it receives from its left.
//!
//! They have the fewest bytes and two connections per rank, but as many rounds as there are peers.
//! Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

use dist_transport::Rank;

use crate::schedule::Kind;
use crate::{Chunks, ReceiveHalf, Schedule, SendHalf, Step};

/// Chunk `r` of the sum ends on rank `r`, after p − 1 rounds of one chunk. The other chunks hold partial sums.
pub const fn reduce_scatter(rank: Rank) -> Schedule {
    Schedule::new(rank, rank.world_size() - 1, Kind::RingReduceScatter)
}

/// Every rank gets every chunk, where rank `r` has chunk `r` to begin with, in p − 1 rounds of one chunk.
pub const fn all_gather(rank: Rank) -> Schedule {
    Schedule::new(rank, rank.world_size() - 1, Kind::RingAllGather)
}

/// Chunk c sets out on its right neighbour, goes once round and comes home.
pub(crate) const fn reduce_scatter_step(rank: Rank, index: usize) -> Step {
    let sent = Chunks::one(left_by(rank, index + 1));
    let received = Chunks::one(left_by(rank, index + 2));
    let (left, right) = (left_by(rank, 1), left_by(rank, rank.world_size() - 1));
    Step::exchange(SendHalf::buffer(right, sent), ReceiveHalf::reduce(left, received))
}

/// Chunk c sets out at home and goes once round.
pub(crate) const fn all_gather_step(rank: Rank, index: usize) -> Step {
    let sent = Chunks::one(left_by(rank, index));
    let received = Chunks::one(left_by(rank, index + 1));
    let (left, right) = (left_by(rank, 1), left_by(rank, rank.world_size() - 1));
    Step::exchange(SendHalf::buffer(right, sent), ReceiveHalf::replace(left, received))
}

/// The place that many places back round the ring, at most once round: [`Rank::minus`] without its divisions,
/// which would be most of the time that a step takes.
pub(crate) const fn left_by(rank: Rank, distance: usize) -> usize {
    if distance <= rank.index() {
        rank.index() - distance
    } else {
        rank.index() + rank.world_size() - distance
    }
}

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
    let sent = Chunks::one(rank.minus(index + 1).index());
    let received = Chunks::one(rank.minus(index + 2).index());
    let (left, right) = (rank.left().index(), rank.right().index());
    Step::exchange(SendHalf { to: right, chunks: sent }, ReceiveHalf::reduce(left, received))
}

/// Chunk c sets out at home and goes once round.
pub(crate) const fn all_gather_step(rank: Rank, index: usize) -> Step {
    let sent = Chunks::one(rank.minus(index).index());
    let received = Chunks::one(rank.minus(index + 1).index());
    let (left, right) = (rank.left().index(), rank.right().index());
    Step::exchange(SendHalf { to: right, chunks: sent }, ReceiveHalf::replace(left, received))
}

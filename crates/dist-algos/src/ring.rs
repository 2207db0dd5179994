//! Ring schedules: each rank sends to its right neighbour while it receives from its left neighbour.
//!
//! They send the fewest bytes over two connections per rank, but need as many rounds as there are peers. Patarasuk
//! and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

use dist_transport::Rank;

use crate::schedule::Kind;
use crate::{Chunks, ReceiveHalf, Schedule, SendHalf, Step};

/// Moves chunk `r` of the sum to rank `r`, in p − 1 rounds of one chunk. The other chunks hold partial sums
/// afterwards.
pub const fn reduce_scatter(rank: Rank) -> Schedule {
    Schedule::new(rank, rank.world_size() - 1, Kind::RingReduceScatter)
}

/// Copies chunk `r` of rank `r` to every rank, in p − 1 rounds of one chunk.
pub const fn all_gather(rank: Rank) -> Schedule {
    Schedule::new(rank, rank.world_size() - 1, Kind::RingAllGather)
}

/// Chunk c starts at the right neighbour of rank c and goes once around the ring to rank c.
pub(crate) const fn reduce_scatter_step(rank: Rank, index: usize) -> Step {
    let sent = Chunks::one(left_by(rank, index + 1));
    let received = Chunks::one(left_by(rank, index + 2));
    let (left, right) = (left_by(rank, 1), left_by(rank, rank.world_size() - 1));
    Step::exchange(SendHalf::buffer(right, sent), ReceiveHalf::reduce(left, received))
}

/// Chunk c starts at rank c and goes once around the ring.
pub(crate) const fn all_gather_step(rank: Rank, index: usize) -> Step {
    let sent = Chunks::one(left_by(rank, index));
    let received = Chunks::one(left_by(rank, index + 1));
    let (left, right) = (left_by(rank, 1), left_by(rank, rank.world_size() - 1));
    Step::exchange(SendHalf::buffer(right, sent), ReceiveHalf::replace(left, received))
}

/// Returns the position `distance` places to the left in the ring, at most once around. It is [`Rank::minus`]
/// without the divisions, which would take most of the time of a step.
pub(crate) const fn left_by(rank: Rank, distance: usize) -> usize {
    if distance <= rank.index() {
        rank.index() - distance
    } else {
        rank.index() + rank.world_size() - distance
    }
}

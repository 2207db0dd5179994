//! Circulant schedules: few rounds and the fewest bytes at once, in every world.
//!
//! In every round all ranks talk over the same distance. Jesper Larsson Träff, "Optimal, non-pipelined reduce-scatter
//! and allreduce algorithms", 2024 (arXiv:2410.14234), whose distances are p halved again and again, rounded up;
//! and Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems",
//! 1997, whose distances double from 1. Chunks are sent as runs round the circle of ranks, so a message can be two
//! pieces of memory.

use dist_transport::Rank;

use crate::cost::log2_ceil;
use crate::schedule::Kind;
use crate::{Chunks, ReceiveHalf, Schedule, SendHalf, Step};

/// Chunk `r` of the sum ends on rank `r`, after ⌈log₂ p⌉ rounds. The other chunks hold partial sums.
pub const fn reduce_scatter(rank: Rank) -> Schedule {
    Schedule::new(rank, log2_ceil(rank.world_size()), Kind::CirculantReduceScatter)
}

/// Every rank gets every chunk, where rank `r` has chunk `r` to begin with, in ⌈log₂ p⌉ rounds: the way of
/// [`reduce_scatter`] back.
pub const fn all_gather(rank: Rank) -> Schedule {
    Schedule::new(rank, log2_ceil(rank.world_size()), Kind::CirculantAllGather)
}

/// As [`all_gather`], over distances 1, 2, 4, …
pub const fn bruck(rank: Rank) -> Schedule {
    Schedule::new(rank, log2_ceil(rank.world_size()), Kind::BruckAllGather)
}

/// Before a round a rank has sums of its own chunk and those after it, as many as the distance. It gives away those
/// beyond the next distance.
pub(crate) const fn reduce_scatter_step(rank: Rank, round: usize) -> Step {
    let (near, far) = distances(rank, round);
    let (to, from) = (rank.plus(near).index(), rank.minus(near).index());
    let (sent, received) = (run(rank, near, far - near), run(rank, 0, far - near));
    Step::exchange(SendHalf::buffer(to, sent), ReceiveHalf::reduce(from, received))
}

pub(crate) const fn all_gather_step(rank: Rank, index: usize) -> Step {
    let (near, far) = distances(rank, log2_ceil(rank.world_size()) - 1 - index);
    gather_step(rank, near, far)
}

pub(crate) const fn bruck_step(rank: Rank, round: usize) -> Step {
    let (near, twice) = (1 << round, 2 << round);
    let far = if twice < rank.world_size() { twice } else { rank.world_size() };
    gather_step(rank, near, far)
}

/// A rank that has its own chunk and those after it, `near` of them, gets those up to `far` from the rank that
/// begins with them.
const fn gather_step(rank: Rank, near: usize, far: usize) -> Step {
    let (to, from) = (rank.minus(near).index(), rank.plus(near).index());
    let (sent, received) = (run(rank, 0, far - near), run(rank, near, far - near));
    Step::exchange(SendHalf::buffer(to, sent), ReceiveHalf::replace(from, received))
}

/// ⌈p / 2^(k+1)⌉ and ⌈p / 2^k⌉.
const fn distances(rank: Rank, round: usize) -> (usize, usize) {
    let world_size = rank.world_size();
    (world_size.div_ceil(2 << round), world_size.div_ceil(1 << round))
}

/// Chunks in a circle, the first of them so many after the rank's own.
const fn run(rank: Rank, first: usize, count: usize) -> Chunks {
    Chunks::wrapping(rank.plus(first).index(), count, rank.world_size())
}

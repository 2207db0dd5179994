//! Circulant schedules: few rounds and the fewest bytes for any number of ranks.
//!
//! In every round all ranks communicate over the same distance. Jesper Larsson Träff, "Optimal, non-pipelined
//! reduce-scatter and allreduce algorithms", 2024 (arXiv:2410.14234): the distances are p halved again and again,
//! rounded up. Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing
//! systems", 1997: the distances double from 1. Chunks are sent as runs in the ring of ranks, so a message can be
//! two pieces of memory.

use dist_transport::Rank;

use crate::cost::{halvings, log2_ceil};
use crate::schedule::Kind;
use crate::{Chunks, Cost, Messages, ReceiveHalf, Schedule, SendHalf, Step};

/// Moves chunk `r` of the sum to rank `r`, in ⌈log₂ p⌉ rounds. The other chunks hold partial sums afterwards.
pub const fn reduce_scatter(rank: Rank) -> Schedule {
    Schedule::new(rank, log2_ceil(rank.world_size()), Kind::CirculantReduceScatter)
}

/// Copies chunk `r` of rank `r` to every rank, in ⌈log₂ p⌉ rounds. It is [`reduce_scatter`] backwards.
pub const fn all_gather(rank: Rank) -> Schedule {
    Schedule::new(rank, log2_ceil(rank.world_size()), Kind::CirculantAllGather)
}

/// Like [`all_gather`], over distances 1, 2, 4, …
pub const fn bruck(rank: Rank) -> Schedule {
    Schedule::new(rank, log2_ceil(rank.world_size()), Kind::BruckAllGather)
}

/// Moves chunk `r` of the root's buffer to every rank `r`, in ⌈log₂ p⌉ rounds. A rank with a run of chunks sends
/// the farther half to the first rank of that half. A root outside the world is taken modulo its size.
pub const fn scatter(rank: Rank, root: usize) -> Schedule {
    let root = root % rank.world_size();
    Schedule::new(rank, log2_ceil(rank.world_size()), Kind::CirculantScatter { root })
}

/// Moves chunk `r` of every rank `r` to the root; it is [`scatter`] backwards. The other chunks of other ranks are
/// lost. A root outside the world is taken modulo its size.
pub const fn gather(rank: Rank, root: usize) -> Schedule {
    let root = root % rank.world_size();
    Schedule::new(rank, log2_ceil(rank.world_size()), Kind::CirculantGather { root })
}

/// Returns the cost of [`scatter`]. It is also the cost of [`gather`], except for the chunks sent by the busiest
/// rank, which is the root of a scatter.
pub(crate) const fn rooted_cost(world_size: usize) -> Cost {
    let (peers, rounds) = (world_size - 1, log2_ceil(world_size));
    Cost {
        rounds,
        path: peers,
        sent_max: peers,
        all: Messages::new(peers, halvings(world_size)),
        depth: Messages::new(world_size.ilog2() as usize, world_size - world_size.count_ones() as usize),
        ..Cost::NOTHING
    }
}

/// Before a round a rank has sums of its own chunk and the following ones, as many as the distance. It sends those
/// beyond the next distance.
pub(crate) const fn reduce_scatter_step(rank: Rank, round: usize) -> Step {
    let (near, far) = distances(rank, round);
    let (to, from) = (rank.plus(near).index(), rank.minus(near).index());
    let (sent, received) = (run(rank, near, far - near), run(rank, 0, far - near));
    Step::exchange(SendHalf::buffer(to, sent), ReceiveHalf::reduce(from, received))
}

pub(crate) const fn all_gather_step(rank: Rank, index: usize) -> Step {
    let (near, far) = distances(rank, log2_ceil(rank.world_size()) - 1 - index);
    grow(rank, near, far)
}

pub(crate) const fn bruck_step(rank: Rank, round: usize) -> Step {
    let (near, twice) = (1 << round, 2 << round);
    let far = if twice < rank.world_size() { twice } else { rank.world_size() };
    grow(rank, near, far)
}

/// A rank has its own chunk and the following ones, `near` in all. It receives the chunks up to `far` from the rank
/// whose run begins with them.
const fn grow(rank: Rank, near: usize, far: usize) -> Step {
    let (to, from) = (rank.minus(near).index(), rank.plus(near).index());
    let (sent, received) = (run(rank, 0, far - near), run(rank, near, far - near));
    Step::exchange(SendHalf::buffer(to, sent), ReceiveHalf::replace(from, received))
}

pub(crate) fn scatter_step(rank: Rank, root: usize, round: usize) -> Option<Step> {
    Some(match share(rank, root, round)? {
        ScatterStep::Given { to, chunks } => Step::send(to, chunks),
        ScatterStep::Taken { from, chunks } => Step::receive(ReceiveHalf::replace(from, chunks)),
    })
}

pub(crate) fn gather_step(rank: Rank, root: usize, index: usize) -> Option<Step> {
    Some(match share(rank, root, log2_ceil(rank.world_size()) - 1 - index)? {
        ScatterStep::Given { to, chunks } => Step::receive(ReceiveHalf::replace(to, chunks)),
        ScatterStep::Taken { from, chunks } => Step::send(from, chunks),
    })
}

/// The action of a rank in a round of [`scatter`].
enum ScatterStep {
    Given { to: usize, chunks: Chunks },
    Taken { from: usize, chunks: Chunks },
}

fn share(rank: Rank, root: usize, round: usize) -> Option<ScatterStep> {
    // The position of the rank in its run before the round, and the length of that run.
    let (mut place, mut len) = (rank.minus(root).index(), rank.world_size());
    for _ in 0..round {
        let near = len.div_ceil(2);
        (place, len) = if place < near { (place, near) } else { (place - near, len - near) };
    }
    let near = len.div_ceil(2);
    match place {
        0 if near < len => {
            Some(ScatterStep::Given { to: rank.plus(near).index(), chunks: run(rank, near, len - near) })
        }
        _ if place == near => {
            Some(ScatterStep::Taken { from: rank.minus(near).index(), chunks: run(rank, 0, len - near) })
        }
        _ => None,
    }
}

/// Returns ⌈p / 2^(k+1)⌉ and ⌈p / 2^k⌉.
const fn distances(rank: Rank, round: usize) -> (usize, usize) {
    let world_size = rank.world_size();
    (world_size.div_ceil(2 << round), world_size.div_ceil(1 << round))
}

/// Returns a run of chunks in the ring that begins `first` chunks after the rank's own.
const fn run(rank: Rank, first: usize, count: usize) -> Chunks {
    Chunks::wrapping(rank.plus(first).index(), count, rank.world_size())
}

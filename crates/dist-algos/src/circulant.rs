//! Circulant schedules: few rounds and the fewest bytes for any number of ranks.
//!
//! In every round all ranks communicate over the same distance. Jesper Larsson Träff, "Optimal, non-pipelined
//! reduce-scatter and allreduce algorithms", 2024 (arXiv:2410.14234): the distances are p halved again and again,
//! rounded up. Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing
//! systems", 1997: the distances double from 1. Chunks are sent as runs in the ring of ranks, so a message can be
//! two pieces of memory.

use dist_transport::Rank;

use crate::cost::{halvings, log2_ceil};
use crate::{
    Chunks, CollectiveKind, Cost, MessageAlgorithm, Messages, Order, Phases, ReceiveHalf, Schedule, SendHalf,
    Source, Step,
};

/// All_reduce: [`reduce_scatter`], then [`all_gather`].
pub static ALL_REDUCE: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::AllReduce,
    name: "circulant",
    about: "The reduce_scatter and the all_gather of the same name: few rounds and the fewest bytes, in every world.",
    chunks: |world_size| world_size,
    order: |world_size| Some(order(world_size)),
    cost: |world_size| {
        Cost::alike(world_size, 2 * log2_ceil(world_size), 2 * (world_size - 1), world_size - 1)
    },
    phases: |rank, _| Phases {
        first: reduce_scatter(rank),
        owned: Chunks::one(rank.index()),
        second: all_gather(rank),
    },
    ..MessageAlgorithm::NOTHING
};

/// Reduce_scatter over distances p/2, p/4, …
pub static REDUCE_SCATTER: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::ReduceScatter,
    name: "circulant",
    about: "In every round all ranks communicate over the same distance: half the world, a quarter, an eighth, …, rounded up.",
    chunks: |world_size| world_size,
    order: |world_size| Some(order(world_size)),
    cost: |world_size| Cost::alike(world_size, log2_ceil(world_size), world_size - 1, world_size - 1),
    // Three ranks send no sums either, but were not measured.
    sends_from: |world_size| if world_size <= 2 { Source::Input } else { Source::Buffer },
    phases: |rank, _| Phases::one(rank, reduce_scatter(rank)),
    ..MessageAlgorithm::NOTHING
};

/// All_gather over distances …, p/4, p/2.
pub static ALL_GATHER: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::AllGather,
    name: "circulant",
    about: "The circulant reduce_scatter backwards.",
    chunks: |world_size| world_size,
    cost: all_gather_cost,
    phases: |rank, _| Phases::one(rank, all_gather(rank)),
    ..MessageAlgorithm::NOTHING
};

/// All_gather over distances 1, 2, 4, …: [`bruck`].
pub static BRUCK: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::AllGather,
    name: "bruck",
    about: "Ranks receive all that the rank at distance 1, 2, 4, … has, for any number of ranks.",
    chunks: |world_size| world_size,
    cost: all_gather_cost,
    phases: |rank, _| Phases::one(rank, bruck(rank)),
    ..MessageAlgorithm::NOTHING
};

/// Broadcast: [`scatter`], then [`all_gather`].
pub static BROADCAST: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::Broadcast,
    name: "scatter_circulant",
    about: "A chunk to every rank, then a circulant all_gather.",
    chunks: |world_size| world_size,
    cost: |world_size| rooted_cost(world_size).then(all_gather_cost(world_size)),
    phases: |rank, root| Phases { first: scatter(rank, root), owned: Chunks::NONE, second: all_gather(rank) },
    ..MessageAlgorithm::NOTHING
};

/// Returns the order class of the sums of [`reduce_scatter`].
const fn order(world_size: usize) -> Order {
    match world_size {
        0..=2 => Order::Canonical,
        _ if world_size.is_power_of_two() => Order::Uniform,
        _ => Order::Any,
    }
}

/// Returns the cost of [`all_gather`] and of [`bruck`].
pub(crate) const fn all_gather_cost(world_size: usize) -> Cost {
    Cost::alike(world_size, log2_ceil(world_size), world_size - 1, 0)
}

/// Returns a reduce_scatter in ⌈log₂ p⌉ rounds: rank `r` gets the sum of chunk `r`. The other chunks hold partial
/// sums afterwards.
pub const fn reduce_scatter(rank: Rank) -> Schedule {
    Schedule::new(rank, log2_ceil(rank.world_size()), |rank, _, round| Some(reduce_scatter_step(rank, round)))
}

/// Returns an all_gather in ⌈log₂ p⌉ rounds: chunk `r` of rank `r` is copied to every rank. It is [`reduce_scatter`]
/// backwards.
pub const fn all_gather(rank: Rank) -> Schedule {
    Schedule::new(rank, log2_ceil(rank.world_size()), |rank, _, index| Some(all_gather_step(rank, index)))
}

/// Returns Bruck's all_gather. It is like [`all_gather`], with distances of 1, 2, 4 and so on between the ranks that
/// exchange.
pub const fn bruck(rank: Rank) -> Schedule {
    Schedule::new(rank, log2_ceil(rank.world_size()), |rank, _, round| Some(bruck_step(rank, round)))
}

/// Returns a scatter in ⌈log₂ p⌉ rounds: chunk `r` of the root's buffer is sent to rank `r`. A rank with a run of
/// chunks sends the farther half to the first rank of that half. A root outside the world is taken modulo its size.
pub const fn scatter(rank: Rank, root: usize) -> Schedule {
    Schedule::rooted(rank, root, log2_ceil(rank.world_size()), scatter_step)
}

/// Returns a gather in ⌈log₂ p⌉ rounds, which is [`scatter`] backwards: chunk `r` of rank `r` is sent to the root.
/// The other chunks of other ranks are overwritten. A root outside the world is taken modulo its size.
pub const fn gather(rank: Rank, root: usize) -> Schedule {
    Schedule::rooted(rank, root, log2_ceil(rank.world_size()), gather_step)
}

/// Returns the cost of [`scatter`]. It is also the cost of [`gather`], except for the chunks that the rank with the
/// most traffic sends: the root of a scatter.
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

/// Returns a step of the reduce_scatter. Before it, a rank has the sums of `far` chunks, beginning with its own
/// chunk. It sends the chunks from `near` on.
const fn reduce_scatter_step(rank: Rank, round: usize) -> Step {
    let (near, far) = distances(rank, round);
    let (to, from) = (rank.plus(near).index(), rank.minus(near).index());
    let (sent, received) = (run(rank, near, far - near), run(rank, 0, far - near));
    Step::exchange(SendHalf::buffer(to, sent), ReceiveHalf::reduce(from, received))
}

const fn all_gather_step(rank: Rank, index: usize) -> Step {
    let (near, far) = distances(rank, log2_ceil(rank.world_size()) - 1 - index);
    grow(rank, near, far)
}

const fn bruck_step(rank: Rank, round: usize) -> Step {
    let (near, twice) = (1 << round, 2 << round);
    let far = if twice < rank.world_size() { twice } else { rank.world_size() };
    grow(rank, near, far)
}

/// Returns a step of the all_gather. Before it, a rank has `near` chunks, beginning with its own. It receives the
/// following ones, up to `far`, from the rank that has them.
const fn grow(rank: Rank, near: usize, far: usize) -> Step {
    let (to, from) = (rank.minus(near).index(), rank.plus(near).index());
    let (sent, received) = (run(rank, 0, far - near), run(rank, near, far - near));
    Step::exchange(SendHalf::buffer(to, sent), ReceiveHalf::replace(from, received))
}

fn scatter_step(rank: Rank, root: usize, round: usize) -> Option<Step> {
    Some(match share(rank, root, round)? {
        ScatterStep::Given { to, chunks } => Step::send(to, chunks),
        ScatterStep::Taken { from, chunks } => Step::receive(ReceiveHalf::replace(from, chunks)),
    })
}

fn gather_step(rank: Rank, root: usize, index: usize) -> Option<Step> {
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

/// Returns a run of `count` chunks in the ring of chunks, which begins `first` chunks after the rank's own.
const fn run(rank: Rank, first: usize, count: usize) -> Chunks {
    Chunks::wrapping(rank.plus(first).index(), count, rank.world_size())
}

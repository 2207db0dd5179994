//! Ring schedules: each rank sends to its right neighbour while it receives from its left neighbour.
//!
//! They send the fewest bytes over two connections per rank, but need as many rounds as there are peers. Patarasuk
//! and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

use dist_transport::Rank;

use crate::{
    Chunks, CollectiveKind, Cost, MessageAlgorithm, Order, Phases, ReceiveHalf, Schedule, SendHalf, Source,
    Step,
};

/// All_reduce: [`reduce_scatter`], then [`all_gather`].
pub static ALL_REDUCE: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::AllReduce,
    name: "ring",
    about: "Chunks go once around the ring while they are summed, and once more so that every rank receives the sums.",
    chunks: |world_size| world_size,
    order: |world_size| Some(order(world_size)),
    cost: |world_size| Cost::alike(world_size, 2 * (world_size - 1), 2 * (world_size - 1), world_size - 1),
    phases: |rank, _| Phases {
        first: reduce_scatter(rank),
        owned: Chunks::one(rank.index()),
        second: all_gather(rank),
    },
    ..MessageAlgorithm::NOTHING
};

/// Reduce_scatter: once around the ring.
pub static REDUCE_SCATTER: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::ReduceScatter,
    name: "ring",
    about: "Every chunk starts at the right neighbour of its rank and goes once around the ring to its rank.",
    chunks: |world_size| world_size,
    order: |world_size| Some(order(world_size)),
    cost: |world_size| Cost::alike(world_size, world_size - 1, world_size - 1, world_size - 1),
    sends_from: |world_size| if world_size <= 2 { Source::Input } else { Source::Buffer },
    phases: |rank, _| Phases::one(rank, reduce_scatter(rank)),
    ..MessageAlgorithm::NOTHING
};

/// All_gather: once around the ring.
pub static ALL_GATHER: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::AllGather,
    name: "ring",
    about: "Every chunk goes once around the ring.",
    chunks: |world_size| world_size,
    cost: |world_size| Cost::alike(world_size, world_size - 1, world_size - 1, 0),
    phases: |rank, _| Phases::one(rank, all_gather(rank)),
    ..MessageAlgorithm::NOTHING
};

/// Returns the order class of the ring's sums. With more than two ranks each chunk starts at another rank, so their order is
/// not canonical.
const fn order(world_size: usize) -> Order {
    if world_size <= 2 { Order::Canonical } else { Order::Any }
}

/// Returns a reduce_scatter around the ring, in p − 1 rounds of one chunk: rank `r` gets the sum of chunk `r`. The
/// other chunks hold partial sums afterwards.
pub const fn reduce_scatter(rank: Rank) -> Schedule {
    Schedule::new(rank, rank.world_size() - 1, |rank, _, index| Some(reduce_scatter_step(rank, index)))
}

/// Returns an all_gather around the ring, in p − 1 rounds of one chunk: chunk `r` of rank `r` is copied to every
/// rank.
pub const fn all_gather(rank: Rank) -> Schedule {
    Schedule::new(rank, rank.world_size() - 1, |rank, _, index| Some(all_gather_step(rank, index)))
}

/// Returns a step of the ring. Chunk `c` starts at the right neighbour of rank `c`, goes once around the ring and
/// ends at rank `c`.
const fn reduce_scatter_step(rank: Rank, index: usize) -> Step {
    let sent = Chunks::one(left_by(rank, index + 1));
    let received = Chunks::one(left_by(rank, index + 2));
    let (left, right) = (left_by(rank, 1), left_by(rank, rank.world_size() - 1));
    Step::exchange(SendHalf::buffer(right, sent), ReceiveHalf::reduce(left, received))
}

/// Returns a step of the ring. Chunk `c` starts at rank `c` and goes once around the ring.
const fn all_gather_step(rank: Rank, index: usize) -> Step {
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

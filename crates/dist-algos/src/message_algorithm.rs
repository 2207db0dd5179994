//! The record of an algorithm that sends messages.

use std::fmt;

use dist_transport::Rank;

use crate::{Chunks, CollectiveKind, Cost, CostModel, Order, Phases, Placement, Schedule, Source, Step};

/// The record of an algorithm that sends messages and treats all ranks alike.
///
/// The fields are what an algorithm declares. [`verify`](crate::verify) proves that they are true. The methods of the
/// same names are for callers: they also accept worlds of one rank and roots outside the world.
///
/// ```
/// use dist_algos::{MessageAlgorithm, ring};
///
/// let rounds = |algorithm: &MessageAlgorithm| algorithm.cost(8).rounds;
/// assert_eq!((rounds(&ring::ALL_REDUCE), rounds(&ring::ALL_GATHER)), (14, 7));
/// ```
pub struct MessageAlgorithm {
    /// The operation.
    pub collective: CollectiveKind,
    /// The name, which is unique among the algorithms of the operation.
    pub name: &'static str,
    /// One or two sentences about the schedule, for documents.
    pub about: &'static str,
    /// Returns `true` if there is a schedule for a world of this size, which is at least 1.
    pub supports: fn(usize) -> bool,
    /// Returns the number of chunks of the memory.
    pub chunks: fn(usize) -> usize,
    /// Returns the class of the reduction order, which does not depend on the root; `None` if nothing is reduced.
    pub order: fn(usize) -> Option<Order>,
    /// Returns the cost in a supported world of at least two ranks, for the most expensive root.
    pub cost: fn(usize) -> Cost,
    /// Returns the memory that ranks can send their data from in a reduce_scatter or an all_to_all. If that
    /// is an input, a reduce_scatter executes the steps that [`Step::from_input`](crate::Step::from_input)
    /// returns.
    pub sends_from: fn(usize) -> Source,
    /// Returns the chunks that pass through the buffer of a rank, for this root, in a gather or a scatter. They are
    /// consecutive.
    pub held: fn(Rank, usize) -> Chunks,
    /// Returns the schedule of a rank in a supported world, for this root.
    pub phases: fn(Rank, usize) -> Phases,
}

impl MessageAlgorithm {
    /// A record of an empty schedule for worlds of any size, from which other records take the fields that they do
    /// not set.
    pub const NOTHING: Self = Self {
        collective: CollectiveKind::Barrier,
        name: "nothing",
        about: "",
        supports: |_| true,
        chunks: |_| 1,
        order: |_| None,
        cost: |_| Cost::NOTHING,
        sends_from: |_| Source::Buffer,
        held: |rank, _| Chunks::all(rank.world_size()),
        phases: |rank, _| Phases::one(rank, Schedule::nothing(rank)),
    };

    /// Returns `true` if there is a schedule for a world of this size.
    pub fn supports(&self, world_size: usize) -> bool {
        world_size > 0 && (self.supports)(world_size)
    }

    /// Returns the number of chunks of the memory; a barrier has one empty chunk.
    pub fn chunks(&self, world_size: usize) -> usize {
        (self.chunks)(world_size)
    }

    /// Returns the class of the reduction order; `None` if nothing is reduced.
    pub fn order(&self, world_size: usize) -> Option<Order> {
        (self.order)(world_size)
    }

    /// Returns `true` if the algorithm reduces in this order or a stricter one, or reduces nothing.
    pub fn keeps(&self, order: Order, world_size: usize) -> bool {
        self.order(world_size).is_none_or(|own| own >= order)
    }

    /// Returns the cost in a supported world, for the most expensive root.
    pub fn cost(&self, world_size: usize) -> Cost {
        if world_size <= 1 { Cost::NOTHING } else { (self.cost)(world_size) }
    }

    /// Returns the memory from which ranks can send their data in a reduce_scatter or an all_to_all.
    ///
    /// An input does not change, because ranks send only their own data from it and no sums. The buffer then
    /// only needs to hold the result of the rank.
    pub fn sends_from(&self, world_size: usize) -> Source {
        (self.sends_from)(world_size)
    }

    /// Returns how many chunks a rank copies besides its steps: its input, if the steps change the memory that they
    /// work on, and the result.
    pub fn copied(&self, world_size: usize) -> usize {
        match (self.collective, self.sends_from(world_size)) {
            (CollectiveKind::ReduceScatter, Source::Buffer) => self.chunks(world_size),
            (CollectiveKind::AllToAll, Source::Buffer) => 2 * self.chunks(world_size),
            _ => 0,
        }
    }

    /// Returns the chunks that this algorithm keeps in the buffer of a rank during a gather or a scatter. They are
    /// consecutive. A root outside the world is taken modulo its size.
    pub fn held(&self, rank: Rank, root: usize) -> Chunks {
        (self.held)(rank, root % rank.world_size())
    }

    /// Returns the schedule of a rank; an empty one if the world is not supported. The root is ignored if the
    /// operation has none, and is taken modulo the size of the world.
    pub fn phases(&self, rank: Rank, root: usize) -> Phases {
        if self.supports(rank.world_size()) {
            (self.phases)(rank, root % rank.world_size())
        } else {
            Phases::one(rank, Schedule::nothing(rank))
        }
    }

    /// Returns the steps of a rank, as [`phases`](Self::phases) does.
    pub fn steps(&self, rank: Rank, root: usize) -> impl Iterator<Item = Step> + use<> {
        self.phases(rank, root).steps()
    }

    /// Returns the time on memory of this many bytes.
    pub fn picoseconds(&self, placement: Placement, bytes: usize, model: &CostModel) -> u128 {
        let (cost, chunks) = (self.cost(placement.ranks), self.chunks(placement.ranks));
        let copied =
            (self.copied(placement.ranks) as u128).saturating_mul(bytes as u128) / chunks.max(1) as u128;
        let time = match placement.is_oversubscribed() {
            true => model.picoseconds_on(placement, self.collective.is_rooted(), cost, (bytes, chunks)),
            false => model.picoseconds(cost, bytes, chunks),
        };
        time.saturating_add(copied.saturating_mul(COPIED_BYTE_PS))
    }
}

/// The time to copy a byte, on any machine: less than the time to send it. With this value, pairwise is chosen for
/// a reduce_scatter of 4 ranks from 256 KiB on, and of 8 ranks from 1 MiB on. Over loopback it was measured to be
/// up to 1.6 times faster than the others there.
const COPIED_BYTE_PS: u128 = 50;

impl fmt::Debug for MessageAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.collective, self.name)
    }
}

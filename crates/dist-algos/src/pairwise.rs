//! Pairwise reduce-scatter: every rank receives all contributions to its chunk and adds them as T(p).
//!
//! The order is canonical for any number of ranks, with the fewest bytes, in p − 1 rounds. Contributions arrive
//! from the previous rank, the one before it, and so on around the ring. Two siblings of the tree are merged as
//! soon as both are complete.

use dist_transport::Rank;
use smallvec::SmallVec;

use crate::ring::left_by;
use crate::{
    ChunkLocation, Chunks, CollectiveKind, Cost, MessageAlgorithm, OnArrival, Order, Phases, ReceiveHalf,
    Schedule, SendHalf, Source, Step, circulant,
};

/// All_reduce: [`reduce_scatter`], then a [`circulant`] all_gather.
pub static ALL_REDUCE: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::AllReduce,
    name: "pairwise_circulant",
    about: "The pairwise reduce_scatter, then the circulant all_gather.",
    chunks: |world_size| world_size,
    order: |_| Some(Order::Canonical),
    cost: |world_size| cost(world_size).then(circulant::all_gather_cost(world_size)),
    phases: |rank, _| Phases {
        first: reduce_scatter(rank),
        owned: Chunks::one(rank.index()),
        second: circulant::all_gather(rank),
    },
    ..MessageAlgorithm::NOTHING
};

/// Reduce_scatter: every rank sends to every rank.
pub static REDUCE_SCATTER: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::ReduceScatter,
    name: "pairwise",
    about: "Every rank receives its chunk from every other rank and adds in the order of the canonical tree.",
    chunks: |world_size| world_size,
    order: |_| Some(Order::Canonical),
    cost,
    sends_from: |_| Source::Input,
    phases: |rank, _| Phases::one(rank, reduce_scatter(rank)),
    ..MessageAlgorithm::NOTHING
};

/// Reduce: [`reduce_scatter`], then a [`circulant`] gather.
pub static REDUCE: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::Reduce,
    name: "pairwise_gather",
    about: "The pairwise reduce_scatter, then every chunk to the root.",
    chunks: |world_size| world_size,
    order: |_| Some(Order::Canonical),
    cost: |world_size| {
        let gather = Cost { sent_max: world_size / 2, ..circulant::rooted_cost(world_size) };
        cost(world_size).then(gather)
    },
    phases: |rank, root| Phases {
        first: reduce_scatter(rank),
        owned: Chunks::NONE,
        second: circulant::gather(rank, root),
    },
    ..MessageAlgorithm::NOTHING
};

/// Returns the cost of [`reduce_scatter`].
const fn cost(world_size: usize) -> Cost {
    Cost::alike(world_size, world_size - 1, world_size - 1, world_size - 1)
}

/// Returns a reduce_scatter in p − 1 rounds of one chunk: rank `r` gets the sum of chunk `r`. The other chunks do not
/// change. At most 2⌈log₂ p⌉ slots are used.
pub fn reduce_scatter(rank: Rank) -> Schedule {
    let (mut merge, mut distance) = (Merge::new(rank), 0);
    Schedule::iterated(std::iter::from_fn(move || {
        if let Some(step) = merge.combine(rank) {
            return Some(step);
        }
        distance += 1;
        (distance < rank.world_size()).then(|| merge.receive(rank, distance))
    }))
}

/// A node of T(p): the 2^level ranks from `index·2^level` on, or fewer at the end of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TreeNode {
    level: u32,
    index: usize,
}

/// The complete nodes of the tree and their locations.
#[derive(Clone, Debug)]
struct Merge {
    /// The node that contains the rank's own contribution; it is in the buffer.
    own: TreeNode,
    /// Complete nodes that wait for their siblings, and their slots. With more than four nodes there are enough messages
    /// that an allocation does not matter.
    held: SmallVec<[(TreeNode, usize); 4]>,
}

impl Merge {
    fn new(rank: Rank) -> Self {
        let own = TreeNode { level: 0, index: rank.index() }.topmost(rank.world_size());
        Self { own, held: SmallVec::new() }
    }

    /// Returns the exchange with the ranks at this distance. If the sibling of the arriving contribution is complete,
    /// the contribution is reduced into it; otherwise it is stored in a free slot.
    fn receive(&mut self, rank: Rank, distance: usize) -> Step {
        let (from, to) = (left_by(rank, distance), left_by(rank, rank.world_size() - distance));
        let leaf = TreeNode { level: 0, index: from }.topmost(rank.world_size());
        let (place, then) = self.add(leaf, rank.world_size());
        let chunks = Chunks::one(rank.index());
        Step::exchange(SendHalf::buffer(to, Chunks::one(to)), ReceiveHalf { from, chunks, place, then })
    }

    /// Returns the next merge of two complete nodes.
    fn combine(&mut self, rank: Rank) -> Option<Step> {
        let (position, sibling) = self.held.iter().enumerate().find_map(|(position, &(node, _))| {
            let sibling = node.sibling();
            let there = self.own == sibling || self.held.iter().any(|&(other, _)| other == sibling);
            there.then_some((position, sibling))
        })?;
        let (_, from) = self.held.swap_remove(position);
        let (into, _) = self.add_to(sibling, rank.world_size()).expect("the sibling was seen to be there");
        Some(Step::Combine { chunk: rank.index(), from, into })
    }

    /// Adds a node to the tree: reduces it into its sibling, or stores it in a slot.
    fn add(&mut self, node: TreeNode, world_size: usize) -> (ChunkLocation, OnArrival) {
        self.add_to(node.sibling(), world_size).unwrap_or_else(|| {
            let slot = (0..=self.held.len()).find(|&slot| self.held.iter().all(|&(_, other)| other != slot));
            let slot = slot.expect("one of n + 1 slots is not among n");
            self.held.push((node, slot));
            (ChunkLocation::Slot(slot), OnArrival::Replace)
        })
    }

    /// Replaces a stored node by its parent, because its sibling is being reduced into it.
    fn add_to(&mut self, node: TreeNode, world_size: usize) -> Option<(ChunkLocation, OnArrival)> {
        if self.own == node {
            self.own = node.parent().topmost(world_size);
            return Some((ChunkLocation::Buffer, OnArrival::Reduce));
        }
        let (other, slot) = self.held.iter_mut().find(|(other, _)| *other == node)?;
        *other = node.parent().topmost(world_size);
        Some((ChunkLocation::Slot(*slot), OnArrival::Reduce))
    }
}

impl TreeNode {
    const fn sibling(self) -> Self {
        Self { level: self.level, index: self.index ^ 1 }
    }

    const fn parent(self) -> Self {
        Self { level: self.level + 1, index: self.index / 2 }
    }

    /// Returns the highest node that covers the same ranks. A left child without a right sibling covers the same
    /// ranks as its parent. The root has no parent.
    fn topmost(self, world_size: usize) -> Self {
        let mut node = self;
        while node.index > 0 && node.index.is_multiple_of(2) && (node.index + 1) << node.level >= world_size {
            node = node.parent();
        }
        node
    }
}

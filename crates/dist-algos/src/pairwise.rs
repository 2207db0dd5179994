//! Pairwise reduce-scatter: every rank gets every other's part of its chunk, and adds them up as T(p).
//!
//! Canonical order for any number of ranks, with the fewest bytes, in p − 1 rounds. Parts arrive from the rank
//! before, the one before that, and so on round; two siblings of the tree are merged as soon as both are there.

use dist_transport::Rank;
use smallvec::SmallVec;

use crate::ring::left_by;
use crate::schedule::Kind;
use crate::{ChunkLocation, Chunks, OnArrival, ReceiveHalf, Schedule, SendHalf, Step};

/// Chunk `r` of the sum ends on rank `r`, after p − 1 rounds of one chunk. The other chunks stay as they are.
/// At most 2⌈log₂ p⌉ slots are in use.
pub fn reduce_scatter(rank: Rank) -> Schedule {
    Schedule::new(rank, rank.world_size() - 1, Kind::Pairwise(Merge::new(rank)))
}

/// A node of T(p): the ranks from `index·2^level`, 2^level of them or as many as there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TreeNode {
    level: u32,
    index: usize,
}

/// Which nodes of the tree are complete, and where they are kept.
#[derive(Clone, Debug)]
pub(crate) struct Merge {
    /// The node that the rank's own part has been merged into; it is in the buffer.
    own: TreeNode,
    /// Complete nodes that wait for their siblings, and their slots. More than a few mean many more messages,
    /// beside which an allocation is nothing.
    held: SmallVec<[(TreeNode, usize); 4]>,
}

impl Merge {
    fn new(rank: Rank) -> Self {
        let own = TreeNode { level: 0, index: rank.index() }.topmost(rank.world_size());
        Self { own, held: SmallVec::new() }
    }

    /// The exchange with the ranks at this distance: what arrives is reduced into its sibling if that is there,
    /// else kept in a free slot.
    pub(crate) fn receive(&mut self, rank: Rank, distance: usize) -> Step {
        let (from, to) = (left_by(rank, distance), left_by(rank, rank.world_size() - distance));
        let leaf = TreeNode { level: 0, index: from }.topmost(rank.world_size());
        let (place, then) = self.add(leaf, rank.world_size());
        let chunks = Chunks::one(rank.index());
        Step::exchange(SendHalf::buffer(to, Chunks::one(to)), ReceiveHalf { from, chunks, place, then })
    }

    /// The next merge of two nodes that are both complete.
    pub(crate) fn combine(&mut self, rank: Rank) -> Option<Step> {
        let (position, sibling) = self.held.iter().enumerate().find_map(|(position, &(node, _))| {
            let sibling = node.sibling();
            let there = self.own == sibling || self.held.iter().any(|&(other, _)| other == sibling);
            there.then_some((position, sibling))
        })?;
        let (_, from) = self.held.swap_remove(position);
        let (into, _) = self.add_to(sibling, rank.world_size()).expect("the sibling was seen to be there");
        Some(Step::Combine { chunk: rank.index(), from, into })
    }

    /// Puts a new node with its sibling, or else into a slot of its own.
    fn add(&mut self, node: TreeNode, world_size: usize) -> (ChunkLocation, OnArrival) {
        self.add_to(node.sibling(), world_size).unwrap_or_else(|| {
            let slot = (0..=self.held.len()).find(|&slot| self.held.iter().all(|&(_, other)| other != slot));
            let slot = slot.expect("one of n + 1 slots is not among n");
            self.held.push((node, slot));
            (ChunkLocation::Slot(slot), OnArrival::Replace)
        })
    }

    /// Turns a node that is there into its parent, as its sibling is being reduced into it.
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

    /// The highest node over the same ranks: a left child without a right sibling is its parent. The root, which
    /// no node is beside, is left as it is.
    fn topmost(self, world_size: usize) -> Self {
        let mut node = self;
        while node.index > 0 && node.index.is_multiple_of(2) && (node.index + 1) << node.level >= world_size {
            node = node.parent();
        }
        node
    }
}

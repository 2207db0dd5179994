//! Sums as trees. Each tree is stored once, so two sums are equal if their numbers are equal.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use smallvec::{SmallVec, smallvec};

use super::goal::Piece;

/// The number of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct SumId(usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum SumNode {
    /// The data of one rank.
    Leaf(Piece),
    /// The sum of two trees, the left operand first.
    Sum(SumId, SumId),
    /// A sum that its owner has finished. Nothing may be added to it.
    Finished(SumId),
}

/// All trees that have occurred, and the contributors of each.
pub(super) struct Forest {
    nodes: Vec<SumNode>,
    /// The tree that stands for each tree and for all others that differ from it by the sides of operands only.
    any_sides: Vec<SumId>,
    numbers: HashMap<SumNode, SumId, BuildHasherDefault<Mix>>,
    contributors: Vec<RankSet>,
    /// The requested trees T(n), by their first rank and their number of ranks.
    canonical: HashMap<(usize, usize), SumId, BuildHasherDefault<Mix>>,
    world_size: usize,
}

impl Forest {
    pub(super) fn new(world_size: usize) -> Self {
        Self {
            nodes: Vec::new(),
            any_sides: Vec::new(),
            numbers: HashMap::default(),
            contributors: Vec::new(),
            canonical: HashMap::default(),
            world_size,
        }
    }

    pub(super) fn leaf(&mut self, piece: Piece) -> SumId {
        let world_size = self.world_size;
        self.number(SumNode::Leaf(piece), None, |_| RankSet::one(piece.rank, world_size))
    }

    /// Returns the sum of two trees, or a rank that contributed to both.
    pub(super) fn sum(&mut self, left: SumId, right: SumId) -> Result<SumId, usize> {
        if let Some(rank) = self.contributors[left.0].shared(&self.contributors[right.0]) {
            return Err(rank);
        }
        let union = |contributors: &[RankSet]| contributors[left.0].union(&contributors[right.0]);
        let (one, other) = (self.any_sides[left.0], self.any_sides[right.0]);
        let any_sides = self.number(SumNode::Sum(one.min(other), one.max(other)), None, union);
        Ok(self.number(SumNode::Sum(left, right), Some(any_sides), union))
    }

    pub(super) fn finished(&mut self, tree: SumId) -> SumId {
        let ranks = |contributors: &[RankSet]| contributors[tree.0].clone();
        let any_sides = self.any_sides[tree.0];
        let any_sides = self.number(SumNode::Finished(any_sides), None, ranks);
        self.number(SumNode::Finished(tree), Some(any_sides), ranks)
    }

    /// Returns the sum inside a finished tree.
    pub(super) fn unfinished(&self, tree: SumId) -> Option<SumId> {
        match self.nodes[tree.0] {
            SumNode::Finished(tree) => Some(tree),
            SumNode::Leaf(_) | SumNode::Sum(..) => None,
        }
    }

    /// Returns `true` if two trees are equal or differ only by the sides of operands.
    pub(super) fn are_alike(&self, one: SumId, other: SumId) -> bool {
        self.any_sides[one.0] == self.any_sides[other.0]
    }

    /// Returns `true` if the tree is the data of one rank.
    pub(super) fn is_leaf(&self, tree: SumId, piece: Piece) -> bool {
        self.nodes[tree.0] == SumNode::Leaf(piece)
    }

    /// Returns `true` if every rank has contributed.
    pub(super) fn is_total(&self, tree: SumId) -> bool {
        self.is_sum_of(tree, self.world_size)
    }

    /// Returns `true` if exactly the first `count` ranks have contributed.
    pub(super) fn is_sum_of(&self, tree: SumId, count: usize) -> bool {
        self.contributors[tree.0].are_first(count)
    }

    /// Returns the canonical tree T(count) over the `count` ranks from `start` on; `count` is at least 1.
    pub(super) fn canonical(&mut self, start: usize, count: usize) -> SumId {
        if count == 1 {
            return self.leaf(Piece { rank: start, chunk: 0 });
        }
        if let Some(&tree) = self.canonical.get(&(start, count)) {
            return tree;
        }
        let left_count = count.next_power_of_two() / 2;
        let left = self.canonical(start, left_count);
        let right = self.canonical(start + left_count, count - left_count);
        let tree = self.sum(left, right).expect("ranges that do not overlap");
        self.canonical.insert((start, count), tree);
        tree
    }

    /// Returns the number of a tree. A tree without `any_sides` stands for itself.
    fn number(
        &mut self,
        node: SumNode,
        any_sides: Option<SumId>,
        contributors: impl FnOnce(&[RankSet]) -> RankSet,
    ) -> SumId {
        if let Some(&tree) = self.numbers.get(&node) {
            return tree;
        }
        let tree = SumId(self.nodes.len());
        let ranks = contributors(&self.contributors);
        self.nodes.push(node);
        self.any_sides.push(any_sides.unwrap_or(tree));
        self.contributors.push(ranks);
        self.numbers.insert(node, tree);
        tree
    }
}

/// A set of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RankSet(SmallVec<[u64; 2]>);

impl RankSet {
    pub(super) fn one(rank: usize, world_size: usize) -> Self {
        let mut words = smallvec![0; world_size.div_ceil(64)];
        words[rank / 64] |= 1 << (rank % 64);
        Self(words)
    }

    pub(super) fn union(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(left, right)| left | right).collect())
    }

    /// Returns the lowest rank below `world_size` that is not in the set.
    pub(super) fn missing(&self, world_size: usize) -> Option<usize> {
        let (word, bits) = self.0.iter().enumerate().find(|(_, bits)| **bits != u64::MAX)?;
        Some(word * 64 + bits.trailing_ones() as usize).filter(|&rank| rank < world_size)
    }

    /// Returns `true` if the set consists of the first `count` ranks.
    fn are_first(&self, count: usize) -> bool {
        self.0.iter().enumerate().all(|(word, &bits)| match count.saturating_sub(word * 64) {
            ranks if ranks >= 64 => bits == u64::MAX,
            ranks => bits == (1 << ranks) - 1,
        })
    }

    /// Returns the lowest rank in both sets.
    fn shared(&self, other: &Self) -> Option<usize> {
        let words = self.0.iter().zip(&other.0).map(|(left, right)| left & right);
        let (word, bits) = words.enumerate().find(|(_, bits)| *bits != 0)?;
        Some(word * 64 + bits.trailing_zeros() as usize)
    }
}

/// A hash of small numbers; a multiplication mixes each of them in.
#[derive(Clone, Copy, Debug, Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }

    fn write_u64(&mut self, number: u64) {
        // 2^64 divided by the golden ratio.
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_differ_by_their_sides_and_by_their_groups() {
        let mut forest = Forest::new(3);
        let [a, b, c] = [0, 1, 2].map(|rank| forest.leaf(Piece { rank, chunk: 0 }));
        let (ab, ba) = (forest.sum(a, b).unwrap(), forest.sum(b, a).unwrap());
        let bc = forest.sum(b, c).unwrap();
        assert!(ab != ba && forest.are_alike(ab, ba));
        let (left, right) = (forest.sum(ab, c).unwrap(), forest.sum(a, bc).unwrap());
        assert!(!forest.are_alike(left, right));
        assert!(forest.is_total(left) && !forest.is_total(ab));
        assert_eq!(forest.canonical(0, 3), left);
    }

    #[test]
    fn nothing_is_added_twice_or_to_a_finished_sum() {
        let mut forest = Forest::new(100);
        let [a, b] = [3, 80].map(|rank| forest.leaf(Piece { rank, chunk: 0 }));
        let ab = forest.sum(a, b).unwrap();
        assert_eq!(forest.sum(ab, b), Err(80));
        let done = forest.finished(ab);
        assert_eq!(forest.sum(done, a), Err(3));
        assert_eq!((forest.unfinished(done), forest.unfinished(ab)), (Some(ab), None));
    }

    #[test]
    fn sets_know_the_first_ranks() {
        let first = |count: usize| {
            (1..count).fold(RankSet::one(0, 130), |set, rank| set.union(&RankSet::one(rank, 130)))
        };
        for count in [1, 2, 63, 64, 65, 128, 129, 130] {
            let set = first(count);
            assert!((0..=130).all(|other| set.are_first(other) == (other == count)), "{count}");
            assert_eq!(set.missing(130), (count < 130).then_some(count));
            assert_eq!(set.missing(count), None);
        }
        assert_eq!(RankSet::one(1, 130).missing(130), Some(0));
        assert!(!RankSet::one(1, 130).are_first(1));
    }

    #[test]
    fn the_canonical_tree_splits_at_the_largest_power_of_two_below() {
        let mut forest = Forest::new(7);
        let (four, three) = (forest.canonical(0, 4), forest.canonical(4, 3));
        assert_eq!(forest.canonical(0, 7), forest.sum(four, three).unwrap());
        let (two, other) = (forest.canonical(0, 2), forest.canonical(2, 2));
        assert_eq!(four, forest.sum(two, other).unwrap());
    }
}

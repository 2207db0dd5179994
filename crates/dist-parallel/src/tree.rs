//! Sums of micro-batches in the canonical order.
//!
//! The sum of n leaves is the tree T(n) = T(largest power of two below n) + T(rest), in whatever order the leaves
//! arrive. If they arrive by index, at most ⌈log₂ n⌉ + 1 partial sums exist at any time, the new leaf included: the
//! set bits of a binary counter.

use std::collections::BTreeMap;

/// A tree sum that accepts leaves in any order.
#[derive(Debug)]
pub(crate) struct TreeSum<B> {
    /// By the index of its first leaf, the number of leaves of a partial sum, which is a power of two, and the sum.
    partial: BTreeMap<usize, (usize, B)>,
}

impl<B> TreeSum<B> {
    pub(crate) const fn new() -> Self {
        Self { partial: BTreeMap::new() }
    }

    /// Adds leaf `index`, which must not have been added before. `combine` adds its right argument to its left.
    pub(crate) fn add(&mut self, index: usize, leaf: B, mut combine: impl FnMut(&mut B, B)) {
        let (mut start, mut size, mut sum) = (index, 1, leaf);
        loop {
            let is_left = (start / size).is_multiple_of(2);
            let sibling = if is_left { start + size } else { start - size };
            if self.partial.get(&sibling).is_none_or(|(other_size, _)| *other_size != size) {
                break;
            }
            let (_, mut other) = self.partial.remove(&sibling).expect("it was just looked at");
            if is_left {
                combine(&mut sum, other);
            } else {
                combine(&mut other, sum);
                (start, sum) = (sibling, other);
            }
            size *= 2;
        }
        let replaced = self.partial.insert(start, (size, sum));
        debug_assert!(replaced.is_none(), "leaf {index} was added twice");
    }

    /// Returns the sum of all leaves, or `None` without leaves, and empties the tree. The indices must have no gap.
    pub(crate) fn finish(&mut self, mut combine: impl FnMut(&mut B, B)) -> Option<B> {
        debug_assert!(self.is_gapless(), "a leaf is missing");
        let mut parts = std::mem::take(&mut self.partial).into_values().rev().map(|(_, sum)| sum);
        let last = parts.next()?;
        Some(parts.fold(last, |right, mut left| {
            combine(&mut left, right);
            left
        }))
    }

    /// Returns the number of partial sums.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        self.partial.len()
    }

    fn is_gapless(&self) -> bool {
        let mut end = 0;
        self.partial.iter().all(|(&start, &(size, _))| {
            let follows = start == end;
            end = start + size;
            follows
        })
    }
}

/// Returns the sum of losses, in the canonical order.
pub(crate) fn sum_of(losses: Vec<f32>) -> f32 {
    let mut sum = TreeSum::new();
    let add = |left: &mut f32, right| *left += right;
    losses.into_iter().enumerate().for_each(|(index, loss)| sum.add(index, loss, add));
    sum.finish(add).unwrap_or(-0.0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns T(n) of the leaves from `start` on, as text.
    fn tree(start: usize, n: usize) -> String {
        if n == 1 {
            return start.to_string();
        }
        let left = n.next_power_of_two() / 2;
        format!("({}+{})", tree(start, left), tree(start + left, n - left))
    }

    fn add(left: &mut String, right: String) {
        *left = format!("({left}+{right})");
    }

    #[test]
    fn leaves_in_order_give_the_tree_within_the_memory_of_a_counter() {
        for share in 1..=64_usize {
            let bound = share.next_power_of_two().ilog2() as usize + 1;
            let mut sum = TreeSum::new();
            for leaf in 0..share {
                assert!(sum.held() < bound, "no room for leaf {leaf} of {share}");
                sum.add(leaf, leaf.to_string(), add);
            }
            assert_eq!(sum.finish(add), Some(tree(0, share)));
            assert_eq!(sum.held(), 0);
        }
    }

    #[test]
    fn equal_shares_that_are_powers_of_two_are_subtrees_for_any_number_of_ranks() {
        for share in [1, 2, 4, 8] {
            for ranks in 1..=9 {
                let mut of_ranks = TreeSum::new();
                for rank in 0..ranks {
                    of_ranks.add(rank, tree(rank * share, share), add);
                }
                assert_eq!(of_ranks.finish(add), Some(tree(0, ranks * share)));
            }
        }
    }

    #[test]
    fn no_leaves_have_no_sum() {
        assert_eq!(TreeSum::<String>::new().finish(add), None);
    }

    proptest! {
        #[test]
        fn leaves_in_any_order_give_the_tree(
            order in (1..=64_usize).prop_flat_map(|n| Just(Vec::from_iter(0..n)).prop_shuffle()),
        ) {
            let mut sum = TreeSum::new();
            for &leaf in &order {
                sum.add(leaf, leaf.to_string(), add);
            }
            prop_assert_eq!(sum.finish(add), Some(tree(0, order.len())));
        }
    }
}

//! A set of integers, stored as ranges.

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of ranges that do not overlap or touch, sorted by their starts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Ranges(BTreeMap<usize, usize>);

impl Ranges {
    /// Creates a set of one range.
    pub(super) fn of(range: Range<usize>) -> Self {
        let mut ranges = Self::default();
        ranges.insert(range);
        ranges
    }

    /// Adds a range that is disjoint from the set.
    pub(super) fn insert(&mut self, Range { mut start, mut end }: Range<usize>) {
        if start >= end {
            return;
        }
        if let Some((&before, &its_end)) = self.0.range(..start).next_back()
            && its_end == start
        {
            self.0.remove(&before);
            start = before;
        }
        if let Some(its_end) = self.0.remove(&end) {
            end = its_end;
        }
        self.0.insert(start, end);
    }

    /// Removes a range, and returns the parts of it that were in the set.
    pub(super) fn remove(&mut self, range: &Range<usize>) -> Vec<Range<usize>> {
        if range.is_empty() {
            return Vec::new();
        }
        let before = self.0.range(..range.start).next_back().filter(|&(_, &end)| end > range.start);
        let overlapping: Vec<(usize, usize)> = before
            .into_iter()
            .chain(self.0.range(range.clone()))
            .map(|(&start, &end)| (start, end))
            .collect();
        let mut removed = Vec::new();
        for (start, end) in overlapping {
            self.0.remove(&start);
            if start < range.start {
                self.0.insert(start, range.start);
            }
            if end > range.end {
                self.0.insert(range.end, end);
            }
            removed.push(start.max(range.start)..end.min(range.end));
        }
        removed
    }

    /// Returns the first range of at least this length.
    pub(super) fn first_of(&self, len: usize) -> Option<Range<usize>> {
        self.iter().find(|range| range.len() >= len)
    }

    /// Returns all ranges in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Range<usize>> {
        self.0.iter().map(|(&start, &end)| start..end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_are_the_set_of_their_numbers(
            steps in prop::collection::vec((any::<bool>(), 0_usize..60, 0_usize..20), 0..40)
        ) {
            let (mut ranges, mut set) = (Ranges::default(), std::collections::BTreeSet::new());
            for (inserts, start, len) in steps {
                let range = start..start + len;
                if inserts {
                    if range.clone().all(|number| !set.contains(&number)) {
                        ranges.insert(range.clone());
                        set.extend(range);
                    }
                } else {
                    let removed: Vec<usize> = ranges.remove(&range).into_iter().flatten().collect();
                    let expected: Vec<usize> = range.filter(|number| set.remove(number)).collect();
                    prop_assert_eq!(removed, expected);
                }
                prop_assert!(ranges.iter().flatten().eq(set.iter().copied()));
                let all: Vec<_> = ranges.iter().collect();
                prop_assert!(all.windows(2).all(|pair| pair[0].end < pair[1].start));
            }
        }
    }
}

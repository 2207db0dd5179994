//! A set of chunks, the unit of schedules.

use std::fmt;

/// A set of chunks in ascending order, which is also their order in a message. The set is one run of consecutive
/// chunks, or several runs at equal distances.
///
/// Two sets are equal if they contain the same chunks, no matter how they were created.
///
/// ```
/// use dist_algos::Chunks;
///
/// let runs = [
///     (Chunks::range(3, 4), "[3..7]"),
///     (Chunks::strided(1, 4, 3), "[1..2, 5..6, 9..10]"),
///     (Chunks::with_bit(1, 7), "[2..4, 6..7]"),
///     (Chunks::wrapping(6, 4, 8), "[0..2, 6..8]"),
/// ];
/// for (chunks, runs) in runs {
///     assert_eq!(format!("{chunks:?}"), runs);
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Chunks {
    start: usize,
    count: usize,
    /// The number of chunks of the first run.
    head: usize,
    /// The number of chunks of each later run; the last run may have fewer.
    block: usize,
    /// The distance from the start of a run to the start of the next.
    stride: usize,
}

impl Chunks {
    /// No chunk, as in the messages of a barrier.
    pub const NONE: Self = Self::range(0, 0);

    /// Returns the chunk with this index.
    pub const fn one(index: usize) -> Self {
        Self::range(index, 1)
    }

    /// Returns the first `count` chunks.
    pub const fn all(count: usize) -> Self {
        Self::range(0, count)
    }

    /// Returns `count` consecutive chunks.
    pub const fn range(start: usize, count: usize) -> Self {
        let start = if count == 0 { 0 } else { start };
        Self { start, count, head: count, block: 1, stride: 1 }
    }

    /// Returns `count` chunks: `start`, `start + stride`, …
    pub const fn strided(start: usize, stride: usize, count: usize) -> Self {
        if stride == 1 { Self::range(start, count) } else { Self::runs(start, count, (1, 1), stride) }
    }

    /// Returns the chunks among the first `count` whose index has this bit.
    pub const fn with_bit(bit: usize, count: usize) -> Self {
        let run = 1 << bit;
        let (whole, rest) = (count / (2 * run), count % (2 * run));
        Self::runs(run, whole * run + rest.saturating_sub(run), (run, run), 2 * run)
    }

    /// Returns `count` chunks from `start` on, in a ring of `within` chunks; `count` is at most `within`.
    pub const fn wrapping(start: usize, count: usize, within: usize) -> Self {
        let before_end = within.saturating_sub(start);
        if count <= before_end {
            return Self::range(start, count);
        }
        let head = count - before_end;
        if head >= start { Self::all(within) } else { Self::runs(0, count, (head, before_end), start) }
    }

    /// Replaces each chunk by `each` consecutive chunks; chunk 0 becomes the chunks from `first` on.
    pub(crate) const fn magnified(self, first: usize, each: usize) -> Self {
        let runs = (self.head * each, self.block * each);
        Self::runs(first + self.start * each, self.count * each, runs, self.stride * each)
    }

    /// Replaces chunk x by chunk `first + x · step`. All runs of the set must have the same length.
    pub(crate) const fn apart(self, first: usize, step: usize) -> Self {
        let stride = if self.is_contiguous() { 1 } else { self.stride };
        Self::strided(first + self.start * step, stride * step, self.count)
    }

    /// Replaces chunk x by the `times` chunks x, x + period, x + 2 · period, … The set must be within one period.
    /// It must be one run, or continue through all periods as through the first.
    pub(crate) const fn repeated(self, period: usize, times: usize) -> Self {
        if !self.is_contiguous() {
            return Self::strided(self.start, self.stride, self.count * times);
        }
        if self.count == period {
            return Self::all(period * times);
        }
        Self::runs(self.start, self.count * times, (self.count, self.count), period)
    }

    /// Returns the set of these runs, each `stride` after the one before. Every set has only one representation.
    const fn runs(start: usize, count: usize, (head, block): (usize, usize), stride: usize) -> Self {
        if count <= head {
            return Self::range(start, count);
        }
        let rest = count - head;
        Self { start, count, head, block: if block < rest { block } else { rest }, stride }
    }

    /// Returns the number of chunks.
    #[inline]
    pub const fn len(self) -> usize {
        self.count
    }

    /// Returns `true` if the set is empty.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.count == 0
    }

    /// Returns `true` if the chunks are consecutive, so that their bytes are one piece of memory.
    #[inline]
    pub const fn is_contiguous(self) -> bool {
        self.count == self.head
    }

    /// Returns the first chunk; 0 if there is none.
    #[inline]
    pub const fn first(self) -> usize {
        self.start
    }

    /// Returns the index after the last chunk; 0 if there is none.
    #[inline]
    pub fn end(self) -> usize {
        let Some(last) = self.count.checked_sub(1) else { return 0 };
        self.checked_index(last).map_or(usize::MAX, |last| last.saturating_add(1))
    }

    /// Returns the chunks that are `by` further in a ring of `within` chunks. Returns `None` if the chunks are
    /// neither consecutive in the ring nor all before its end.
    pub(crate) fn rotated(self, by: usize, within: usize) -> Option<Self> {
        if self.is_contiguous() {
            return Some(Self::wrapping((self.start + by) % within, self.count, within));
        }
        let is_arc = self.is_two_runs() && self.start == 0 && self.end() == within;
        if is_arc {
            return Some(Self::wrapping((self.stride + by) % within, self.count, within));
        }
        (self.end() + by <= within).then_some(Self { start: self.start + by, ..self })
    }

    /// Returns `true` if every index is below `chunks` and none is repeated.
    #[inline]
    pub fn fit(self, chunks: usize) -> bool {
        let Some(last) = self.count.checked_sub(1) else { return true };
        let apart = self.stride >= self.head && (self.is_two_runs() || self.stride >= self.block);
        (self.is_contiguous() || apart) && self.checked_index(last).is_some_and(|last| last < chunks)
    }

    /// Returns `true` if the set contains the chunk with this index.
    pub const fn contains(self, index: usize) -> bool {
        let Some(offset) = index.checked_sub(self.start) else { return false };
        if offset < self.head {
            return true;
        }
        let Some(after) = offset.checked_sub(self.stride) else { return false };
        if self.is_two_runs() || self.stride == 0 {
            return after < self.count - self.head;
        }
        let (run, place) = (after / self.stride, after % self.stride);
        place < self.block && run * self.block + place < self.count - self.head
    }

    const fn is_two_runs(self) -> bool {
        self.count - self.head <= self.block
    }

    /// Returns `true` if the set contains every chunk of another set.
    pub fn includes(self, other: Self) -> bool {
        other.indices().all(|index| self.contains(index))
    }

    /// Returns `true` if the two sets have a chunk in common.
    pub fn overlap(self, other: Self) -> bool {
        if self.is_contiguous() && other.is_contiguous() {
            let apart = self.start + self.count <= other.start || other.start + other.count <= self.start;
            return !self.is_empty() && !other.is_empty() && !apart;
        }
        let (few, many) = if self.count <= other.count { (self, other) } else { (other, self) };
        few.indices().any(|index| many.contains(index))
    }

    /// Returns the indices in the order that the chunks have in a message.
    pub fn indices(self) -> impl ExactSizeIterator<Item = usize> + Clone {
        (0..self.count).map(move |place| self.index(place))
    }

    /// Returns the runs of consecutive chunks; one empty run for an empty set.
    pub(crate) fn contiguous(self) -> impl Iterator<Item = Self> + Clone {
        let others = (self.count - self.head).div_ceil(self.block);
        let run = move |run: usize| {
            let before = self.head + (run - 1) * self.block;
            Self::range(self.start + run * self.stride, self.block.min(self.count - before))
        };
        std::iter::once(Self::range(self.start, self.head)).chain((1..=others).map(run))
    }

    const fn index(self, place: usize) -> usize {
        if place < self.head {
            return self.start + place;
        }
        let after = place - self.head;
        self.start + (after / self.block + 1) * self.stride + after % self.block
    }

    fn checked_index(self, place: usize) -> Option<usize> {
        let Some(after) = place.checked_sub(self.head) else { return self.start.checked_add(place) };
        let run = (after / self.block + 1).checked_mul(self.stride)?;
        self.start.checked_add(run)?.checked_add(after % self.block)
    }
}

impl fmt::Debug for Chunks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.contiguous().filter(|run| !run.is_empty());
        f.debug_list().entries(runs.map(|run| run.start..run.start.saturating_add(run.count))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn indices(chunks: Chunks) -> Vec<usize> {
        chunks.indices().collect()
    }

    /// Returns sets of all kinds, some of them equal.
    fn sets() -> Vec<Chunks> {
        let small = || (0..5).flat_map(|a| (0..5).map(move |b| (a, b)));
        let strided = small()
            .flat_map(|(start, count)| (1..4).map(move |stride| Chunks::strided(start, stride, count)));
        let bits = (0..3).flat_map(|bit| (0..12).map(move |count| Chunks::with_bit(bit, count)));
        let wrapping = small().map(|(start, count)| Chunks::wrapping(start, count, 5));
        strided.chain(bits).chain(wrapping).collect()
    }

    #[test]
    fn sets_contain_the_chunks_of_their_runs() {
        assert_eq!(indices(Chunks::strided(1, 4, 3)), [1, 5, 9]);
        assert_eq!(indices(Chunks::with_bit(1, 11)), [2, 3, 6, 7, 10]);
        assert_eq!(indices(Chunks::with_bit(0, 5)), [1, 3]);
        assert_eq!(indices(Chunks::with_bit(2, 3)), []);
        assert_eq!(indices(Chunks::wrapping(6, 4, 8)), [0, 1, 6, 7]);
        assert_eq!(indices(Chunks::wrapping(3, 8, 8)), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(indices(Chunks::wrapping(3, 5, 8)), [3, 4, 5, 6, 7]);
        for set in sets() {
            let held = indices(set);
            assert!(held.is_sorted() && held.len() == set.len());
            assert!((0..20).all(|index| set.contains(index) == held.contains(&index)), "{set:?}");
            let end = held.last().map_or(0, |last| last + 1);
            assert!(set.fit(end) && (end == 0 || !set.fit(end - 1)), "{set:?}");
            let runs: Vec<usize> = set.contiguous().flat_map(Chunks::indices).collect();
            assert_eq!(runs, held);
            assert_eq!(set.is_contiguous(), held.windows(2).all(|pair| pair[0] + 1 == pair[1]));
        }
    }

    #[test]
    fn sets_grow_chunk_by_chunk() {
        let each = |set: Chunks, grow: &dyn Fn(usize) -> Vec<usize>| {
            let mut grown: Vec<usize> = set.indices().flat_map(grow).collect();
            grown.sort_unstable();
            grown
        };
        for set in sets() {
            let neighbours = each(set, &|index| (0..3).map(|next| 2 + index * 3 + next).collect());
            assert_eq!(indices(set.magnified(2, 3)), neighbours, "{set:?}");
            assert!(set.magnified(2, 0) == Chunks::NONE && set.magnified(0, 1) == set);
        }
        for set in [Chunks::NONE, Chunks::range(2, 3), Chunks::strided(1, 4, 3), Chunks::one(4)] {
            assert_eq!(indices(set.apart(5, 7)), each(set, &|index| vec![5 + index * 7]), "{set:?}");
            assert_eq!(set.apart(0, 1), set);
        }
        for set in
            [Chunks::NONE, Chunks::range(2, 3), Chunks::strided(1, 4, 3), Chunks::one(4), Chunks::all(12)]
        {
            let periods = each(set, &|index| (0..4).map(|period| index + period * 12).collect());
            assert_eq!(indices(set.repeated(12, 4)), periods, "{set:?}");
            assert_eq!(set.repeated(12, 1), set);
        }
    }

    #[test]
    fn sets_are_equal_if_they_hold_the_same() {
        for left in sets() {
            for right in sets() {
                assert_eq!(left == right, indices(left) == indices(right), "{left:?} {right:?}");
                let shared = left.indices().any(|index| right.contains(index));
                assert_eq!(left.overlap(right), shared, "{left:?} {right:?}");
            }
        }
    }

    #[test]
    fn rotated_sets_contain_the_following_chunks() {
        let arcs = (0..6).flat_map(|start| (0..=6).map(move |count| Chunks::wrapping(start, count, 6)));
        for arc in arcs {
            for by in 0..6 {
                let mut expected: Vec<usize> = arc.indices().map(|index| (index + by) % 6).collect();
                expected.sort_unstable();
                assert_eq!(arc.rotated(by, 6).map(indices), Some(expected), "{arc:?} by {by}");
            }
        }
        let strided = Chunks::strided(0, 2, 3);
        assert_eq!(strided.rotated(1, 6), Some(Chunks::strided(1, 2, 3)));
        assert_eq!(strided.rotated(2, 6), None);
    }

    #[test]
    fn sets_that_make_no_sense_do_not_fit() {
        assert!(!Chunks::strided(0, 0, 2).fit(10));
        assert!(!Chunks::strided(1, usize::MAX, 3).fit(usize::MAX));
        assert!(!Chunks::range(usize::MAX, 2).fit(usize::MAX));
        assert!(Chunks::NONE.fit(0));
    }
}

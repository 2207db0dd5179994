//! A set of chunks, the unit that schedules deal in.

/// The chunks `start`, `start + stride`, … : `count` of them, in this order in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Chunks {
    /// The first chunk's index.
    pub start: usize,
    /// From one index to the next; at least 1.
    pub stride: usize,
    /// How many chunks.
    pub count: usize,
}

impl Chunks {
    /// No chunk: what a message of a barrier carries.
    pub const NONE: Self = Self { start: 0, stride: 1, count: 0 };

    /// The chunk with this index.
    pub const fn one(index: usize) -> Self {
        Self { start: index, stride: 1, count: 1 }
    }

    /// The first `count` chunks, which are all of them if there are as many.
    pub const fn all(count: usize) -> Self {
        Self { start: 0, stride: 1, count }
    }

    /// `count` neighbouring chunks.
    pub const fn range(start: usize, count: usize) -> Self {
        Self { start, stride: 1, count }
    }

    /// Whether there is no chunk in the set.
    pub const fn is_empty(self) -> bool {
        self.count == 0
    }

    /// Whether the chunks are neighbours, so that their bytes are one piece of memory.
    pub const fn is_contiguous(self) -> bool {
        self.stride == 1 || self.count <= 1
    }

    /// Whether every index is below `chunks`, and none is named twice.
    pub fn fit(self, chunks: usize) -> bool {
        match self.count {
            0 => true,
            count => {
                let last = self.stride.checked_mul(count - 1).and_then(|span| span.checked_add(self.start));
                (self.stride > 0 || count == 1) && last.is_some_and(|last| last < chunks)
            }
        }
    }

    /// Whether the chunk with this index is in the set.
    pub const fn contains(self, index: usize) -> bool {
        if self.count == 0 || index < self.start {
            return false;
        }
        let distance = index - self.start;
        if self.stride == 0 {
            return distance == 0;
        }
        distance.is_multiple_of(self.stride) && distance / self.stride < self.count
    }

    /// Whether a chunk is in both sets.
    pub fn overlap(self, other: Self) -> bool {
        if self.is_contiguous() && other.is_contiguous() {
            let apart = self.start + self.count <= other.start || other.start + other.count <= self.start;
            return !self.is_empty() && !other.is_empty() && !apart;
        }
        let (few, many) = if self.count <= other.count { (self, other) } else { (other, self) };
        few.indices().any(|index| many.contains(index))
    }

    /// The indices, in the order of the chunks in a message.
    pub fn indices(self) -> impl ExactSizeIterator<Item = usize> + Clone {
        (0..self.count).map(move |index| self.start + index * self.stride)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_know_what_they_hold() {
        let strided = Chunks { start: 1, stride: 4, count: 3 };
        assert_eq!(strided.indices().collect::<Vec<_>>(), [1, 5, 9]);
        assert!(strided.contains(9) && !strided.contains(8) && !strided.contains(13));
        assert!(strided.fit(10) && !strided.fit(9));
        assert!(!strided.is_contiguous());
        assert!(Chunks::NONE.fit(0) && !Chunks::NONE.contains(0));
    }

    #[test]
    fn sets_that_make_no_sense_do_not_fit() {
        assert!(!Chunks { start: 0, stride: 0, count: 2 }.fit(10));
        assert!(!Chunks { start: 1, stride: usize::MAX, count: 3 }.fit(usize::MAX));
        assert!(!Chunks::range(usize::MAX, 2).fit(usize::MAX));
    }

    #[test]
    fn overlap_is_what_a_search_by_hand_finds() {
        let sets: Vec<Chunks> = (0..4)
            .flat_map(|start| (1..4).flat_map(move |stride| (0..4).map(move |count| (start, stride, count))))
            .map(|(start, stride, count)| Chunks { start, stride, count })
            .collect();
        for &left in &sets {
            for &right in &sets {
                let shared = left.indices().any(|index| right.indices().any(|other| other == index));
                assert_eq!(left.overlap(right), shared, "{left:?} {right:?}");
            }
        }
    }
}

//! The partition of a buffer into chunks.

use std::ops::Range;

use dist_transport::cpu::CacheLine;

use crate::Chunks;

/// A partition of a buffer into chunks. Of `n` elements in `p` chunks, chunk `i` has the elements `i·n/p ..
/// (i+1)·n/p`.
///
/// The chunks cover the buffer in order, and their sizes differ by at most one element. If `p` is more than `n`,
/// some chunks are empty. Messages of empty chunks are sent too. So a schedule has the same messages for every
/// length, and two ranks that disagree about the length find out.
///
/// ```
/// use dist_algos::Partition;
///
/// let partition = Partition::new(10, 4, 3).unwrap();          // ten elements of four bytes
/// let chunks: Vec<_> = (0..3).map(|chunk| partition.range(chunk)).collect();
/// assert_eq!(chunks, [0..12, 12..24, 24..40]);
/// ```
///
/// [`Partition::at`] creates chunks of any other sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Partition<'a> {
    elements: usize,
    element_size: usize,
    boundaries: Boundaries<'a>,
    /// The number of chunks, and the first chunk with elements; see [`among`](Partition::among).
    parts: usize,
    first: usize,
}

/// The boundaries between chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Boundaries<'a> {
    /// The boundaries are at equal distances, rounded to elements.
    Even { parts: usize },
    /// The boundaries are at these elements.
    At { borders: &'a [usize], largest: usize },
}

impl<'a> Partition<'a> {
    /// Creates a partition into equal chunks. Returns `None` if there are no parts, if the element size is 0,
    /// or if the size in bytes overflows.
    #[inline]
    pub const fn new(elements: usize, element_size: usize, parts: usize) -> Option<Self> {
        if parts == 0 || !fits(elements, element_size) {
            return None;
        }
        Some(Self { elements, element_size, boundaries: Boundaries::Even { parts }, parts, first: 0 })
    }

    /// Creates a partition in which chunk `i` has the elements `borders[i] .. borders[i + 1]`. The borders begin with
    /// 0 and ascend. Returns `None` if they do not, if the element size is 0, or if the size in bytes overflows.
    ///
    /// ```
    /// use dist_algos::Partition;
    ///
    /// let partition = Partition::at(&[0, 3, 3, 10], 4).unwrap();
    /// assert_eq!([0, 1, 2].map(|chunk| partition.range(chunk)), [0..12, 12..12, 12..40]);
    /// ```
    pub fn at(borders: &'a [usize], element_size: usize) -> Option<Self> {
        let [0, .., elements] = *borders else { return None };
        if !borders.is_sorted() || !fits(elements, element_size) {
            return None;
        }
        let largest = borders.windows(2).map(|pair| pair[1] - pair[0]).max()?;
        let parts = borders.len() - 1;
        Some(Self {
            elements,
            element_size,
            boundaries: Boundaries::At { borders, largest },
            parts,
            first: 0,
        })
    }

    /// Makes these chunks the chunks `first`, `first + 1`, … of `parts` chunks; all others are empty. It describes
    /// memory that holds only some of the chunks of a schedule. Returns `None` if `parts` is too small.
    ///
    /// ```
    /// use dist_algos::Partition;
    ///
    /// let partition = Partition::new(6, 4, 2).and_then(|held| held.among(1, 4)).unwrap();
    /// assert_eq!([0, 1, 2, 3].map(|chunk| partition.range(chunk).len()), [0, 12, 12, 0]);
    /// ```
    #[inline]
    pub fn among(self, first: usize, parts: usize) -> Option<Self> {
        let room = parts.checked_sub(first)?;
        (self.parts <= room).then(|| Self { parts, first: self.first + first, ..self })
    }

    /// Returns the number of chunks.
    #[inline]
    pub const fn parts(&self) -> usize {
        self.parts
    }

    /// Returns the number of bytes of an element.
    #[inline]
    pub const fn element_size(&self) -> usize {
        self.element_size
    }

    /// Returns `true` if 64 bytes are whole elements. A transport delivers messages in pieces of a multiple of 64 bytes.
    #[inline]
    pub(crate) const fn divides_cache_lines(&self) -> bool {
        self.element_size.is_power_of_two() && self.element_size <= CacheLine::BYTES
    }

    /// Returns the number of bytes of the buffer.
    #[inline]
    pub const fn bytes(&self) -> usize {
        self.elements * self.element_size
    }

    /// Returns the number of bytes of the largest chunk.
    #[inline]
    pub const fn chunk_bytes_max(&self) -> usize {
        let largest = match self.boundaries {
            Boundaries::Even { parts } => self.elements.div_ceil(parts),
            Boundaries::At { largest, .. } => largest,
        };
        largest * self.element_size
    }

    /// Returns the byte range of one chunk. For an index of `parts` or more it is an empty range at the end.
    #[inline]
    pub fn range(&self, chunk: usize) -> Range<usize> {
        self.border(chunk)..self.border(chunk.saturating_add(1))
    }

    /// Returns the byte range from the first chunk of a set to its last one. If the set is not contiguous, the range
    /// also contains other chunks.
    #[inline]
    pub fn span(&self, chunks: Chunks) -> Range<usize> {
        self.border(chunks.first())..self.border(chunks.end())
    }

    /// Returns the number of bytes of all chunks of a set.
    pub fn bytes_of(&self, chunks: Chunks) -> usize {
        chunks.contiguous().map(|run| self.span(run).len()).sum()
    }

    /// Returns the first byte of a chunk; the end of the buffer for an index of `parts` or more.
    #[inline]
    fn border(&self, chunk: usize) -> usize {
        let chunk = chunk.saturating_sub(self.first);
        let elements = match self.boundaries {
            _ if chunk == 0 => 0,
            Boundaries::Even { parts } if chunk >= parts => self.elements,
            Boundaries::Even { parts } => even_border(self.elements, parts, chunk),
            Boundaries::At { borders, .. } => borders[chunk.min(borders.len() - 1)],
        };
        elements * self.element_size
    }
}

/// Returns `true` if a buffer can have this many elements of this size.
#[inline]
const fn fits(elements: usize, element_size: usize) -> bool {
    element_size != 0 && elements.checked_mul(element_size).is_some()
}

/// Returns `chunk·elements/parts` without overflow, for a chunk up to `parts`.
fn even_border(elements: usize, parts: usize, chunk: usize) -> usize {
    let (whole, rest) = (elements / parts, elements % parts);
    match chunk.checked_mul(rest) {
        Some(product) => chunk * whole + product / parts,
        None => {
            let product = chunk as u128 * rest as u128 / parts as u128;
            chunk * whole + usize::try_from(product).expect("a fraction of the rest")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn no_partition_is_made_of_lengths_that_cannot_be_divided() {
        assert_eq!(Partition::new(8, 4, 0), None);
        assert_eq!(Partition::new(8, 0, 2), None);
        assert_eq!(Partition::new(usize::MAX / 2, 4, 2), None);
        assert!(Partition::new(0, 64, 5).is_some());
    }

    #[test]
    fn cache_lines_are_whole_elements_only_of_sizes_that_divide_64() {
        for (size, divides) in [(1, true), (3, false), (8, true), (24, false), (64, true), (128, false)] {
            let partition = Partition::new(8, size, 2).unwrap();
            assert_eq!((partition.divides_cache_lines(), partition.range(1)), (divides, 4 * size..8 * size));
        }
    }

    #[test]
    fn a_buffer_shorter_than_its_parts_has_empty_chunks() {
        let partition = Partition::new(2, 8, 5).unwrap();
        let lengths: Vec<usize> = (0..6).map(|chunk| partition.range(chunk).len()).collect();
        assert_eq!(lengths, [0, 0, 8, 0, 8, 0]);
        assert_eq!(partition.chunk_bytes_max(), 8);
    }

    #[test]
    fn borders_that_make_no_sense_are_no_partition() {
        for borders in [&[][..], &[0], &[1, 2], &[0, 3, 2], &[0, usize::MAX]] {
            assert_eq!(Partition::at(borders, 4), None, "{borders:?}");
        }
        assert_eq!(Partition::at(&[0, 5], 0), None);
        assert_eq!(Partition::at(&[0, 0, 0], 4).unwrap().bytes(), 0);
    }

    #[test]
    fn uneven_chunks_lie_between_their_borders() {
        let partition = Partition::at(&[0, 2, 2, 7, 8], 8).unwrap();
        assert_eq!((partition.parts(), partition.bytes(), partition.chunk_bytes_max()), (4, 64, 40));
        assert_eq!(partition.range(2), 16..56);
        assert_eq!(partition.range(4), 64..64);
        assert_eq!(partition.span(Chunks::range(1, 3)), 16..64);
        assert_eq!(partition.bytes_of(Chunks::strided(0, 2, 2)), 56);
    }

    #[test]
    fn chunks_among_others_keep_their_sizes() {
        let borders = [0, 1, 4];
        for held in [Partition::new(4, 2, 2).unwrap(), Partition::at(&borders, 2).unwrap()] {
            let among = held.among(3, 6).unwrap();
            assert_eq!((among.parts(), among.bytes()), (6, 8));
            assert_eq!(among.range(3), held.range(0));
            assert_eq!(among.range(4), held.range(1));
            assert_eq!(among.span(Chunks::all(6)), 0..8);
            assert!(among.range(0).is_empty() && among.range(5).is_empty());
            assert_eq!((held.among(5, 6), held.among(7, 6)), (None, None));
            assert_eq!(held.among(usize::MAX, 6), None);
        }
    }

    fn lengths() -> impl Strategy<Value = usize> {
        prop_oneof![0_usize..200, 0..usize::MAX / 64]
    }

    proptest! {
        #[test]
        fn chunks_tile_the_buffer(
            elements in lengths(),
            element_size in 1_usize..=64,
            parts in prop_oneof![1_usize..70, 1..1_000_000_usize],
            chunk in 0_usize..1_000_000,
        ) {
            let partition = Partition::new(elements, element_size, parts).unwrap();
            let chunk = chunk % parts;
            let range = partition.range(chunk);
            let by_hand = chunk as u128 * elements as u128 / parts as u128 * element_size as u128;
            prop_assert_eq!(range.start as u128, by_hand);
            prop_assert_eq!(partition.range(0).start, 0);
            prop_assert_eq!(partition.range(parts - 1).end, partition.bytes());
            prop_assert_eq!(range.end, partition.range(chunk + 1).start);
            prop_assert!(range.len() <= partition.chunk_bytes_max());
            prop_assert!(range.len() + element_size >= partition.chunk_bytes_max());
        }

        #[test]
        fn borders_do_not_overflow(chunk in any::<usize>(), parts in 1..usize::MAX) {
            let partition = Partition::new(usize::MAX, 1, parts).unwrap();
            let by_hand = chunk.min(parts) as u128 * usize::MAX as u128 / parts as u128;
            prop_assert_eq!(partition.range(chunk).start as u128, by_hand);
        }

        #[test]
        fn a_set_has_the_bytes_of_its_chunks(
            elements in 0_usize..1000,
            start in 0_usize..8, stride in 1_usize..4, count in 0_usize..6,
        ) {
            let partition = Partition::new(elements, 4, 32).unwrap();
            let chunks = Chunks::strided(start, stride, count);
            let sum: usize = chunks.indices().map(|chunk| partition.range(chunk).len()).sum();
            prop_assert_eq!(partition.bytes_of(chunks), sum);
            if chunks.is_contiguous() {
                prop_assert_eq!(partition.span(chunks).len(), sum);
            }
        }
    }
}

//! How memory is cut for a direct schedule: into parts, and every part into blocks.

use std::ops::Range;

use dist_transport::Grain;

use crate::Partition;

/// Memory cut into parts, each of them into the same number of blocks, at multiples of 64 bytes from the start of the
/// part. One block of one part is a cell.
///
/// ```
/// use dist_algos::Partition;
/// use dist_algos::direct::Cells;
///
/// let parts = Partition::new(100, 4, 2).unwrap();
/// let cells = Cells::new(parts, 3);
/// assert_eq!([0, 1, 2].map(|block| cells.range(1, block)), [200..264, 264..328, 328..400]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Cells<'a> {
    parts: Partition<'a>,
    blocks: usize,
}

impl<'a> Cells<'a> {
    /// These parts in so many blocks, at least one.
    #[inline]
    pub const fn new(parts: Partition<'a>, blocks: usize) -> Self {
        Self { parts, blocks: if blocks == 0 { 1 } else { blocks } }
    }

    /// The bytes of one cell.
    #[inline]
    pub fn range(&self, part: usize, block: usize) -> Range<usize> {
        range(&self.parts, self.blocks, (part, block))
    }

    /// Bytes that a place has which holds any of the cells, a multiple of 64.
    pub fn place_bytes(&self) -> usize {
        place_bytes(self.parts.chunk_bytes_max(), self.blocks)
    }
}

/// The bytes of a cell of parts that are cut into so many blocks.
#[inline]
pub(super) fn range(parts: &Partition<'_>, blocks: usize, (part, block): (usize, usize)) -> Range<usize> {
    let part = parts.range(part);
    if blocks == 1 {
        return part;
    }
    let grains = part.len().div_ceil(Grain::BYTES);
    let border = |block: usize| part.start + (block * grains / blocks * Grain::BYTES).min(part.len());
    border(block)..if block + 1 == blocks { part.end } else { border(block + 1) }
}

/// What a place has of parts of which the largest has so many bytes.
pub(super) const fn place_bytes(part_bytes_max: usize, blocks: usize) -> usize {
    part_bytes_max.div_ceil(Grain::BYTES).div_ceil(blocks) * Grain::BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_tile_their_part_and_fit_their_place() {
        for len in [0, 1, 63, 64, 65, 1000, 4096] {
            for blocks in 1..6 {
                let borders = [0, len / 3, len];
                let cells = Cells::new(Partition::at(&borders, 1).unwrap(), blocks);
                for part in 0..2 {
                    let mut end = borders[part];
                    for block in 0..blocks {
                        let range = cells.range(part, block);
                        assert_eq!(range.start, end);
                        let is_whole = (range.start - borders[part]).is_multiple_of(Grain::BYTES);
                        assert!(range.is_empty() || is_whole && range.len() <= cells.place_bytes());
                        end = range.end;
                    }
                    assert_eq!(end, borders[part + 1]);
                }
            }
        }
    }
}

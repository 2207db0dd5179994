//! The partition of memory for a direct schedule. Memory consists of parts, and every part consists of the same
//! number of blocks. Blocks start at multiples of 64 bytes from the start of the part.
//!
//! One block of one part is a cell.

use std::ops::Range;

use dist_transport::cpu::CacheLine;

use crate::Partition;

/// Returns the byte range of a cell. There is at least one block.
#[inline]
pub(super) fn range(parts: &Partition<'_>, blocks: usize, (part, block): (usize, usize)) -> Range<usize> {
    let part = parts.range(part);
    if blocks == 1 {
        return part;
    }
    let lines = part.len().div_ceil(CacheLine::BYTES);
    let border = |block: usize| part.start + (block * lines / blocks * CacheLine::BYTES).min(part.len());
    border(block)..if block + 1 == blocks { part.end } else { border(block + 1) }
}

/// Returns the size of a place that can hold any cell, a multiple of 64 bytes. `part_bytes_max` is the size of the
/// largest part.
pub(super) const fn place_bytes(part_bytes_max: usize, blocks: usize) -> usize {
    part_bytes_max.div_ceil(CacheLine::BYTES).div_ceil(blocks) * CacheLine::BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_tile_their_part_and_fit_their_place() {
        for len in [0, 1, 63, 64, 65, 1000, 4096] {
            for blocks in 1..6 {
                let borders = [0, len / 3, len];
                let parts = Partition::at(&borders, 1).unwrap();
                let place_bytes = place_bytes(parts.chunk_bytes_max(), blocks);
                for part in 0..2 {
                    let mut end = borders[part];
                    for block in 0..blocks {
                        let range = range(&parts, blocks, (part, block));
                        assert_eq!(range.start, end);
                        let is_whole = (range.start - borders[part]).is_multiple_of(CacheLine::BYTES);
                        assert!(range.is_empty() || is_whole && range.len() <= place_bytes);
                        end = range.end;
                    }
                    assert_eq!(end, borders[part + 1]);
                }
            }
        }
    }
}

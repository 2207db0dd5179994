//! The assignment of replicated values to the ranks that write them.

use super::Chunk;
use crate::shard_tensor::range_of_part;

/// Returns the values that rank `copy` of `copies` writes, if all of these ranks hold `chunks`. They are contiguous
/// in the list, and the shares are as equal as possible. Each chunk comes with the index of the one that it is from.
pub(super) fn assign(chunks: &[Chunk], copy: usize, copies: usize) -> Vec<(usize, Chunk)> {
    let total = chunks.iter().map(|chunk| chunk.len).sum();
    let share = range_of_part(total, copies, copy);
    let mut start = 0;
    let mut dealt = Vec::new();
    for (number, chunk) in chunks.iter().enumerate() {
        let (from, to) = (share.start.clamp(start, start + chunk.len), share.end.min(start + chunk.len));
        if from < to {
            dealt.push((number, Chunk { offset: chunk.offset + from - start, len: to - from, ..*chunk }));
        }
        start += chunk.len;
    }
    dealt
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_value_is_written_by_one_of_its_holders_and_shares_are_equal(
            lens in prop::collection::vec((0..7_usize, 0..30_usize), 0..12),
            copies in 1..9_usize,
        ) {
            let chunks: Vec<Chunk> = lens
                .iter()
                .enumerate()
                .map(|(parameter, &(offset, len))| Chunk { parameter, offset, len })
                .collect();
            let shares: Vec<_> = (0..copies).map(|copy| assign(&chunks, copy, copies)).collect();
            let mut ends: Vec<usize> = chunks.iter().map(|chunk| chunk.offset).collect();
            for (number, part) in shares.iter().flatten() {
                prop_assert_eq!(part.parameter, chunks[*number].parameter);
                prop_assert_eq!(part.offset, ends[*number]);
                prop_assert!(part.len > 0);
                ends[*number] += part.len;
            }
            for (chunk, end) in chunks.iter().zip(ends) {
                prop_assert_eq!(end, chunk.offset + chunk.len);
            }
            let sizes: Vec<usize> =
                shares.iter().map(|share| share.iter().map(|(_, part)| part.len).sum()).collect();
            prop_assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1);
            // A boundary splits at most one chunk, and there are `copies` − 1 boundaries.
            prop_assert!(shares.iter().map(Vec::len).sum::<usize>() < chunks.len() + copies);
        }
    }
}

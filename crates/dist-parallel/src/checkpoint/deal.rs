//! Which of several ranks that hold the same writes which part of it.

use super::Piece;
use crate::shard_tensor::range_of_part;

/// Of the values that `copies` ranks all hold, those that rank `copy` of them writes: neighbours in the list, and as
/// equal shares as possible. With each part comes the number of the piece that it is from.
pub(super) fn deal(pieces: &[Piece], copy: usize, copies: usize) -> Vec<(usize, Piece)> {
    let total = pieces.iter().map(|piece| piece.len).sum();
    let share = range_of_part(total, copies, copy);
    let mut start = 0;
    let mut dealt = Vec::new();
    for (number, piece) in pieces.iter().enumerate() {
        let (from, to) = (share.start.clamp(start, start + piece.len), share.end.min(start + piece.len));
        if from < to {
            dealt.push((number, Piece { offset: piece.offset + from - start, len: to - from, ..*piece }));
        }
        start += piece.len;
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
            let pieces: Vec<Piece> = lens
                .iter()
                .enumerate()
                .map(|(parameter, &(offset, len))| Piece { parameter, offset, len })
                .collect();
            let shares: Vec<_> = (0..copies).map(|copy| deal(&pieces, copy, copies)).collect();
            let mut ends: Vec<usize> = pieces.iter().map(|piece| piece.offset).collect();
            for (number, part) in shares.iter().flatten() {
                prop_assert_eq!(part.parameter, pieces[*number].parameter);
                prop_assert_eq!(part.offset, ends[*number]);
                prop_assert!(part.len > 0);
                ends[*number] += part.len;
            }
            for (piece, end) in pieces.iter().zip(ends) {
                prop_assert_eq!(end, piece.offset + piece.len);
            }
            let sizes: Vec<usize> =
                shares.iter().map(|share| share.iter().map(|(_, part)| part.len).sum()).collect();
            prop_assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1);
            // A cut makes one part more, and there are no more cuts than copies but one.
            prop_assert!(shares.iter().map(Vec::len).sum::<usize>() < pieces.len() + copies);
        }
    }
}

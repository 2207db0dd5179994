//! Division of a tensor along dim 0, and the inverse.

use std::ops::Range;

use crate::{Error, Result};

/// A shard of a tensor: some of its rows, in row-major order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorShard<'a, T> {
    /// The shape of the shard: that of the tensor, except for dim 0.
    pub shape: Vec<usize>,
    /// The values of the shard.
    pub values: &'a [T],
}

/// Divides a tensor of this shape along dim 0 into `parts` shards, as equal as possible. Earlier shards have one row
/// more. Nothing is copied. If there are more parts than rows, the last shards are empty. A tensor without dims has
/// no rows and is not divided.
///
/// ```
/// use dist_parallel::own_loop::{gather_shards, shard_tensor};
///
/// let values = [1, 2, 3, 4, 5, 6];
/// let shards = shard_tensor(&[3, 2], &values, 2)?;
/// assert_eq!((&shards[0].shape[..], shards[0].values), (&[2, 2][..], &[1, 2, 3, 4][..]));
/// assert_eq!((&shards[1].shape[..], shards[1].values), (&[1, 2][..], &[5, 6][..]));
/// assert_eq!(gather_shards(&shards)?, (vec![3, 2], values.to_vec()));
/// # Ok::<_, dist_parallel::Error>(())
/// ```
///
/// # Errors
/// `parts` is 0, or the shape does not match the number of values.
pub fn shard_tensor<'a, T>(
    shape: &[usize],
    values: &'a [T],
    parts: usize,
) -> Result<Vec<TensorShard<'a, T>>> {
    check(shape, values.len())?;
    if parts == 0 {
        return Err(Error::NoParts);
    }
    let Some((&rows, trailing)) = shape.split_first() else {
        return Ok(vec![TensorShard { shape: Vec::new(), values }]);
    };
    let row_len = values.len().checked_div(rows).unwrap_or(0);
    let shard = |part| {
        let Range { start, end } = range_of_part(rows, parts, part);
        let shape = [&[end - start], trailing].concat();
        TensorShard { shape, values: &values[start * row_len..end * row_len] }
    };
    Ok((0..parts).map(shard).collect())
}

/// Joins the shards of a tensor along dim 0 and returns its shape and values. A single shard is returned unchanged,
/// also one without dims.
///
/// # Errors
/// There are no shards, their dims after the first differ, or a shape does not match its number of values.
pub fn gather_shards<T: Clone>(shards: &[TensorShard<'_, T>]) -> Result<(Vec<usize>, Vec<T>)> {
    let (first, others) = shards.split_first().ok_or(Error::NoParts)?;
    check(&first.shape, first.values.len())?;
    if others.is_empty() {
        return Ok((first.shape.clone(), first.values.to_vec()));
    }
    let mut rows = 0;
    for (part, shard) in shards.iter().enumerate() {
        check(&shard.shape, shard.values.len())?;
        match (first.shape.split_first(), shard.shape.split_first()) {
            (Some((_, expected)), Some((count, trailing))) if expected == trailing => rows += count,
            _ => {
                let (expected, got) = (first.shape.clone(), shard.shape.clone());
                return Err(Error::PartsDiffer { part, expected, got });
            }
        }
    }
    let shape = [&[rows], &first.shape[1..]].concat();
    Ok((shape, shards.iter().flat_map(|shard| shard.values).cloned().collect()))
}

/// Returns the range of one of `parts` contiguous parts, as equal as possible. Earlier parts have one more.
pub(crate) fn range_of_part(len: usize, parts: usize, part: usize) -> Range<usize> {
    let (each, longer) = (len / parts, len % parts);
    let start = |part: usize| part * each + part.min(longer);
    start(part)..start(part + 1)
}

/// Returns an error unless a tensor of this shape has `len` values.
pub(crate) fn check(shape: &[usize], len: usize) -> Result<()> {
    let expected = shape.iter().try_fold(1_usize, |product, &dim| product.checked_mul(dim));
    // A product with a factor of 0 is 0, also if other factors overflow.
    let expected = if shape.contains(&0) { Some(0) } else { expected };
    if expected == Some(len) { Ok(()) } else { Err(Error::ShapeDiffers { shape: shape.to_vec(), len }) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::even(&[4, 3], 2, &[2, 2])]
    #[case::earlier_parts_get_one_more(&[7, 2], 3, &[3, 2, 2])]
    #[case::one_part(&[5], 1, &[5])]
    #[case::more_parts_than_rows(&[2, 3], 4, &[1, 1, 0, 0])]
    #[case::no_rows(&[0, 3], 2, &[0, 0])]
    #[case::rows_of_nothing(&[3, 0], 2, &[2, 1])]
    fn rows_are_assigned_in_order(#[case] shape: &[usize], #[case] parts: usize, #[case] expected: &[usize]) {
        let values: Vec<usize> = (0..shape.iter().product()).collect();
        let shards = shard_tensor(shape, &values, parts).unwrap();
        assert_eq!(shards.iter().map(|shard| shard.shape[0]).collect::<Vec<_>>(), expected);
        assert!(shards.iter().all(|shard| shard.shape[1..] == shape[1..]));
        assert_eq!(gather_shards(&shards).unwrap(), (shape.to_vec(), values));
    }

    #[rstest]
    fn a_single_value_stays_whole(#[values(1, 2, 5)] parts: usize) {
        let shards = shard_tensor(&[], &[7], parts).unwrap();
        assert_eq!(shards, [TensorShard { shape: vec![], values: &[7] }]);
        assert_eq!(gather_shards(&shards).unwrap(), (vec![], vec![7]));
    }

    #[test]
    fn invalid_shards_are_rejected() {
        assert!(matches!(shard_tensor(&[2], &[1, 2], 0), Err(Error::NoParts)));
        assert!(matches!(shard_tensor(&[3], &[1, 2], 1), Err(Error::ShapeDiffers { len: 2, .. })));
        assert!(matches!(shard_tensor(&[usize::MAX, 2], &[1, 2], 1), Err(Error::ShapeDiffers { .. })));
        assert!(matches!(gather_shards::<u8>(&[]), Err(Error::NoParts)));
        let shard = |shape: &[usize], values| TensorShard { shape: shape.to_vec(), values };
        let differ = gather_shards(&[shard(&[1, 2], &[1, 2]), shard(&[2, 1], &[3, 4])]);
        assert!(matches!(differ, Err(Error::PartsDiffer { part: 1, .. })), "{differ:?}");
        let whole = gather_shards(&[shard(&[], &[1]), shard(&[], &[2])]);
        assert!(matches!(whole, Err(Error::PartsDiffer { part: 0, .. })), "{whole:?}");
        let short = gather_shards(&[shard(&[1, 2], &[1, 2]), shard(&[1, 2], &[3])]);
        assert!(matches!(short, Err(Error::ShapeDiffers { len: 1, .. })), "{short:?}");
    }

    proptest! {
        #[test]
        fn gathering_undoes_sharding(
            shape in prop::collection::vec(0..6_usize, 0..4),
            parts in 1..9_usize,
        ) {
            let values: Vec<usize> = (0..shape.iter().product()).collect();
            let shards = shard_tensor(&shape, &values, parts).unwrap();
            let rows: Vec<usize> = shards.iter().filter_map(|shard| shard.shape.first().copied()).collect();
            prop_assert!(rows.is_sorted_by(|earlier, later| earlier >= later));
            prop_assert!(rows.iter().max().unwrap_or(&0) - rows.iter().min().unwrap_or(&0) <= 1);
            prop_assert_eq!(gather_shards(&shards).unwrap(), (shape, values));
        }
    }
}

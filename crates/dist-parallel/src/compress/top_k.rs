//! A communication hook that sends the largest gradients (top-k).

use std::cmp::Ordering;

use dist_collectives::Communicator;
use serde::{Deserialize, Serialize};

use super::residual::Residuals;
use super::{BucketGradients, BucketHook, BucketTensor, as_f32};
use crate::tree::TreeSum;
use crate::{BoxError, Error, Result, shard_tensor};

/// A hook that sums the ⌈ratio·n⌉ values of each tensor that are largest in magnitude on each rank, and keeps the
/// rest for later steps (error feedback).
///
/// The candidates are this step's gradient plus the residual: one addition in `f32`. Each value is then either sent
/// or left unchanged, bit for bit. A sent value is therefore the `f32` sum of all gradients since the value was last
/// sent. Nothing is lost and nothing is counted twice. With ratio 1 the sums have the bits of those without a hook.
///
/// NaN counts as larger than infinity, so both are sent and leave no residual.
#[derive(Debug)]
pub struct TopKHook {
    ratio: f64,
    residuals: Residuals,
}

impl TopKHook {
    /// Returns a hook that sends this fraction of each tensor.
    ///
    /// # Errors
    /// The ratio is not larger than 0 and at most 1.
    pub fn new(ratio: f64) -> Result<Self> {
        Ok(Self { ratio: check(ratio)?, residuals: Residuals::default() })
    }

    /// Returns the residual of a bucket, or an empty slice if the bucket was never sent.
    pub fn residual(&self, bucket: usize) -> &[f32] {
        self.residuals.look(bucket)
    }

    fn sum_f32(
        &mut self,
        bucket: usize,
        tensors: &[BucketTensor],
        values: &mut [f32],
        comm: &mut Communicator,
    ) -> Result<()> {
        let left = self.residuals.of(bucket, values.len());
        for (left, value) in left.iter_mut().zip(&*values) {
            *left += value;
        }
        let mut sent = Vec::new();
        for tensor in tensors {
            let count = count(self.ratio, tensor.len);
            take_largest(&mut left[tensor.offset..][..tensor.len], count, &mut sent)?;
        }
        let mut received = vec![0; sent.len() * comm.world_size()];
        comm.all_gather(&sent, &mut received).map_err(Error::communication)?;
        let mut sum = TreeSum::new();
        for (rank, entries) in received.chunks(sent.len().max(1)).enumerate() {
            sum.add(rank, self.read(entries, tensors)?, merge);
        }
        values.fill(0.0);
        for (index, value) in sum.finish(merge).unwrap_or_default() {
            values[index] = value;
        }
        Ok(())
    }

    /// Decodes the values of one rank, with indices in the bucket.
    fn read(&self, entries: &[u32], tensors: &[BucketTensor]) -> Result<Entries> {
        let (mut pairs, _) = entries.as_chunks();
        let mut read = Vec::with_capacity(pairs.len());
        for tensor in tensors {
            let (own, rest) = pairs.split_at(count(self.ratio, tensor.len));
            pairs = rest;
            for &[index, bits] in own {
                let index = in_range(index, tensor.len)?;
                read.push((tensor.offset + index, f32::from_bits(bits)));
            }
        }
        Ok(read)
    }
}

impl BucketHook for TopKHook {
    fn name(&self) -> String {
        format!("topk:{}", self.ratio)
    }

    fn keeps_residual(&self) -> bool {
        true
    }

    fn forget(&mut self) {
        self.residuals = Residuals::default();
    }

    fn sum(&mut self, bucket: BucketGradients<'_>, comm: &mut Communicator) -> Result<(), BoxError> {
        let BucketGradients { bucket, tensors, values } = bucket;
        as_f32(values, |values| Ok(self.sum_f32(bucket, tensors, values, comm)?))
    }
}

/// The largest values of a tensor with their indices.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SparseGradient {
    /// The indices in the tensor, in row-major order.
    pub indices: Vec<u32>,
    /// The values, by falling magnitude. Equal magnitudes are ordered by index.
    pub values: Vec<f32>,
    /// The number of values of the tensor.
    pub len: usize,
}

impl SparseGradient {
    /// Returns the ⌈ratio·n⌉ of these n values that are largest in magnitude. NaN counts as larger than infinity.
    ///
    /// ```
    /// use dist_parallel::compress::SparseGradient;
    ///
    /// let sparse = SparseGradient::largest(&[0.5, -3.0, 0.0, 1.0], 0.5)?;
    /// assert_eq!((&sparse.indices[..], &sparse.values[..]), (&[1, 3][..], &[-3.0, 1.0][..]));
    /// assert_eq!(sparse.decompress(&[2, 2])?, [0.0, -3.0, 0.0, 1.0]);
    /// # Ok::<_, dist_parallel::Error>(())
    /// ```
    ///
    /// # Errors
    /// The ratio is not larger than 0 and at most 1, or there are more values than `u32` can index.
    pub fn largest(values: &[f32], ratio: f64) -> Result<Self> {
        let mut keys = largest(values, count(check(ratio)?, values.len()))?;
        keys.sort_unstable();
        let indices: Vec<u32> = keys.into_iter().map(index_of).collect();
        let values_at = indices.iter().map(|&index| values[index as usize]).collect();
        Ok(Self { values: values_at, indices, len: values.len() })
    }

    /// Returns all values of the tensor of this shape, with zeros for missing ones.
    ///
    /// # Errors
    /// The shape has another number of values, the numbers of indices and values differ, or an index is out of range.
    pub fn decompress(&self, shape: &[usize]) -> Result<Vec<f32>> {
        let &Self { ref indices, ref values, len } = self;
        shard_tensor::check(shape, len)?;
        if indices.len() != values.len() {
            return Err(Error::SparseDiffers { indices: indices.len(), values: values.len() });
        }
        if let Some(&index) = indices.iter().find(|&&index| index as usize >= len) {
            return Err(Error::IndexOutOfRange { index, len });
        }
        let mut dense = vec![0.0; len];
        for (&index, &value) in indices.iter().zip(values) {
            dense[index as usize] = value;
        }
        Ok(dense)
    }
}

/// The values of a tensor with their indices, in ascending order.
type Entries = Vec<(usize, f32)>;

/// Adds the right entries to the left ones.
fn merge(left: &mut Entries, right: Entries) {
    let mut sum = Vec::with_capacity(left.len() + right.len());
    let (mut lefts, mut rights) = (left.iter().copied().peekable(), right.into_iter().peekable());
    while let (Some(&(left, value)), Some(&(right, other))) = (lefts.peek(), rights.peek()) {
        sum.push(match left.cmp(&right) {
            Ordering::Less => (left, value),
            Ordering::Equal => (left, value + other),
            Ordering::Greater => (right, other),
        });
        if left <= right {
            lefts.next();
        }
        if right <= left {
            rights.next();
        }
    }
    sum.extend(lefts.chain(rights));
    *left = sum;
}

/// Moves the largest values to `sent`, as pairs of index and bits in ascending order of index, and leaves zeros.
fn take_largest(left: &mut [f32], count: usize, sent: &mut Vec<u32>) -> Result<()> {
    let mut indices: Vec<u32> = largest(left, count)?.into_iter().map(index_of).collect();
    indices.sort_unstable();
    for index in indices {
        let value = std::mem::replace(&mut left[index as usize], -0.0);
        sent.extend([index, value.to_bits()]);
    }
    Ok(())
}

/// Returns the keys of the values with the largest magnitudes, in any order. A key is the inverted bits of the
/// magnitude followed by the index. It rises as magnitudes fall, and with the index for equal ones.
fn largest(values: &[f32], count: usize) -> Result<Vec<u64>> {
    if u32::try_from(values.len()).is_err() {
        return Err(Error::TooLong { len: values.len() });
    }
    let key = |(index, value): (u64, &f32)| u64::from(!value.abs().to_bits()) << 32 | index;
    let mut keys: Vec<u64> = (0..).zip(values).map(key).collect();
    if 0 < count && count < keys.len() {
        keys.select_nth_unstable(count - 1);
    }
    keys.truncate(count);
    Ok(keys)
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half is the index")]
const fn index_of(key: u64) -> u32 {
    key as u32
}

fn in_range(index: u32, len: usize) -> Result<usize> {
    usize::try_from(index).ok().filter(|&index| index < len).ok_or(Error::IndexOutOfRange { index, len })
}

/// Returns ⌈ratio·len⌉. The ratio is treated as the decimal number that was written: 0.07 of 100 is 7, although the
/// nearest `f64` is slightly larger.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and the length")]
#[expect(clippy::cast_precision_loss, reason = "lengths below 2³² are exact, and no others come here")]
fn count(ratio: f64, len: usize) -> usize {
    ((ratio * len as f64 * (1.0 - f64::EPSILON)).ceil() as usize).min(len)
}

fn check(ratio: f64) -> Result<f64> {
    let allowed = ratio > 0.0 && ratio <= 1.0;
    if allowed { Ok(ratio) } else { Err(Error::Setting { name: "the ratio", value: ratio }) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[rstest]
    #[case::nothing(&[], 0.5, &[])]
    #[case::at_least_one(&[1.0, 2.0, 3.0], 0.001, &[2])]
    #[case::falling_magnitude(&[1.0, -4.0, 2.0, 3.0], 0.75, &[1, 3, 2])]
    #[case::ties_by_index(&[1.0, -1.0, 1.0, 1.0], 0.5, &[0, 1])]
    #[case::all(&[0.0, 1.0], 1.0, &[1, 0])]
    #[case::zeros(&[0.0, -0.0, 0.0], 0.6, &[0, 1])]
    #[case::nan_before_infinity(&[1.0, f32::NEG_INFINITY, f32::NAN], 0.5, &[2, 1])]
    fn the_largest_are_chosen(#[case] values: &[f32], #[case] ratio: f64, #[case] expected: &[u32]) {
        let sparse = SparseGradient::largest(values, ratio).unwrap();
        assert_eq!(sparse.indices, expected);
        let chosen: Vec<f32> = expected.iter().map(|&index| values[index as usize]).collect();
        assert_eq!((bits(&sparse.values), sparse.len), (bits(&chosen), values.len()));
    }

    #[rstest]
    #[case(0.01, 100, 1)]
    #[case(0.07, 100, 7)]
    #[case(0.29, 100, 29)]
    #[case(0.01, 101, 2)]
    #[case(1.0, 7, 7)]
    #[case(1e-300, 7, 1)]
    #[case(0.5, 0, 0)]
    fn a_ratio_is_a_decimal_number(#[case] ratio: f64, #[case] len: usize, #[case] expected: usize) {
        assert_eq!(count(ratio, len), expected);
    }

    #[rstest]
    fn ratios_that_make_no_sense_are_refused(
        #[values(0.0, -0.0, -0.1, 1.000_001, f64::NAN, f64::INFINITY)] ratio: f64,
    ) {
        for refused in [TopKHook::new(ratio).map(drop), SparseGradient::largest(&[1.0], ratio).map(drop)] {
            assert!(matches!(refused, Err(Error::Setting { name: "the ratio", .. })), "{refused:?}");
        }
    }

    #[test]
    fn inconsistent_sparse_gradients_are_not_decompressed() {
        let sparse = SparseGradient::largest(&[1.0, 2.0, 3.0], 1.0).unwrap();
        assert!(matches!(sparse.decompress(&[2]), Err(Error::ShapeDiffers { len: 3, .. })));
        assert!(matches!(sparse.decompress(&[usize::MAX, 9]), Err(Error::ShapeDiffers { .. })));
        let empty = SparseGradient::largest(&[], 1.0).unwrap();
        assert_eq!(empty.decompress(&[usize::MAX, 2, 0]).unwrap(), [0.0; 0], "as shards have it");
        let fewer = SparseGradient { values: vec![1.0], ..sparse.clone() };
        assert!(matches!(fewer.decompress(&[3]), Err(Error::SparseDiffers { indices: 3, values: 1 })));
        let beyond = SparseGradient { indices: vec![0, 3, 1], ..sparse };
        assert!(matches!(beyond.decompress(&[3]), Err(Error::IndexOutOfRange { index: 3, len: 3 })));
    }

    proptest! {
        #[test]
        fn all_of_a_tensor_is_decompressed_as_it_was(values in prop::collection::vec(any::<f32>(), 0..50)) {
            let sparse = SparseGradient::largest(&values, 1.0).unwrap();
            prop_assert_eq!(bits(&sparse.decompress(&[values.len()]).unwrap()), bits(&values));
        }

        #[test]
        fn no_residual_is_larger_than_a_sent_value(
            values in prop::collection::vec(-8_i8..8, 1..50),
            ratio in 0.01..1.0_f64,
        ) {
            let values: Vec<f32> = values.into_iter().map(f32::from).collect();
            let mut left = values.clone();
            let mut sent = Vec::new();
            take_largest(&mut left, count(ratio, values.len()), &mut sent).unwrap();
            let (pairs, _) = sent.as_chunks::<2>();
            prop_assert!(pairs.is_sorted_by(|a, b| a[0] < b[0]));
            let least = pairs.iter().map(|pair| f32::from_bits(pair[1]).abs()).fold(f32::INFINITY, f32::min);
            prop_assert!(left.iter().all(|left| left.abs() <= least));
            // Each value is in exactly one place, unchanged.
            for &[index, sent] in pairs {
                prop_assert_eq!(std::mem::replace(&mut left[index as usize], f32::from_bits(sent)), 0.0);
            }
            prop_assert_eq!(bits(&left), bits(&values));
        }

        #[test]
        fn lists_are_merged_by_index(
            left in prop::collection::btree_map(0..20_usize, -9_i8..9, 0..12),
            right in prop::collection::btree_map(0..20_usize, -9_i8..9, 0..12),
        ) {
            let entries = |map: &BTreeMap<usize, i8>| -> Entries {
                map.iter().map(|(&index, &value)| (index, value.into())).collect()
            };
            let mut expected = left.clone();
            for (&index, value) in &right {
                *expected.entry(index).or_default() += value;
            }
            let mut merged = entries(&left);
            merge(&mut merged, entries(&right));
            prop_assert_eq!(merged, entries(&expected));
        }
    }
}

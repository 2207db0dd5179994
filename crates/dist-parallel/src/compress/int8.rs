//! A communication hook that sends 8-bit gradients with a scale for each block.

use dist_collectives::Communicator;

use super::{BucketGradients, BucketHook, as_f32};
use crate::tree::TreeSum;
use crate::{BoxError, Error};

/// A hook that sums gradients as `i8` with a scale for each block of 256 values: about a quarter of the bytes.
///
/// The bucket is divided into one part per rank. Every rank sends each part to its owner. The owner decodes the
/// parts, sums them in the canonical order, encodes the sum and sends it to all ranks. The values of a block are
/// multiples of 1/127 of its largest magnitude, rounded to nearest even. The sum differs from the exact one, except
/// for rounding of `f32`, by at most 1/254 of the sum of the ranks' largest magnitudes in the block plus 1/254 of the
/// largest magnitude of the sum.
///
/// A block with a NaN or an infinity becomes NaN as a whole.
#[derive(Debug, Default)]
pub struct Int8Hook {
    sent: Vec<u8>,
    received: Vec<u8>,
}

impl BucketHook for Int8Hook {
    fn name(&self) -> String {
        format!("int8 in blocks of {BLOCK_LEN}")
    }

    fn sum(&mut self, bucket: BucketGradients<'_>, comm: &mut Communicator) -> Result<(), BoxError> {
        as_f32(bucket.values, |values| Ok(self.sum_f32(values, comm)?))
    }
}

impl Int8Hook {
    fn sum_f32(&mut self, values: &mut [f32], comm: &mut Communicator) -> Result<(), Error> {
        let shard_len = values.len().div_ceil(comm.world_size());
        if shard_len == 0 {
            return Ok(());
        }
        let bytes = encoded_len(shard_len);
        // The last parts can be shorter or empty. Their missing values are sent as zeros and ignored.
        self.sent.clear();
        self.sent.resize(bytes * comm.world_size(), 0);
        for (part, into) in values.chunks(shard_len).zip(self.sent.chunks_mut(bytes)) {
            encode(part, into, shard_len);
        }
        self.received.clear();
        self.received.resize(self.sent.len(), 0);
        comm.all_to_all(&self.sent, &mut self.received).map_err(Error::communication)?;
        let mut sum = TreeSum::new();
        for (rank, part) in self.received.chunks(bytes).enumerate() {
            let mut decoded = vec![0.0; shard_len];
            decode(part, &mut decoded, shard_len);
            sum.add(rank, decoded, |left, right| add(left, right));
        }
        let sum = sum.finish(|left, right| add(left, right)).expect("there is at least one rank");
        self.sent.truncate(bytes);
        encode(&sum, &mut self.sent, shard_len);
        comm.all_gather(&self.sent, &mut self.received).map_err(Error::communication)?;
        for (part, from) in values.chunks_mut(shard_len).zip(self.received.chunks(bytes)) {
            decode(from, part, shard_len);
        }
        Ok(())
    }
}

fn add(left: &mut [f32], right: Vec<f32>) {
    left.iter_mut().zip(right).for_each(|(left, right)| *left += right);
}

/// Returns the bytes of `len` values: the scales of the blocks, then the values.
const fn encoded_len(len: usize) -> usize {
    len + SCALE_BYTES * len.div_ceil(BLOCK_LEN)
}

/// Encodes a part, which can be shorter than `part_len`, the length of the message.
fn encode(values: &[f32], into: &mut [u8], shard_len: usize) {
    let (scales, codes) = into.split_at_mut(SCALE_BYTES * shard_len.div_ceil(BLOCK_LEN));
    let blocks = values.chunks(BLOCK_LEN).zip(codes.chunks_mut(BLOCK_LEN));
    for ((block, codes), scale_bytes) in blocks.zip(scales.chunks_mut(SCALE_BYTES)) {
        let scale = scale(block);
        scale_bytes.copy_from_slice(&scale.to_le_bytes());
        for (code, value) in codes.iter_mut().zip(block) {
            *code = quotient(*value, scale).cast_unsigned();
        }
    }
}

/// Decodes values until the slice is full.
fn decode(from: &[u8], values: &mut [f32], shard_len: usize) {
    let (scales, codes) = from.split_at(SCALE_BYTES * shard_len.div_ceil(BLOCK_LEN));
    let blocks = values.chunks_mut(BLOCK_LEN).zip(codes.chunks(BLOCK_LEN));
    for ((block, codes), scale) in blocks.zip(scales.chunks(SCALE_BYTES)) {
        let scale = f32::from_le_bytes(scale.try_into().expect("a scale has four bytes"));
        for (value, code) in block.iter_mut().zip(codes) {
            // The largest finite value, divided and multiplied again, can exceed the range.
            *value = (f32::from(code.cast_signed()) * scale).clamp(f32::MIN, f32::MAX);
        }
    }
}

/// Returns the scale of a block, or NaN if a value is not finite.
fn scale(block: &[f32]) -> f32 {
    if !block.iter().all(|value| value.is_finite()) {
        return f32::NAN;
    }
    block.iter().fold(0.0_f32, |largest, value| largest.max(value.abs())) / CODE_MAX
}

/// Returns the nearest multiple of the scale. The scale of tiny values is 0.
#[expect(clippy::cast_possible_truncation, reason = "quotients lie between −127 and 127, and casts saturate")]
fn quotient(value: f32, scale: f32) -> i8 {
    if scale > 0.0 { (value / scale).round_ties_even().clamp(-CODE_MAX, CODE_MAX) as i8 } else { 0 }
}

const BLOCK_LEN: usize = 256;
const SCALE_BYTES: usize = size_of::<f32>();
const CODE_MAX: f32 = 127.0;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn round_trip(values: &[f32], shard_len: usize) -> Vec<f32> {
        let mut bytes = vec![0; encoded_len(shard_len)];
        encode(values, &mut bytes, shard_len);
        let mut decoded = vec![0.0; values.len()];
        decode(&bytes, &mut decoded, shard_len);
        decoded
    }

    #[test]
    fn zeros_the_largest_and_the_smallest_values_arrive() {
        assert_eq!(round_trip(&[0.0, -0.0, 0.0], 3), [0.0; 3]);
        assert_eq!(round_trip(&[f32::MAX, f32::MIN, 0.0], 5), [f32::MAX, f32::MIN, 0.0]);
        let smallest = f32::from_bits(1);
        assert_eq!(round_trip(&[smallest], 1), [0.0], "too small for a scale");
        assert!(round_trip(&[], 300).is_empty());
    }

    #[test]
    fn a_value_that_is_not_finite_makes_only_its_block_nan() {
        for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![1.0; 2 * BLOCK_LEN + 1];
            values[BLOCK_LEN] = special;
            let decoded = round_trip(&values, values.len());
            let nan: Vec<usize> = (0..decoded.len()).filter(|&index| decoded[index].is_nan()).collect();
            assert_eq!(nan, Vec::from_iter(BLOCK_LEN..2 * BLOCK_LEN));
            assert_eq!(decoded[0], 1.0);
        }
    }

    /// Checks that each value is off by at most half a scale and three roundings. Scale, quotient and product are
    /// each rounded by at most 2⁻²⁴ of the block's largest magnitude.
    #[track_caller]
    fn check_errors(values: &[f32], shard_len: usize) {
        let decoded = round_trip(values, shard_len);
        for (block, decoded) in values.chunks(BLOCK_LEN).zip(decoded.chunks(BLOCK_LEN)) {
            let largest = block.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            let bound = f64::from(largest) * (1.0 / 254.0 + 3.0 / f64::from(1 << 24));
            for (value, decoded) in block.iter().zip(decoded) {
                let error = (f64::from(*value) - f64::from(*decoded)).abs();
                assert!(error <= bound, "{value} arrived as {decoded}, {error} off, more than {bound}");
            }
        }
    }

    #[test]
    fn a_quotient_that_is_rounded_to_a_tie_is_off_by_no_more_than_the_rounding() {
        check_errors(&[8.505_157e29, -9.955_345_5e29], 2);
    }

    proptest! {
        #[test]
        fn a_value_arrives_within_half_a_scale(
            values in prop::collection::vec(-1e30_f32..1e30, 1..600),
            room in 0..40_usize,
        ) {
            check_errors(&values, values.len() + room);
        }
    }
}

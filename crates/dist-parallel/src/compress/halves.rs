//! Communication hooks that send 16-bit gradients.

use dist_collectives::{Communicator, Element, ReduceOp};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::{BucketGradients, BucketHook, as_f32};
use crate::BoxError;

/// A hook that sums gradients as `bf16`: half the bytes, 8 bits of precision, the range of `f32`.
///
/// Values are rounded once. The sum over n ranks is rounded at each of the at most ⌈log₂ n⌉ additions of a value. It
/// differs from the exact sum by at most (1 + ⌈log₂ n⌉) · 2⁻⁸ of the sum of magnitudes, except for terms of higher
/// order. NaN and infinities are preserved.
#[derive(Debug, Default)]
pub struct Bf16Hook {
    memory: Vec<bf16>,
}

/// A hook that sums gradients as `f16`: half the bytes, 11 bits of precision, a small range.
///
/// The ranks agree on the largest finite magnitude in the bucket, one `f32`. They multiply all values by the power of
/// two that brings n of them just into the range of `f16`. So no finite gradient becomes infinite, however many
/// micro-batches a rank has summed. The sum differs from the exact one by at most (1 + ⌈log₂ n⌉) · 2⁻¹¹ of the sum of
/// magnitudes plus n · 2^⌈log₂ n⌉ · 2⁻³⁹ of the largest magnitude in the bucket. NaN and infinities are preserved.
#[derive(Debug, Default)]
pub struct F16Hook {
    memory: Vec<f16>,
}

impl BucketHook for Bf16Hook {
    fn name(&self) -> String {
        "bf16".to_owned()
    }

    fn sum(&mut self, bucket: BucketGradients<'_>, comm: &mut Communicator) -> Result<(), BoxError> {
        as_f32(bucket.values, |values| Ok(sum(values, &mut self.memory, comm)?))
    }
}

impl BucketHook for F16Hook {
    fn name(&self) -> String {
        "f16".to_owned()
    }

    fn sum(&mut self, bucket: BucketGradients<'_>, comm: &mut Communicator) -> Result<(), BoxError> {
        as_f32(bucket.values, |values| {
            if values.is_empty() {
                return Ok(());
            }
            let finite = values.iter().map(|value| value.abs()).filter(|value| value.is_finite());
            let mut largest = [finite.fold(0.0, f32::max)];
            comm.all_reduce(&mut largest, ReduceOp::Max)?;
            let scale = scale(largest[0], comm.world_size());
            values.iter_mut().for_each(|value| *value *= scale);
            sum(values, &mut self.memory, comm)?;
            values.iter_mut().for_each(|value| *value /= scale);
            Ok(())
        })
    }
}

/// Returns the power of two that scales a sum of `ranks` values of this magnitude to at most 2¹⁵, in the range of
/// `f16`. Multiplying by it rounds no value that is not zero as an `f16`.
fn scale(largest: f32, ranks: usize) -> f32 {
    let exponent = match largest {
        0.0 => 0,
        largest => exponent_above(largest),
    };
    let ranks = ranks.next_power_of_two().trailing_zeros().cast_signed();
    // Both the scale and its inverse are normal numbers.
    2.0_f32.powi((15 - exponent - ranks).clamp(-126, 126))
}

/// Returns the least exponent of a power of two above a finite number above 0.
fn exponent_above(number: f32) -> i32 {
    let biased = (number.to_bits() >> 23).cast_signed();
    if biased == 0 { -126 } else { biased - 126 }
}

/// Sums the values as a 16-bit type, in reused memory.
fn sum<T: Element>(
    values: &mut [f32],
    memory: &mut Vec<T>,
    comm: &mut Communicator,
) -> dist_collectives::Result<()>
where
    [T]: HalfFloatSliceExt,
{
    memory.resize(values.len(), T::zeroed());
    memory.convert_from_f32_slice(values);
    comm.all_reduce(memory, ReduceOp::Sum)?;
    memory.convert_to_f32_slice(values);
    Ok(())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(1.0, 1, 2.0_f32.powi(14))]
    #[case(1.5, 1, 2.0_f32.powi(14))]
    #[case(2.0, 1, 2.0_f32.powi(13))]
    #[case(1.0, 5, 2.0_f32.powi(11))]
    #[case(80_000.0, 2, 2.0_f32.powi(-3))]
    #[case(0.0, 1, 2.0_f32.powi(15))]
    #[case(f32::MAX, 1, 2.0_f32.powi(-113))]
    #[case(f32::MAX, 1 << 40, 2.0_f32.powi(-126))]
    #[case(f32::from_bits(1), 1, 2.0_f32.powi(126))]
    fn the_largest_values_of_all_ranks_have_a_sum_in_range(
        #[case] largest: f32,
        #[case] ranks: usize,
        #[case] expected: f32,
    ) {
        assert_eq!(scale(largest, ranks), expected);
    }
}

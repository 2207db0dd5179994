//! Gradients that travel in 16 bits.

use dist_collectives::{Communicator, Element, ReduceOp};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::{BucketGradients, BucketHook, as_f32};
use crate::BoxError;

/// Sums gradients as `bf16`: half the bytes, 8 bits of precision, the range of `f32`.
///
/// Values are rounded once, and the sum of n ranks at each of the at most ⌈log₂ n⌉ additions that a value goes
/// through: a sum differs from the exact one by at most (1 + ⌈log₂ n⌉) · 2⁻⁸ of the sum of magnitudes, but for terms of
/// higher order. NaN and infinities arrive as they are.
#[derive(Debug, Default)]
pub struct Bf16Hook {
    memory: Vec<bf16>,
}

/// Sums gradients as `f16`: half the bytes, 11 bits of precision, a small range.
///
/// A rank's value is multiplied by the power of two that keeps n of the largest from overflowing, 2^−⌈log₂ n⌉. One
/// beyond 65504 then is infinite, and so is the sum, on every rank; below 2⁻¹⁴ precision fades, and 2⁻²⁵ is zero. In
/// between a sum differs from the exact one by at most (1 + ⌈log₂ n⌉) · 2⁻¹¹ of the sum of magnitudes.
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
        // Powers of two: nothing is rounded.
        let ranks = power_of_two_from(comm.world_size());
        as_f32(bucket.values, |values| {
            values.iter_mut().for_each(|value| *value /= ranks);
            sum(values, &mut self.memory, comm)?;
            values.iter_mut().for_each(|value| *value *= ranks);
            Ok(())
        })
    }
}

/// Sums the values as halves, by way of memory that is kept.
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

/// The smallest power of two that is no less than a number of ranks.
fn power_of_two_from(ranks: usize) -> f32 {
    (0..ranks.next_power_of_two().trailing_zeros()).fold(1.0, |power, _| 2.0 * power)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(1, 1.0)]
    #[case(5, 8.0)]
    #[case(32_768, 32_768.0)]
    #[case(32_769, 65_536.0)]
    #[case((1 << 40) - 1, 1_099_511_627_776.0)]
    fn any_number_of_ranks_has_its_power_of_two(#[case] ranks: usize, #[case] expected: f32) {
        assert_eq!(power_of_two_from(ranks), expected);
    }
}

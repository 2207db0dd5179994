//! Mean gradients in the memory of their sums.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::flat::Flat;
use crate::{FloatType, Values, ValuesMut};

/// Mean gradients of one type. Those of `f16` are stored in the first half of the memory of their `f32` sums, so that
/// the next step can reuse it.
#[derive(Debug)]
pub(crate) struct Mean {
    memory: Flat,
    dtype: FloatType,
}

impl Mean {
    /// Divides sums of gradients by `count` and rounds the quotients to the type of the gradients, once.
    pub(crate) fn of(mut sums: Flat, dtype: FloatType, count: usize) -> Self {
        debug_assert_eq!(sums.dtype(), dtype.sum_dtype(), "sums are carried in the type for them");
        let len = sums.len();
        sums.slice_mut(0, len).divide(count);
        if let (Flat::F32(quotients), FloatType::F16) = (&mut sums, dtype) {
            narrow_in_place(quotients);
        }
        Self { memory: sums, dtype }
    }

    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    pub(crate) fn slice(&self, offset: usize, len: usize) -> Values<'_> {
        match (&self.memory, self.dtype) {
            (Flat::F32(memory), FloatType::F16) => {
                Values::F16(&bytemuck::cast_slice::<f32, f16>(memory)[offset..offset + len])
            }
            (memory, _) => memory.slice(offset, len),
        }
    }

    fn slice_mut(&mut self, offset: usize, len: usize) -> ValuesMut<'_> {
        match (&mut self.memory, self.dtype) {
            (Flat::F32(memory), FloatType::F16) => {
                ValuesMut::F16(&mut bytemuck::cast_slice_mut::<f32, f16>(memory)[offset..offset + len])
            }
            (memory, _) => memory.slice_mut(offset, len),
        }
    }

    /// Scales all means.
    pub(crate) fn scale(&mut self, factor: f64) {
        self.slice_mut(0, self.len()).scale(factor);
    }

    /// Returns the memory for the sums of the next step. Its contents are unspecified.
    pub(crate) fn into_memory(self) -> Flat {
        self.memory
    }
}

/// Rounds all values to `f16` and stores them in the first half of the memory.
fn narrow_in_place(values: &mut [f32]) {
    let mut block = [0.0; BLOCK];
    for start in (0..values.len()).step_by(BLOCK) {
        let end = values.len().min(start + BLOCK);
        // A block is copied before it is overwritten: the first block's halves overlap its own values.
        let block = &mut block[..end - start];
        block.copy_from_slice(&values[start..end]);
        bytemuck::cast_slice_mut::<f32, f16>(values)[start..end].convert_from_f32_slice(block);
    }
}

/// The number of values that are rounded at a time.
const BLOCK: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_of_f16_are_rounded_once_and_lie_in_the_memory_of_their_sums() {
        for len in [0, 1, 2, 255, 256, 257, 1000] {
            let sums: Vec<f32> = (0..len).map(|index| (index as f32 - 400.0) * 1234.5).collect();
            let expected: Vec<f16> = sums.iter().map(|sum| f16::from_f32(sum / 7.0)).collect();
            let mut mean = Mean::of(Flat::F32(sums.into()), FloatType::F16, 7);
            assert_eq!(mean.slice(0, len), Values::F16(&expected), "{len}");
            assert_eq!(mean.slice(len / 2, len - len / 2), Values::F16(&expected[len / 2..]));
            mean.scale(0.5);
            let halves: Vec<f16> = expected.iter().map(|mean| f16::from_f32(mean.to_f32() / 2.0)).collect();
            assert_eq!(mean.slice(0, len), Values::F16(&halves));
            let memory = mean.into_memory();
            assert_eq!((memory.dtype(), memory.len()), (FloatType::F32, len));
        }
    }

    #[test]
    fn means_of_other_types_are_their_sums_divided() {
        let mean = Mean::of(Flat::F32(vec![3.0, 8.0].into()), FloatType::F32, 2);
        assert_eq!(mean.slice(0, 2), Values::F32(&[1.5, 4.0]));
        let mean = Mean::of(Flat::F64(vec![3.0].into()), FloatType::F64, 2);
        assert_eq!(mean.slice(0, 1), Values::F64(&[1.5]));
    }
}

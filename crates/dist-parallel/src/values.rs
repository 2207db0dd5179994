//! Slices of parameters and gradients of any type.

use std::ops::Range;

use dist_collectives::kernel::{combine, divide_by_count};
use dist_collectives::{Communicator, ReduceOp};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::flat::Flat;
use crate::number::{Exact, Number};
use crate::{Error, FloatType, Result};

/// Evaluates `$body` with both slices in their common type. Returns an error from the function if they differ.
macro_rules! with_both {
    ($values:expr, $others:expr, |$a:ident, $b:ident| $body:expr) => {{
        let (values, others) = ($values, $others);
        values.check(others)?;
        match (values, others) {
            (ValuesMut::F32($a), Values::F32($b)) => $body,
            (ValuesMut::F64($a), Values::F64($b)) => $body,
            (ValuesMut::F16($a), Values::F16($b)) => $body,
            (ValuesMut::Bf16($a), Values::Bf16($b)) => $body,
            _ => unreachable!("the types were compared"),
        }
    }};
}

pub(crate) use with_both;

/// Evaluates `$body` with the contents of an enum over all types.
macro_rules! with_values {
    ($kind:ident, $values:expr, |$slice:ident| $body:expr) => {
        match $values {
            $kind::F32($slice) => $body,
            $kind::F64($slice) => $body,
            $kind::F16($slice) => $body,
            $kind::Bf16($slice) => $body,
        }
    };
}

pub(crate) use with_values;

/// Maps the contents of an enum over all types to another such enum with `$body`.
macro_rules! map_values {
    ($from:ident => $to:ident, $values:expr, |$slice:ident| $body:expr) => {
        match $values {
            $from::F32($slice) => $to::F32($body),
            $from::F64($slice) => $to::F64($body),
            $from::F16($slice) => $to::F16($body),
            $from::Bf16($slice) => $to::Bf16($body),
        }
    };
}

pub(crate) use map_values;

/// A slice of values of any type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Values<'a> {
    /// 32 bits each.
    F32(&'a [f32]),
    /// 64 bits each.
    F64(&'a [f64]),
    /// 16 bits each, the IEEE format.
    F16(&'a [f16]),
    /// 16 bits each, the upper half of an `f32`.
    Bf16(&'a [bf16]),
}

/// A mutable slice of values of any type.
#[derive(Debug, PartialEq)]
pub enum ValuesMut<'a> {
    /// 32 bits each.
    F32(&'a mut [f32]),
    /// 64 bits each.
    F64(&'a mut [f64]),
    /// 16 bits each, the IEEE format.
    F16(&'a mut [f16]),
    /// 16 bits each, the upper half of an `f32`.
    Bf16(&'a mut [bf16]),
}

impl<'a> Values<'a> {
    /// Returns the memory as bytes, in the machine's byte order.
    pub(crate) fn as_bytes(self) -> &'a [u8] {
        with_values!(Values, self, |values| bytemuck::cast_slice(values))
    }

    /// Returns the type.
    pub const fn dtype(&self) -> FloatType {
        match self {
            Self::F32(_) => FloatType::F32,
            Self::F64(_) => FloatType::F64,
            Self::F16(_) => FloatType::F16,
            Self::Bf16(_) => FloatType::Bf16,
        }
    }

    /// Returns the number of values.
    pub const fn len(&self) -> usize {
        with_values!(Values, self, |values| values.len())
    }

    /// Returns `true` if there are no values.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns a subslice.
    pub(crate) fn part(self, range: Range<usize>) -> Self {
        map_values!(Values => Values, self, |values| &values[range])
    }

    /// Returns the index and the value of the first number that is not finite.
    pub(crate) fn first_not_finite(self) -> Option<(usize, f64)> {
        with_values!(Values, self, |values| {
            let at = values.iter().position(|value| value.parts().is_none())?;
            Some((at, values[at].to_f64()))
        })
    }
}

impl ValuesMut<'_> {
    /// Returns the memory as bytes, to overwrite it.
    pub(crate) fn as_bytes_mut(&mut self) -> &mut [u8] {
        with_values!(ValuesMut, self, |values| bytemuck::cast_slice_mut(values))
    }

    /// Returns the type.
    pub const fn dtype(&self) -> FloatType {
        self.as_values().dtype()
    }

    /// Returns the number of values.
    pub const fn len(&self) -> usize {
        self.as_values().len()
    }

    /// Returns `true` if there are no values.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the same values, read-only.
    pub const fn as_values(&self) -> Values<'_> {
        map_values!(ValuesMut => Values, self, |values| values)
    }

    /// Copies `source` over these values.
    ///
    /// # Errors
    /// Type or length differ; then nothing is changed.
    pub fn copy_from(&mut self, source: Values<'_>) -> Result<()> {
        with_both!(self, source, |values, source| values.copy_from_slice(source));
        Ok(())
    }

    /// Adds `addends` to these values. Half types are widened to `f32`, added, and rounded to nearest even.
    ///
    /// # Errors
    /// Type or length differ; then nothing is changed.
    pub fn add(&mut self, addends: Values<'_>) -> Result<()> {
        with_both!(self, addends, |values, addends| combine(ReduceOp::Sum, values, addends));
        Ok(())
    }

    /// Adds gradients of type `dtype` to these sums, converted to their type. The first gradients are copied instead.
    ///
    /// # Errors
    /// Type or length differ; then nothing is changed.
    pub(crate) fn take_gradients(
        &mut self,
        gradients: Values<'_>,
        dtype: FloatType,
        is_first: bool,
    ) -> Result<()> {
        check((self.len(), dtype), gradients)?;
        match (self, gradients) {
            (sums, gradients) if is_first => sums.convert_from(gradients),
            (ValuesMut::F32(sums), Values::F16(gradients)) => {
                sums.iter_mut().zip(gradients).for_each(|(sum, gradient)| *sum += gradient.to_f32());
            }
            (sums, gradients) if sums.dtype() == gradients.dtype() => sums.add(gradients)?,
            (sums, gradients) => {
                let mut converted = Flat::zeros(sums.dtype(), gradients.len());
                converted.slice_mut(0, gradients.len()).convert_from(gradients);
                sums.add(converted.slice(0, gradients.len()))?;
            }
        }
        Ok(())
    }

    /// Sets every value to +0.
    pub fn clear(&mut self) {
        with_values!(ValuesMut, self, |values| values.fill(Number::of(0.0)));
    }

    /// Divides these values by `count`. Half types are widened to `f32`, divided, and rounded to nearest even.
    pub fn divide(&mut self, count: usize) {
        let divided = with_values!(ValuesMut, self, |values| divide_by_count(values, count));
        debug_assert!(divided, "floats have a mean");
    }

    /// Broadcasts the root's values.
    pub(crate) fn broadcast(self, comm: &mut Communicator, root: usize) -> Result<()> {
        with_values!(ValuesMut, self, |values| comm.broadcast(values, root)).map_err(Error::communication)
    }

    /// Returns a subslice.
    pub(crate) fn part(self, range: Range<usize>) -> Self {
        map_values!(ValuesMut => ValuesMut, self, |values| &mut values[range])
    }

    /// Reborrows the values.
    pub(crate) fn reborrow(&mut self) -> ValuesMut<'_> {
        map_values!(ValuesMut => ValuesMut, self, |values| values)
    }

    /// Copies values of any type over these, rounded once to nearest even. Panics in debug builds if the lengths
    /// differ.
    pub(crate) fn convert_from(&mut self, source: Values<'_>) {
        debug_assert_eq!(self.len(), source.len(), "values are converted one by one");
        if self.dtype() == source.dtype() {
            self.copy_from(source).expect("type and length were compared");
            return;
        }
        if let (ValuesMut::F32(values), Values::F16(source)) = (&mut *self, source) {
            source.convert_to_f32_slice(values);
            return;
        }
        with_values!(ValuesMut, self, |values| with_values!(Values, source, |source| {
            values.iter_mut().zip(source).for_each(|(value, &source)| *value = Number::of(source.to_f64()));
        }));
    }

    /// Rounds every value to a type, to nearest even.
    pub(crate) fn round_to(&mut self, dtype: FloatType) {
        let (len, own) = (self.len(), self.dtype());
        // Every value of a half type is one of `f32`, and every value is one of `f64`.
        if own == dtype || dtype == FloatType::F64 || (own.size(), dtype) == (2, FloatType::F32) {
            return;
        }
        let mut rounded = Flat::zeros(dtype, len);
        rounded.slice_mut(0, len).convert_from(self.as_values());
        self.convert_from(rounded.slice(0, len));
    }

    /// Multiplies these values by a factor, which is rounded to the type of the computation: `f64` for `f64`, `f32`
    /// for all other types.
    pub fn scale(&mut self, factor: f64) {
        with_values!(ValuesMut, self, |values| {
            values.iter_mut().for_each(|value| *value = value.times(factor));
        });
    }

    /// Sets every value to −0, the neutral element of addition, also for −0.
    pub(crate) fn fill_neutral(&mut self) {
        with_values!(ValuesMut, self, |values| {
            values.iter_mut().for_each(|value| *value = Number::of(-0.0));
        });
    }

    /// Returns an error unless `other` has the same type and length.
    pub(crate) fn check(&self, other: Values<'_>) -> Result<()> {
        check((self.len(), self.dtype()), other)
    }
}

/// Returns an error unless `other` has this length and type.
fn check((expected_len, expected): (usize, FloatType), other: Values<'_>) -> Result<()> {
    let (got_len, got) = (other.len(), other.dtype());
    if (expected_len, expected) == (got_len, got) {
        return Ok(());
    }
    Err(Error::ValuesDiffer { expected_len, expected, got_len, got })
}

macro_rules! from_slice {
    ($($variant:ident: $element:ty),*) => {$(
        impl<'a> From<&'a [$element]> for Values<'a> {
            fn from(values: &'a [$element]) -> Self {
                Self::$variant(values)
            }
        }
        impl<'a> From<&'a mut [$element]> for ValuesMut<'a> {
            fn from(values: &'a mut [$element]) -> Self {
                Self::$variant(values)
            }
        }
    )*};
}

from_slice!(F32: f32, F64: f64, F16: f16, Bf16: bf16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_types_are_added_in_f32_and_rounded_to_even() {
        // 256 + 1 lies between 256 and 258, 258 + 1 between 258 and 260. Ties go to the even significand.
        let mut sums = [256.0, 258.0, 1.0].map(bf16::from_f32);
        let mut values = ValuesMut::Bf16(&mut sums);
        values.add(Values::Bf16(&[1.0; 3].map(bf16::from_f32))).unwrap();
        values.divide(3);
        assert_eq!(sums, [256.0 / 3.0, 260.0 / 3.0, 2.0 / 3.0].map(bf16::from_f32));
        let mut sums = [2048.0, 2050.0].map(f16::from_f32);
        ValuesMut::F16(&mut sums).add(Values::F16(&[1.0; 2].map(f16::from_f32))).unwrap();
        assert_eq!(sums, [2048.0, 2052.0].map(f16::from_f32));
    }

    #[test]
    fn values_are_rounded_to_another_type_once() {
        let fine = 1.0 + f32::EPSILON;
        for (dtype, expected) in
            [(FloatType::F64, fine), (FloatType::F32, fine), (FloatType::F16, 1.0), (FloatType::Bf16, 1.0)]
        {
            let mut values = [fine, -3.0];
            ValuesMut::F32(&mut values).round_to(dtype);
            assert_eq!(values, [expected, -3.0], "{dtype}");
        }
        let mut values = [1.0 + f64::EPSILON, 1e300];
        ValuesMut::F64(&mut values).round_to(FloatType::F32);
        assert_eq!(values, [1.0, f64::INFINITY]);
        let mut values = [f16::MAX];
        ValuesMut::F16(&mut values).round_to(FloatType::Bf16);
        assert_eq!(values, [f16::INFINITY]);
    }

    #[test]
    fn values_of_another_type_or_length_are_refused_unchanged() {
        let mut values = [1.0_f32, 2.0];
        let others = [Values::F32(&[1.0; 3]), Values::F64(&[1.0; 2]), Values::F32(&[])];
        for other in others {
            assert!(matches!(ValuesMut::F32(&mut values).add(other), Err(Error::ValuesDiffer { .. })));
            assert!(matches!(ValuesMut::F32(&mut values).copy_from(other), Err(Error::ValuesDiffer { .. })));
        }
        assert_eq!(values, [1.0, 2.0]);
    }
}

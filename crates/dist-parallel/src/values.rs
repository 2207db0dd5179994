//! Slices of parameters and gradients, whatever their type.

use half::{bf16, f16};

use crate::{Error, FloatType, Result};

/// Values to read.
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

/// Values to overwrite.
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

impl Values<'_> {
    /// Their type.
    pub const fn dtype(&self) -> FloatType {
        match self {
            Self::F32(_) => FloatType::F32,
            Self::F64(_) => FloatType::F64,
            Self::F16(_) => FloatType::F16,
            Self::Bf16(_) => FloatType::Bf16,
        }
    }

    /// How many there are.
    pub const fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl ValuesMut<'_> {
    /// Their type.
    pub const fn dtype(&self) -> FloatType {
        self.as_values().dtype()
    }

    /// How many there are.
    pub const fn len(&self) -> usize {
        self.as_values().len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same values, to read.
    pub const fn as_values(&self) -> Values<'_> {
        match self {
            Self::F32(values) => Values::F32(values),
            Self::F64(values) => Values::F64(values),
            Self::F16(values) => Values::F16(values),
            Self::Bf16(values) => Values::Bf16(values),
        }
    }

    /// Copies `source` over these values.
    ///
    /// # Errors
    /// If type or length differ; then nothing is changed.
    pub fn copy_from(&mut self, source: Values<'_>) -> Result<()> {
        self.check(source)?;
        match (self, source) {
            (Self::F32(values), Values::F32(source)) => values.copy_from_slice(source),
            (Self::F64(values), Values::F64(source)) => values.copy_from_slice(source),
            (Self::F16(values), Values::F16(source)) => values.copy_from_slice(source),
            (Self::Bf16(values), Values::Bf16(source)) => values.copy_from_slice(source),
            _ => unreachable!("the types were compared"),
        }
        Ok(())
    }

    /// Adds `addend` to these values. Half types are widened to `f32`, added, and rounded to nearest even.
    ///
    /// # Errors
    /// If type or length differ; then nothing is changed.
    pub fn add(&mut self, addend: Values<'_>) -> Result<()> {
        self.check(addend)?;
        match (self, addend) {
            (Self::F32(values), Values::F32(addend)) => zip(values, addend, |a, b| a + b),
            (Self::F64(values), Values::F64(addend)) => zip(values, addend, |a, b| a + b),
            (Self::F16(values), Values::F16(addend)) => {
                zip(values, addend, |a, b| f16::from_f32(a.to_f32() + b.to_f32()));
            }
            (Self::Bf16(values), Values::Bf16(addend)) => {
                zip(values, addend, |a, b| bf16::from_f32(a.to_f32() + b.to_f32()));
            }
            _ => unreachable!("the types were compared"),
        }
        Ok(())
    }

    fn check(&self, other: Values<'_>) -> Result<()> {
        if self.dtype() == other.dtype() && self.len() == other.len() {
            return Ok(());
        }
        Err(Error::ValuesDiffer {
            expected_len: self.len(),
            expected: self.dtype(),
            got_len: other.len(),
            got: other.dtype(),
        })
    }
}

fn zip<T: Copy>(values: &mut [T], others: &[T], f: impl Fn(T, T) -> T) {
    for (value, &other) in values.iter_mut().zip(others) {
        *value = f(*value, other);
    }
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

//! The types of values in files, including types that a model's parameters cannot have.

use std::fmt;

use half::{bf16, f16};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use crate::FloatType;
use crate::number::Number;

/// The type of a stored tensor's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct StoredType(Dtype);

impl StoredType {
    pub(super) const fn new(dtype: Dtype) -> Self {
        Self(dtype)
    }

    /// Returns the bytes of one value. Types that are smaller than a byte are never read.
    pub(super) fn size(self) -> usize {
        self.0.bitsize() / 8
    }

    /// Returns the type of parameters with the same representation, if there is one.
    pub(super) const fn float(self) -> Option<FloatType> {
        match self.0 {
            Dtype::F32 => Some(FloatType::F32),
            Dtype::F64 => Some(FloatType::F64),
            Dtype::F16 => Some(FloatType::F16),
            Dtype::BF16 => Some(FloatType::Bf16),
            _ => None,
        }
    }

    /// Returns `true` if values of this type can be [converted](Self::convert).
    pub(super) const fn is_convertible(self) -> bool {
        use Dtype::{BF16, BOOL, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
        matches!(self.0, F64 | F32 | F16 | BF16 | I64 | I32 | I16 | I8 | U64 | U32 | U16 | U8 | BOOL)
    }

    /// Converts little-endian values to another type. Floats are rounded to nearest even.
    ///
    /// # Errors
    /// The first value that cannot be converted: a finite value that would become infinite, or an integer that would
    /// change.
    pub(super) fn convert(self, bytes: &[u8], to: FloatType) -> Result<Vec<u8>, String> {
        match to {
            FloatType::F32 => self.convert_to(bytes, f32::to_le_bytes),
            FloatType::F64 => self.convert_to(bytes, f64::to_le_bytes),
            FloatType::F16 => self.convert_to(bytes, f16::to_le_bytes),
            FloatType::Bf16 => self.convert_to(bytes, bf16::to_le_bytes),
        }
    }

    fn convert_to<T: Number, const N: usize>(
        self,
        bytes: &[u8],
        write: impl Fn(T) -> [u8; N],
    ) -> Result<Vec<u8>, String> {
        macro_rules! floats {
            ($from:ty) => {
                each(bytes, |value| {
                    let value = <$from>::from_le_bytes(value).to_f64();
                    let narrowed = T::of(value);
                    let is_lost = value.is_finite() && !narrowed.to_f64().is_finite();
                    if is_lost { Err(value.to_string()) } else { Ok(write(narrowed)) }
                })
            };
        }
        macro_rules! integers {
            ($from:ty) => {
                each(bytes, |value| {
                    let value = <$from>::from_le_bytes(value);
                    let narrowed = T::of(value as f64);
                    // Every integer of 64 bits fits into one of 128.
                    #[expect(
                        clippy::cast_possible_truncation,
                        reason = "it is compared with what it was made of"
                    )]
                    let is_same = narrowed.to_f64() as i128 == i128::from(value);
                    if is_same { Ok(write(narrowed)) } else { Err(value.to_string()) }
                })
            };
        }
        match self.0 {
            Dtype::F64 => floats!(f64),
            Dtype::F32 => floats!(f32),
            Dtype::F16 => floats!(f16),
            Dtype::BF16 => floats!(bf16),
            Dtype::I64 => integers!(i64),
            Dtype::I32 => integers!(i32),
            Dtype::I16 => integers!(i16),
            Dtype::I8 => integers!(i8),
            Dtype::U64 => integers!(u64),
            Dtype::U32 => integers!(u32),
            Dtype::U16 => integers!(u16),
            Dtype::U8 | Dtype::BOOL => integers!(u8),
            _ => Err(format!("of type {self}")),
        }
    }
}

/// Converts each value, one after the other.
fn each<const M: usize, const N: usize>(
    bytes: &[u8],
    convert: impl Fn([u8; M]) -> Result<[u8; N], String>,
) -> Result<Vec<u8>, String> {
    let (values, _) = bytes.as_chunks::<M>();
    let mut converted = Vec::with_capacity(values.len() * N);
    for value in values {
        converted.extend_from_slice(&convert(*value)?);
    }
    Ok(converted)
}

impl From<FloatType> for StoredType {
    fn from(dtype: FloatType) -> Self {
        Self(match dtype {
            FloatType::F32 => Dtype::F32,
            FloatType::F64 => Dtype::F64,
            FloatType::F16 => Dtype::F16,
            FloatType::Bf16 => Dtype::BF16,
        })
    }
}

impl From<StoredType> for Dtype {
    fn from(StoredType(dtype): StoredType) -> Self {
        dtype
    }
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{:?}", self.0).to_lowercase())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn converted(from: Dtype, bytes: &[u8], to: FloatType) -> Result<Vec<u8>, String> {
        StoredType::new(from).convert(bytes, to)
    }

    #[test]
    fn floats_are_rounded_to_the_nearest() {
        let values = [1.0_f32, -0.0, 1.0 + f32::EPSILON, f32::INFINITY, 3.0e-8];
        let bytes = bytemuck::cast_slice(&values);
        let expected: Vec<u8> = values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect();
        assert_eq!(converted(Dtype::F32, bytes, FloatType::F16), Ok(expected));
        let wide: Vec<u8> = values.iter().flat_map(|&value| f64::from(value).to_le_bytes()).collect();
        assert_eq!(converted(Dtype::F32, bytes, FloatType::F64), Ok(wide));
        assert_eq!(converted(Dtype::F32, bytes, FloatType::F32), Ok(bytes.to_vec()));
        let half = bf16::from_f32(-2.5).to_le_bytes();
        assert_eq!(converted(Dtype::BF16, &half, FloatType::F32), Ok((-2.5_f32).to_le_bytes().to_vec()));
        assert!(converted(Dtype::F32, &f32::NAN.to_le_bytes(), FloatType::Bf16).is_ok());
    }

    #[rstest]
    #[case::too_large_for_a_half(Dtype::F32, &70_000_f32.to_le_bytes(), FloatType::F16, "70000")]
    #[case::too_large_for_a_single(Dtype::F64, &1e300_f64.to_le_bytes(), FloatType::F32, "1000")]
    #[case::an_integer_between_two_floats(Dtype::I64, &((1_i64 << 53) + 1).to_le_bytes(), FloatType::F64, "9007199254740993")]
    #[case::the_largest_integer(Dtype::U64, &u64::MAX.to_le_bytes(), FloatType::F64, "18446744073709551615")]
    #[case::an_integer_in_a_half(Dtype::I32, &2049_i32.to_le_bytes(), FloatType::F16, "2049")]
    #[case::a_complex_number(Dtype::C64, &[0; 8], FloatType::F32, "of type c64")]
    fn a_value_that_would_be_lost_is_named(
        #[case] from: Dtype,
        #[case] bytes: &[u8],
        #[case] to: FloatType,
        #[case] lost: &str,
    ) {
        let error = converted(from, bytes, to).unwrap_err();
        assert!(error.starts_with(lost), "{error}");
    }

    #[rstest]
    fn integers_are_converted_as_they_are(
        #[values(
            Dtype::I64,
            Dtype::I32,
            Dtype::I16,
            Dtype::I8,
            Dtype::U64,
            Dtype::U32,
            Dtype::U16,
            Dtype::U8,
            Dtype::BOOL
        )]
        from: Dtype,
    ) {
        let one: Vec<u8> = [1].into_iter().chain([0; 7]).take(from.bitsize() / 8).collect();
        assert_eq!(converted(from, &one, FloatType::F32), Ok(1.0_f32.to_le_bytes().to_vec()));
        assert!(StoredType::new(from).is_convertible());
    }
}

//! The number types of parameters.

use half::{bf16, f16};
use num_traits::Float;

/// A type of parameters with its type of computation: `f32` for half types, otherwise the type itself.
pub(crate) trait Number: Copy {
    type Math: Float;

    fn widen(self) -> Self::Math;

    /// Rounds to nearest even.
    fn narrow(value: Self::Math) -> Self;

    fn to_f64(self) -> f64;

    /// Rounds to nearest even.
    fn of(value: f64) -> Self;

    /// Multiplies by a factor. The factor is rounded first, and then the product.
    fn times(self, factor: f64) -> Self {
        let factor = <Self::Math as num_traits::NumCast>::from(factor)
            .expect("every float has a nearest one of another type");
        Self::narrow(self.widen() * factor)
    }
}

macro_rules! float_number {
    ($($float:ty),*) => {$(
        impl Number for $float {
            type Math = Self;

            fn widen(self) -> Self {
                self
            }

            fn narrow(value: Self) -> Self {
                value
            }

            fn to_f64(self) -> f64 {
                self.into()
            }

            #[allow(clippy::cast_possible_truncation, reason = "values are rounded to the narrower type")]
            fn of(value: f64) -> Self {
                value as Self
            }
        }
    )*};
}

float_number!(f32, f64);

macro_rules! half_number {
    ($($half:ty),*) => {$(
        impl Number for $half {
            type Math = f32;

            fn widen(self) -> f32 {
                self.to_f32()
            }

            fn narrow(value: f32) -> Self {
                Self::from_f32(value)
            }

            fn to_f64(self) -> f64 {
                self.to_f64()
            }

            fn of(value: f64) -> Self {
                Self::from_f64(value)
            }
        }
    )*};
}

half_number!(f16, bf16);

/// A type whose numbers are small integers times powers of two.
pub(crate) trait Exact: Number {
    /// Returns the significand without its sign, and the exponent. `None` if the number is not finite.
    fn parts(self) -> Option<(u64, i32)>;
}

impl Exact for f32 {
    fn parts(self) -> Option<(u64, i32)> {
        let bits = u64::from(self.to_bits());
        parts(bits >> 23 & 0xff, bits & 0x7f_ffff, 23, 0xff)
    }
}

impl Exact for f64 {
    fn parts(self) -> Option<(u64, i32)> {
        let bits = self.to_bits();
        parts(bits >> 52 & 0x7ff, bits & 0xf_ffff_ffff_ffff, 52, 0x7ff)
    }
}

macro_rules! exact_half {
    ($($half:ty),*) => {$(
        impl Exact for $half {
            fn parts(self) -> Option<(u64, i32)> {
                self.to_f32().parts()
            }
        }
    )*};
}

exact_half!(f16, bf16);

/// Returns significand and exponent of a number in IEEE format, given its biased exponent and its fraction.
fn parts(biased: u64, fraction: u64, fraction_bits: i32, largest: i32) -> Option<(u64, i32)> {
    let biased = i32::try_from(biased).expect("exponents have few bits");
    let exponent_min = 2 - (largest + 1) / 2 - fraction_bits;
    match biased {
        0 => Some((fraction, exponent_min)),
        _ if biased == largest => None,
        _ => Some((fraction | 1 << fraction_bits, exponent_min + biased - 1)),
    }
}

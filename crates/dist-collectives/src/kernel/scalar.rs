//! The scalar rules: the reduction of one pair of elements, per type.

use std::ops::{BitAnd, BitOr, BitXor};

use half::{bf16, f16};
use num_complex::Complex;

use super::all::{Rows, sum_by_rule};
use super::halves::{round_bf16, round_f16, widen_bf16, widen_f16};
use super::native;

/// The reduction of one pair of elements. Only this crate can implement it.
#[allow(unnameable_types, reason = "it seals `Element`")]
pub trait Scalar: Copy {
    /// Adds two buffers of the same length by the same rule, if there is a faster implementation than element by
    /// element. Otherwise returns `false` and does nothing.
    #[doc(hidden)]
    fn sum_all(_into: &mut [Self], _from: &[Self]) -> bool {
        false
    }
    /// Sums the rows of `COUNT` ranks by the same rule.
    #[doc(hidden)]
    fn sum_many<const COUNT: usize, R: Rows<Self, COUNT>>(rows: R);
    #[doc(hidden)]
    fn reduce_sum(self, other: Self) -> Self;
    #[doc(hidden)]
    fn reduce_product(self, other: Self) -> Self;
}

/// A type whose values are ordered, so that the smaller or the larger one of a pair can be kept.
pub(crate) trait Comparable: Copy {
    /// Returns the smaller value.
    fn reduce_min(self, other: Self) -> Self;
    /// Returns the larger value.
    fn reduce_max(self, other: Self) -> Self;
}

/// An integer type, whose bits can be combined.
pub(crate) trait Bits:
    Copy + BitAnd<Output = Self> + BitOr<Output = Self> + BitXor<Output = Self>
{
}

/// A floating-point type or a complex type, which can be scaled. The factor is an `f64` and is rounded to the type of the arithmetic:
/// `f32`, except for `f64`.
pub(crate) trait Float: Copy {
    /// Returns the product, rounded once.
    fn scaled(self, factor: f64) -> Self;
    /// Returns the quotient, rounded once.
    fn divided(self, divisor: f64) -> Self;
}

macro_rules! integers {
    ($($integer:ty)*) => {$(
        impl Bits for $integer {}

        impl Scalar for $integer {
            fn sum_many<const COUNT: usize, R: Rows<Self, COUNT>>(rows: R) {
                sum_by_rule::<_, _, { VECTOR_BYTES / size_of::<Self>() }, _>(rows);
            }
            #[inline(always)]
            fn reduce_sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn reduce_product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
        }

        impl Comparable for $integer {
            #[inline(always)]
            fn reduce_min(self, other: Self) -> Self {
                Ord::min(self, other)
            }
            #[inline(always)]
            fn reduce_max(self, other: Self) -> Self {
                Ord::max(self, other)
            }
        }
    )*};
}

integers! { i8 i32 i64 u8 u32 u64 }

/// Defines floating-point rules: sums and products through `$widen` and `$round`, and an order by the bits read as
/// a signed integer. Negative values are in reverse order there.
macro_rules! floats {
    ($($float:ty, $signed:ty, $narrow:expr, $widen:expr, $round:expr, $sum_all:expr, $sum_many:expr;)*) => {$(
        impl Scalar for $float {
            fn sum_all(into: &mut [Self], from: &[Self]) -> bool {
                $sum_all(into, from)
            }
            fn sum_many<const COUNT: usize, R: Rows<Self, COUNT>>(rows: R) {
                $sum_many(rows);
            }
            #[inline(always)]
            fn reduce_sum(self, other: Self) -> Self {
                $round($widen(self) + $widen(other))
            }
            #[inline(always)]
            fn reduce_product(self, other: Self) -> Self {
                $round($widen(self) * $widen(other))
            }
        }

        impl Comparable for $float {
            #[inline(always)]
            fn reduce_min(self, other: Self) -> Self {
                let lesser = if key(self) <= key(other) { self } else { other };
                either_nan(self, other, lesser)
            }
            #[inline(always)]
            fn reduce_max(self, other: Self) -> Self {
                let greater = if key(self) >= key(other) { self } else { other };
                either_nan(self, other, greater)
            }
        }

        impl Float for $float {
            #[inline(always)]
            fn scaled(self, factor: f64) -> Self {
                $round($widen(self) * $narrow(factor))
            }
            #[inline(always)]
            fn divided(self, divisor: f64) -> Self {
                $round($widen(self) / $narrow(divisor))
            }
        }

        impl Ordered for $float {
            type Key = $signed;
            #[inline(always)]
            fn key(self) -> $signed {
                let bits = self.to_bits().cast_signed();
                bits ^ ((bits >> (<$signed>::BITS - 1)) & <$signed>::MAX)
            }
            #[inline(always)]
            fn nan(self) -> bool {
                self.is_nan()
            }
        }
    )*};
}

floats! {
    f32, i32, narrow, |value: f32| value, |value: f32| value, one_by_one, sum_by_rule::<_, _, 8, _>;
    f64, i64, |number: f64| number, |value: f64| value, |value: f64| value, one_by_one, sum_by_rule::<_, _, 4, _>;
    f16, i16, narrow, widen_f16, round_f16, native::sum_f16, native::sum_many_f16;
    bf16, i16, narrow, widen_bf16, round_bf16, native::sum_bf16, native::sum_many_bf16;
}

macro_rules! complex {
    ($($part:ty)*) => {$(
        impl Scalar for Complex<$part> {
            fn sum_many<const COUNT: usize, R: Rows<Self, COUNT>>(rows: R) {
                sum_by_rule::<_, _, { VECTOR_BYTES / size_of::<Self>() }, _>(rows);
            }
            #[inline(always)]
            fn reduce_sum(self, other: Self) -> Self {
                Self::new(self.re + other.re, self.im + other.im)
            }
            #[inline(always)]
            fn reduce_product(self, other: Self) -> Self {
                let re = self.re * other.re - self.im * other.im;
                Self::new(re, self.re * other.im + self.im * other.re)
            }
        }

        impl Float for Complex<$part> {
            #[inline(always)]
            fn scaled(self, factor: f64) -> Self {
                Self::new(self.re.scaled(factor), self.im.scaled(factor))
            }
            #[inline(always)]
            fn divided(self, divisor: f64) -> Self {
                Self::new(self.re.divided(divisor), self.im.divided(divisor))
            }
        }
    )*};
}

complex! { f32 f64 }

/// Bytes of integers and complex numbers that are added at a time.
const VECTOR_BYTES: usize = 32;

/// For types for which the compiler's loop is equally fast.
fn one_by_one<T>(_into: &mut [T], _from: &[T]) -> bool {
    false
}

/// Returns the nearest `f32`.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "rounding is what it is for")]
pub(super) fn narrow(number: f64) -> f32 {
    number as f32
}

/// A total order of the values other than NaN, with −0 below +0.
trait Ordered: Copy {
    type Key: Ord;
    fn key(self) -> Self::Key;
    fn nan(self) -> bool;
}

#[inline(always)]
fn key<T: Ordered>(value: T) -> T::Key {
    value.key()
}

/// Returns the first NaN of a pair, or `chosen` if there is none.
#[inline(always)]
fn either_nan<T: Ordered>(left: T, right: T, chosen: T) -> T {
    let right_or_chosen = if right.nan() { right } else { chosen };
    if left.nan() { left } else { right_or_chosen }
}

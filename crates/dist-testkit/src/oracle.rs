//! Expected results of collectives, computed by one thread from the inputs of all ranks, element by element.
//!
//! Sums and products are evaluated in canonical order, which is the tree T(n) = T(largest power of two below
//! n) + T(rest). The arithmetic comes from the standard library and `half`, never from the code under test.

use std::fmt::Debug;

use half::{bf16, f16};
use num_complex::Complex;
use num_traits::{Float, FromPrimitive, WrappingAdd, WrappingMul};

/// The reduction of elements of different ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// The sum; integers wrap.
    Sum,
    /// The sum of [partial sums](Number::Partial), divided by the number of contributions and rounded once.
    Mean,
    /// The product; integers wrap.
    Product,
    /// The smallest; NaN if there is one, −0 before +0.
    Min,
    /// The largest; NaN if there is one, −0 before +0.
    Max,
    /// The bitwise and.
    And,
    /// The bitwise or.
    Or,
    /// The bitwise exclusive or.
    Xor,
}

impl Reduction {
    /// Returns the reduction with this name: `sum`, `mean`, `product`, `min`, `max`, `and`, `or` or `xor`.
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "sum" => Self::Sum,
            "mean" => Self::Mean,
            "product" => Self::Product,
            "min" => Self::Min,
            "max" => Self::Max,
            "and" => Self::And,
            "or" => Self::Or,
            "xor" => Self::Xor,
            _ => return None,
        })
    }

    /// Reduces two elements. For a mean, returns their sum.
    ///
    /// # Panics
    /// If the reduction is bitwise and the elements are floating-point numbers.
    pub fn pair<T: Number>(self, left: T, right: T) -> T {
        match self {
            Self::Sum | Self::Mean => left.sum(right),
            Self::Product => left.product(right),
            Self::Min => left.least(right),
            Self::Max => left.greatest(right),
            Self::And | Self::Or | Self::Xor => left.bits(right, self).expect("only integers have bits"),
        }
    }

    /// Reduces the contributions of all ranks in canonical order.
    ///
    /// # Panics
    /// If there are no contributions, or if the elements do not support the reduction.
    pub fn all<T: Number>(self, contributions: &[T]) -> T {
        match self {
            Self::Mean => weighted_mean_of(contributions, &vec![1.0; contributions.len()]),
            _ => tree(contributions, &|left, right| self.pair(*left, *right)),
        }
    }
}

/// Evaluates T(n) over values of any type: splits at the largest power of two below n and combines the
/// results of both sides.
///
/// # Panics
/// If there are no contributions.
pub fn tree<T: Clone>(contributions: &[T], combine: &impl Fn(&T, &T) -> T) -> T {
    match contributions {
        [] => panic!("a tree needs at least one contribution"),
        [only] => only.clone(),
        _ => {
            let (left, right) = contributions.split_at(contributions.len().next_power_of_two() / 2);
            combine(&tree(left, combine), &tree(right, combine))
        }
    }
}

/// Returns the result of an all_reduce on every rank, and of a reduce on the root.
///
/// # Panics
/// If there are no inputs or their lengths differ.
pub fn all_reduce<T: Number>(inputs: &[Vec<T>], reduction: Reduction) -> Vec<T> {
    assert!(inputs.iter().all(|input| input.len() == inputs[0].len()), "inputs differ in length");
    (0..inputs[0].len())
        .map(|index| reduction.all(&inputs.iter().map(|input| input[index]).collect::<Vec<_>>()))
        .collect()
}

/// Returns the result of a sum in which the input of each rank is multiplied by its factor.
///
/// # Panics
/// If there are no inputs, their lengths differ, or they are integers.
pub fn scaled_sum<T: Number>(inputs: &[Vec<T>], factors: &[f64]) -> Vec<T> {
    let scale = |(input, &factor): (&Vec<T>, _)| -> Vec<T> {
        input.iter().map(|element| element.times(factor).expect("integers have no factors")).collect()
    };
    all_reduce(&inputs.iter().zip(factors).map(scale).collect::<Vec<_>>(), Reduction::Sum)
}

/// Returns the result of a weighted mean, with one weight for each rank.
///
/// # Panics
/// As for [`scaled_sum`].
pub fn weighted_mean<T: Number>(inputs: &[Vec<T>], weights: &[f64]) -> Vec<T> {
    assert!(inputs.iter().all(|input| input.len() == inputs[0].len()), "inputs differ in length");
    let contributions = |index: usize| inputs.iter().map(|input| input[index]).collect::<Vec<_>>();
    (0..inputs[0].len()).map(|index| weighted_mean_of(&contributions(index), weights)).collect()
}

/// Returns Σ weight · contribution / Σ weight, computed in the type of partial sums and rounded once.
fn weighted_mean_of<T: Number>(contributions: &[T], weights: &[f64]) -> T {
    let weighted = |(one, &weight): (&T, _)| one.partial().times(weight).expect("integers have no means");
    let products: Vec<T::Partial> = contributions.iter().zip(weights).map(weighted).collect();
    let sum = tree(&products, &|left, right| left.sum(*right));
    let total = tree(weights, &|left, right| left + right);
    T::from_partial(sum.over(total).expect("integers have no means"))
}

/// Returns the result of an all_gather on every rank.
pub fn all_gather<T: Number>(inputs: &[Vec<T>]) -> Vec<T> {
    inputs.concat()
}

/// An element type of the oracle.
pub trait Number: Copy + Debug + PartialEq + 'static {
    /// The type of products and partial sums of a mean: `f32` for `f16`, otherwise this type.
    type Partial: Number;
    /// Converts the number exactly.
    fn partial(self) -> Self::Partial;
    /// Rounds to the nearest number.
    fn from_partial(partial: Self::Partial) -> Self;
    /// Returns the sum; integers wrap.
    #[must_use]
    fn sum(self, other: Self) -> Self;
    /// Returns the product; integers wrap.
    #[must_use]
    fn product(self, other: Self) -> Self;
    /// Returns the smaller number, by the rules of [`Reduction::Min`].
    #[must_use]
    fn least(self, other: Self) -> Self;
    /// Returns the larger number, by the rules of [`Reduction::Max`].
    #[must_use]
    fn greatest(self, other: Self) -> Self;
    /// Returns the product with a factor, which is rounded to `f32` first unless this is an `f64`. Returns
    /// `None` for integers.
    fn times(self, factor: f64) -> Option<Self>;
    /// Returns the quotient by a divisor, which is rounded like a factor. Returns `None` for integers.
    fn over(self, divisor: f64) -> Option<Self>;
    /// Applies a bitwise reduction. Returns `None` for floating-point numbers and for other reductions.
    fn bits(self, other: Self, reduction: Reduction) -> Option<Self>;
    /// Returns `true` if all bits agree. Two NaNs are always equal.
    fn same(self, other: Self) -> bool;
    /// Makes a finite value from arbitrary bits: small numbers, large numbers, and zeros of both signs.
    fn from_noise(noise: u64) -> Self;
    /// Values that are not finite, zeros of both signs, the largest number and the smallest numbers; empty
    /// for integers.
    const SPECIAL: &'static [Self];
}

/// Returns `len` numbers that depend only on the seed and the rank.
pub fn sample<T: Number>(seed: u64, rank: usize, len: usize) -> Vec<T> {
    noise(seed, rank).map(T::from_noise).take(len).collect()
}

/// Returns numbers as [`sample`] does, a fifth of which are [special](Number::SPECIAL), if the type has
/// special values.
pub fn sample_with_special<T: Number>(seed: u64, rank: usize, len: usize) -> Vec<T> {
    let choices = T::SPECIAL.len() as u64 * 5;
    let special = |noise: u64| T::SPECIAL.get(usize::try_from(noise.checked_rem(choices)?).ok()?).copied();
    let number = |noise| special(noise).unwrap_or_else(|| T::from_noise(noise));
    noise(seed, rank).map(number).take(len).collect()
}

/// Returns arbitrary bits, generated by SplitMix64.
fn noise(seed: u64, rank: usize) -> impl Iterator<Item = u64> {
    let mut state =
        seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (rank as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03);
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    })
}

fn wrapping_sum<T: WrappingAdd>(left: T, right: T) -> T {
    left.wrapping_add(&right)
}

fn wrapping_product<T: WrappingMul>(left: T, right: T) -> T {
    left.wrapping_mul(&right)
}

/// Returns the smaller of two floats, by value, and by sign if the values are equal.
fn lesser<T: Float>(left: T, right: T) -> T {
    if left.is_nan() || right.is_nan() {
        T::nan()
    } else if left < right || (left == right && left.is_sign_negative()) {
        left
    } else {
        right
    }
}

/// Returns a number of either sign over ten powers of two, and occasionally a zero.
fn noisy<T: FromPrimitive>(noise: u64) -> T {
    let sign = if noise & 1 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::try_from((noise >> 1) % 10).expect("below ten") - 6;
    let fraction =
        if (noise >> 5).is_multiple_of(16) { 0.0 } else { 1.0 + (noise >> 12) as f64 / (1_u64 << 52) as f64 };
    T::from_f64(sign * fraction * 2.0_f64.powi(exponent)).expect("every float type takes an f64")
}

macro_rules! integers {
    ($($integer:ty)*) => {$(
        impl Number for $integer {
            type Partial = Self;
            fn partial(self) -> Self {
                self
            }
            fn from_partial(partial: Self) -> Self {
                partial
            }
            fn sum(self, other: Self) -> Self {
                wrapping_sum(self, other)
            }
            fn product(self, other: Self) -> Self {
                wrapping_product(self, other)
            }
            fn least(self, other: Self) -> Self {
                self.min(other)
            }
            fn greatest(self, other: Self) -> Self {
                self.max(other)
            }
            fn times(self, _: f64) -> Option<Self> {
                None
            }
            fn over(self, _: f64) -> Option<Self> {
                None
            }
            fn bits(self, other: Self, reduction: Reduction) -> Option<Self> {
                match reduction {
                    Reduction::And => Some(self & other),
                    Reduction::Or => Some(self | other),
                    Reduction::Xor => Some(self ^ other),
                    _ => None,
                }
            }
            fn same(self, other: Self) -> bool {
                self == other
            }
            #[allow(clippy::cast_possible_truncation, reason = "the bits are arbitrary")]
            fn from_noise(noise: u64) -> Self {
                noise as Self
            }
            const SPECIAL: &'static [Self] = &[];
        }
    )*};
}

integers! { i8 i32 i64 u8 u32 u64 }

macro_rules! floats {
    ($($float:ty as $wide:ty, $partial:ty, $from_partial:expr;)*) => {$(
        impl Number for $float {
            type Partial = $partial;
            fn partial(self) -> $partial {
                self.into()
            }
            fn from_partial(partial: $partial) -> Self {
                $from_partial(partial)
            }
            fn sum(self, other: Self) -> Self {
                self + other
            }
            fn product(self, other: Self) -> Self {
                self * other
            }
            fn least(self, other: Self) -> Self {
                lesser(self, other)
            }
            fn greatest(self, other: Self) -> Self {
                -lesser(-self, -other)
            }
            #[allow(clippy::cast_possible_truncation, reason = "the factor is rounded on purpose")]
            fn times(self, factor: f64) -> Option<Self> {
                FromPrimitive::from_f64((<$wide>::from(self) * factor as $wide).into())
            }
            #[allow(clippy::cast_possible_truncation, reason = "the divisor is rounded on purpose")]
            fn over(self, divisor: f64) -> Option<Self> {
                FromPrimitive::from_f64((<$wide>::from(self) / divisor as $wide).into())
            }
            fn bits(self, _: Self, _: Reduction) -> Option<Self> {
                None
            }
            fn same(self, other: Self) -> bool {
                self.to_bits() == other.to_bits() || (self.is_nan() && other.is_nan())
            }
            fn from_noise(noise: u64) -> Self {
                noisy(noise)
            }
            const SPECIAL: &'static [Self] = &[
                Self::NAN,
                Self::INFINITY,
                Self::NEG_INFINITY,
                Self::MAX,
                Self::MIN_POSITIVE,
                // The smallest positive number, and zeros.
                Self::from_bits(1),
                Self::from_bits(0),
                Self::from_bits(!(!0 >> 1)),
            ];
        }
    )*};
}

floats! {
    f32 as f32, f32, f32::from;
    f64 as f64, f64, f64::from;
    f16 as f32, f32, f16::from_f32;
    bf16 as f32, bf16, bf16::from;
}

macro_rules! complex {
    ($($part:ty)*) => {$(
        impl Number for Complex<$part> {
            type Partial = Self;
            fn partial(self) -> Self {
                self
            }
            fn from_partial(partial: Self) -> Self {
                partial
            }
            fn sum(self, other: Self) -> Self {
                self + other
            }
            fn product(self, other: Self) -> Self {
                self * other
            }
            fn least(self, _: Self) -> Self {
                unreachable!("complex numbers have no order")
            }
            fn greatest(self, _: Self) -> Self {
                unreachable!("complex numbers have no order")
            }
            fn times(self, factor: f64) -> Option<Self> {
                Some(Self::new(self.re.times(factor)?, self.im.times(factor)?))
            }
            fn over(self, divisor: f64) -> Option<Self> {
                Some(Self::new(self.re.over(divisor)?, self.im.over(divisor)?))
            }
            fn bits(self, _: Self, _: Reduction) -> Option<Self> {
                None
            }
            fn same(self, other: Self) -> bool {
                self.re.same(other.re) && self.im.same(other.im)
            }
            fn from_noise(noise: u64) -> Self {
                Self::new(noisy(noise), noisy(noise.rotate_left(32)))
            }
            const SPECIAL: &'static [Self] = &[
                Self::new(<$part>::NAN, 1.0),
                Self::new(<$part>::INFINITY, <$part>::MAX),
                Self::new(-0.0, <$part>::MIN_POSITIVE),
            ];
        }
    )*};
}

complex! { f32 f64 }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_splits_at_the_largest_power_of_two_below() {
        let names: Vec<String> = (0..7).map(|rank| rank.to_string()).collect();
        let joined = tree(&names, &|left, right| format!("({left}+{right})"));
        assert_eq!(joined, "(((0+1)+(2+3))+((4+5)+6))");
    }

    #[test]
    fn means_of_f16_are_rounded_once_and_means_of_bf16_at_every_sum() {
        let mean = Reduction::Mean.all(&[60_000.0; 8].map(f16::from_f32));
        assert_eq!(mean, f16::from_f32(60_000.0));
        // 1 + 2⁻¹¹ is between two numbers of `f16`; with another 2⁻¹¹ the sum is representable.
        let (one, small) = (f16::ONE, f16::from_f32(2.0_f32.powi(-11)));
        assert_eq!(Reduction::Mean.all(&[one, small, small]), f16::from_f32((1.0 + 2.0_f32.powi(-10)) / 3.0));
        let (one, small) = (bf16::ONE, bf16::from_f32(2.0_f32.powi(-8)));
        assert_eq!(Reduction::Mean.all(&[one, small, small]), bf16::from_f32(1.0 / 3.0));
        assert_eq!(Reduction::Sum.all(&[60_000.0; 8].map(f16::from_f32)), f16::INFINITY);
        assert_eq!(weighted_mean(&[vec![f16::MAX], vec![f16::MAX]], &[1000.0, 1.0]), [f16::MAX]);
    }

    #[test]
    fn samples_differ_by_rank_and_repeat_by_seed() {
        assert_eq!(sample::<f32>(1, 2, 9), sample::<f32>(1, 2, 9));
        assert_ne!(sample::<f32>(1, 2, 9), sample::<f32>(1, 3, 9));
    }

    #[test]
    fn samples_contain_special_numbers_if_the_type_has_them() {
        fn all_are_there<T: Number>() -> bool {
            let sample = sample_with_special::<T>(1, 2, 1000);
            let is_there = |special: &T| sample.iter().any(|number| number.same(*special));
            let usual =
                sample.iter().filter(|number| !T::SPECIAL.iter().any(|special| special.same(**number)));
            T::SPECIAL.iter().all(is_there) && usual.count() > 700
        }
        assert!(f16::SPECIAL[7] == f16::NEG_ZERO && f16::SPECIAL[7].is_sign_negative());
        assert!(all_are_there::<f64>() && all_are_there::<bf16>());
        assert_eq!(sample_with_special::<i32>(1, 2, 9), sample::<i32>(1, 2, 9));
    }
}

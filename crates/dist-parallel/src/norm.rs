//! The exact Euclidean norm of gradients, with the same bits for any division and order of the gradients.
//!
//! The square of a number with a significand of 53 bits or fewer is an integer times a power of two. Squares with
//! equal exponents are added as integers. All of them together form one large integer, about 640 bits for `f32`,
//! which ranks can add digit by digit. It is rounded once.

use crate::number::Exact;
use crate::values::with_values;
use crate::{FloatType, Values};

/// An exact sum of squares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SumOfSquares {
    /// The range of the squares.
    range: SquareRange,
    /// By the exponent of the squared number, the sum of the squares of significands.
    bins: Vec<u128>,
    /// The number of squares that every bin can still hold.
    capacity: u32,
    /// The sum of all squares whose bins were emptied, in digits of 32 bits, the lowest first.
    digits: Vec<u64>,
    infinite: bool,
    nan: bool,
}

/// The range of the numbers that are squared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SquareRange {
    /// The numbers of `f32` and of half types.
    F32,
    /// The numbers of `f64`.
    F64,
}

impl SquareRange {
    /// Returns the smallest range for all these types.
    pub(crate) fn of(dtypes: impl IntoIterator<Item = FloatType>) -> Self {
        if dtypes.into_iter().any(|dtype| dtype == FloatType::F64) { Self::F64 } else { Self::F32 }
    }

    /// Returns the exponent of the smallest number above 0.
    const fn exponent_min(self) -> i32 {
        match self {
            Self::F32 => -149,
            Self::F64 => -1074,
        }
    }

    /// Returns the number of exponents of a significand.
    const fn bins(self) -> usize {
        match self {
            Self::F32 => 254,
            Self::F64 => 2046,
        }
    }

    /// Returns the number of digits of a sum of 2⁶⁴ squares.
    const fn digits(self) -> usize {
        // Each exponent needs two bits, the largest square of a significand 106, the count 64.
        (2 * self.bins() + 106 + 64).div_ceil(DIGIT_BITS)
    }

    /// Returns the number of squares that fit into a bin of 128 bits.
    const fn capacity(self) -> u32 {
        match self {
            Self::F32 => u32::MAX,
            Self::F64 => 1 << 22,
        }
    }
}

impl SumOfSquares {
    pub(crate) fn new(range: SquareRange) -> Self {
        Self {
            range,
            bins: vec![0; range.bins()],
            capacity: range.capacity(),
            digits: vec![0; range.digits()],
            infinite: false,
            nan: false,
        }
    }

    /// Adds the squares of these values.
    pub(crate) fn add(&mut self, values: Values<'_>) {
        with_values!(Values, values, |values| values.iter().for_each(|&value| self.add_one(value)));
    }

    fn add_one<T: Exact>(&mut self, value: T) {
        let Some((significand, exponent)) = value.parts() else {
            let is_nan = value.to_f64().is_nan();
            (self.infinite, self.nan) = (self.infinite || !is_nan, self.nan || is_nan);
            return;
        };
        if significand == 0 {
            return;
        }
        let bin = usize::try_from(exponent - self.range.exponent_min()).expect("the range holds the type");
        self.bins[bin] += u128::from(significand) * u128::from(significand);
        self.capacity -= 1;
        if self.capacity == 0 {
            self.empty_bins();
        }
    }

    /// Moves the contents of the bins to the digits.
    fn empty_bins(&mut self) {
        for (bin, sum) in self.bins.iter_mut().enumerate() {
            let (digit, shift) = (2 * bin / DIGIT_BITS, 2 * bin % DIGIT_BITS);
            // In two halves, so that no bit is shifted out.
            let (low, high) = (*sum & u128::from(u64::MAX), *sum >> 64);
            add_digits(&mut self.digits[digit..], low << shift);
            add_digits(&mut self.digits[digit + 2..], high << shift);
            *sum = 0;
        }
        self.capacity = self.range.capacity();
    }

    /// Encodes the sum as integers that can be added between fewer than 2³¹ ranks, position by position.
    pub(crate) fn encode(&mut self) -> Vec<u64> {
        self.empty_bins();
        let flags = [u64::from(self.infinite), u64::from(self.nan)];
        flags.into_iter().chain(self.digits.iter().copied()).collect()
    }

    /// Returns the root of an encoded sum or of a sum of such. It is infinite or NaN if a number was.
    pub(crate) fn root(range: SquareRange, encoded: &[u64]) -> f64 {
        let Some((&[infinite, nan], digits)) = encoded.split_first_chunk() else { return 0.0 };
        if nan > 0 {
            return f64::NAN;
        }
        if infinite > 0 {
            return f64::INFINITY;
        }
        let mut digits = digits.to_vec();
        carry(&mut digits);
        root(&digits, 2 * range.exponent_min())
    }

    /// Returns the root of the sum.
    #[cfg(test)]
    fn norm(mut self) -> f64 {
        Self::root(self.range, &self.encode())
    }
}

/// Returns the Euclidean norm of these gradients as one vector. It is rounded once, so its bits do not depend on the
/// order of the gradients. It is infinite or NaN if a gradient is.
///
/// ```
/// use dist_parallel::own_loop::gradient_norm;
/// use dist_parallel::Values;
///
/// assert_eq!(gradient_norm([Values::F32(&[3.0]), Values::F64(&[4.0])]), 5.0);
/// ```
pub fn gradient_norm<'a>(gradients: impl IntoIterator<Item = Values<'a>, IntoIter: Clone>) -> f64 {
    let gradients = gradients.into_iter();
    let range = SquareRange::of(gradients.clone().map(|values| values.dtype()));
    let mut sum = SumOfSquares::new(range);
    gradients.for_each(|values| sum.add(values));
    SumOfSquares::root(range, &sum.encode())
}

/// Returns the factor that scales gradients of this norm to a norm of `max`. `None` if the norm is not above `max`,
/// or if either is not a valid length.
pub(crate) fn factor(norm: f64, max: f64) -> Option<f64> {
    (norm.is_finite() && max >= 0.0 && norm > max).then(|| max / norm)
}

/// Adds to a number. Every digit stays below 2³².
fn add_digits(digits: &mut [u64], mut rest: u128) {
    for digit in digits {
        if rest == 0 {
            return;
        }
        rest += u128::from(*digit);
        *digit = lowest_digit(rest);
        rest >>= DIGIT_BITS;
    }
    debug_assert_eq!(rest, 0, "there is a digit for every square");
}

/// Propagates carries, so that every digit except the last is below 2³².
fn carry(digits: &mut [u64]) {
    let Some((last, lower)) = digits.split_last_mut() else { return };
    let mut rest = 0;
    for digit in lower {
        rest += u128::from(*digit);
        *digit = lowest_digit(rest);
        rest >>= DIGIT_BITS;
    }
    *last += u64::try_from(rest).expect("what digits of 64 bits carry has fewer");
}

fn lowest_digit(number: u128) -> u64 {
    u64::try_from(number & DIGIT_MASK).expect("a digit has 32 bits")
}

/// Returns the root of an integer times a power of two with an even exponent. The integer is cut to 64 bits, whose
/// last bit says whether anything was cut off. It is therefore rounded only once, to an `f64`.
fn root(digits: &[u64], exponent: i32) -> f64 {
    let Some(top) = digits.iter().rposition(|&digit| digit != 0) else { return 0.0 };
    let at = |below: usize| top.checked_sub(below).map_or(0, |place| u128::from(digits[place]));
    let head = at(0) << (2 * DIGIT_BITS) | at(1) << DIGIT_BITS | at(2);
    let surplus = head.ilog2() - (u64::BITS - 1);
    let rest = digits[..top.saturating_sub(2)].iter().any(|&digit| digit != 0);
    let cut_off = rest || head & ((1 << surplus) - 1) != 0;
    let kept = u64::try_from(head >> surplus).expect("64 bits are kept") | u64::from(cut_off);
    // The root is computed near 2⁶⁴, far from the limits of the exponent.
    let cut = (top * DIGIT_BITS) as i64 + i64::from(surplus) - 2 * DIGIT_BITS as i64;
    let weight = i32::try_from(cut).expect("there are few digits") + exponent;
    let (near, weight) =
        if weight % 2 == 0 { (kept as f64, weight) } else { (kept as f64 * 2.0, weight - 1) };
    // In two factors, because one alone could underflow.
    let half = weight / 4;
    near.sqrt() * power_of_two(half) * power_of_two(weight / 2 - half)
}

/// Returns 2 to the power of an exponent of a normal `f64`.
fn power_of_two(exponent: i32) -> f64 {
    let biased = u64::try_from(exponent + 1023).expect("exponents here are above -1023");
    f64::from_bits(biased << 52)
}

/// The number of bits of a digit.
const DIGIT_BITS: usize = 32;
const DIGIT_MASK: u128 = (1 << DIGIT_BITS) - 1;

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn norm(values: &[f32]) -> f64 {
        let mut sum = SumOfSquares::new(SquareRange::F32);
        sum.add(Values::F32(values));
        sum.norm()
    }

    #[rstest]
    #[case::nothing(&[], 0.0)]
    #[case::zeros(&[0.0, -0.0], 0.0)]
    #[case::pythagoras(&[3.0, -4.0], 5.0)]
    #[case::smallest(&[f32::from_bits(1)], f64::from(f32::from_bits(1)))]
    #[case::largest(&[f32::MAX], f64::from(f32::MAX))]
    #[case::all_of_the_largest(&[f32::MAX; 4], 2.0 * f64::from(f32::MAX))]
    #[case::far_apart(&[1.0, f32::from_bits(1)], 1.0)]
    #[case::infinite(&[1.0, f32::NEG_INFINITY], f64::INFINITY)]
    fn norms_are_exact(#[case] values: &[f32], #[case] expected: f64) {
        assert_eq!(norm(values), expected);
    }

    #[test]
    fn squares_that_floating_point_would_lose_are_counted() {
        // 2⁵³ + 1 − 2⁵³ would lose the 1 if each addition were rounded. Here the ones make the sum round up.
        let large = 2.0_f32.powi(27);
        let mut values = vec![1.0_f32; 3];
        values.push(large);
        assert_eq!(norm(&values), (large as f64 * large as f64 + 4.0).sqrt());
        assert!(norm(&[f32::NAN, f32::INFINITY]).is_nan());
    }

    #[test]
    fn wide_and_narrow_types_have_norms_too() {
        for value in [f64::from_bits(1), f64::MIN_POSITIVE, 1.5, 1e300, f64::MAX] {
            let mut sum = SumOfSquares::new(SquareRange::of([FloatType::F32, FloatType::F64]));
            sum.add(Values::F64(&[value]));
            assert_eq!(sum.norm(), value);
        }
        let mut sum = SumOfSquares::new(SquareRange::of([FloatType::Bf16]));
        sum.add(Values::Bf16(&[3.0, 4.0].map(bf16::from_f32)));
        assert_eq!(sum.norm(), 5.0);
    }

    #[test]
    fn full_bins_are_emptied() {
        let mut sum = SumOfSquares { capacity: 3, ..SumOfSquares::new(SquareRange::F32) };
        sum.add(Values::F32(&[2.0; 100]));
        assert_eq!(sum.norm(), 20.0);
    }

    proptest! {
        #[test]
        fn however_values_are_divided_the_norm_has_the_same_bits(
            bits in prop::collection::vec(any::<u32>(), 0..200),
            cut in 0..200_usize,
        ) {
            let mut values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            values.retain(|value| value.is_finite());
            let whole = norm(&values);
            let (left, right) = values.split_at(cut.min(values.len()));
            let parts = [right, left].map(|part| {
                let mut sum = SumOfSquares::new(SquareRange::F32);
                sum.add(Values::F32(part));
                sum.encode()
            });
            let added: Vec<u64> = parts[0].iter().zip(&parts[1]).map(|(a, b)| a + b).collect();
            let of_parts = SumOfSquares::root(SquareRange::F32, &added);
            prop_assert_eq!(of_parts.to_bits(), whole.to_bits());
            let about: f64 = values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt();
            prop_assert!((whole - about).abs() <= 1e-14 * about);
        }
    }
}

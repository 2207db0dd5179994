//! Conversions between half types and `f32` without branches, so that loops over them vectorise.
//!
//! The conversion to `f32` is exact. The conversion back rounds to nearest, ties to even, overflows to infinity and
//! keeps NaN a NaN. All NaN become the same NaN, because processors, and even two loops, differ in the NaN of a sum
//! of two.

use half::{bf16, f16};

/// Returns the value of a `bf16`.
#[inline(always)]
pub(super) fn widen_bf16(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Returns the nearest `bf16`.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "the upper half of 32 bits fits 16")]
pub(super) fn round_bf16(value: f32) -> bf16 {
    bf16::from_bits((rounded_upper_half(value) >> 16) as u16)
}

/// Returns the sums of two pairs of `bf16`, each pair in one word. No number moves to another lane, so a loop over
/// words takes half the time of a loop over numbers.
#[inline(always)]
pub(super) fn sum_of_pairs(left: u32, right: u32) -> u32 {
    const UPPER: u32 = 0xffff_0000;
    let lower = f32::from_bits(left << 16) + f32::from_bits(right << 16);
    let upper = f32::from_bits(left & UPPER) + f32::from_bits(right & UPPER);
    (rounded_upper_half(lower) >> 16) | (rounded_upper_half(upper) & UPPER)
}

/// Returns a word whose upper half is the nearest `bf16`.
#[inline(always)]
fn rounded_upper_half(value: f32) -> u32 {
    let bits = value.to_bits();
    // Adds half of the last kept place, or one less if that place is even, so that a tie stays even. A carry goes
    // into the exponent, as it should.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    if value.is_nan() { BF16_NAN } else { rounded }
}

/// Returns the value of an `f16`.
#[inline(always)]
#[allow(clippy::cast_precision_loss, reason = "the fraction has 10 bits")]
pub(super) fn widen_f16(value: f16) -> f32 {
    let bits = u32::from(value.to_bits());
    let sign = (bits & 0x8000) << 16;
    let magnitude = bits & 0x7fff;
    let normal = (magnitude << 13) + F16_REBIAS;
    // Infinity and NaN: the exponent is moved by the same distance again to the largest exponent.
    let special = normal + F16_REBIAS;
    // Below the normal numbers the fraction counts steps of 2^-24.
    let subnormal = (magnitude as f32 * F16_STEP).to_bits();
    let finite = if magnitude < F16_SMALLEST_NORMAL { subnormal } else { normal };
    f32::from_bits(sign | if magnitude >= F16_INFINITY { special } else { finite })
}

/// Returns the nearest `f16`.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "all three candidates fit 16 bits")]
pub(super) fn round_f16(value: f32) -> f16 {
    let bits = value.to_bits();
    let sign = (bits & 0x8000_0000) >> 16;
    let magnitude = bits & 0x7fff_ffff;
    // This works as in `round_bf16`, with 13 dropped places and another exponent.
    let normal = magnitude.wrapping_sub(F16_REBIAS).wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 gives the last place of the sum the value 2^-24, so the addition itself rounds.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    let finite = if magnitude < F32_SMALLEST_NORMAL_F16 { subnormal } else { normal };
    let number = sign | if magnitude >= F32_BEYOND_F16 { F16_INFINITY } else { finite };
    f16::from_bits(if magnitude > F32_INFINITY { F16_NAN } else { number } as u16)
}

/// The NaN, in the upper half.
const BF16_NAN: u32 = 0x7fc0_0000;
/// The difference of the exponents' biases, 127 − 15, at the position of the exponent.
const F16_REBIAS: u32 = (127 - 15) << 23;
/// The distance between subnormal numbers, 2^-24.
const F16_STEP: f32 = 1.0 / 16_777_216.0;
const F16_SMALLEST_NORMAL: u32 = 0x0400;
const F16_INFINITY: u32 = 0x7c00;
const F16_NAN: u32 = 0x7e00;
const F32_INFINITY: u32 = 0x7f80_0000;
/// 2^-14, the smallest normal `f16`, as an `f32`.
const F32_SMALLEST_NORMAL_F16: u32 = (127 - 14) << 23;
/// 2^16: from here on everything is infinite. (From 65520 on, the rounding carries to infinity by itself.)
const F32_BEYOND_F16: u32 = (127 + 16) << 23;

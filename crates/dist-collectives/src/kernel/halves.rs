//! Half types to `f32` and back, without branches, so that loops over them vectorise.
//!
//! To `f32` is exact; back rounds to nearest, ties to even, overflows to infinity and keeps NaN a NaN. All NaN become
//! the same one: which of two NaN a sum is differs between processors, and even between two loops.

use half::{bf16, f16};

/// The value of a `bf16`.
#[inline(always)]
pub(super) fn widen_bf16(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// The nearest `bf16`.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "the upper half of 32 bits fits 16")]
pub(super) fn round_bf16(value: f32) -> bf16 {
    bf16::from_bits((rounded_upper_half(value) >> 16) as u16)
}

/// The sums of two pairs of `bf16`, each pair one word: without moving numbers to other lanes, so that a loop over
/// words takes half the time of one over numbers.
#[inline(always)]
pub(super) fn sum_of_pairs(left: u32, right: u32) -> u32 {
    const UPPER: u32 = 0xffff_0000;
    let lower = f32::from_bits(left << 16) + f32::from_bits(right << 16);
    let upper = f32::from_bits(left & UPPER) + f32::from_bits(right & UPPER);
    (rounded_upper_half(lower) >> 16) | (rounded_upper_half(upper) & UPPER)
}

/// A word whose upper half is the nearest `bf16`.
#[inline(always)]
fn rounded_upper_half(value: f32) -> u32 {
    let bits = value.to_bits();
    // Half of the last kept place, less one where that place is even: a tie then stays even. A carry runs into
    // the exponent, as it should.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    if value.is_nan() { BF16_NAN } else { rounded }
}

/// The value of an `f16`.
#[inline(always)]
#[allow(clippy::cast_precision_loss, reason = "the fraction has 10 bits")]
pub(super) fn widen_f16(value: f16) -> f32 {
    let bits = u32::from(value.to_bits());
    let sign = (bits & 0x8000) << 16;
    let magnitude = bits & 0x7fff;
    let normal = (magnitude << 13) + F16_REBIAS;
    // Infinity and NaN: the largest exponent again, by the same distance once more.
    let special = normal + F16_REBIAS;
    // Below the normal numbers the fraction counts steps of 2^-24.
    let subnormal = (magnitude as f32 * F16_STEP).to_bits();
    let finite = if magnitude < F16_SMALLEST_NORMAL { subnormal } else { normal };
    f32::from_bits(sign | if magnitude >= F16_INFINITY { special } else { finite })
}

/// The nearest `f16`.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "all three candidates fit 16 bits")]
pub(super) fn round_f16(value: f32) -> f16 {
    let bits = value.to_bits();
    let sign = (bits & 0x8000_0000) >> 16;
    let magnitude = bits & 0x7fff_ffff;
    // As in `round_bf16`, with 13 places to drop and the exponent moved.
    let normal = magnitude.wrapping_sub(F16_REBIAS).wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 makes the last place of the sum worth 2^-24, so the addition itself rounds.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    let finite = if magnitude < F32_SMALLEST_NORMAL_F16 { subnormal } else { normal };
    let number = sign | if magnitude >= F32_BEYOND_F16 { F16_INFINITY } else { finite };
    f16::from_bits(if magnitude > F32_INFINITY { F16_NAN } else { number } as u16)
}

/// In the upper half.
const BF16_NAN: u32 = 0x7fc0_0000;
/// Difference of the exponents' biases, 127 − 15, in place.
const F16_REBIAS: u32 = (127 - 15) << 23;
/// The distance between subnormal numbers, 2^-24.
const F16_STEP: f32 = 1.0 / 16_777_216.0;
const F16_SMALLEST_NORMAL: u32 = 0x0400;
const F16_INFINITY: u32 = 0x7c00;
const F16_NAN: u32 = 0x7e00;
const F32_INFINITY: u32 = 0x7f80_0000;
/// 2^-14, the smallest normal `f16`, as an `f32`.
const F32_SMALLEST_NORMAL_F16: u32 = (127 - 14) << 23;
/// 2^16: from here on everything is infinite. (From 65520 the rounding carries to infinity by itself.)
const F32_BEYOND_F16: u32 = (127 + 16) << 23;

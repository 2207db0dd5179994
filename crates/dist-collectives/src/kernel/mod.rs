//! The loops that reduce one buffer into another.
//!
//! There is one scalar rule per type and operation. The loops apply it element by element; they are compiled once
//! per instruction set and selected at run time. Every loop gives the bits of its rule.

mod all;
mod halves;
mod native;
mod pairs;
mod scalar;

use dist_transport::cpu::tuning;
use half::f16;
use multiversion::multiversion;

pub(crate) use scalar::Scalar;
use scalar::{Bits, Comparable, Float};

use crate::{Element, ReduceOp};

/// Reduces `from` into `into`, element by element: `into[i] = into[i] op from[i]`, by the rounding rules of
/// [`ReduceOp`]. The steps before and after the sums of some operations are left out: the multiplication by this
/// rank's number, and the division of a mean, for which there is [`divide_by_count`]. Elements of `f16` are rounded
/// to `f16` after each sum, even for means. To compute partial sums of a mean as `f32`, combine `f32`.
///
/// ```
/// use dist_collectives::ReduceOp;
/// use dist_collectives::kernel::combine;
///
/// let mut sums = [1.0_f32, 2.0];
/// combine(ReduceOp::Sum, &mut sums, &[10.0, 20.0]);
/// assert_eq!(sums, [11.0, 22.0]);
/// ```
///
/// # Panics
/// If the lengths differ, or if elements of this type do not [support](ReduceOp::supports) the operation.
pub fn combine<T: Element>(op: ReduceOp, into: &mut [T], from: &[T]) {
    assert_eq!(into.len(), from.len(), "combine needs two buffers of one length");
    let bitwise = || T::BITWISE.unwrap_or_else(|| panic!("{op} does not reduce {}", T::DTYPE));
    let ordering = || T::ORDERING.unwrap_or_else(|| panic!("{op} does not reduce {}", T::DTYPE));
    match op {
        ReduceOp::Sum | ReduceOp::Mean | ReduceOp::PreMulSum(_) | ReduceOp::WeightedMean(_) => {
            if !T::sum_all(into, from) {
                sum(into, from);
            }
        }
        ReduceOp::Product => product(into, from),
        ReduceOp::Min => (ordering().min)(into, from),
        ReduceOp::Max => (ordering().max)(into, from),
        ReduceOp::And => (bitwise().and)(into, from),
        ReduceOp::Or => (bitwise().or)(into, from),
        ReduceOp::Xor => (bitwise().xor)(into, from),
    }
}

/// Returns `true` if one loop combines the data of this many ranks: [`sum_into_all`], or [`sum_into_first`] for 4
/// and 8.
pub(crate) fn combines_at_once(op: ReduceOp, count: usize) -> bool {
    let is_sum =
        matches!(op, ReduceOp::Sum | ReduceOp::Mean | ReduceOp::PreMulSum(_) | ReduceOp::WeightedMean(_));
    is_sum && all::COUNTS.contains(&count)
}

/// Sums all slices in canonical order, in one loop, and writes the sums into all of them. If the memory belongs to
/// other cores, this takes as little as half of the time of adding two slices at a time and copying the sums.
///
/// # Panics
/// If the lengths differ, or there is no loop for this number of slices.
pub(crate) fn sum_into_all<T: Element>(all: &mut [&mut [T]]) {
    let as_long = |other: &&mut [T]| other.len() == all[0].len();
    assert!(all.iter().all(as_long), "what all have is of one length");
    // On Intel, a cache line of another core arrives late. Writing one line while reads of others are outstanding
    // delays both. On AMD, one loop is faster than pieces, and prefetching slows down large vectors.
    all::sum(all, tuning().sums_in_pieces);
}

/// Sums 4 or 8 slices in canonical order and leaves the sums in the first, in one loop over the memory of all
/// ranks.
///
/// # Panics
/// If the lengths differ, or there is no loop for this number of slices.
pub(crate) fn sum_into_first<T: Element>(first: &mut [T], others: &[&[T]]) {
    assert!(others.iter().all(|other| other.len() == first.len()), "what all have is of one length");
    all::sum_into_first(first, others);
}

/// Combines all slices in canonical order, two at a time, and leaves the result in the first. The contents of the
/// others are unspecified afterwards.
pub(crate) fn combine_into_first<T: Element>(op: ReduceOp, all: &mut [&mut [T]]) {
    let mut width = 1;
    while width < all.len() {
        for left in (0..all.len() - width).step_by(2 * width) {
            let (lefts, rights) = all.split_at_mut(left + width);
            combine(op, lefts[left], rights[0]);
        }
        width *= 2;
    }
}

/// Divides sums by the number of summands, as the last step of a mean. It rounds once; half types are divided as
/// `f32`. Returns `false` and does nothing for integers, which have no mean.
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "a count of ranks or batches is far below 2^24")]
pub fn divide_by_count<T: Element>(sums: &mut [T], count: usize) -> bool {
    T::SCALING.map(|scaling| (scaling.divide)(sums, count as f64)).is_some()
}

/// Buffers up to this size are reduced without detecting the instruction set.
const FEW_BYTES: usize = 32;

/// Defines a loop over two buffers, compiled once per instruction set.
///
/// The loops are limited by memory, so wider vectors (AVX-512) would not be faster. After such arithmetic an Intel
/// processor also lowers its clock for everything that follows, including system calls.
macro_rules! loops {
    ($bound:ident: $($operation:ident => $rule:ident;)*) => {$(
        #[inline]
        fn $operation<T: $bound>(into: &mut [T], from: &[T]) {
            #[multiversion(targets("x86_64+avx2", "aarch64+neon"))]
            fn many<T: $bound>(into: &mut [T], from: &[T]) {
                for (into, from) in into.iter_mut().zip(from) {
                    *into = T::$rule(*into, *from);
                }
            }
            if size_of_val(into) > FEW_BYTES {
                return many(into, from);
            }
            for (into, from) in into.iter_mut().zip(from) {
                *into = T::$rule(*into, *from);
            }
        }
    )*};
}

loops! {
    Scalar:
    sum => reduce_sum;
    product => reduce_product;
}

loops! {
    Bits:
    and => bitand;
    or => bitor;
    xor => bitxor;
}

/// The number of elements that are copied aside at a time.
const ASIDE: usize = 256;

/// Defines a loop that selects one of two values, compiled once per instruction set.
///
/// The old values are copied aside first. If they were stored where they came from, compilers would make a masked
/// store, which takes AMD processors a dozen times as long as a normal one.
macro_rules! choices {
    ($($operation:ident => $rule:ident;)*) => {$(
        #[inline]
        fn $operation<T: Comparable>(into: &mut [T], from: &[T]) {
            #[multiversion(targets("x86_64+avx2", "aarch64+neon"))]
            fn many<T: Comparable>(into: &mut [T], aside: &[T], from: &[T]) {
                for ((into, aside), from) in into.iter_mut().zip(aside).zip(from) {
                    *into = T::$rule(*aside, *from);
                }
            }
            if size_of_val(into) > FEW_BYTES {
                let mut aside = [from[0]; ASIDE];
                for (into, from) in into.chunks_mut(ASIDE).zip(from.chunks(ASIDE)) {
                    let aside = &mut aside[..into.len()];
                    aside.copy_from_slice(into);
                    many(into, aside, from);
                }
                return;
            }
            for (into, from) in into.iter_mut().zip(from) {
                *into = T::$rule(*into, *from);
            }
        }
    )*};
}

choices! {
    min => reduce_min;
    max => reduce_max;
}

/// Defines a loop over one buffer and a number, compiled once per instruction set.
macro_rules! scalings {
    ($($operation:ident => $rule:ident;)*) => {$(
        #[multiversion(targets("x86_64+avx2", "aarch64+neon"))]
        fn $operation<T: Float>(values: &mut [T], number: f64) {
            for value in values {
                *value = value.$rule(number);
            }
        }
    )*};
}

scalings! {
    scale => scaled;
    divide => divided;
}

/// The functions that scale floating-point and complex numbers.
#[derive(Clone, Copy, Debug)]
#[allow(unnameable_types, reason = "it is no part of what users of `Element` see")]
pub struct Scaling<T> {
    /// Multiplies every value by a factor.
    pub(crate) scale: fn(&mut [T], f64),
    /// Divides every value by a divisor.
    pub(crate) divide: fn(&mut [T], f64),
}

pub(crate) const fn scaling<T: Float>() -> Scaling<T> {
    Scaling { scale, divide }
}

/// The functions that keep the smaller or the larger one of two values, and the bounds of the type.
#[derive(Clone, Copy, Debug)]
#[allow(unnameable_types, reason = "it is no part of what users of `Element` see")]
pub struct Ordering<T> {
    /// The value less than every other value.
    pub(crate) least: T,
    /// The value greater than every other value.
    pub(crate) greatest: T,
    /// Returns the smaller of two values.
    pub(crate) smaller: fn(T, T) -> T,
    /// Returns the larger of two values.
    pub(crate) larger: fn(T, T) -> T,
    min: fn(&mut [T], &[T]),
    max: fn(&mut [T], &[T]),
}

pub(crate) const fn ordering<T: Comparable>(least: T, greatest: T) -> Ordering<T> {
    Ordering { least, greatest, smaller: T::reduce_min, larger: T::reduce_max, min, max }
}

/// The functions that convert elements to `f32` and back.
#[derive(Clone, Copy, Debug)]
#[allow(unnameable_types, reason = "it is no part of what users of `Element` see")]
pub struct Widening<T> {
    /// Converts elements to `f32`, exactly.
    pub(crate) widen: fn(&[T], &mut [f32]),
    /// Rounds `f32` to elements.
    pub(crate) narrow: fn(&[f32], &mut [T]),
}

/// The conversions of `f16`.
pub(crate) const WIDENING_F16: Widening<f16> = Widening {
    widen: |from, into| {
        if !native::widen_f16(from, into) {
            widen_by_rule(from, into);
        }
    },
    narrow: |from, into| {
        if !native::narrow_f16(from, into) {
            narrow_by_rule(from, into);
        }
    },
};

#[multiversion(targets("x86_64+avx2", "aarch64+neon"))]
fn widen_by_rule(from: &[f16], into: &mut [f32]) {
    for (from, into) in from.iter().zip(into) {
        *into = halves::widen_f16(*from);
    }
}

#[multiversion(targets("x86_64+avx2", "aarch64+neon"))]
fn narrow_by_rule(from: &[f32], into: &mut [f16]) {
    for (from, into) in from.iter().zip(into) {
        *into = halves::round_f16(*from);
    }
}

/// The functions that combine the bits of integers.
#[derive(Clone, Copy, Debug)]
#[allow(unnameable_types, reason = "it is no part of what users of `Element` see")]
pub struct Bitwise<T> {
    /// The value in which every bit is set.
    pub(crate) ones: T,
    and: fn(&mut [T], &[T]),
    or: fn(&mut [T], &[T]),
    xor: fn(&mut [T], &[T]),
}

pub(crate) const fn bitwise<T: Bits>(ones: T) -> Bitwise<T> {
    Bitwise { ones, and, or, xor }
}

#[cfg(test)]
mod tests;

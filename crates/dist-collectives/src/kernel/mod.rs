//! The loops that reduce one buffer into another.
//!
//! One scalar rule per type and operation; the loops apply it element by element, compiled once per instruction
//! set and chosen at run time. No loop differs from its rule in a bit.

mod all;
mod halves;
mod native;
mod pairs;
mod scalar;

use dist_transport::processor::is_intel;
use half::f16;
use multiversion::multiversion;

pub(crate) use scalar::Scalar;
use scalar::{Bits, Float};

use crate::{Element, ReduceOp};

/// Reduces `from` into `into`, element by element: `into[i] = into[i] op from[i]`, by the rounding rules of
/// [`ReduceOp`]. What comes before and after the sums of some operations is left out: the multiplication by this
/// rank's number, the division of a mean, which [`divide_by_count`] does. Elements of `f16` are rounded to `f16` here
/// after each sum, also for means: a mean that carries its partial sums as `f32` combines `f32`.
///
/// ```
/// use dist_collectives::{combine, ReduceOp};
///
/// let mut sums = [1.0_f32, 2.0];
/// combine(ReduceOp::Sum, &mut sums, &[10.0, 20.0]);
/// assert_eq!(sums, [11.0, 22.0]);
/// ```
///
/// # Panics
/// If the lengths differ, or if the bits of floating-point numbers are to be combined.
pub fn combine<T: Element>(op: ReduceOp, into: &mut [T], from: &[T]) {
    assert_eq!(into.len(), from.len(), "combine needs two buffers of one length");
    let bitwise = || T::BITWISE.unwrap_or_else(|| panic!("{op} does not reduce {}", T::DTYPE));
    match op {
        ReduceOp::Sum | ReduceOp::Mean | ReduceOp::PreMulSum(_) | ReduceOp::WeightedMean(_) => {
            if !T::sum_all(into, from) {
                sum(into, from);
            }
        }
        ReduceOp::Product => product(into, from),
        ReduceOp::Min => min(into, from),
        ReduceOp::Max => max(into, from),
        ReduceOp::And => (bitwise().and)(into, from),
        ReduceOp::Or => (bitwise().or)(into, from),
        ReduceOp::Xor => (bitwise().xor)(into, from),
    }
}

/// Whether there is one loop that combines what so many have: [`sum_into_all`], and of 4 and 8 [`sum_into_first`].
pub(crate) fn combines_at_once(op: ReduceOp, count: usize) -> bool {
    let is_sum =
        matches!(op, ReduceOp::Sum | ReduceOp::Mean | ReduceOp::PreMulSum(_) | ReduceOp::WeightedMean(_));
    is_sum && all::COUNTS.contains(&count)
}

/// Adds what all have, in canonical order, and leaves the sums with all, in one loop over the memory of all: up to half of
/// the time that it takes to add two at a time and to copy the sums, where the memory is another core's.
///
/// # Panics
/// If the lengths differ, or there is no loop for so many.
pub(crate) fn sum_into_all<T: Element>(all: &mut [&mut [T]]) {
    let as_long = |other: &&mut [T]| other.len() == all[0].len();
    assert!(all.iter().all(as_long), "what all have is of one length");
    // On Intel's processors a line that another core has comes late, and to write one while others are awaited that are read
    // holds both up. On AMD's one loop takes less time than pieces, and to ask early makes large vectors slower.
    all::sum(all, is_intel());
}

/// Adds what 4 or 8 have, in canonical order, and leaves the sums with the first, in one loop over the memory of all.
///
/// # Panics
/// If the lengths differ, or there is no loop for so many.
pub(crate) fn sum_into_first<T: Element>(first: &mut [T], others: &[&[T]]) {
    assert!(others.iter().all(|other| other.len() == first.len()), "what all have is of one length");
    all::sum_into_first(first, others);
}

/// Combines what all have, in canonical order, two at a time, and leaves that with the first; what the others have then is
/// unspecified.
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

/// Divides sums by the number of what was added, rounding once (in `f32` for half types): the last step of a
/// mean. `false`, and nothing done, for integers, which have no mean.
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "a count of ranks or batches is far below 2^24")]
pub fn divide_by_count<T: Element>(sums: &mut [T], count: usize) -> bool {
    T::SCALING.map(|scaling| (scaling.divide)(sums, count as f64)).is_some()
}

/// Bytes of buffers that are reduced before it is found out which instructions there are.
const FEW_BYTES: usize = 32;

/// A loop over two buffers, compiled once per instruction set.
///
/// They wait for memory, which wider vectors (AVX-512) do not bring sooner, and a processor of Intel lowers its clock for all
/// that comes after such arithmetic, system calls included.
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

/// Elements that are put aside at a time.
const ASIDE: usize = 256;

/// A loop that chooses one of two, compiled once per instruction set.
///
/// What is there is put aside first. To store it where it comes from is to leave it there, of which compilers make a store
/// under a mask, and that takes AMD's processors a dozen times as long as another.
macro_rules! choices {
    ($($operation:ident => $rule:ident;)*) => {$(
        #[inline]
        fn $operation<T: Scalar>(into: &mut [T], from: &[T]) {
            #[multiversion(targets("x86_64+avx2", "aarch64+neon"))]
            fn many<T: Scalar>(into: &mut [T], aside: &[T], from: &[T]) {
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

/// A loop over one buffer and a number, compiled once per instruction set.
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

/// What is done to floating-point numbers beside combining them.
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

/// How elements are converted to `f32` and back.
#[derive(Clone, Copy, Debug)]
#[allow(unnameable_types, reason = "it is no part of what users of `Element` see")]
pub struct Widening<T> {
    /// Converts elements to as many `f32`, exactly.
    pub(crate) widen: fn(&[T], &mut [f32]),
    /// Rounds `f32` to as many elements.
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

/// How the bits of integers are combined.
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

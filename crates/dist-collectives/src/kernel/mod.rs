//! The loops that reduce one buffer into another.
//!
//! One scalar rule per type and operation; the loops apply it element by element, compiled once per instruction
//! set and chosen at run time. No loop differs from its rule in a bit.

mod halves;
mod scalar;

use multiversion::multiversion;

pub(crate) use scalar::Scalar;

use crate::{Element, ReduceOp};

/// Reduces `from` into `into`, element by element: `into[i] = into[i] op from[i]`, by the rounding rules of
/// [`ReduceOp`]. The mean is left as a sum: [`divide_by_count`] finishes it.
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
/// If the lengths differ.
pub fn combine<T: Element>(op: ReduceOp, into: &mut [T], from: &[T]) {
    assert_eq!(into.len(), from.len(), "combine needs two buffers of one length");
    match op {
        ReduceOp::Sum | ReduceOp::Mean => sum(into, from),
        ReduceOp::Product => product(into, from),
        ReduceOp::Min => min(into, from),
        ReduceOp::Max => max(into, from),
    }
}

/// Divides sums by the number of what was added, rounding once (in `f32` for half types): the last step of a
/// mean. `false`, and nothing done, for integers, which have no mean.
#[must_use]
pub fn divide_by_count<T: Element>(sums: &mut [T], count: usize) -> bool {
    T::DIVIDE.map(|divide| divide(sums, count)).is_some()
}

macro_rules! loops {
    ($($operation:ident => $rule:ident;)*) => {$(
        #[multiversion(targets(
            "x86_64+avx512f+avx512bw+avx512dq+avx512vl",
            "x86_64+avx2",
            "aarch64+neon",
        ))]
        fn $operation<T: Scalar>(into: &mut [T], from: &[T]) {
            for (into, from) in into.iter_mut().zip(from) {
                *into = T::$rule(*into, *from);
            }
        }
    )*};
}

loops! {
    sum => reduce_sum;
    product => reduce_product;
    min => reduce_min;
    max => reduce_max;
}

/// A type with a mean.
pub(crate) trait Divide: Copy {
    /// The quotient, rounded once.
    fn divided(self, count: usize) -> Self;
}

/// Divides every value by `count`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub(crate) fn divide<T: Divide>(values: &mut [T], count: usize) {
    for value in values {
        *value = value.divided(count);
    }
}

#[cfg(test)]
mod tests;

//! Sums of `bf16`, two in a word.

use half::bf16;
use multiversion::multiversion;

use super::all::Rows;
use super::halves::{round_bf16, sum_of_pairs, widen_bf16};

/// The number of values of one loop iteration, which fill the widest registers.
pub(super) const LANES: usize = 32;

/// Adds all of one buffer to another of the same length.
pub(super) fn sum(into: &mut [bf16], from: &[bf16]) -> bool {
    sum_words(into, from);
    true
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2", "aarch64+neon",))]
fn sum_words(into: &mut [bf16], from: &[bf16]) {
    let (into, into_rest) = into.as_chunks_mut::<LANES>();
    let (from, from_rest) = from.as_chunks::<LANES>();
    for (into, from) in into.iter_mut().zip(from) {
        *into = add(*into, *from);
    }
    for (into, from) in into_rest.iter_mut().zip(from_rest) {
        *into = round_bf16(widen_bf16(*into) + widen_bf16(*from));
    }
}

/// Sums the rows of `COUNT` ranks.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2", "aarch64+neon",))]
pub(super) fn sum_many<const COUNT: usize, R: Rows<bf16, COUNT>>(rows: R) {
    rows.sum_by(add);
}

#[inline(always)]
pub(super) fn add(left: [bf16; LANES], right: [bf16; LANES]) -> [bf16; LANES] {
    let mut words: [u32; LANES / 2] = bytemuck::cast(left);
    let others: [u32; LANES / 2] = bytemuck::cast(right);
    for (word, other) in words.iter_mut().zip(others) {
        *word = sum_of_pairs(*word, other);
    }
    bytemuck::cast(words)
}

//! Sums of all ranks' data, in one loop over the memory of all ranks. While the cache lines of one rank are
//! awaited, those of the others are fetched. Memory of another core is written soon after it was read.

use std::array;
use std::ops::RangeInclusive;

use multiversion::multiversion;

use super::{Scalar, native};

/// The rows of `COUNT` ranks, one per rank in rank order.
#[allow(unnameable_types, reason = "it is not a part of the public interface of `Element`")]
pub trait Rows<T, const COUNT: usize> {
    /// Adds the rows in canonical order: `LANES` columns at a time with `add`, the remaining columns with the
    /// scalar rule.
    fn sum_by<const LANES: usize>(self, add: impl Fn([T; LANES], [T; LANES]) -> [T; LANES]);
}

/// The sums are left in all rows, which are read and written in turn.
impl<T: Scalar, const COUNT: usize> Rows<T, COUNT> for &mut [&mut [T]; COUNT] {
    #[inline(always)]
    fn sum_by<const LANES: usize>(self, add: impl Fn([T; LANES], [T; LANES]) -> [T; LANES]) {
        let mut all = in_blocks(self);
        for block in 0..all[0].0.len() {
            let sum = tree::<_, COUNT>(|rank| all[rank].0[block], &add);
            for (one, _) in &mut all {
                one[block] = sum;
            }
        }
        sum_rests(&mut all);
    }
}

/// The sums are left in all rows. A piece of each row is read before the others are written.
struct InPieces<'a, 'b, T, const COUNT: usize>(&'a mut [&'b mut [T]; COUNT]);

/// Bytes of each row that stay in the cache while the sums are copied to the others.
const PIECE_BYTES: usize = 2 << 10;
/// The prefetch distance in bytes.
const AHEAD_BYTES: usize = 1 << 10;
const LINE_BYTES: usize = 64;

impl<T: Scalar, const COUNT: usize> Rows<T, COUNT> for InPieces<'_, '_, T, COUNT> {
    #[inline(always)]
    fn sum_by<const LANES: usize>(self, add: impl Fn([T; LANES], [T; LANES]) -> [T; LANES]) {
        let blocks_of = |bytes: usize| (bytes / size_of::<[T; LANES]>()).max(1);
        let (few, ahead, line) = (blocks_of(PIECE_BYTES), blocks_of(AHEAD_BYTES), blocks_of(LINE_BYTES));
        let mut all = in_blocks(self.0);
        let blocks = all[0].0.len();
        for start in (0..blocks).step_by(few) {
            let piece = start..blocks.min(start + few);
            for block in piece.clone() {
                // Nothing beyond these rows is fetched: another core works on it and would have to fetch it back.
                if block % line == 0 && block + ahead < blocks {
                    all.iter().for_each(|(one, _)| native::fetch(&one[block + ahead]));
                }
                all[0].0[block] = tree::<_, COUNT>(|rank| all[rank].0[block], &add);
            }
            let ((first, _), others) = all.split_first_mut().expect("there are at least two");
            for (other, _) in others {
                other[piece.clone()].copy_from_slice(&first[piece.clone()]);
            }
        }
        sum_rests(&mut all);
    }
}

/// The blocks of `LANES` numbers, and the remaining numbers.
type Blocks<'a, T, const LANES: usize> = (&'a mut [[T; LANES]], &'a mut [T]);

#[inline(always)]
fn in_blocks<'a, T, const LANES: usize, const COUNT: usize>(
    all: &'a mut [&mut [T]; COUNT],
) -> [Blocks<'a, T, LANES>; COUNT] {
    let len = all[0].len();
    all.each_mut().map(|one| {
        let (blocks, rest) = one.as_chunks_mut::<LANES>();
        (&mut blocks[..len / LANES], &mut rest[..len % LANES])
    })
}

#[inline(always)]
fn sum_rests<T: Scalar, const LANES: usize, const COUNT: usize>(all: &mut [Blocks<'_, T, LANES>; COUNT]) {
    for number in 0..all[0].1.len() {
        let sum = tree::<_, COUNT>(|rank| all[rank].1[number], T::reduce_sum);
        for (_, one) in &mut *all {
            one[number] = sum;
        }
    }
}

/// The sums are left in the first row, which is separate.
impl<T: Scalar, const COUNT: usize> Rows<T, COUNT> for (&mut [T], &[&[T]]) {
    #[inline(always)]
    fn sum_by<const LANES: usize>(self, add: impl Fn([T; LANES], [T; LANES]) -> [T; LANES]) {
        let (first, others) = self;
        let (first, first_rest) = first.as_chunks_mut::<LANES>();
        let others: [_; COUNT] = array::from_fn(|row| match row.checked_sub(1) {
            None => (&[][..], &[][..]),
            Some(other) => {
                let (other, other_rest) = others[other].as_chunks::<LANES>();
                (&other[..first.len()], &other_rest[..first_rest.len()])
            }
        });
        for (block, first) in first.iter_mut().enumerate() {
            *first = tree::<_, COUNT>(|row| if row == 0 { *first } else { others[row].0[block] }, &add);
        }
        for (number, first) in first_rest.iter_mut().enumerate() {
            let value = |row: usize| if row == 0 { *first } else { others[row].1[number] };
            *first = tree::<_, COUNT>(value, T::reduce_sum);
        }
    }
}

/// The numbers of ranks for which there is a loop.
pub(super) const COUNTS: RangeInclusive<usize> = 2..=8;

macro_rules! by_count {
    ($sum:ident $arguments:tt of $all:expr, $($count:literal)*) => {
        match $all {
            $($count => $sum::<T, $count> $arguments,)*
            count => panic!("there is no loop for {count}"),
        }
    };
}

/// Sums all rows and leaves the sums in all of them: in pieces, or one block after the other.
pub(super) fn sum<T: Scalar>(all: &mut [&mut [T]], in_pieces: bool) {
    fn of<T: Scalar, const COUNT: usize>(all: &mut [&mut [T]], in_pieces: bool) {
        let rows: &mut [&mut [T]; COUNT] = all.try_into().expect("the match has counted the rows");
        if in_pieces { T::sum_many(InPieces(rows)) } else { T::sum_many(rows) }
    }
    by_count!(of(all, in_pieces) of all.len(), 2 3 4 5 6 7 8);
}

/// Sums 4 or 8 rows and leaves the sums in the first.
pub(super) fn sum_into_first<T: Scalar>(first: &mut [T], others: &[&[T]]) {
    fn of<T: Scalar, const COUNT: usize>(first: &mut [T], others: &[&[T]]) {
        T::sum_many::<COUNT, _>((first, others));
    }
    by_count!(of(first, others) of 1 + others.len(), 4 8);
}

/// Adds numbers by the scalar rule in a loop.
#[multiversion(targets("x86_64+avx2", "aarch64+neon"))]
pub(super) fn sum_by_rule<T: Scalar, const COUNT: usize, const LANES: usize, R: Rows<T, COUNT>>(rows: R) {
    rows.sum_by(add_by_rule::<T, LANES>);
}

#[inline(always)]
fn add_by_rule<T: Scalar, const LANES: usize>(mut left: [T; LANES], right: [T; LANES]) -> [T; LANES] {
    for (left, right) in left.iter_mut().zip(right) {
        *left = left.reduce_sum(right);
    }
    left
}

/// Returns the sum of `COUNT` values in canonical order, unrolled so that everything stays in registers.
#[inline(always)]
fn tree<V, const COUNT: usize>(value: impl Fn(usize) -> V, add: impl Fn(V, V) -> V) -> V {
    match COUNT {
        2 => two(&value, 0, &add),
        3 => add(two(&value, 0, &add), value(2)),
        4 => four(&value, 0, &add),
        5 => add(four(&value, 0, &add), value(4)),
        6 => add(four(&value, 0, &add), two(&value, 4, &add)),
        7 => add(four(&value, 0, &add), add(two(&value, 4, &add), value(6))),
        8 => add(four(&value, 0, &add), four(&value, 4, &add)),
        _ => unreachable!("no loop sums this number of rows"),
    }
}

#[inline(always)]
fn four<V>(value: impl Fn(usize) -> V, first: usize, add: impl Fn(V, V) -> V) -> V {
    add(two(&value, first, &add), two(&value, first + 2, &add))
}

#[inline(always)]
fn two<V>(value: impl Fn(usize) -> V, first: usize, add: impl Fn(V, V) -> V) -> V {
    add(value(first), value(first + 1))
}

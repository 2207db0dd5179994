//! Sums of what all ranks have, left with all of them, in one loop over the memory of all: what was read of another core's
//! memory is written while it is at hand, and while one rank's lines are waited for, the others' are fetched.

use multiversion::multiversion;

use super::Scalar;

/// Adds what all have, and leaves the sums with all; `false`, and nothing done, if there is no loop for so many.
pub(super) fn sum<T: Scalar>(all: &mut [&mut [T]]) -> bool {
    macro_rules! loops {
        ($($count:literal)*) => {
            match all.len() {
                $($count => T::sum_many::<$count>(all.try_into().expect("they are so many")),)*
                _ => return false,
            }
        };
    }
    loops!(2 3 4 5 6 7 8);
    true
}

/// The loop for numbers that are added by their rule.
#[multiversion(targets("x86_64+avx2", "aarch64+neon"))]
pub(super) fn sum_by_rule<T: Scalar, const COUNT: usize, const LANES: usize>(all: &mut [&mut [T]; COUNT]) {
    sum_by(all, add_by_rule::<T, LANES>);
}

#[inline(always)]
fn add_by_rule<T: Scalar, const LANES: usize>(mut left: [T; LANES], right: [T; LANES]) -> [T; LANES] {
    for (left, right) in left.iter_mut().zip(right) {
        *left = left.reduce_sum(right);
    }
    left
}

/// The loop for numbers that `add` adds, so many at a time.
#[inline(always)]
pub(super) fn sum_by<T: Scalar, const COUNT: usize, const LANES: usize>(
    all: &mut [&mut [T]; COUNT],
    add: impl Fn([T; LANES], [T; LANES]) -> [T; LANES],
) {
    let len = all[0].len();
    let (blocks, rest) = (len / LANES, len % LANES);
    let mut all = all.each_mut().map(|one| {
        let (one, one_rest) = one.as_chunks_mut::<LANES>();
        (&mut one[..blocks], &mut one_rest[..rest])
    });
    for block in 0..blocks {
        let sum = tree::<_, COUNT>(|rank| all[rank].0[block], &add);
        for (one, _) in &mut all {
            one[block] = sum;
        }
    }
    for number in 0..rest {
        let sum = tree::<_, COUNT>(|rank| all[rank].1[number], T::reduce_sum);
        for (_, one) in &mut all {
            one[number] = sum;
        }
    }
}

/// The sum of so many values in canonical order, written out so that all of it stays in registers.
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
        _ => unreachable!("there is no loop for so many"),
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

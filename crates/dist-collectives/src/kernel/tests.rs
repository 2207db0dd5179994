//! Exhaustive tests of half types, and tests of every loop against its scalar rule.

use dist_testkit::oracle::{Number, Reduction};
use half::{bf16, f16};
use num_complex::Complex;
use proptest::prelude::*;

use super::halves::{round_bf16, round_f16, widen_bf16, widen_f16};
use super::*;

#[test]
fn every_half_widens_exactly_and_rounds_back_to_itself() {
    for bits in 0..=u16::MAX {
        let (short, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
        if short.is_nan() {
            assert!(widen_f16(short).is_nan() && round_f16(widen_f16(short)).is_nan());
        } else {
            assert_eq!(widen_f16(short).to_bits(), short.to_f32().to_bits());
            assert_eq!(round_f16(widen_f16(short)).to_bits(), bits);
        }
        if brain.is_nan() {
            assert!(widen_bf16(brain).is_nan() && round_bf16(widen_bf16(brain)).is_nan());
        } else {
            assert_eq!(widen_bf16(brain).to_bits(), brain.to_f32().to_bits());
            assert_eq!(round_bf16(widen_bf16(brain)).to_bits(), bits);
        }
    }
}

#[track_caller]
fn rounds_as_the_reference(value: f32) {
    if value.is_nan() {
        assert!(round_f16(value).is_nan() && round_bf16(value).is_nan());
        return;
    }
    assert_eq!(round_f16(value).to_bits(), f16::from_f32(value).to_bits(), "{value:e}");
    assert_eq!(round_bf16(value).to_bits(), bf16::from_f32(value).to_bits(), "{value:e}");
}

#[test]
fn ties_and_their_neighbours_round_to_even() {
    for bits in 0..u16::MAX {
        for (low, high) in [
            (f16::from_bits(bits).to_f32(), f16::from_bits(bits + 1).to_f32()),
            (bf16::from_bits(bits).to_f32(), bf16::from_bits(bits + 1).to_f32()),
        ] {
            let middle = low + (high - low) / 2.0;
            for value in [middle, middle.next_up(), middle.next_down(), low.next_up(), high.next_down()] {
                rounds_as_the_reference(value);
            }
        }
    }
    for value in [65504.0, 65519.996, 65520.0, 65536.0, f32::MAX, f32::INFINITY, f32::MIN_POSITIVE, 1e-45] {
        rounds_as_the_reference(value);
        rounds_as_the_reference(-value);
    }
}

/// Checks every loop of `T` on buffers long enough for the inner loop and the tail of each version.
fn check_loops<T: Element + Number>(left: &[T], right: &[T]) {
    for op in ReduceOp::PLAIN.into_iter().filter(|op| op.supports(T::DTYPE)) {
        let reduction = Reduction::parse(op.name()).expect("the oracle knows every operation");
        let mut combined = left.to_vec();
        combine(op, &mut combined, right);
        for ((combined, left), right) in combined.iter().zip(left).zip(right) {
            let expected = reduction.pair(*left, *right);
            assert!(
                combined.same(expected),
                "{op} of {left:?} and {right:?}: {combined:?}, not {expected:?}"
            );
        }
    }
    let Some(scaling) = T::SCALING else { return assert!(!ReduceOp::Mean.supports(T::DTYPE)) };
    for number in [1.0, 2.0, 3.0, 7.0, 1000.0, 0.1, 1e-30, -2.5, 0.0, f64::INFINITY, f64::NAN] {
        let (mut products, mut quotients) = (left.to_vec(), left.to_vec());
        (scaling.scale)(&mut products, number);
        (scaling.divide)(&mut quotients, number);
        for (index, left) in left.iter().enumerate() {
            let expected = left.times(number).zip(left.over(number)).expect("a float is scaled");
            let same = products[index].same(expected.0) && quotients[index].same(expected.1);
            assert!(
                same,
                "{left:?} and {number}: {:?} {:?}, not {expected:?}",
                products[index], quotients[index]
            );
        }
    }
}

#[test]
fn a_count_divides_floats_and_nothing_else() {
    let (mut floats, mut integers) = ([3.0_f32, 1.0], [3_i32, 1]);
    assert!(divide_by_count(&mut floats, 2) && !divide_by_count(&mut integers, 2));
    assert_eq!((floats, integers), ([1.5, 0.5], [3, 1]));
}

#[test]
#[should_panic(expected = "and does not reduce f32")]
fn the_bits_of_floats_are_not_combined() {
    combine(ReduceOp::And, &mut [1.0_f32], &[2.0]);
}

#[test]
#[should_panic(expected = "max does not reduce complex_f64")]
fn complex_numbers_are_not_compared() {
    combine(ReduceOp::Max, &mut [Complex::new(1.0_f64, 0.0)], &[Complex::new(2.0, 0.0)]);
}

#[test]
fn complex_products_are_those_of_the_formula() {
    let mut product = [Complex::new(1.0_f32, 2.0), Complex::new(0.0, 1.0)];
    combine(ReduceOp::Product, &mut product, &[Complex::new(3.0, -1.0), Complex::new(0.0, 1.0)]);
    assert_eq!(product, [Complex::new(5.0, 5.0), Complex::new(-1.0, 0.0)]);
}

#[test]
fn every_half_is_combined_as_the_rule_says() {
    let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    let brains: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    for shift in [0, 1, 17, 1024, 0x3c01, 0x7fff, 0x8000, 0x8003, 0xfbff] {
        let mut others = all.clone();
        others.rotate_left(shift);
        check_loops(&all, &others);
        let mut others = brains.clone();
        others.rotate_left(shift);
        check_loops(&brains, &others);
    }
}

/// Checks that sums of two buffers have the bits of the rule, for lengths that end within a loop iteration too.
#[track_caller]
fn sums_have_the_bits_of_the_rule<T: Element>(left: &[T], right: &[T]) {
    for len in [left.len(), left.len() - 1, 61, 7, 1, 0] {
        let mut sums = left[..len].to_vec();
        combine(ReduceOp::Sum, &mut sums, &right[..len]);
        let rule: Vec<T> = left.iter().zip(right).map(|(left, right)| left.reduce_sum(*right)).collect();
        assert!(bytemuck::cast_slice::<T, u16>(&sums) == bytemuck::cast_slice::<T, u16>(&rule[..len]));
    }
}

#[test]
fn sums_of_halves_have_the_bits_of_the_rule_whatever_the_processor_has_for_them() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for shift in (0..1 << 16).step_by(1021) {
        let mut others = all.clone();
        others.rotate_left(shift);
        sums_have_the_bits_of_the_rule::<f16>(bytemuck::cast_slice(&all), bytemuck::cast_slice(&others));
        sums_have_the_bits_of_the_rule::<bf16>(bytemuck::cast_slice(&all), bytemuck::cast_slice(&others));
    }
}

/// Checks that the rows of all ranks are combined in canonical order, with the result in the first row, or in all
/// rows for sums of few.
#[track_caller]
fn is_combined_in_canonical_order<T: Element + Number>(op: ReduceOp, contributions: &[Vec<T>]) {
    fn in_order<T: Copy>(values: &[T], rule: &impl Fn(T, T) -> T) -> T {
        if let [value] = values {
            return *value;
        }
        let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
        rule(in_order(left, rule), in_order(right, rule))
    }
    let reduction = Reduction::parse(op.name()).expect("the oracle knows every operation");
    let (mut first, mut all) = (contributions.to_vec(), Vec::new());
    combine_into_first(op, &mut first.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
    let at_once = combines_at_once(op, contributions.len());
    assert_eq!(
        at_once,
        matches!(op, ReduceOp::Sum | ReduceOp::Mean) && (2..=8).contains(&contributions.len())
    );
    if at_once {
        let ways: [fn(&mut [&mut [T]]); 3] =
            [sum_into_all, |all| all::sum(all, false), |all| all::sum(all, true)];
        for sum in ways {
            let mut sums = contributions.to_vec();
            sum(&mut sums.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
            all.append(&mut sums);
        }
    }
    if at_once && matches!(contributions.len(), 4 | 8) {
        let mut sums = contributions[0].clone();
        sum_into_first(&mut sums, &contributions[1..].iter().map(Vec::as_slice).collect::<Vec<_>>());
        all.push(sums);
    }
    for index in 0..contributions[0].len() {
        let values: Vec<T> = contributions.iter().map(|one| one[index]).collect();
        let expected = in_order(&values, &|left, right| reduction.pair(left, right));
        for (rank, one) in first[..1].iter().chain(&all).enumerate() {
            let got = one[index];
            assert!(got.same(expected), "{op} of {values:?}, {rank}: {got:?}, not {expected:?}");
        }
    }
}

fn every_length_is_combined<T: Element + Number>(bits: &[Vec<u64>]) {
    // The longest length is two pieces and a rest.
    for len in [0, 1, 31, 64, 173, 4164 / size_of::<T>()] {
        let contributions: Vec<Vec<T>> =
            bits.iter().map(|one| bytemuck::cast_slice(one)[..len].to_vec()).collect();
        for op in ReduceOp::PLAIN.into_iter().filter(|op| op.supports(T::DTYPE)) {
            is_combined_in_canonical_order(op, &contributions);
        }
    }
}

#[test]
fn rows_of_all_ranks_are_combined_in_canonical_order() {
    let mut state = 1_u64;
    let mut word = || {
        // A linear congruential generator: consecutive numbers differ in sign and exponent.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state ^ (state >> 29)
    };
    for count in 1..=9 {
        let bits: Vec<Vec<u64>> = (0..count).map(|_| (0..522).map(|_| word()).collect()).collect();
        every_length_is_combined::<f32>(&bits);
        every_length_is_combined::<f64>(&bits);
        every_length_is_combined::<f16>(&bits);
        every_length_is_combined::<bf16>(&bits);
        every_length_is_combined::<u8>(&bits);
        every_length_is_combined::<i32>(&bits);
        every_length_is_combined::<i64>(&bits);
        every_length_is_combined::<Complex<f32>>(&bits);
        every_length_is_combined::<Complex<f64>>(&bits);
    }
}

#[test]
fn every_pair_of_bytes_wraps() {
    let left: Vec<u8> = (0..=u16::MAX).map(|pair| pair.to_le_bytes()[0]).collect();
    let right: Vec<u8> = (0..=u16::MAX).map(|pair| pair.to_le_bytes()[1]).collect();
    check_loops(&left, &right);
    check_loops::<i8>(bytemuck::cast_slice(&left), bytemuck::cast_slice(&right));
}

#[test]
fn min_and_max_know_nan_and_the_sign_of_zero() {
    let cases =
        [(0.0_f32, -0.0_f32), (-0.0, 0.0), (f32::NAN, 1.0), (1.0, f32::NAN), (f32::NEG_INFINITY, -1.0)];
    for (left, right) in cases {
        let (mut low, mut high) = ([left], [left]);
        combine(ReduceOp::Min, &mut low, &[right]);
        combine(ReduceOp::Max, &mut high, &[right]);
        if left.is_nan() || right.is_nan() {
            assert!(low[0].is_nan() && high[0].is_nan());
        } else {
            let mut order = [left, right];
            order.sort_by(f32::total_cmp);
            assert_eq!([low[0], high[0]].map(f32::to_bits), order.map(f32::to_bits));
        }
    }
}

proptest! {
    #[test]
    fn loops_equal_the_rule_for_any_bits(words in prop::collection::vec(any::<[u64; 2]>(), 0..200)) {
        let (left, right): (Vec<u64>, Vec<u64>) = words.iter().map(|[left, right]| (*left, *right)).unzip();
        check_loops::<u64>(&left, &right);
        check_loops::<i64>(bytemuck::cast_slice(&left), bytemuck::cast_slice(&right));
        check_loops::<u32>(bytemuck::cast_slice(&left), bytemuck::cast_slice(&right));
        check_loops::<i32>(bytemuck::cast_slice(&left), bytemuck::cast_slice(&right));
        check_loops::<f64>(bytemuck::cast_slice(&left), bytemuck::cast_slice(&right));
        check_loops::<f32>(bytemuck::cast_slice(&left), bytemuck::cast_slice(&right));
        check_loops::<f16>(bytemuck::cast_slice(&left), bytemuck::cast_slice(&right));
        check_loops::<bf16>(bytemuck::cast_slice(&left), bytemuck::cast_slice(&right));
        check_loops::<Complex<f32>>(bytemuck::cast_slice(&left), bytemuck::cast_slice(&right));
        let even = left.len() & !1;
        check_loops::<Complex<f64>>(bytemuck::cast_slice(&left[..even]), bytemuck::cast_slice(&right[..even]));
    }

    #[test]
    fn near_numbers_add_as_the_rule_says(pairs in prop::collection::vec((-1e6_f32..1e6, -1e6_f32..1e6), 1..100)) {
        let (left, right): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
        check_loops(&left, &right);
        let halves = |values: &[f32]| -> Vec<f16> { values.iter().map(|&value| f16::from_f32(value / 20.0)).collect() };
        check_loops(&halves(&left), &halves(&right));
        let brains = |values: &[f32]| -> Vec<bf16> { values.iter().map(|&value| bf16::from_f32(value)).collect() };
        check_loops(&brains(&left), &brains(&right));
    }
}

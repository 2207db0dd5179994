//! Inputs whose reductions are exact in any order.
//!
//! Every element is 1 or 2. Sums are small whole numbers and products are powers of two, which every type
//! represents without rounding. Integers wrap in both the expected and the measured result.

use std::ops::{BitAnd, BitOr, BitXor};

use dist_collectives::{Complex, DType, Element, ReduceOp, bf16, f16};

/// An element type that can be converted from whole numbers.
pub(super) trait Exact: Element {
    /// Converts a whole number. Integers wrap, floating-point numbers round.
    fn whole(value: u128) -> Self;
    /// Returns a sum divided by a count, rounded once. Integers have no mean and return the sum.
    fn mean(sum: u128, count: usize) -> Self;
}

macro_rules! integers {
    ($($integer:ty)*) => {$(
        impl Exact for $integer {
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "integers are to wrap")]
            fn whole(value: u128) -> Self {
                value as Self
            }

            fn mean(sum: u128, _count: usize) -> Self {
                Self::whole(sum)
            }
        }
    )*};
}

integers! { i8 i32 i64 u8 u32 u64 }

macro_rules! floats {
    ($($float:ty as $wide:ty, $narrow:expr;)*) => {$(
        impl Exact for $float {
            fn whole(value: u128) -> Self {
                $narrow(value as $wide)
            }

            fn mean(sum: u128, count: usize) -> Self {
                $narrow(sum as $wide / count as $wide)
            }
        }
    )*};
}

floats! {
    f32 as f32, f32::from;
    f64 as f64, f64::from;
    f16 as f32, f16::from_f32;
    bf16 as f32, bf16::from_f32;
}

macro_rules! complex {
    ($($part:ty)*) => {$(
        impl Exact for Complex<$part> {
            fn whole(value: u128) -> Self {
                <$part as Exact>::whole(value).into()
            }

            fn mean(sum: u128, count: usize) -> Self {
                <$part as Exact>::mean(sum, count).into()
            }
        }
    )*};
}

complex! { f32 f64 }

/// Returns `true` if reductions over this number of ranks are exact.
pub(super) fn possible(dtype: DType, op: ReduceOp, world_size: usize) -> bool {
    match (op, dtype) {
        (ReduceOp::Sum | ReduceOp::Mean, DType::Bf16) => 2 * world_size <= 1 << 8,
        (ReduceOp::Sum, DType::F16) => 2 * world_size <= 1 << 11,
        (ReduceOp::Product, _) => world_size < 128,
        _ => true,
    }
}

/// Returns the input of a rank at an index: 1 or 2.
pub(super) fn input(rank: usize, index: usize) -> u128 {
    let mixed = (index as u64 ^ ((rank as u64 + 1) << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0x94d0_49bb_1331_11eb);
    u128::from(1 + (mixed >> 63))
}

/// Returns the result of the reduction over all ranks at an index.
pub(super) fn reduced<T: Exact>(op: ReduceOp, world_size: usize, index: usize) -> T {
    let inputs = (0..world_size).map(|rank| input(rank, index));
    match op {
        ReduceOp::Sum => T::whole(inputs.sum()),
        ReduceOp::Mean => T::mean(inputs.sum(), world_size),
        ReduceOp::Product => T::whole(1 << inputs.filter(|&input| input == 2).count()),
        ReduceOp::Min => T::whole(inputs.min().unwrap_or_default()),
        ReduceOp::Max => T::whole(inputs.max().unwrap_or_default()),
        ReduceOp::And => T::whole(inputs.fold(3, BitAnd::bitand)),
        ReduceOp::Or => T::whole(inputs.fold(0, BitOr::bitor)),
        ReduceOp::Xor => T::whole(inputs.fold(0, BitXor::bitxor)),
        _ => unreachable!("the arguments name no other operation"),
    }
}

/// A wrong element of a result.
#[derive(Debug, PartialEq)]
pub(super) struct Wrong<T> {
    pub(super) index: usize,
    pub(super) got: T,
    pub(super) expected: T,
}

/// Returns the first element that differs from the expected one.
pub(super) fn compare<T: Exact>(got: &[T], expected: impl Fn(usize) -> T) -> Option<Wrong<T>> {
    let differs = |(index, &got): (usize, &T)| {
        let expected = expected(index);
        (got != expected).then_some(Wrong { index, got, expected })
    };
    got.iter().enumerate().find_map(differs)
}

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;

    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(ReduceOp::Sum, 5.0..=10.0)]
    #[case(ReduceOp::Mean, 1.0..=2.0)]
    #[case(ReduceOp::Product, 1.0..=32.0)]
    #[case(ReduceOp::Min, 1.0..=2.0)]
    #[case(ReduceOp::Max, 1.0..=2.0)]
    #[case(ReduceOp::And, 0.0..=2.0)]
    #[case(ReduceOp::Or, 1.0..=3.0)]
    #[case(ReduceOp::Xor, 1.0..=2.0)]
    fn a_reduction_combines_the_inputs_of_all_ranks(
        #[case] op: ReduceOp,
        #[case] within: RangeInclusive<f64>,
    ) {
        let values: Vec<f64> = (0..100).map(|index| reduced(op, 5, index)).collect();
        assert!(values.iter().all(|value| within.contains(value)), "{values:?}");
        assert!(values.iter().any(|value| *value != values[0]), "{values:?}");
        let sums = (0..100).map(|index| (0..5).map(|rank| input(rank, index)).sum::<u128>());
        if op == ReduceOp::Sum {
            assert_eq!(values, sums.map(|sum| sum as f64).collect::<Vec<_>>());
        }
    }

    #[test]
    fn one_wrong_element_is_found() {
        let mut result: Vec<f32> = (0..1000).map(|index| reduced(ReduceOp::Sum, 3, index)).collect();
        let expected = |index| reduced(ReduceOp::Sum, 3, index);
        assert_eq!(compare(&result, expected), None);
        result[777] += 1.0;
        assert_eq!(compare(&result, expected).map(|wrong| wrong.index), Some(777));
    }

    #[test]
    fn a_type_is_refused_where_its_sums_would_round() {
        assert!(possible(DType::Bf16, ReduceOp::Sum, 128) && !possible(DType::Bf16, ReduceOp::Sum, 129));
        assert!(possible(DType::I8, ReduceOp::Sum, 4096));
        assert!(!possible(DType::F16, ReduceOp::Sum, 4096) && possible(DType::F16, ReduceOp::Mean, 4096));
    }
}

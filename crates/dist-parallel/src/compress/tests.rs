//! Every hook on a simulated network: equal bits on all ranks, documented byte counts, unusual gradients.

use dist_collectives::algorithms::{all_to_all, halving_doubling, ring};
use dist_transport::sim;
use half::bf16;
use proptest::prelude::*;
use rstest::rstest;

use super::*;

const ALL: [&str; 8] =
    ["bf16", "f16", "int8", "topk:0.1", "topk:1", "powersgd:1", "powersgd:2", "powersgd:100"];

const SHAPES: [&[&[usize]]; 5] =
    [&[], &[&[0]], &[&[1]], &[&[7]], &[&[], &[40, 3], &[0, 4], &[1000], &[12, 5, 5]]];

fn hook(text: &str) -> Box<dyn BucketHook> {
    text.parse::<Compression>().unwrap().hook().unwrap().unwrap()
}

/// Returns values between −1 and 1 that differ from rank to rank and step to step.
fn gradients(rank: usize, step: usize, len: usize) -> Vec<f32> {
    let mix = |index: usize| (rank * 7919 + step * 104_729 + index * 1299 + 12345) % 65_521;
    (0..len).map(|index| f32::from(u16::try_from(mix(index)).unwrap()) / 32_760.5 - 1.0).collect()
}

fn tensors(shapes: &[&[usize]]) -> Vec<BucketTensor> {
    BucketTensor::row(shapes.iter().map(|shape| shape.to_vec()))
}

fn len(tensors: &[BucketTensor]) -> usize {
    tensors.iter().map(|tensor| tensor.len).sum()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns the sums of one bucket on every rank, step by step. `gradients` returns the values of a rank in a step.
fn sums(
    text: &'static str,
    ranks: usize,
    steps: usize,
    tensors: &[BucketTensor],
    gradients: impl Fn(usize, usize) -> Vec<f32> + Send + Sync + 'static,
) -> Vec<Vec<Vec<f32>>> {
    let tensors = tensors.to_vec();
    let outcome = sim::run(1, ranks, move |transport| {
        let mut comm = Communicator::new(transport);
        let mut hook = hook(text);
        let rank = comm.rank();
        let step = |step| {
            let mut values = gradients(rank, step);
            let bucket =
                BucketGradients { bucket: 0, tensors: &tensors, values: ValuesMut::F32(&mut values) };
            hook.sum(bucket, &mut comm).unwrap();
            values
        };
        (0..steps).map(step).collect::<Vec<_>>()
    });
    outcome.results
}

/// Returns sums without a hook, in canonical order.
fn exact(ranks: usize, of: &dyn Fn(usize) -> Vec<f32>) -> Vec<f32> {
    fn tree(first: usize, count: usize, of: &dyn Fn(usize) -> Vec<f32>) -> Vec<f32> {
        if count == 1 {
            return of(first);
        }
        let left = count.next_power_of_two() / 2;
        let right = tree(first + left, count - left, of);
        tree(first, left, of).into_iter().zip(right).map(|(left, right)| left + right).collect()
    }
    tree(0, ranks, of)
}

#[rstest]
fn every_rank_ends_with_the_same_bits_near_the_sum(
    #[values(0, 1, 2, 3, 4, 5, 6, 7)] hook: usize,
    #[values(1, 2, 3, 5)] ranks: usize,
    #[values(0, 1, 2, 3, 4)] shapes: usize,
) {
    let tensors = tensors(SHAPES[shapes]);
    let len = len(&tensors);
    let all = sums(ALL[hook], ranks, 3, &tensors, move |rank, step| gradients(rank, step, len));
    for (rank, sums) in all.iter().enumerate() {
        for (step, sum) in sums.iter().enumerate() {
            assert_eq!(bits(sum), bits(&all[0][step]), "rank {rank}, step {step}");
            assert!(sum.len() == len && sum.iter().all(|sum| sum.is_finite()));
        }
    }
}

#[rstest]
#[case("bf16", 2_f64.powi(-8))]
#[case("f16", 2_f64.powi(-11))]
fn halves_differ_by_their_rounding_from_the_sum(
    #[case] text: &'static str,
    #[case] rounding: f64,
    #[values(1, 2, 3, 4, 8)] ranks: usize,
) {
    let tensors = tensors(&[&[500]]);
    let all = sums(text, ranks, 1, &tensors, |rank, step| gradients(rank, step, 500));
    let roundings = f64::from(1 + ranks.next_power_of_two().ilog2());
    for (index, sum) in all[0][0].iter().enumerate() {
        let terms = (0..ranks).map(|rank| f64::from(gradients(rank, 0, 500)[index]));
        let (exact, magnitude) = terms.fold((0.0, 0.0), |(sum, all), term| (sum + term, all + term.abs()));
        // The last terms cover terms of higher order and the loss of precision near zero.
        let bound = (roundings * rounding + 2_f64.powi(-14)) * magnitude + 2_f64.powi(-20);
        assert!((f64::from(*sum) - exact).abs() <= bound, "{sum} is not {exact}");
    }
}

#[rstest]
fn blocks_of_int8_differ_by_their_scales_from_the_sum(#[values(1, 2, 3, 4)] ranks: usize) {
    let tensors = tensors(&[&[3000]]);
    let all = sums("int8", ranks, 1, &tensors, |rank, step| gradients(rank, step, 3000));
    let exact = exact(ranks, &|rank| gradients(rank, 0, 3000));
    // No magnitude exceeds 1, or the number of ranks in the sum.
    let bound = 2.0 * ranks as f32 / 254.0 * 1.01;
    for (sum, exact) in all[0][0].iter().zip(exact) {
        assert!((sum - exact).abs() <= bound, "{sum} is not {exact}");
    }
}

#[rstest]
fn all_of_a_tensor_and_full_rank_are_exact(
    #[values("topk:1", "powersgd:6", "powersgd:100")] text: &'static str,
    #[values(1, 2, 3, 5)] ranks: usize,
) {
    let tensors = tensors(&[&[6, 9], &[20], &[], &[2, 3, 4]]);
    let len = len(&tensors);
    // A sum of zeros is negative only if all are.
    let values = move |rank, step| {
        let mut values = gradients(rank, step, len);
        values.iter_mut().step_by(7).for_each(|value| *value = -0.0);
        values
    };
    let all = sums(text, ranks, 3, &tensors, values);
    for (step, sum) in all[0].iter().enumerate() {
        assert_eq!(bits(sum), bits(&exact(ranks, &|rank| values(rank, step))), "step {step}");
    }
}

#[rstest]
fn zeros_stay_zero_and_harm_no_later_step(
    #[values(0, 1, 2, 3, 4, 5, 6, 7)] hook: usize,
    #[values(1, 3)] ranks: usize,
) {
    let tensors = tensors(&[&[10, 10], &[30]]);
    let all = sums(ALL[hook], ranks, 2, &tensors, |rank, step| match step {
        0 => vec![0.0; 130],
        _ => gradients(rank, step, 130),
    });
    assert_eq!(all[0][0], [0.0; 130]);
    let sum: f32 = all[0][1].iter().map(|value| value.abs()).sum();
    assert!(sum > 0.5, "gradients after zeros arrive");
}

#[rstest]
fn a_value_that_is_not_finite_reaches_all_ranks_and_no_later_step(
    #[values(0, 1, 2, 3, 4, 5, 6, 7)] hook: usize,
    #[values(1, 3)] ranks: usize,
    #[values(f32::NAN, f32::INFINITY, f32::NEG_INFINITY)] special: f32,
    #[values(17, 104)] place: usize,
) {
    let tensors = tensors(&[&[10, 10], &[30]]);
    let all = sums(ALL[hook], ranks, 2, &tensors, move |rank, step| {
        let mut values = gradients(rank, step, 130);
        if (rank, step) == (ranks - 1, 0) {
            values[place] = special;
        }
        values
    });
    for sums in &all {
        assert!(!sums[0][place].is_finite());
        assert!(sums[1].iter().all(|value| value.is_finite()), "{:?}", sums[1]);
        let not_nan = |values: &[f32]| {
            bits(&values.iter().map(|v| if v.is_nan() { 0.5 } else { *v }).collect::<Vec<_>>())
        };
        assert_eq!(not_nan(&sums[0]), not_nan(&all[0][0]));
    }
}

#[test]
fn gradients_beyond_the_range_of_f16_arrive_and_those_far_below_the_largest_are_lost() {
    let values = [60_000.0, 1e6, -1e6, 1e-9];
    let all = sums("f16", 4, 1, &tensors(&[&[4]]), move |_, _| values.to_vec());
    // 10⁶ / 128 lies between 7812 and 7816.
    assert_eq!(all[0][0], [240_000.0, 3_999_744.0, -3_999_744.0, 0.0]);
    let extremes = [f32::MAX / 8.0, f32::MIN / 8.0];
    let all = sums("f16", 4, 1, &tensors(&[&[2]]), move |_, _| extremes.to_vec());
    assert_eq!(all[0][0], [2.0_f32.powi(127), -2.0_f32.powi(127)]);
    let small = [3.0 * 2.0_f32.powi(-120), 2.0_f32.powi(-140)];
    let all = sums("f16", 4, 1, &tensors(&[&[2]]), move |_, _| small.to_vec());
    assert_eq!(all[0][0], small.map(|value| 4.0 * value));
}

#[rstest]
fn other_types_are_summed_by_way_of_f32(#[values(0, 1, 2, 3, 4, 5, 6, 7)] hook_index: usize) {
    let outcome = sim::run(1, 2, move |transport| {
        let mut comm = Communicator::new(transport);
        let tensors = tensors(&[&[10, 10]]);
        let single = gradients(comm.rank(), 0, 100);
        let mut sum = |values: ValuesMut<'_>| {
            hook(ALL[hook_index])
                .sum(BucketGradients { bucket: 0, tensors: &tensors, values }, &mut comm)
                .unwrap();
        };
        let mut half: Vec<bf16> = single.iter().map(|&value| bf16::from_f32(value)).collect();
        let mut widened: Vec<f32> = half.iter().map(|half| half.to_f32()).collect();
        sum(ValuesMut::Bf16(&mut half));
        sum(ValuesMut::F32(&mut widened));
        assert_eq!(half, widened.into_iter().map(bf16::from_f32).collect::<Vec<_>>());
        let mut double: Vec<f64> = single.iter().map(|&value| value.into()).collect();
        let mut single = single;
        sum(ValuesMut::F64(&mut double));
        sum(ValuesMut::F32(&mut single));
        assert_eq!(double, single.into_iter().map(f64::from).collect::<Vec<_>>());
        half
    });
    assert_eq!(outcome.results[0], outcome.results[1]);
}

/// Returns the bytes that a hook sends for one bucket on every rank, with algorithms of simple formulas.
fn bytes_sent(text: &'static str, ranks: usize, shapes: &'static [&'static [usize]]) -> Vec<u64> {
    let outcome = sim::run(1, ranks, move |transport| {
        let mut comm = Communicator::new(transport);
        let tensors = tensors(shapes);
        let mut values = gradients(comm.rank(), 0, len(&tensors));
        let mut hook = hook(text);
        let mut comm = comm.with_algorithm(&halving_doubling::ALL_REDUCE);
        let mut comm = comm.with_algorithm(&ring::ALL_GATHER);
        let mut comm = comm.with_algorithm(&all_to_all::PAIRWISE);
        let bucket = BucketGradients { bucket: 0, tensors: &tensors, values: ValuesMut::F32(&mut values) };
        hook.sum(bucket, &mut comm).unwrap();
        comm.traffic().bytes_sent
    });
    outcome.results
}

/// Returns the bytes that an all_reduce sends if the ranks divide it evenly.
fn all_reduce_bytes(ranks: usize, bytes: usize) -> usize {
    2 * (ranks - 1) * bytes / ranks
}

#[rstest]
fn hooks_send_the_documented_bytes(#[values(1, 2, 4, 8)] ranks: usize) {
    // 1600 values in matrices, 320 in a vector.
    const SHAPES: &[&[usize]] = &[&[40, 24], &[320], &[16, 8, 5]];
    const LEN: usize = 40 * 24 + 320 + 16 * 40;
    let top_k: usize = [960, 320, 640].iter().map(|len: &usize| len.div_ceil(100)).sum();
    let part = LEN.div_ceil(ranks);
    let thin = |rank: usize| rank * (40 + 16) + 320;
    for (text, expected) in [
        ("bf16", all_reduce_bytes(ranks, 2 * LEN)),
        ("int8", 2 * (ranks - 1) * (part + 4 * part.div_ceil(256))),
        ("topk:0.01", (ranks - 1) * 8 * top_k),
        ("topk:1", (ranks - 1) * 8 * LEN),
        ("powersgd:1", all_reduce_bytes(ranks, 4 * thin(1)) + all_reduce_bytes(ranks, 4 * (24 + 40))),
        ("powersgd:4", all_reduce_bytes(ranks, 4 * thin(4)) + all_reduce_bytes(ranks, 4 * 4 * (24 + 40))),
        ("powersgd:24", all_reduce_bytes(ranks, 4 * LEN)),
    ] {
        assert_eq!(bytes_sent(text, ranks, SHAPES), vec![expected as u64; ranks], "{text}");
    }
    // The largest magnitude is one number, which the ranks send a different number of times.
    let all: u64 = bytes_sent("f16", ranks, SHAPES).iter().sum();
    assert_eq!(all, (ranks * all_reduce_bytes(ranks, 2 * LEN) + 2 * (ranks - 1) * 4) as u64);
}

/// Returns the residuals of one rank and the sums, step by step.
fn kept(ratio: f64, ranks: usize, gradients: &[Vec<Vec<f32>>]) -> Vec<Vec<(Vec<f32>, Vec<f32>)>> {
    let (gradients, tensors) = (gradients.to_vec(), tensors(&[&[3], &[gradients[0][0].len() - 3]]));
    let outcome = sim::run(1, ranks, move |transport| {
        let mut comm = Communicator::new(transport);
        let mut hook = TopKHook::new(ratio).unwrap();
        let rank = comm.rank();
        let step = |gradients: &Vec<Vec<f32>>| {
            let mut values = gradients[rank].clone();
            let bucket =
                BucketGradients { bucket: 2, tensors: &tensors, values: ValuesMut::F32(&mut values) };
            hook.sum(bucket, &mut comm).unwrap();
            (hook.residual(2).to_vec(), values)
        };
        gradients.iter().map(step).collect::<Vec<_>>()
    });
    outcome.results
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Every value of every step was either sent or left unchanged, bit for bit.
    #[test]
    fn values_that_are_not_sent_stay_in_the_residual_to_the_last_bit(
        ranks in 1..4_usize,
        ratio in 0.01..1.0_f64,
        gradients in prop::collection::vec(prop::collection::vec(prop::collection::vec(-1e3_f32..1e3, 3 + 7), 3), 1..6),
    ) {
        let all = kept(ratio, ranks, &gradients);
        let mut left = vec![vec![-0.0_f32; 10]; ranks];
        for (step, gradients) in gradients.iter().enumerate() {
            let mut sent = vec![vec![None; 10]; ranks];
            for rank in 0..ranks {
                for index in 0..10 {
                    let due = left[rank][index] + gradients[rank][index];
                    let kept = all[rank][step].0[index];
                    if kept.to_bits() != due.to_bits() {
                        prop_assert_eq!(kept.to_bits(), (-0.0_f32).to_bits(), "sent values leave no residual");
                        sent[rank][index] = Some(due);
                    }
                    left[rank][index] = kept;
                }
                let sent = sent[rank].iter().flatten().count();
                let zeros = left[rank].iter().filter(|left| **left == 0.0).count();
                let largest = [3, 7].map(|len| SparseGradient::largest(&vec![0.0; len], ratio).unwrap().indices.len());
                let expected: usize = largest.iter().sum();
                prop_assert!(sent <= expected && expected <= zeros.max(sent));
            }
            // T(n) of the ranks that sent a value, n ≤ 3.
            let sum = |index| (0..ranks).filter_map(|rank: usize| sent[rank][index]).reduce(|left, right| left + right);
            let sums: Vec<f32> = (0..10).map(|index| sum(index).unwrap_or(0.0)).collect();
            for of_rank in &all {
                prop_assert_eq!(bits(&of_rank[step].1), bits(&sums));
            }
        }
    }

    /// If additions are exact, every value arrives once.
    #[test]
    fn all_that_is_left_arrives_in_the_end(
        ranks in 1..4_usize,
        ratio in 0.05..0.5_f64,
        whole in prop::collection::vec(prop::collection::vec(prop::collection::vec(-100_i8..100, 10), 3), 1..5),
    ) {
        let as_f32 = |values: &Vec<i8>| values.iter().map(|&value| value.into()).collect::<Vec<f32>>();
        let mut gradients: Vec<Vec<Vec<f32>>> =
            whole.iter().map(|step| step.iter().map(as_f32).collect()).collect();
        gradients.extend(vec![vec![vec![0.0; 10]; 3]; 10]);
        let all = kept(ratio, ranks, &gradients);
        for index in 0..10 {
            let expected: f32 =
                gradients.iter().flat_map(|step| &step[..ranks]).map(|values| values[index]).sum();
            let arrived: f32 = all[0].iter().map(|(_, sums)| sums[index]).sum();
            prop_assert_eq!(arrived, expected);
        }
        prop_assert!(all.iter().all(|steps| steps.last().unwrap().0 == [0.0; 10]));
    }
}

/// Returns the sums of PowerSGD, and the residuals of every rank at the end.
fn power_sgd(
    rank: usize,
    ranks: usize,
    steps: usize,
    gradients: fn(usize, usize) -> Vec<f32>,
) -> Vec<(Vec<Vec<f32>>, Vec<f32>)> {
    let outcome = sim::run(1, ranks, move |transport| {
        let mut comm = Communicator::new(transport);
        let mut hook = PowerSgdHook::new(rank).unwrap();
        let tensors = tensors(&[&[12, 10]]);
        let own = comm.rank();
        let step = |step| {
            let mut values = gradients(own, step);
            let bucket =
                BucketGradients { bucket: 0, tensors: &tensors, values: ValuesMut::F32(&mut values) };
            hook.sum(bucket, &mut comm).unwrap();
            values
        };
        let sums = (0..steps).map(step).collect::<Vec<_>>();
        (sums, hook.residual(0).to_vec())
    });
    outcome.results
}

#[test]
fn a_matrix_of_low_rank_arrives_in_one_step() {
    fn rank_1(rank: usize, step: usize) -> Vec<f32> {
        let (column, row) = (gradients(9, step, 12), gradients(8, step, 10));
        column.iter().flat_map(|c| row.iter().map(move |r| c * r * (rank + 1) as f32)).collect()
    }
    for (sums, left) in power_sgd(1, 3, 2, rank_1) {
        for (step, sum) in sums.iter().enumerate() {
            for (sum, exact) in sum.iter().zip(exact(3, &|rank| rank_1(rank, step))) {
                assert!((sum - exact).abs() < 1e-5, "{sum} is not {exact}");
            }
        }
        assert!(left.iter().all(|left| left.abs() < 1e-5));
    }
}

#[rstest]
fn residuals_and_sums_of_power_sgd_add_up_to_the_gradients(
    #[values(1, 2)] rank: usize,
    #[values(1, 2, 3)] ranks: usize,
) {
    let all = power_sgd(rank, ranks, 6, |rank, step| gradients(rank, step, 120));
    for index in 0..120 {
        let given: f64 = (0..ranks)
            .flat_map(|rank| (0..6).map(move |step| f64::from(gradients(rank, step, 120)[index])))
            .sum();
        let arrived: f64 = all[0].0.iter().map(|sum| f64::from(sum[index])).sum();
        let left: f64 = all.iter().map(|(_, left)| f64::from(left[index])).sum();
        assert!((arrived + left - given).abs() < 1e-4, "{arrived} + {left} is not {given}");
    }
}

#[test]
fn residuals_of_power_sgd_arrive_in_the_end() {
    let all = power_sgd(2, 2, 60, |rank, step| match step {
        0 => gradients(rank, 0, 120),
        _ => vec![0.0; 120],
    });
    let exact = exact(2, &|rank| gradients(rank, 0, 120));
    for (index, exact) in exact.into_iter().enumerate() {
        let arrived: f32 = all[0].0.iter().map(|sum| sum[index]).sum();
        assert!((arrived - exact).abs() < 1e-3, "{arrived} is not {exact}");
    }
}

#[rstest]
#[case("none")]
#[case("bf16")]
#[case("f16")]
#[case("int8")]
#[case("topk:0.01")]
#[case("topk:1")]
#[case("powersgd:4")]
fn compressions_are_read_as_they_are_written(#[case] text: &str) {
    let compression: Compression = text.parse().unwrap();
    assert_eq!(compression.to_string(), text);
    assert_eq!(compression.hook().unwrap().is_none(), compression == Compression::None);
}

#[rstest]
fn compressions_that_make_no_sense_are_refused(
    #[values(
        "",
        "bf8",
        "bf16:2",
        "topk",
        "topk:",
        "topk:x",
        "topk:0",
        "topk:-0.5",
        "topk:NaN",
        "topk:1.5",
        "topk:inf",
        "powersgd:0",
        "powersgd:-1",
        "powersgd:1.5"
    )]
    text: &str,
) {
    let refused = text.parse::<Compression>();
    assert!(matches!(refused, Err(Error::UnknownCompression { .. } | Error::Setting { .. })), "{refused:?}");
}

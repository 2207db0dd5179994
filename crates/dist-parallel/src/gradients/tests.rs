//! Ranks without communication: the tests add their sums by the definition.

use std::ops::Range;
use std::time::Duration;

use half::bf16;
use proptest::prelude::*;
use rstest::rstest;

use super::*;
use crate::flat_storage::Allocator;
use crate::{BucketBytes, BucketPlan, Error, FloatType, ParamInfo};

/// Returns two ordinary parameters, a frozen one, one in a half type, and one that is tied to the first.
fn infos() -> Vec<ParamInfo> {
    let mut infos = vec![
        ParamInfo::new("embedding", [2, 2], FloatType::F32),
        ParamInfo::new("scale", [3], FloatType::Bf16),
        ParamInfo::new("frozen", [5], FloatType::F32),
        ParamInfo::new("bias", [3], FloatType::F32),
        ParamInfo::new("head", [2, 2], FloatType::F32),
    ];
    infos[2].trainable = false;
    infos[4].same_as = Some(0);
    infos
}

/// One rank's gradients and losses.
struct TestRank {
    gradients: Gradients,
    losses: TreeSum<f32>,
}

impl TestRank {
    fn new(infos: &[ParamInfo], plan: &BucketPlan) -> Self {
        let layout = GradientLayout::of_plan(infos, plan, None, 1);
        let gradients = Gradients::new(layout, Scatter::Never, GradientMemory::OfEachBucket, false, 0);
        Self { gradients, losses: TreeSum::new() }
    }

    fn begin(&mut self) {
        self.gradients.begin_step();
        self.gradients.begin(self.gradients.ended(), RoundRole::Inner);
    }

    fn report(&mut self, parameter: usize, values: Values<'_>) -> Result<()> {
        let number = self.gradients.ended();
        alone(|groups| self.gradients.report(number, parameter, values, groups))
    }

    fn end(&mut self, loss: f32) {
        let number = self.gradients.ended();
        alone(|groups| self.gradients.end(number, groups)).unwrap();
        self.losses.add(number, loss, |left, right| *left += right);
    }

    /// Returns this rank's sum of a bucket.
    fn take_sum(&mut self, bucket: usize) -> Flat {
        let Gradients { sums, layout, memory, scatter, .. } = &mut self.gradients;
        let sum = &mut sums[bucket][0];
        let sum = sum.tree.finish(|left, right| merge(left, right, &mut sum.pool, memory));
        let planned = &layout.units()[bucket].buckets[0];
        sum.unwrap_or_else(|| alone(|groups| sums[bucket][0].nothing(planned, *scatter, groups)).unwrap())
    }
}

/// Calls `f` with the groups of a rank without others.
fn alone<T>(f: impl FnOnce(&mut ReduceGroups<'_>) -> T) -> T {
    let mut waited = Duration::ZERO;
    f(&mut ReduceGroups::new(None, None, None, &Allocator::Memory, &mut waited))
}

/// Returns values whose f32 sums are rounded, different for every micro-batch and use.
fn values(micro_batch: usize, parameter: usize, len: usize) -> Vec<f32> {
    let mix = |index: usize| (micro_batch * 7919 + parameter * 104_729 + index * 1299 + 12345) % 65_521;
    let float = |mixed: usize| f32::from(u16::try_from(mixed).unwrap()) / 997.0 - 30.0;
    (0..len).map(|index| float(mix(index))).collect()
}

fn halves(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&value| bf16::from_f32(value)).collect()
}

/// Returns `true` if a micro-batch has a gradient: the bias every third time, the head every second.
fn has(micro_batch: usize, parameter: usize) -> bool {
    match parameter {
        3 => micro_batch.is_multiple_of(3),
        4 => micro_batch.is_multiple_of(2),
        _ => true,
    }
}

fn run(rank: &mut TestRank, micro_batch: usize) {
    rank.begin();
    report_all(rank, micro_batch);
    rank.end(values(micro_batch, 9, 1)[0]);
}

fn report_all(rank: &mut TestRank, micro_batch: usize) {
    for parameter in (0..5).rev().filter(|&parameter| has(micro_batch, parameter)) {
        let values = values(micro_batch, parameter, infos()[parameter].len());
        match parameter {
            1 => rank.report(parameter, Values::Bf16(&halves(&values))).unwrap(),
            _ => rank.report(parameter, Values::F32(&values)).unwrap(),
        }
    }
}

/// Returns T(n) by its definition.
fn tree<T: Clone>(leaves: &[T], add: &impl Fn(&T, &T) -> T) -> T {
    if let [gradient] = leaves {
        return gradient.clone();
    }
    let (left, right) = leaves.split_at(leaves.len().next_power_of_two() / 2);
    add(&tree(left, add), &tree(right, add))
}

/// Returns the mean gradient of one parameter over all micro-batches, as one process defines it.
fn expected(parameter: usize, micro_batches: usize) -> Vec<f32> {
    let len = infos()[parameter].len();
    let round = |value: f32| if parameter == 1 { bf16::from_f32(value).to_f32() } else { value };
    let add = |left: &Vec<f32>, right: &Vec<f32>| left.iter().zip(right).map(|(l, r)| round(l + r)).collect();
    let gradient = |micro_batch| {
        let own = has(micro_batch, parameter).then(|| values(micro_batch, parameter, len));
        let own = own.map(|values| values.into_iter().map(round).collect::<Vec<_>>());
        let tied = (parameter == 0 && has(micro_batch, 4)).then(|| values(micro_batch, 4, len));
        match (own, tied) {
            (Some(own), Some(tied)) => add(&tied, &own),
            (own, tied) => own.or(tied).unwrap_or_else(|| vec![0.0; len]),
        }
    };
    let sum = tree(&(0..micro_batches).map(gradient).collect::<Vec<Vec<f32>>>(), &add);
    sum.into_iter().map(|sum| round(sum / u16::try_from(micro_batches).map(f32::from).unwrap())).collect()
}

/// Sums the gradients of the ranks and gives every rank the mean, like a reduction over the network.
fn synchronise(ranks: &mut [TestRank], micro_batches: usize) -> Vec<f32> {
    for bucket in 0..ranks[0].gradients.bucket_count() {
        let mut tree = TreeSum::new();
        let add = |left: &mut Flat, right| left.add(&right);
        ranks.iter_mut().enumerate().for_each(|(rank, of)| tree.add(rank, of.take_sum(bucket), add));
        let sum = tree.finish(add).unwrap();
        for TestRank { gradients, .. } in ranks.iter_mut() {
            let dtype = gradients.layout.units()[bucket].buckets[0].mean_dtype;
            let mean = Mean::of(sum.part(sum.dtype(), 0, sum.len()), dtype, micro_batches);
            gradients.sums[bucket][0].state = SumState::Mean(mean);
        }
    }
    let used = |parameter| ranks.iter().any(|rank| rank.gradients.used()[parameter]);
    let used: Vec<bool> = (0..ranks[0].gradients.used().len()).map(used).collect();
    for TestRank { gradients, .. } in ranks.iter_mut() {
        gradients.set_used(used.iter().copied());
        gradients.ended = 0;
    }
    let loss = |rank: &mut TestRank| rank.losses.finish(|left, right| *left += right).unwrap_or(-0.0);
    ranks.iter_mut().map(loss).collect()
}

fn ranks(count: usize, first_max: usize) -> Vec<TestRank> {
    let plan = BucketPlan::new(&infos(), BucketBytes { first_max, other_max: first_max });
    (0..count).map(|_| TestRank::new(&infos(), &plan)).collect()
}

fn share(rank: usize, ranks: usize, micro_batches: usize) -> Range<usize> {
    rank * micro_batches / ranks..(rank + 1) * micro_batches / ranks
}

fn bits(values: Values<'_>) -> Vec<u32> {
    match values {
        Values::F32(values) => values.iter().map(|value| value.to_bits()).collect(),
        Values::Bf16(values) => values.iter().map(|value| value.to_f32().to_bits()).collect(),
        other => panic!("no parameter of the model is {}", other.dtype()),
    }
}

#[rstest]
#[case(1, 1)]
#[case(1, 7)]
#[case(1, 8)]
#[case(2, 8)]
#[case(4, 8)]
#[case(8, 8)]
#[case(3, 12)]
#[case(5, 10)]
#[case(7, 7)]
fn shares_that_are_powers_of_two_give_the_bits_of_one_process(
    #[case] count: usize,
    #[case] micro_batches: usize,
    #[values(0, 1, 20, usize::MAX)] bucket_bytes: usize,
) {
    let mut ranks = ranks(count, bucket_bytes);
    // The second step shows that the first leaves nothing behind.
    for _ in 0..2 {
        for (rank, of) in ranks.iter_mut().enumerate() {
            share(rank, count, micro_batches).for_each(|index| run(of, index));
        }
        let losses = synchronise(&mut ranks, micro_batches);
        let all: Vec<f32> = (0..micro_batches).map(|index| values(index, 9, 1)[0]).collect();
        let add = |left: &f32, right: &f32| left + right;
        assert_eq!(tree(&losses, &add).to_bits(), tree(&all, &add).to_bits());
        for TestRank { gradients, .. } in &ranks {
            for parameter in [0, 1, 3] {
                let expected = expected(parameter, micro_batches);
                assert_eq!(bits(gradients.mean(parameter).unwrap()), bits(Values::F32(&expected)));
            }
            assert_eq!(gradients.mean(4), gradients.mean(0), "the same parameter has the same gradient");
            assert_eq!(gradients.mean(2), None, "a frozen parameter has none");
        }
    }
}

#[test]
fn a_rank_holds_the_buffers_that_its_plan_says_for_its_micro_batches() {
    let plan = BucketPlan::new(&infos(), BucketBytes { first_max: 20, other_max: 20 });
    for share in 1..=64_usize {
        let mut rank = ranks(1, 20).remove(0);
        for _ in 0..3 {
            (0..share).for_each(|index| run(&mut rank, index));
            alone(|groups| rank.gradients.finish(share, groups)).unwrap();
            rank.losses = TreeSum::new();
            // Between steps the mean is in one buffer, and the pool has all others.
            let held = rank.gradients.sums.iter().flatten().zip(plan.buckets());
            let bytes = held.map(|(sum, bucket)| (1 + sum.pool.len()) * bucket.bytes()).sum::<usize>();
            assert_eq!(bytes, plan.memory(share), "{share} micro-batches");
        }
    }
}

#[test]
fn a_bucket_is_closed_once_every_use_of_its_parameters_is_reported() {
    let mut rank = ranks(1, 0).remove(0);
    // Last to first: bias, scale, embedding. The head is tied to the embedding.
    assert_eq!(Vec::from_iter(rank.gradients.parameters()), [3, 1, 0]);
    rank.begin();
    let closed = |rank: &TestRank| [0, 1, 2].map(|unit: usize| rank.gradients.open[0].units[unit].closed);
    let steps = [
        (4, [false, false, false]),
        (3, [true, false, false]),
        (2, [true, false, false]),
        (1, [true, true, false]),
        (0, [true, true, true]),
    ];
    for (parameter, expected) in steps {
        let values = values(0, parameter, infos()[parameter].len());
        let halves = halves(&values);
        let values = if parameter == 1 { Values::Bf16(&halves) } else { Values::F32(&values) };
        rank.report(parameter, values).unwrap();
        assert_eq!(closed(&rank), expected, "after parameter {parameter}");
    }
}

/// Buckets start in one order on every rank, whatever the order of their last gradients.
#[test]
fn in_the_last_micro_batch_a_bucket_starts_after_all_buckets_before_it() {
    let mut rank = ranks(1, 0).remove(0);
    rank.gradients.begin_step();
    rank.gradients.begin(0, RoundRole::Last);
    for (parameter, started) in [(1, 0), (0, 0), (3, 2), (4, 3)] {
        let values = values(0, parameter, infos()[parameter].len());
        let halves = halves(&values);
        let values = if parameter == 1 { Values::Bf16(&halves) } else { Values::F32(&values) };
        rank.report(parameter, values).unwrap();
        assert_eq!(rank.gradients.started, started, "after parameter {parameter}");
    }
}

#[test]
fn a_parameter_that_never_had_a_gradient_has_none_and_an_absent_one_counts_as_plus_zero() {
    let mut ranks = ranks(2, usize::MAX);
    for (rank, gradients) in ranks.iter_mut().enumerate() {
        gradients.begin();
        if rank == 1 {
            gradients.report(0, Values::F32(&[-0.0, 8.0, -0.0, 1.0])).unwrap();
        }
        gradients.end(0.0);
    }
    synchronise(&mut ranks, 2);
    for TestRank { gradients, .. } in &ranks {
        assert_eq!(bits(gradients.mean(0).unwrap()), bits(Values::F32(&[0.0, 4.0, 0.0, 0.5])));
        assert_eq!((gradients.mean(1), gradients.mean(3), gradients.mean(7)), (None, None, None));
    }
    // The next step drops the gradients of a micro-batch.
    for gradients in &mut ranks {
        gradients.begin();
        gradients.end(0.0);
    }
    synchronise(&mut ranks, 2);
    assert_eq!(ranks[0].gradients.mean(0), None);
}

#[test]
fn a_rank_without_micro_batches_adds_zeros() {
    let mut ranks = ranks(3, 8);
    ranks[2].gradients.begin_step();
    for (micro_batch, rank) in ranks[..2].iter_mut().enumerate() {
        run(rank, micro_batch);
    }
    synchronise(&mut ranks, 2);
    for TestRank { gradients, .. } in &ranks {
        assert_eq!(bits(gradients.mean(0).unwrap()), bits(Values::F32(&expected(0, 2))));
    }
}

#[test]
fn wrong_reports_are_errors_that_name_the_parameter() {
    let mut gradients = ranks(1, 0).remove(0);
    gradients.begin();
    gradients.report(3, Values::F32(&[1.0; 3])).unwrap();
    let twice = gradients.report(3, Values::F32(&[1.0; 3])).unwrap_err();
    assert!(matches!(&twice, Error::ReportedTwice { parameter } if parameter == "bias"), "{twice}");
    let short = gradients.report(0, Values::F32(&[1.0; 3])).unwrap_err();
    assert!(matches!(&short, Error::WrongGradient { parameter, .. } if parameter == "embedding"), "{short}");
    let unlike = gradients.report(1, Values::F32(&[1.0; 3])).unwrap_err();
    assert!(matches!(&unlike, Error::WrongGradient { parameter, .. } if parameter == "scale"), "{unlike}");
    let nobody = gradients.report(5, Values::F32(&[1.0; 3])).unwrap_err();
    assert!(matches!(nobody, Error::NoSuchParameter { index: 5, count: 5 }), "{nobody}");
}

#[test]
fn sums_can_be_dropped() {
    let mut ranks = ranks(1, 20);
    run(&mut ranks[0], 5);
    ranks[0].begin();
    report_all(&mut ranks[0], 6);
    ranks[0].gradients.forget();
    ranks[0].losses = TreeSum::new();
    (0..4).for_each(|index| run(&mut ranks[0], index));
    synchronise(&mut ranks, 4);
    assert_eq!(bits(ranks[0].gradients.mean(3).unwrap()), bits(Values::F32(&expected(3, 4))));
}

proptest! {
    #[test]
    fn any_reports_of_micro_batches_give_the_mean_of_one_process(
        lens in prop::collection::vec(0..5_usize, 1..6),
        ranks in 1..6_usize,
        share in prop::sample::select(vec![1_usize, 2, 4]),
        reports in prop::collection::vec(prop::collection::vec(prop::option::of(-9.0..9.0_f32), 6), 24),
        bucket_bytes in 0..60_usize,
    ) {
        let infos: Vec<ParamInfo> = lens
            .iter()
            .enumerate()
            .map(|(index, &len)| ParamInfo::new(format!("p{index}"), [len], FloatType::F32))
            .collect();
        let plan = BucketPlan::new(&infos, BucketBytes { first_max: bucket_bytes / 2, other_max: bucket_bytes });
        let mut all: Vec<TestRank> = (0..ranks).map(|_| TestRank::new(&infos, &plan)).collect();
        for (rank, gradients) in all.iter_mut().enumerate() {
            for report in &reports[rank * share..(rank + 1) * share] {
                gradients.begin();
                for (parameter, (value, &len)) in report.iter().zip(&lens).enumerate() {
                    if let Some(value) = value {
                        gradients.report(parameter, Values::F32(&vec![*value; len])).unwrap();
                    }
                }
                gradients.end(0.0);
            }
        }
        let reports = &reports[..ranks * share];
        synchronise(&mut all, reports.len());
        for (parameter, &len) in lens.iter().enumerate() {
            let leaves: Vec<Option<f32>> = reports.iter().map(|report| report[parameter]).collect();
            let zeros: Vec<f32> = leaves.iter().map(|gradient| gradient.unwrap_or(0.0)).collect();
            let mean = tree(&zeros, &|left, right| left + right) / f32::from(u8::try_from(zeros.len()).unwrap());
            let expected = leaves.iter().any(Option::is_some).then(|| vec![mean.to_bits(); len]);
            for TestRank { gradients, .. } in &all {
                prop_assert_eq!(gradients.mean(parameter).map(bits), expected.clone());
            }
        }
    }
}

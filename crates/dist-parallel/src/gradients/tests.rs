//! Ranks without communication: the tests add their sums by the definition.

use std::cell::Cell;
use std::ops::Range;

use half::bf16;
use proptest::prelude::*;
use rstest::rstest;

use super::*;
use crate::step_consensus::TrainingCall;
use crate::updates::Updates;
use crate::{BucketBytes, Error, FloatType};

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

const fn step(micro_batches: usize) -> StepDescriptor {
    StepDescriptor::new(TrainingCall::Step, micro_batches, false)
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

fn run(gradients: &mut BucketedGradients, micro_batch: usize) {
    gradients.begin(&mut ordinary).unwrap();
    report_all(gradients, micro_batch);
    gradients.end(values(micro_batch, 9, 1)[0], 1);
}

fn report_all(gradients: &mut BucketedGradients, micro_batch: usize) {
    for parameter in (0..5).rev().filter(|&parameter| has(micro_batch, parameter)) {
        let values = values(micro_batch, parameter, infos()[parameter].len());
        match parameter {
            1 => gradients.report(parameter, Values::Bf16(&halves(&values))).unwrap(),
            _ => gradients.report(parameter, Values::F32(&values)).unwrap(),
        }
    }
}

fn ordinary(dtype: FloatType, len: usize) -> Result<Flat> {
    Ok(Flat::zeros(dtype, len))
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
fn synchronise(ranks: &mut [BucketedGradients], micro_batches: usize) -> Vec<f32> {
    let mut means: Vec<Vec<Mean>> = ranks.iter().map(|_| Vec::new()).collect();
    for bucket in 0..ranks[0].bucket_count() {
        let mut sum = TreeSum::new();
        for (rank, gradients) in ranks.iter_mut().enumerate() {
            sum.add(rank, gradients.take_sum(bucket, &mut ordinary).unwrap(), |left: &mut Flat, right| {
                left.add(&right)
            });
        }
        let sum = sum.finish(|left, right| left.add(&right)).unwrap();
        for means in &mut means {
            let dtype = ranks[0].dtype(bucket);
            means.push(Mean::of(sum.part(sum.dtype(), 0, sum.len()), dtype, micro_batches));
        }
    }
    let tallies: Vec<(f32, Vec<i64>)> = ranks
        .iter_mut()
        .map(|gradients| gradients.take_totals(step(micro_batches), &Updates::new()))
        .collect();
    let sum = |index: usize| tallies.iter().map(|(_, consensus)| consensus[index]).sum::<i64>();
    let consensus: Vec<i64> = (0..tallies[0].1.len()).map(sum).collect();
    let consensus = StepConsensus::decode(&consensus);
    assert_eq!(consensus.divisor(step(micro_batches)).unwrap(), micro_batches);
    assert_eq!(consensus.micro_batches(), micro_batches);
    for (gradients, means) in ranks.iter_mut().zip(means) {
        gradients.synchronised(means, consensus.used());
    }
    tallies.into_iter().map(|(loss, _)| loss).collect()
}

fn ranks(count: usize, first_max: usize) -> Vec<BucketedGradients> {
    let plan = BucketPlan::new(&infos(), BucketBytes { first_max, other_max: first_max });
    (0..count).map(|_| BucketedGradients::new(&infos(), plan.clone(), false)).collect()
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
        for (rank, gradients) in ranks.iter_mut().enumerate() {
            share(rank, count, micro_batches).for_each(|index| run(gradients, index));
        }
        let losses = synchronise(&mut ranks, micro_batches);
        let all: Vec<f32> = (0..micro_batches).map(|index| values(index, 9, 1)[0]).collect();
        let add = |left: &f32, right: &f32| left + right;
        assert_eq!(tree(&losses, &add).to_bits(), tree(&all, &add).to_bits());
        for gradients in &ranks {
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
        let mut gradients = ranks(1, 20).remove(0);
        let travelling = Cell::new(0);
        let mut allocate = |dtype, len| {
            travelling.set(travelling.get() + 1);
            ordinary(dtype, len)
        };
        for _ in 0..3 {
            for index in 0..share {
                gradients.begin(&mut allocate).unwrap();
                report_all(&mut gradients, index);
                gradients.end(0.0, 1);
            }
            let buckets = 0..gradients.bucket_count();
            let dtypes: Vec<FloatType> = buckets.clone().map(|bucket| gradients.dtype(bucket)).collect();
            let sums = buckets.map(|bucket| gradients.take_sum(bucket, &mut allocate).unwrap());
            let means = sums.zip(dtypes).map(|(sum, dtype)| Mean::of(sum, dtype, share)).collect();
            gradients.take_totals(step(share), &Updates::new());
            gradients.synchronised(means, std::iter::repeat_n(true, 6));
            // Between steps the pool has every buffer.
            let held = gradients.buckets.iter().zip(plan.buckets());
            let bytes = held.map(|(sum, bucket)| (1 + sum.pool.len()) * bucket.bytes()).sum::<usize>();
            assert_eq!(bytes, plan.memory(share), "{share} micro-batches");
            assert_eq!(travelling.get(), gradients.bucket_count(), "one buffer of each bucket travels");
        }
    }
}

#[test]
fn a_bucket_is_final_once_every_use_of_its_parameters_is_reported() {
    let mut gradients = ranks(1, 0).remove(0);
    // Last to first: bias, scale, embedding. The head is tied to the embedding.
    assert_eq!(Vec::from_iter(gradients.parameters()), [3, 1, 0]);
    gradients.begin(&mut ordinary).unwrap();
    let finals =
        |gradients: &BucketedGradients| (0..3).map(|bucket| gradients.is_final(bucket)).collect::<Vec<_>>();
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
        gradients.report(parameter, values).unwrap();
        assert_eq!(finals(&gradients), expected, "after parameter {parameter}");
    }
}

#[test]
fn a_parameter_that_never_had_a_gradient_has_none_and_an_absent_one_counts_as_plus_zero() {
    let mut ranks = ranks(2, usize::MAX);
    for (rank, gradients) in ranks.iter_mut().enumerate() {
        gradients.begin(&mut ordinary).unwrap();
        if rank == 1 {
            gradients.report(0, Values::F32(&[-0.0, 8.0, -0.0, 1.0])).unwrap();
        }
        gradients.end(0.0, 1);
    }
    synchronise(&mut ranks, 2);
    for gradients in &ranks {
        assert_eq!(bits(gradients.mean(0).unwrap()), bits(Values::F32(&[0.0, 4.0, 0.0, 0.5])));
        assert_eq!((gradients.mean(1), gradients.mean(3), gradients.mean(7)), (None, None, None));
    }
    // The next step drops the gradients of a micro-batch.
    for gradients in &mut ranks {
        gradients.begin(&mut ordinary).unwrap();
        gradients.end(0.0, 1);
    }
    synchronise(&mut ranks, 2);
    assert_eq!(ranks[0].mean(0), None);
}

#[test]
fn a_rank_without_micro_batches_adds_zeros() {
    let mut ranks = ranks(3, 8);
    ranks[2].begin_step();
    for (micro_batch, gradients) in ranks[..2].iter_mut().enumerate() {
        run(gradients, micro_batch);
    }
    synchronise(&mut ranks, 2);
    for gradients in &ranks {
        assert_eq!(bits(gradients.mean(0).unwrap()), bits(Values::F32(&expected(0, 2))));
    }
}

#[test]
fn wrong_reports_are_errors_that_name_the_parameter() {
    let mut gradients = ranks(1, 0).remove(0);
    gradients.begin(&mut ordinary).unwrap();
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
    ranks[0].begin(&mut ordinary).unwrap();
    report_all(&mut ranks[0], 6);
    ranks[0].forget();
    (0..4).for_each(|index| run(&mut ranks[0], index));
    synchronise(&mut ranks, 4);
    assert_eq!(bits(ranks[0].mean(3).unwrap()), bits(Values::F32(&expected(3, 4))));
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
        let mut all: Vec<BucketedGradients> = (0..ranks).map(|_| BucketedGradients::new(&infos, plan.clone(), false)).collect();
        for (rank, gradients) in all.iter_mut().enumerate() {
            for report in &reports[rank * share..(rank + 1) * share] {
                gradients.begin(&mut ordinary).unwrap();
                for (parameter, (value, &len)) in report.iter().zip(&lens).enumerate() {
                    if let Some(value) = value {
                        gradients.report(parameter, Values::F32(&vec![*value; len])).unwrap();
                    }
                }
                gradients.end(0.0, 1);
            }
        }
        let reports = &reports[..ranks * share];
        synchronise(&mut all, reports.len());
        for (parameter, &len) in lens.iter().enumerate() {
            let leaves: Vec<Option<f32>> = reports.iter().map(|report| report[parameter]).collect();
            let zeros: Vec<f32> = leaves.iter().map(|gradient| gradient.unwrap_or(0.0)).collect();
            let mean = tree(&zeros, &|left, right| left + right) / f32::from(u8::try_from(zeros.len()).unwrap());
            let expected = leaves.iter().any(Option::is_some).then(|| vec![mean.to_bits(); len]);
            for gradients in &all {
                prop_assert_eq!(gradients.mean(parameter).map(bits), expected.clone());
            }
        }
    }
}

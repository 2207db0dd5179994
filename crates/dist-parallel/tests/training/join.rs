//! Ranks with different numbers of micro-batches.

use std::panic::{AssertUnwindSafe, catch_unwind};

use dist_collectives::Communicator;
use dist_parallel::{Ddp, DdpOptions, Error, FloatType, ParamInfo, Ready, Values};
use dist_transport::sim;
use proptest::prelude::*;
use rstest::rstest;

use crate::ddp::{optimizer, options};
use crate::errors::run_at_once;
use crate::plain::{Bag, Numbers, bits, micro_batch, model, squared_error};

pub(crate) fn tree(leaves: &[Vec<f32>]) -> Vec<f32> {
    if let [leaf] = leaves {
        return leaf.clone();
    }
    let (left, right) = leaves.split_at(leaves.len().next_power_of_two() / 2);
    tree(left).into_iter().zip(tree(right)).map(|(left, right)| left + right).collect()
}

/// The gradient of micro-batch `index` of a rank's step.
pub(crate) fn gradient(rank: usize, step: usize, index: usize) -> Vec<f32> {
    Numbers((rank * 10_000 + step * 100 + index) as u64).take(3)
}

/// The mean of the micro-batches that there are, by the definition.
fn mean(step: usize, own: &[usize]) -> Vec<u32> {
    let of_rank = |(rank, &own): (usize, &usize)| match own {
        0 => vec![0.0; 3],
        _ => tree(&(0..own).map(|index| gradient(rank, step, index)).collect::<Vec<_>>()),
    };
    let sum = tree(&own.iter().enumerate().map(of_rank).collect::<Vec<_>>());
    let count = own.iter().sum::<usize>() as f32;
    sum.into_iter().map(|sum| (sum / count).to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    #[test]
    fn a_step_is_the_mean_of_what_the_ranks_have(
        // For each rank, how many micro-batches it has in each of its steps.
        steps in prop::collection::vec(prop::collection::vec(1..4_usize, 0..5), 1..6),
    ) {
        let ranks = steps.len();
        let given = steps.clone();
        let outcome = sim::run(1, ranks, move |transport| {
            let comm = Communicator::new(transport);
            let rank = comm.rank();
            let infos = vec![ParamInfo::new("w", [3], FloatType::F32)];
            let mut ddp = Ddp::new(comm, Bag::new(infos, 1), DdpOptions::default()).unwrap();
            let mut gradients = Vec::new();
            let mut own = given[rank].iter();
            loop {
                let step = gradients.len();
                let own = own.next().copied().unwrap_or(0);
                let report = ddp.join_with(own, |_, index, ready| {
                    ready(0, Values::F32(&gradient(rank, step, index)))?;
                    Ok(1.0)
                });
                let Some(report) = report.unwrap() else { break gradients };
                assert_eq!(report.loss, 1.0);
                let Some(Values::F32(gradient)) = ddp.gradient(0) else { panic!("somebody had a gradient") };
                gradients.push((report.micro_batches, gradient.iter().map(|value| value.to_bits()).collect()));
            }
        });
        let last = steps.iter().map(Vec::len).max().unwrap_or(0);
        let expected: Vec<(usize, Vec<u32>)> = (0..last)
            .map(|step| {
                let own: Vec<usize> = steps.iter().map(|own| own.get(step).copied().unwrap_or(0)).collect();
                (own.iter().sum(), mean(step, &own))
            })
            .collect();
        prop_assert_eq!(outcome.results, vec![expected; ranks]);
    }
}

#[test]
fn models_are_trained_the_same_on_ranks_that_run_out_at_different_times() {
    let outcome = sim::run(1, 3, |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank();
        let mut ddp = Ddp::new(comm, model(7), options(30)).unwrap();
        let mut sgd = optimizer("sgd");
        let mut steps = 0;
        loop {
            let own = usize::from(steps <= 2 * rank);
            let report = ddp.join(own, |index| {
                let (input, target) = micro_batch(steps, 10 * rank + index);
                Ok((input, squared_error(target)))
            });
            if report.unwrap().is_none() {
                break;
            }
            ddp.update(&mut *sgd).unwrap();
            steps += 1;
        }
        // Whoever has joined can go on with steps of another kind.
        ddp.step_with(3, |_, _, _| Ok(0.0)).unwrap();
        (steps, bits(ddp.model()))
    });
    assert!(outcome.results.iter().all(|result| *result == outcome.results[0] && result.0 == 5));
}

#[test]
fn what_was_accumulated_counts_in_a_joint_step() {
    let outcome = sim::run(1, 2, |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank();
        let infos = vec![ParamInfo::new("w", [1], FloatType::F32)];
        let mut ddp = Ddp::new(comm, Bag::new(infos, 1), DdpOptions::default()).unwrap();
        ddp.accumulate_with(2, |_, _, ready| ready(0, Values::F32(&[1.0])).map(|()| 1.0)).unwrap();
        let report = ddp.join_with(rank, |_, _, ready| ready(0, Values::F32(&[7.0])).map(|()| 7.0));
        let report = report.unwrap().unwrap();
        assert_eq!(ddp.gradient(0), Some(Values::F32(&[3.0])));
        (report.loss, report.micro_batches)
    });
    assert_eq!(outcome.results, [(3.0, 3); 2]);
}

#[test]
fn joining_and_sharing_in_one_step_is_an_error_on_every_rank_and_harms_nobody() {
    let outcome = sim::run(1, 3, |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank();
        let mut ddp = Ddp::new(comm, model(1), DdpOptions::default()).unwrap();
        let refused = match rank {
            2 => ddp.join_with(2, |_, _, _| Ok(0.0)).map(drop),
            _ => ddp.step_with(6, |_, _, _| Ok(0.0)).map(drop),
        };
        (refused, ddp.step_with(3, |_, _, _| Ok(0.0)).map(drop))
    });
    for (refused, next) in &outcome.results {
        let told = refused.as_ref().unwrap_err().to_string();
        let asked = "a step of the micro-batches that it has, rank 0 for a step of 6 micro-batches";
        assert_eq!(told, format!("rank 2 was asked for {asked}"));
        assert!(next.is_ok());
    }
}

#[test]
fn a_rank_that_stops_without_joining_is_named() {
    let results = run_at_once(3, |comm| {
        let rank = comm.rank();
        let mut ddp = Ddp::new(comm, model(1), DdpOptions::default()).unwrap();
        for step in 0.. {
            if (rank, step) == (1, 2) {
                // Its data has run out, and nobody has told it to join.
                return None;
            }
            if let Err(error) = ddp.step_with(3, |_, _, _| Ok(0.0)) {
                return Some(error);
            }
        }
        unreachable!("rank 1 stops")
    });
    for rank in [0, 2] {
        let Some(Error::Communication(source)) = &results[rank] else { panic!("{results:?}") };
        assert_eq!(source.peer(), Some(1), "{source}");
    }
}

/// The caller catches the panic and takes the step again: what the first attempt had summed must not count.
#[rstest]
fn a_step_that_panicked_leaves_nothing_for_the_next(#[values(false, true)] accumulates: bool) {
    let outcome = sim::run(1, 2, move |transport| {
        let infos = vec![ParamInfo::new("w", [1], FloatType::F32)];
        let mut ddp =
            Ddp::new(Communicator::new(transport), Bag::new(infos, 1), DdpOptions::default()).unwrap();
        let mut attempt = |fails: bool| {
            let compute = |_: &mut Bag, index: usize, ready: &mut Ready<'_>| {
                assert!(!fails || index < 2, "the third micro-batch cannot be read");
                ready(0, Values::F32(&[[1.0, 2.0, 6.0][index]]))?;
                Ok(1.0)
            };
            if accumulates {
                ddp.accumulate_with(6, |bag, index, ready| compute(bag, index % 3, ready)).unwrap();
            }
            let own = if accumulates { 0 } else { 3 };
            let report = ddp.join_with(own, compute).unwrap().unwrap();
            let Some(Values::F32(mean)) = ddp.gradient(0) else { panic!("there was a gradient") };
            (report.micro_batches, mean[0])
        };
        catch_unwind(AssertUnwindSafe(|| attempt(true))).unwrap_err();
        attempt(false)
    });
    assert_eq!(outcome.results, [(6, 3.0); 2]);
}

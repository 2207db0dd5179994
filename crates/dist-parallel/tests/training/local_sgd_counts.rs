//! Local SGD with weighted steps.

use dist_collectives::Communicator;
use dist_collectives::transport::Chain;
use dist_parallel::checkpoint::{CheckpointProblem, Checkpoints};
use dist_parallel::local_sgd::{LocalSgd, LocalSgdOptions, OuterStep};
use dist_parallel::{BoxError, Error, FloatType, ParamInfo, Params, ValuesMut};
use dist_transport::sim;
use rstest::rstest;

use crate::errors::run_at_once;
use crate::join::tree;
use crate::local_sgd::{LEN, bag, change, expected, inner, values};
use crate::plain::{Bag, bits};

/// Returns the ranks' changes after one step each, with these weights.
fn counted(rank: usize, step: usize, count: u64) -> impl FnOnce(&mut Bag) -> Result<(f32, u64), BoxError> {
    move |model| Ok((inner(rank, step)(model)?, count))
}

/// Returns the weighted mean of the ranks' values, or those of rank 0 if the others have weight 0.
fn weighted(all: &[Vec<f32>], counts: &[u64]) -> Vec<f32> {
    let total = counts.iter().sum::<u64>() as f64;
    #[expect(clippy::cast_possible_truncation, reason = "factors are rounded to the type of the parameters")]
    let part = |count: u64| (count as f64 / total) as f32;
    let scaled = |(values, &count): (&Vec<f32>, &u64)| {
        values.iter().map(|value| if count == 0 { -0.0 } else { value * part(count) }).collect()
    };
    tree(&all.iter().zip(counts).map(scaled).collect::<Vec<_>>())
}

/// Returns the steps of rank r before a first and a second synchronisation point, and the weight of each.
const UNEQUAL: [[(usize, u64); 2]; 3] = [[(2, 5), (1, 3)], [(2, 0), (0, 9)], [(1, 2), (2, 7)]];

#[rstest]
fn ranks_are_weighted_by_their_steps(
    #[values(
        OuterStep::Average,
        OuterStep::Nesterov { learning_rate: 0.7, momentum: 0.9 }
    )]
    outer: OuterStep,
) {
    let outcome = sim::run(1, 3, move |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank();
        let mut local = LocalSgd::new(comm, bag(0), LocalSgdOptions { inner_steps: 10, outer }).unwrap();
        let mut met = Vec::new();
        for (sync_point, (steps, count)) in UNEQUAL[rank].into_iter().enumerate() {
            for step in 0..steps {
                let report = local.step_with(counted(rank, 10 * sync_point + step, count)).unwrap();
                assert_eq!(report.loss, (100 * (10 * sync_point + step) + rank) as f32);
            }
            met.push((local.synchronise().unwrap().loss, values(local.model())));
        }
        // No rank has micro-batches left, and all have the same parameters.
        let nothing = local.synchronise().unwrap_err();
        assert!(matches!(nothing, Error::ZeroWeight { micro_batches: 0 }), "{nothing}");
        met.push((0.0, values(local.model())));
        met
    });
    let (mut start, mut velocity, mut expected) = (values(&bag(0)), vec![0.0; LEN], Vec::new());
    for sync_point in 0..2 {
        let of_rank = |(rank, of): (usize, &[(usize, u64); 2])| {
            let mut own = start.clone();
            for step in 0..of[sync_point].0 {
                let change = change(rank, 10 * sync_point + step);
                own.iter_mut().zip(change).for_each(|(own, change)| *own -= 0.25 * change);
            }
            own
        };
        let all: Vec<Vec<f32>> = UNEQUAL.iter().enumerate().map(of_rank).collect();
        let counts = UNEQUAL.map(|of| of[sync_point].0 as u64 * of[sync_point].1);
        match outer {
            OuterStep::Average => start = weighted(&all, &counts),
            OuterStep::Nesterov { .. } => {
                let gone = |own: &Vec<f32>| start.iter().zip(own).map(|(start, own)| start - own).collect();
                let gone = weighted(&all.iter().map(gone).collect::<Vec<_>>(), &counts);
                for ((start, v), gone) in start.iter_mut().zip(&mut velocity).zip(gone) {
                    *v = if sync_point == 0 { gone } else { 0.9 * *v + gone };
                    *start -= 0.7 * (gone + 0.9 * *v);
                }
            }
        }
        let losses = UNEQUAL.iter().enumerate().map(|(rank, of)| {
            (0..of[sync_point].0).map(|step| (100 * (10 * sync_point + step) + rank) as f32).sum::<f32>()
        });
        let loss = losses.sum::<f32>() / counts.iter().sum::<u64>() as f32;
        expected.push((loss, start.clone()));
    }
    expected.push((0.0, start));
    assert_eq!(outcome.results, vec![expected; 3]);
}

/// Any weights, as long as they are equal.
#[rstest]
fn equal_weights_give_the_mean_without_weights(
    #[values(LocalSgdOptions::average(2), LocalSgdOptions::diloco(2))] options: LocalSgdOptions,
    #[values(2, 3)] ranks: usize,
) {
    let run = move |count: Option<u64>| {
        let outcome = sim::run(1, ranks, move |transport| {
            let comm = Communicator::new(transport);
            let rank = comm.rank();
            let mut local = LocalSgd::new(comm, bag(0), options).unwrap();
            for step in 0..4 {
                match count {
                    None => local.step_with(inner(rank, step)).unwrap(),
                    Some(count) => local.step_with(counted(rank, step, count)).unwrap(),
                };
            }
            bits(local.model())
        });
        outcome.results
    };
    assert_eq!(run(Some(7)), run(None));
}

/// A rank with weight 0 does not affect the mean. Half types do not overflow in the computation of the mean.
#[test]
fn only_ranks_with_a_weight_are_in_the_mean() {
    let outcome = sim::run(1, 3, |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank();
        let infos = vec![ParamInfo::new("w", [1], FloatType::F16)];
        let mut local = LocalSgd::new(comm, Bag::new(infos, 1), LocalSgdOptions::average(1)).unwrap();
        let value = [32_768.0, f32::NAN, 61_440.0][rank];
        let set = |model: &mut Bag| {
            model.write(0, &mut |values| {
                let ValuesMut::F16(values) = values else { panic!("the model is f16") };
                values[0] = half::f16::from_f32(value);
            })?;
            Ok((0.0, [1, 0, 3][rank]))
        };
        local.step_with(set).unwrap();
        bits(local.model())
    });
    assert_eq!(outcome.results, vec![vec![u32::from(half::f16::from_f32(54_272.0).to_bits())]; 3]);
}

#[test]
fn steps_of_weight_0_are_refused_and_training_continues() {
    let results = run_at_once(2, |comm| {
        let rank = comm.rank();
        let mut local = LocalSgd::new(comm, bag(0), LocalSgdOptions::average(1)).unwrap();
        let refused = local.step_with(counted(rank, 0, 0)).unwrap_err();
        let sync_point = local.step_with(counted(rank, 1, 2 + rank as u64)).unwrap().sync_point.unwrap();
        (refused, sync_point.loss, bits(local.model()))
    });
    for (refused, loss, model) in &results {
        assert!(matches!(refused, Error::ZeroWeight { micro_batches: 2 }), "{refused}");
        // The steps since then: 100 on rank 0 and 101 on rank 1.
        assert_eq!((*loss, model), (201.0 / 5.0, &results[0].2));
    }
}

/// Rank 0 has texts with these weights, and rank 1 has none. Rank 1 gets rank 0's parameters at these synchronisation
/// points. The final state can be saved if it is equal on all ranks.
#[rstest]
#[case::what_comes_after_counts(&[0, 0, 3], 1, 3)]
#[case::what_comes_before_and_after_counts(&[3, 0, 0, 0, 5], 2, 5)]
#[case::what_comes_last_counts_for_nothing(&[2, 0, 0, 0], 1, 2)]
fn ranks_continue_with_weight_0_until_no_step_is_left(
    #[case] texts: &'static [u64],
    #[case] sync_points: u64,
    #[case] steps: usize,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let results = run_at_once(2, move |comm| {
        let rank = comm.rank();
        let mut local = LocalSgd::new(comm, bag(0), LocalSgdOptions::average(2)).unwrap();
        let mut left = if rank == 0 { texts } else { &[] }.iter().enumerate();
        let mut calls = 0;
        loop {
            calls += 1;
            assert!(calls < 10, "training does not end");
            let met = match left.next() {
                Some((step, &count)) => local.step_with(counted(0, step, count)).map(drop),
                None => local.synchronise().map(drop),
            };
            match met {
                Ok(()) | Err(Error::ZeroWeight { micro_batches: 1.. }) => {}
                Err(Error::ZeroWeight { .. }) => break,
                Err(error) => panic!("{error}"),
            }
        }
        let saved = match local.save(&mut Checkpoints::at(&path), None, 1) {
            Ok(()) => true,
            Err(Error::Checkpoint(error))
                if matches!(error.problem, CheckpointProblem::Diverged { rank: 1, .. }) =>
            {
                false
            }
            Err(error) => panic!("{error}"),
        };
        (local.traffic().sync_points, saved, bits(local.model())[..LEN].to_vec())
    });
    let after = |steps| expected(1, steps, steps, OuterStep::Average);
    let same = steps == texts.len();
    assert_eq!(results, [(sync_points, same, after(texts.len())), (sync_points, same, after(steps))]);
}

#[rstest]
#[case::on_one_rank(|rank, _| rank == 1)]
#[case::one_after_the_other(|_, step| step == 1)]
fn weights_of_only_some_steps_abort_the_job(#[case] counts: fn(usize, usize) -> bool) {
    let results = run_at_once(2, move |comm| {
        let rank = comm.rank();
        // One rank can fail while the other still waits for its initial parameters.
        let mut local = LocalSgd::new(comm, bag(0), LocalSgdOptions::average(2))?;
        let step = |step| match counts(rank, step) {
            true => local.step_with(counted(rank, step, 1)).map(drop),
            false => local.step_with(inner(rank, step)).map(drop),
        };
        (0..2).try_for_each(step)
    });
    for result in &results {
        let why = "only some micro-batches of a step have a weight; give all of them one, or none";
        assert!(Chain(result.as_ref().unwrap_err()).to_string().contains(why), "{results:?}");
    }
}

#[test]
fn a_rank_without_steps_synchronises_with_weighted_ranks() {
    let outcome = sim::run(1, 2, |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank();
        let mut local = LocalSgd::new(comm, bag(0), LocalSgdOptions::diloco(2)).unwrap();
        let mut sync_points = 0;
        loop {
            let met = match rank {
                // It never has any data.
                1 => local.synchronise().map(drop),
                _ if sync_points == 3 => local.synchronise().map(drop),
                _ => (0..2)
                    .try_for_each(|step| local.step_with(counted(rank, 2 * sync_points + step, 4)).map(drop)),
            };
            match met {
                Ok(()) => sync_points += 1,
                Err(Error::ZeroWeight { micro_batches: 0 }) => break,
                Err(error) => panic!("{error}"),
            }
        }
        (sync_points, bits(local.model()))
    });
    let expected = expected(1, 6, 2, LocalSgdOptions::diloco(2).outer);
    for (sync_points, model) in &outcome.results {
        assert_eq!((*sync_points, &model[..LEN]), (3, &expected[..]));
    }
}

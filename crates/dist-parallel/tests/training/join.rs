//! Ranks with different numbers of micro-batches.

use dist_collectives::Communicator;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::model::{Ready, Saved, Slot};
use dist_parallel::step::StepReport;
use dist_parallel::{
    Block, BoxError, Ddp, DdpOptions, Error, FloatType, ParamInfo, Params, Sequence, Values,
};
use dist_transport::sim;
use proptest::prelude::*;
use rstest::rstest;

use crate::ddp::{optimizer, options};
use crate::errors::run_at_once;
use crate::plain::{Bag, Numbers, Rows, bits, micro_batch, model, params_in_slots, squared_error};

pub(crate) fn tree(leaves: &[Vec<f32>]) -> Vec<f32> {
    if let [leaf] = leaves {
        return leaf.clone();
    }
    let (left, right) = leaves.split_at(leaves.len().next_power_of_two() / 2);
    tree(left).into_iter().zip(tree(right)).map(|(left, right)| left + right).collect()
}

/// Returns the gradient of micro-batch `index` of a rank's step.
pub(crate) fn gradient(rank: usize, step: usize, index: usize) -> Vec<f32> {
    Numbers((rank * 10_000 + step * 100 + index) as u64).take(3)
}

/// Returns the mean of the existing micro-batches, by the definition.
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
    fn a_join_is_the_mean_of_the_ranks_micro_batches(
        // For each rank, the number of micro-batches in each of its steps.
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
                let Some(Values::F32(gradient)) = ddp.gradient(0) else { panic!("a rank had a gradient") };
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
        // Ranks that have joined can continue with steps of another kind.
        ddp.step_with(3, |_, _, _| Ok(0.0)).unwrap();
        (steps, bits(ddp.model()))
    });
    assert!(outcome.results.iter().all(|result| *result == outcome.results[0] && result.0 == 5));
}

#[test]
fn a_rank_that_stops_without_joining_is_named() {
    let results = run_at_once(3, |comm| {
        let rank = comm.rank();
        let mut ddp = Ddp::new(comm, model(1), DdpOptions::default()).unwrap();
        for step in 0.. {
            if (rank, step) == (1, 2) {
                // Its data has run out, and it does not know that it should join.
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

/// A block with three parameters whose gradients are the block's input, which it passes on.
pub(crate) struct Echo {
    infos: [ParamInfo; 1],
    slots: [Slot; 1],
}

impl Echo {
    pub(crate) fn model() -> Sequence<Rows> {
        let infos = [ParamInfo::new("w", [3], FloatType::F32)];
        Sequence::new(vec![Box::new(Self { infos, slots: [Slot::from(vec![0.0_f32; 3])] })]).unwrap()
    }
}

params_in_slots!(Echo);

impl Block<Rows> for Echo {
    fn forward(&mut self, input: Rows) -> Result<(Rows, Saved), BoxError> {
        Ok((input.clone(), Saved::new(input)))
    }

    fn backward(&mut self, saved: Saved, of: Rows, ready: &mut Ready<'_>) -> Result<Option<Rows>, BoxError> {
        ready(0, Values::F32(&saved.take::<Rows>()?))?;
        Ok(Some(of))
    }
}

/// Returns the mean for replicas of `shards` ranks, by the definition: each round is summed over the ranks of a
/// replica, the rounds are summed, and then the replicas.
fn mean_of_rounds(step: usize, own: &[usize], copy: usize) -> Vec<u32> {
    let of_copy = |(number, own): (usize, &[usize])| {
        let of_rank = |round: usize, rank: usize| match own[rank] {
            own if round < own => gradient(number * copy + rank, step, round),
            _ => vec![-0.0; 3],
        };
        let of_round = |round| tree(&(0..copy).map(|rank| of_rank(round, rank)).collect::<Vec<_>>());
        let rounds: Vec<Vec<f32>> = (0..own.iter().copied().max().unwrap_or(0)).map(of_round).collect();
        if rounds.is_empty() { vec![-0.0; 3] } else { tree(&rounds) }
    };
    let sum = tree(&own.chunks(copy).enumerate().map(of_copy).collect::<Vec<_>>());
    let count = own.iter().sum::<usize>() as f32;
    sum.into_iter().map(|sum| (sum / count).to_bits()).collect()
}

/// A report, and this rank's shard of the gradient, each value with its place.
type Step = (StepReport, Vec<(usize, u32)>);

/// Takes steps until no rank has micro-batches left. Each rank has its own number in each step.
fn join_sharded(comm: Communicator, own: &[usize], strategy: ShardingStrategy) -> Vec<Step> {
    let rank = comm.rank();
    let mut fsdp = Fsdp::new(comm, Echo::model(), &FsdpOptions::new(strategy)).unwrap();
    let (mut steps, mut own) = (Vec::new(), own.iter());
    loop {
        let step = steps.len();
        let report = fsdp.join(own.next().copied().unwrap_or(0), |index| {
            let loss = gradient(rank, step, index)[0];
            Ok((gradient(rank, step, index), move |output| Ok((loss, output))))
        });
        let Some(report) = report.unwrap() else { break };
        let part = fsdp.gradient(0).map_or_else(Vec::new, |(range, values)| {
            let Values::F32(values) = values else { panic!("the model is f32") };
            range.zip(values).map(|(place, value)| (place, value.to_bits())).collect()
        });
        steps.push((report, part));
    }
    // Ranks that have joined can continue with steps of another kind.
    fsdp.step(3, |_| Ok((vec![1.0; 3], |output| Ok((1.0, output))))).unwrap();
    steps
}

#[track_caller]
fn check_sharded(steps: &[Vec<usize>], strategy: ShardingStrategy) {
    let (ranks, given) = (steps.len(), steps.to_vec());
    let copy = match strategy {
        ShardingStrategy::FullShard | ShardingStrategy::ShardGradOp => ranks,
        ShardingStrategy::HybridShard { shard_degree } => shard_degree,
        _ => 1,
    };
    let outcome = sim::run(1, ranks, move |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank();
        join_sharded(comm, &given[rank], strategy)
    });
    let last = steps.iter().map(Vec::len).max().unwrap_or(0);
    for step in 0..last {
        let own: Vec<usize> = steps.iter().map(|own| own.get(step).copied().unwrap_or(0)).collect();
        let expected = mean_of_rounds(step, &own, copy);
        let mut seen = [false; 3];
        for of_rank in &outcome.results {
            let (report, part) = &of_rank[step];
            assert_eq!(report.micro_batches, own.iter().sum::<usize>());
            assert_eq!(report.loss.to_bits(), expected[0], "losses are those of the first parameter");
            for &(place, bits) in part {
                seen[place] = true;
                assert_eq!(bits, expected[place], "{strategy:?}, step {step} of {own:?}");
            }
        }
        assert_eq!(seen, [true; 3], "{strategy:?}, step {step} of {own:?}");
    }
    assert!(outcome.results.iter().all(|steps| steps.len() == last));
}

pub(crate) const STRATEGIES: [ShardingStrategy; 5] = [
    ShardingStrategy::FullShard,
    ShardingStrategy::ShardGradOp,
    ShardingStrategy::ShardOptimizer,
    ShardingStrategy::NoShard,
    ShardingStrategy::HybridShard { shard_degree: 2 },
];

#[rstest]
fn sharded_ranks_join_with_their_own_micro_batches(
    #[values(0, 1, 2, 3, 4)] strategy: usize,
    #[values(
        [&[2][..], &[0, 1], &[3], &[1]],
        // A replica of two ranks without micro-batches.
        [&[][..], &[], &[3, 1, 2], &[1, 1]],
        [&[][..], &[5], &[], &[]],
        [&[][..]; 4]
    )]
    steps: [&[usize]; 4],
) {
    check_sharded(&steps.map(<[usize]>::to_vec), STRATEGIES[strategy]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    #[test]
    fn a_sharded_join_is_the_mean_of_the_ranks_micro_batches(
        // A rank without micro-batches can have some later. The last step has some.
        mut steps in prop::collection::vec(prop::collection::vec(0..4_usize, 3), 1..6),
        strategy in prop::sample::select(STRATEGIES.to_vec()),
    ) {
        for step in 0..3 {
            let rank = step % steps.len();
            steps[rank][step] += 1;
        }
        if matches!(strategy, ShardingStrategy::HybridShard { .. }) && steps.len() % 2 == 1 {
            steps.push(vec![0, 2, 1]);
        }
        check_sharded(&steps, strategy);
    }
}

/// Three ranks that run out at different times, on a model with weights in two units.
#[rstest]
fn sharded_models_are_trained_the_same_on_ranks_that_run_out(#[values(0, 1, 2, 3)] strategy: usize) {
    const RANKS: usize = 3;
    let own = |rank: usize, step: usize| usize::from(step <= 2 * rank) * (1 + step % 2);
    let batch = |rank: usize, step: usize| {
        move |index| {
            let (input, target) = micro_batch(step, 10 * rank + index);
            Ok((input, squared_error(target)))
        }
    };
    let outcome = sim::run(1, RANKS, move |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank();
        let options = FsdpOptions::new(STRATEGIES[strategy]).with_prefetch(1);
        let mut fsdp = Fsdp::new(comm, model(7), &options).unwrap();
        let (mut sgd, mut steps) = (optimizer("sgd"), 0);
        loop {
            // It is used, or dropped by the last step, which has no micro-batches.
            if STRATEGIES[strategy] == ShardingStrategy::FullShard {
                fsdp.prefetch().unwrap();
            }
            let Some(report) = fsdp.join(own(rank, steps), batch(rank, steps)).unwrap() else { break };
            assert_eq!(report.micro_batches, (0..RANKS).map(|rank| own(rank, steps)).sum::<usize>());
            fsdp.update(&mut *sgd).unwrap();
            steps += 1;
        }
        if STRATEGIES[strategy] == ShardingStrategy::FullShard {
            assert!(fsdp.model().read(0, &mut |_| ()).is_err(), "its memory is freed");
        }
        fsdp.step(4, batch(0, 99)).unwrap();
        fsdp.update(&mut *sgd).unwrap();
        (steps, bits(&fsdp.into_parts().unwrap().1))
    });
    assert!(outcome.results.iter().all(|result| *result == outcome.results[0] && result.0 == 5));
    // If each rank sums its own micro-batches first, the result is that of replicas of the whole model.
    if matches!(STRATEGIES[strategy], ShardingStrategy::ShardOptimizer | ShardingStrategy::NoShard) {
        let whole = sim::run(1, RANKS, move |transport| {
            let comm = Communicator::new(transport);
            let rank = comm.rank();
            let mut ddp = Ddp::new(comm, model(7), options(30)).unwrap();
            let mut sgd = optimizer("sgd");
            for step in 0..5 {
                ddp.join(own(rank, step), batch(rank, step)).unwrap();
                ddp.update(&mut *sgd).unwrap();
            }
            ddp.step(4, batch(0, 99)).unwrap();
            ddp.update(&mut *sgd).unwrap();
            bits(ddp.model())
        });
        assert_eq!(outcome.results[0].1, whole.results[0]);
    }
}

#[rstest]
fn sharded_ranks_that_join_divide_by_the_weight(#[values(0, 1, 2, 3, 4)] strategy: usize) {
    let outcome = sim::run(1, 4, move |transport| {
        let comm = Communicator::new(transport);
        let rank = comm.rank();
        let mut fsdp = Fsdp::new(comm, Echo::model(), &FsdpOptions::new(STRATEGIES[strategy])).unwrap();
        let counts = |count: u64| move |_| Ok((vec![5.0; 3], move |output| Ok(((2.0, count), output))));
        let nothing = fsdp.join(rank, counts(0)).unwrap_err();
        assert!(matches!(nothing, Error::ZeroWeight { micro_batches: 6 }), "{nothing}");
        let report = fsdp.join(rank / 2, counts(1 + rank as u64)).unwrap().unwrap();
        let part = fsdp.gradient(0);
        assert!(part.is_none_or(|(_, values)| values == Values::F32(&vec![10.0 / 7.0; values.len()])));
        (report.loss, report.micro_batches)
    });
    // Of three tokens on rank 2 and four on rank 3.
    assert_eq!(outcome.results, [(4.0 / 7.0, 2); 4]);
}

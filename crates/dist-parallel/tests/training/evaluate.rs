//! Evaluation of sharded models compared with one process.

use std::cell::RefCell;

use dist_collectives::Communicator;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::{Ddp, DdpOptions, Error};
use dist_transport::sim::{self, Network};
use rstest::rstest;

use crate::ddp::optimizer;
use crate::errors::run_at_once;
use crate::join::tree;
use crate::plain::{Numbers, Rows, batch, bits, model, squared_error};

const STEPS: usize = 3;

const STRATEGIES: [ShardingStrategy; 5] = [
    ShardingStrategy::FullShard,
    ShardingStrategy::ShardGradOp,
    ShardingStrategy::ShardOptimizer,
    ShardingStrategy::NoShard,
    ShardingStrategy::HybridShard { shard_degree: 2 },
];

/// Returns the input of an evaluation micro-batch, and its target: of one to three rows.
fn validation(index: usize) -> (Rows, Rows) {
    let mut numbers = Numbers(99_000 + index as u64);
    let rows = 1 + index % 3;
    (numbers.take(3 * rows), numbers.take(2 * rows))
}

fn loss(index: usize, output: Rows) -> Result<f32, dist_parallel::BoxError> {
    Ok(squared_error(validation(index).1)(output)?.0)
}

/// Returns the losses of one process before training and after every step, by the definition, and its parameters.
fn alone(evaluated: usize) -> (Vec<u32>, Vec<u32>) {
    let mut outcome = sim::run(1, 1, move |transport| {
        let mut ddp = Ddp::new(Communicator::new(transport), model(7), DdpOptions::default()).unwrap();
        let (mut sgd, mut found) = (optimizer("sgd"), Vec::new());
        let find = |ddp: &mut Ddp<_>| {
            let one = |index| vec![loss(index, ddp.forward(validation(index).0).unwrap()).unwrap()];
            let sum = tree(&(0..evaluated).map(one).collect::<Vec<_>>())[0];
            (sum / evaluated as f32).to_bits()
        };
        for step in 0..STEPS {
            found.push(find(&mut ddp));
            ddp.step(4, batch(step)).unwrap();
            ddp.update(&mut *sgd).unwrap();
        }
        found.push(find(&mut ddp));
        (found, bits(ddp.model()))
    });
    outcome.results.remove(0)
}

fn find(fsdp: &mut Fsdp<Rows>, evaluated: usize) -> u32 {
    let report = fsdp.evaluate(evaluated, |index| Ok(validation(index).0), loss).unwrap();
    assert_eq!(report.micro_batches, evaluated);
    report.loss.to_bits()
}

/// Evaluates before training, between every step and its update, and at the end.
fn train_and_evaluate(
    comm: Communicator,
    evaluated: usize,
    strategy: ShardingStrategy,
) -> (Vec<u32>, Vec<u32>) {
    let options = FsdpOptions::new(strategy).with_prefetch(1);
    let mut fsdp = Fsdp::new(comm, model(7), &options).unwrap();
    let (mut sgd, mut found) = (optimizer("sgd"), vec![find(&mut fsdp, evaluated)]);
    for step in 0..STEPS {
        // An evaluation uses prefetched units, and the following step gathers its own.
        let _ = fsdp.prefetch();
        assert_eq!(find(&mut fsdp, evaluated), found[step]);
        fsdp.step(4, batch(step)).unwrap();
        assert_eq!(find(&mut fsdp, evaluated), found[step], "nothing has changed yet");
        fsdp.update(&mut *sgd).unwrap();
        found.push(find(&mut fsdp, evaluated));
    }
    if strategy == ShardingStrategy::FullShard && fsdp.world_size() > 1 {
        assert!(dist_parallel::Params::read(fsdp.model(), 0, &mut |_| ()).is_err(), "its memory is freed");
    }
    (found, bits(&fsdp.into_parts().unwrap().1))
}

#[rstest]
fn every_strategy_evaluates_and_trains_like_one_process(
    #[values(1, 2, 4)] ranks: usize,
    #[values(1, 2, 3, 8, 11)] evaluated: usize,
    #[values(0, 1, 2, 3, 4)] strategy: usize,
    #[values(false, true)] shares_memory: bool,
) {
    let strategy = STRATEGIES[strategy];
    if ranks == 1 && matches!(strategy, ShardingStrategy::HybridShard { .. }) {
        return;
    }
    let network = Network::new(ranks);
    let network = if shares_memory { network.with_shared_memory() } else { network };
    let outcome =
        network.run(move |transport| train_and_evaluate(Communicator::new(transport), evaluated, strategy));
    let expected = alone(evaluated);
    for (rank, result) in outcome.results.iter().enumerate() {
        assert_eq!(*result, expected, "rank {rank}");
    }
}

/// Every number of micro-batches, on one rank and on numbers of ranks that are no powers of two.
#[rstest]
fn each_micro_batch_is_evaluated_once(
    #[values(3, 6)] ranks: usize,
    #[values(0, 1, 2, 3)] strategy: usize,
    #[values(2, 3, 7, 20)] evaluated: usize,
) {
    let outcome = sim::run(1, ranks, move |transport| {
        let options = FsdpOptions::new(STRATEGIES[strategy]);
        let mut fsdp = Fsdp::new(Communicator::new(transport), model(7), &options).unwrap();
        let (given, taken) = (RefCell::new(Vec::new()), RefCell::new(Vec::new()));
        let input = |index| {
            given.borrow_mut().push(index);
            Ok(validation(index).0)
        };
        let of_output = |index, output: Rows| {
            assert_eq!(output.len(), validation(index).1.len());
            taken.borrow_mut().push(index);
            loss(index, output)
        };
        let loss = fsdp.evaluate(evaluated, input, of_output).unwrap().loss.to_bits();
        assert_eq!(given, taken);
        (loss, given.into_inner())
    });
    let expected = alone(evaluated).0[0];
    assert!(outcome.results.iter().all(|(loss, _)| *loss == expected));
    let mut all: Vec<usize> = outcome.results.into_iter().flat_map(|(_, indices)| indices).collect();
    all.sort_unstable();
    assert_eq!(all, Vec::from_iter(0..evaluated));
}

#[rstest]
fn an_evaluation_leaves_accumulated_gradients_unchanged(#[values(0, 1, 2, 3, 4)] strategy: usize) {
    let run = |evaluates: bool| {
        let outcome = sim::run(1, 4, move |transport| {
            let options = FsdpOptions::new(STRATEGIES[strategy]);
            let mut fsdp = Fsdp::new(Communicator::new(transport), model(7), &options).unwrap();
            fsdp.accumulate(8, batch(0)).unwrap();
            if evaluates {
                find(&mut fsdp, 3);
                // Errors of all ranks change nothing either.
                let none = fsdp.evaluate(0, |_| Ok(Rows::new()), loss).unwrap_err();
                assert!(matches!(none, Error::NoMicroBatches), "{none}");
                let input = |index| Ok(validation(index).0);
                let nothing = fsdp.evaluate(3, input, |_, _| Ok((1.0, 0))).unwrap_err();
                assert!(matches!(nothing, Error::ZeroWeight { micro_batches: 3 }), "{nothing}");
            }
            let report = fsdp.step(5, batch(1)).unwrap();
            fsdp.update(&mut *optimizer("sgd")).unwrap();
            (report.loss.to_bits(), report.micro_batches, bits(&fsdp.into_parts().unwrap().1))
        });
        outcome.results
    };
    assert_eq!(run(true), run(false));
}

#[rstest]
fn the_mean_is_weighted_over_micro_batches(#[values(1, 3, 4)] ranks: usize) {
    let outcome = sim::run(1, ranks, |transport| {
        let options = FsdpOptions::new(ShardingStrategy::FullShard);
        let mut fsdp = Fsdp::new(Communicator::new(transport), model(7), &options).unwrap();
        let loss = |index: usize, _| Ok((index as f32, 2 * index as u64));
        fsdp.evaluate(7, |index| Ok(validation(index).0), loss).unwrap().loss
    });
    assert_eq!(outcome.results, vec![0.5; ranks]);
}

#[test]
fn ranks_with_different_evaluations_get_an_error_and_can_continue() {
    let results = run_at_once(2, |comm| {
        let rank = comm.rank();
        let options = FsdpOptions::new(ShardingStrategy::FullShard);
        let mut fsdp = Fsdp::new(comm, model(7), &options).unwrap();
        let evaluate = |fsdp: &mut Fsdp<Rows>, micro_batches| {
            fsdp.evaluate(micro_batches, |index| Ok(validation(index).0), loss)
        };
        let numbers = evaluate(&mut fsdp, 2 + rank).unwrap_err().to_string();
        let kinds = match rank {
            0 => evaluate(&mut fsdp, 2),
            _ => fsdp.step(2, batch(0)),
        };
        (numbers, kinds.unwrap_err().to_string(), evaluate(&mut fsdp, 3).unwrap().loss.to_bits())
    });
    for (numbers, kinds, next) in &results {
        let on_rank_0 = "rank 0 for an evaluation of 2 micro-batches";
        assert_eq!(
            *numbers,
            format!(
                "the ranks called for different steps: rank 1 for an evaluation of 3 micro-batches, {on_rank_0}"
            )
        );
        assert_eq!(
            *kinds,
            format!(
                "the ranks called for different steps: rank 1 for a step of 2 micro-batches, {on_rank_0}"
            )
        );
        assert_eq!(*next, alone(3).0[0]);
    }
}

#[test]
fn an_evaluation_that_fails_on_one_rank_ends_the_job_on_every_rank() {
    let results = run_at_once(2, |comm| {
        let rank = comm.rank();
        let options = FsdpOptions::new(ShardingStrategy::FullShard);
        let mut fsdp = Fsdp::new(comm, model(7), &options).unwrap();
        let fails = |index, output| if rank == 1 { Err("no target".into()) } else { loss(index, output) };
        fsdp.evaluate(4, |index| Ok(validation(index).0), fails).unwrap_err()
    });
    assert!(matches!(&results[1], Error::Compute(_)), "{results:?}");
    let Error::Communication(source) = &results[0] else { panic!("{results:?}") };
    assert_eq!(source.peer(), Some(1));
}

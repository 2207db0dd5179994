//! Steps of all strategies: the schedule of a pipeline, timeouts, orders of reduction, and types of activations.

use std::time::Duration;

use dist_collectives::transport::Chain;
use dist_collectives::{Communicator, ReductionOrder};
use dist_parallel::pipeline::PlainVectors;
use dist_parallel::trainer::{Strategy, TrainerOptions};
use dist_parallel::{Error, FloatType, Result};
use dist_transport::sim;
use rstest::rstest;

use super::{MICRO_BATCHES, RANKS, STRATEGIES, batch, blocks, sgd};
use crate::errors::run_at_once;
use crate::plain::{micro_batch, squared_error};

#[test]
fn activations_travel_between_stages_in_their_type() {
    let bytes_sent = |activations: Option<FloatType>| {
        let program = move |transport| {
            let strategy = "pipeline:1f1b".parse().unwrap();
            let mut options = TrainerOptions::new(strategy).with_micro_batches(MICRO_BATCHES);
            options.activations = activations;
            let mut trainer = options.build(Communicator::new(transport), blocks(), PlainVectors).unwrap();
            // The shapes are sent in the first step.
            let mut step = || trainer.step(MICRO_BATCHES, |index| batch(0, index)).unwrap().bytes_sent;
            step();
            step()
        };
        sim::run(1, 2, program).results
    };
    // Each rank sends two rows of four values for each micro-batch: activations or their gradients.
    let values = 8 * MICRO_BATCHES as u64;
    let others: Vec<u64> = bytes_sent(None).into_iter().map(|bytes| bytes - 4 * values).collect();
    for (dtype, size) in [(FloatType::Bf16, 2), (FloatType::F32, 4), (FloatType::F64, 8)] {
        let expected: Vec<u64> = others.iter().map(|bytes| bytes + size * values).collect();
        assert_eq!(bytes_sent(Some(dtype)), expected, "{dtype}");
    }
}

/// Builds a trainer of a pipeline whose schedule is for 8 micro-batches on each of four ranks. A rank then takes steps
/// of the numbers of micro-batches that `steps` returns for it.
fn steps_of_a_schedule(strategy: &str, steps: fn(usize) -> [usize; 3]) -> Vec<Vec<Result<()>>> {
    let strategy: Strategy = strategy.parse().unwrap();
    run_at_once(RANKS, move |comm| {
        let steps = steps(comm.rank());
        let options = TrainerOptions::new(strategy).with_micro_batches(8);
        // Another rank can have aborted the job before this one is ready.
        let mut trainer = match options.build(comm, blocks(), PlainVectors) {
            Ok(trainer) => trainer,
            Err(error) => return vec![Err(error)],
        };
        let mut step = |count| trainer.step(count, |index| batch(0, index)).map(drop);
        steps.into_iter().map(&mut step).collect()
    })
}

#[rstest]
fn a_step_that_a_pipeline_has_no_schedule_for_is_an_error_on_every_rank_and_training_continues(
    #[values("pipeline:1f1b", "pipeline:1f1b:1", "pipeline:1f1b:2:sharded")] strategy: &str,
) {
    for results in steps_of_a_schedule(strategy, |_| [8, 4, 8]) {
        let refused = Error::ScheduledMicroBatches { scheduled: 8, requested: 4 }.to_string();
        let results = results.into_iter().map(|result| result.map_err(|error| error.to_string()));
        assert_eq!(Vec::from_iter(results), [Ok(()), Err(refused), Ok(())]);
    }
}

#[rstest]
fn different_steps_without_a_schedule_are_the_same_error_on_every_rank(
    #[values("pipeline:1f1b", "pipeline:1f1b:1", "pipeline:1f1b:2:sharded")] strategy: &str,
) {
    for results in steps_of_a_schedule(strategy, |rank| [8, if rank == 2 { 6 } else { 4 }, 8]) {
        let Err(Error::StepsDiffer { rank: 2, there, on_rank_0 }) = &results[1] else {
            panic!("{results:?}")
        };
        assert_eq!((there.micro_batches, on_rank_0.micro_batches), (6, 4));
        assert!(results[2].is_ok(), "{results:?}");
    }
}

#[rstest]
fn a_rank_that_alone_takes_a_step_without_a_schedule_is_named_at_once(
    #[values("pipeline:1f1b", "pipeline:1f1b:1", "pipeline:1f1b:2:sharded")] strategy: &str,
) {
    for results in steps_of_a_schedule(strategy, |rank| [if rank == 1 { 4 } else { 8 }, 8, 8]) {
        let error = results.into_iter().find_map(Result::err).expect("every rank gets the error").to_string();
        assert!(error.contains("called step(other)") && error.contains("called step"), "{error}");
    }
}

/// A timeout of an hour, much more than a communicator's own.
const HOUR: Duration = Duration::from_secs(3600);

/// The last rank is two minutes late in a call of each kind.
#[rstest]
fn every_group_of_a_trainer_waits_as_long_as_its_communicator_is_told_to(
    #[values(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)] strategy: usize,
) {
    const LATE: Duration = Duration::from_secs(120);
    let strategy: Strategy = STRATEGIES[strategy].1.parse().unwrap();
    let outcome = sim::run(1, RANKS, move |transport| {
        let comm = Communicator::new(transport);
        let (runtime, is_late) = (comm.runtime().clone(), comm.rank() == RANKS - 1);
        let be_late = || {
            if is_late {
                runtime.sleep(LATE)
            }
        };
        let options = TrainerOptions::new(strategy).with_micro_batches(MICRO_BATCHES);
        let mut trainer = options.build(comm, blocks(), PlainVectors).unwrap();
        trainer.communicator_mut().set_timeout(HOUR);
        be_late();
        trainer.step(MICRO_BATCHES, |index| batch(0, index)).unwrap();
        be_late();
        trainer.gradient_norm().unwrap();
        be_late();
        trainer.update(&mut sgd()).unwrap();
        be_late();
        let loss = |index, output| Ok(squared_error(micro_batch(9, index).1)(output)?.0);
        trainer.synchronise_parameters().unwrap();
        trainer.evaluate(MICRO_BATCHES, |index| Ok(micro_batch(9, index).0), loss).unwrap();
        be_late();
        trainer.for_each_parameter(&mut |_, _| ()).unwrap();
    });
    assert!(outcome.elapsed >= 5 * LATE, "{:?}", outcome.elapsed);
}

/// Ranks compare the orders of their reductions.
#[rstest]
fn a_reduction_order_that_one_rank_sets_alone_is_an_error(
    #[values(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)] strategy: usize,
) {
    let strategies = STRATEGIES.map(|(_, strategy)| strategy);
    let strategy = strategies.get(strategy).copied().unwrap_or("pipeline:1f1b:1");
    let strategy: Strategy = strategy.parse().unwrap();
    let results = run_at_once(RANKS, move |comm| {
        let options = TrainerOptions::new(strategy).with_micro_batches(MICRO_BATCHES);
        // Another rank can have aborted the job before this one is ready.
        let mut trainer = options.build(comm, blocks(), PlainVectors)?;
        if trainer.rank() == 1 {
            trainer.communicator_mut().set_order(ReductionOrder::Any);
        }
        trainer.step(MICRO_BATCHES, |index| batch(0, index))?;
        trainer.update(&mut sgd())?;
        trainer.synchronise_parameters()
    });
    let errors: Vec<String> =
        results.into_iter().filter_map(Result::err).map(|error| Chain(&error).to_string()).collect();
    assert!(errors.iter().any(|error| error.contains("order of reduction")), "{errors:?}");
}

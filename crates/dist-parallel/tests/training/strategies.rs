//! One test for all strategies whose ranks compute whole micro-batches.

use std::panic::{AssertUnwindSafe, catch_unwind};

use dist_collectives::Communicator;
use dist_parallel::checkpoint::Checkpoints;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, Precision, ShardingStrategy};
use dist_parallel::optim::{AdamW, AdamWOptions, Sgd, SgdOptions};
use dist_parallel::pipeline::PlainVectors;
use dist_parallel::trainer::{Trainer, TrainerOptions};
use dist_parallel::{BoxError, Error, FloatType, Params, Sequence, Values, ValuesMut};
use dist_transport::sim;
use rstest::rstest;

use crate::errors::run_at_once;
use crate::join::Echo;
use crate::plain::{Rows, bits, micro_batch, model, squared_error};

/// Returns a trainer. `no_shard` is [`Fsdp`] without shards, which no [`Strategy`](dist_parallel::trainer::Strategy) builds.
fn trainer(comm: Communicator, strategy: &str, model: Sequence<Rows>) -> Box<dyn Trainer<Rows>> {
    if strategy == "no_shard" {
        return Box::new(Fsdp::new(comm, model, &FsdpOptions::new(ShardingStrategy::NoShard)).unwrap());
    }
    TrainerOptions::new(strategy.parse().unwrap()).build(comm, model, PlainVectors).unwrap()
}

/// The loss of [`Echo`] and its gradient.
type EchoLoss = Result<(f32, Rows), BoxError>;

/// Returns a micro-batch of [`Echo`] with this gradient, which is also its loss.
fn echo(value: f32) -> Result<(Rows, impl FnOnce(Rows) -> EchoLoss), BoxError> {
    Ok((vec![value; 3], move |output| Ok((value, output))))
}

/// Returns the mean gradient of [`Echo`]: a step of SGD subtracts it from the parameters, which are zero.
fn mean_gradient(trainer: &mut dyn Trainer<Rows>) -> f32 {
    let options = SgdOptions { learning_rate: 1.0, ..SgdOptions::default() };
    trainer.update(&mut Sgd::new(options).unwrap()).unwrap();
    let mut found = Vec::new();
    let mut read = |_, values: Values<'_>| {
        let Values::F32(values) = values else { panic!("the parameters are f32") };
        found.extend_from_slice(values);
    };
    trainer.for_each_parameter(&mut read).unwrap();
    assert_eq!(found, [found[0]; 3]);
    -found[0]
}

#[rstest]
fn accumulated_micro_batches_count_as_those_of_one_larger_step(
    #[values("ddp", "zero1", "zero2", "fsdp")] strategy: &'static str,
    #[values(1, 2, 3)] ranks: usize,
) {
    let run = |parts: &'static [usize]| {
        let program = move |transport| {
            let mut trainer = trainer(Communicator::new(transport), strategy, model(7));
            let (rank, mut done) = (trainer.rank(), 0);
            // A rank computes its micro-batches in the order of the calls, whatever their numbers are.
            let mut next = |_| {
                let (input, target) = micro_batch(100 * rank, done);
                done += 1;
                Ok((input, squared_error(target)))
            };
            let (last, before) = parts.split_last().unwrap();
            before.iter().for_each(|part| trainer.accumulate(part * ranks, &mut next).unwrap());
            let report = trainer.step(last * ranks, &mut next).unwrap();
            assert_eq!(report.micro_batches, 6 * ranks);
            trainer.update(&mut AdamW::new(AdamWOptions::default()).unwrap()).unwrap();
            let mut trained = model(7);
            trainer.copy_parameters(&mut trained).unwrap();
            (report.loss.to_bits(), bits(&trained))
        };
        sim::run(4, ranks, program).results
    };
    let whole = run(&[6]);
    assert_eq!(run(&[3, 3]), whole);
    assert_eq!(run(&[1, 2, 0, 2, 1]), whole);
    assert_eq!(run(&[4, 2, 0]), whole, "a step may be all that is communicated");
}

#[rstest]
fn accumulated_micro_batches_count_in_a_join(
    #[values("ddp", "zero1", "zero2", "fsdp", "hybrid:2")] strategy: &'static str,
    #[values(false, true)] more: bool,
) {
    let outcome = sim::run(1, 4, move |transport| {
        let comm = Communicator::new(transport);
        let own = if more { comm.rank() } else { 0 };
        let mut trainer = trainer(comm, strategy, Echo::model());
        trainer.accumulate(4, |_| echo(1.0)).unwrap();
        let report = trainer.join(own, |_| echo(6.0)).unwrap().unwrap();
        assert_eq!(mean_gradient(&mut *trainer), report.loss);
        (report.loss, report.micro_batches, trainer.join(0, |_| echo(9.0)).unwrap().is_none())
    });
    assert_eq!(outcome.results, [if more { (4.0, 10, true) } else { (1.0, 4, true) }; 4]);
}

#[rstest]
fn a_join_and_a_step_in_one_step_is_an_error_on_every_rank_and_training_continues(
    #[values("ddp", "zero1", "zero2", "fsdp")] strategy: &'static str,
) {
    let results = run_at_once(3, move |comm| {
        let rank = comm.rank();
        let mut trainer = trainer(comm, strategy, Echo::model());
        let refused = match rank {
            2 => trainer.join(2, |_| echo(1.0)).map(drop),
            _ => trainer.step(6, |_| echo(1.0)).map(drop),
        };
        (refused, trainer.join(rank, |_| echo(1.0)).unwrap().map(|report| report.micro_batches))
    });
    for (refused, next) in &results {
        let told = refused.as_ref().unwrap_err().to_string();
        let asked = "a join with its own micro-batches, rank 0 for a step of 6 micro-batches";
        assert_eq!(told, format!("the ranks called for different steps: rank 2 for {asked}"));
        assert_eq!(*next, Some(3));
    }
}

/// With weights on only some ranks, each would use another divisor.
#[rstest]
fn zero_and_partial_weights_are_refused_and_training_continues(
    #[values("ddp", "zero1", "zero2", "fsdp")] strategy: &'static str,
) {
    let results = run_at_once(2, move |comm| {
        let rank = comm.rank();
        let mut trainer = trainer(comm, strategy, Echo::model());
        let weighted = |weight: u64| move |_| Ok((vec![1.0; 3], move |output| Ok(((1.0, weight), output))));
        let refused = trainer.step(2, weighted(0)).unwrap_err();
        assert!(matches!(refused, Error::ZeroWeight { micro_batches: 2 }), "{refused}");
        assert_eq!(trainer.step(2, weighted(4)).unwrap().loss, 0.25);
        let differ = match rank {
            0 => trainer.step(2, |_| echo(1.0)),
            _ => trainer.step(2, weighted(7)),
        };
        let asked = "a step of 2 micro-batches with weights, rank 0 for a step of 2 micro-batches";
        let expected = format!("the ranks called for different steps: rank 1 for {asked}");
        assert_eq!(differ.unwrap_err().to_string(), expected);
        trainer.step(2, |_| echo(1.0)).unwrap().loss
    });
    assert_eq!(results, [1.0; 2]);
}

#[derive(Clone, Copy, Debug)]
enum Call {
    Accumulate,
    AccumulateWeighted,
    Step,
    StepWeighted,
    Join,
}

#[rstest]
fn weighted_micro_batches_are_not_mixed_with_others(
    #[values("ddp", "zero1", "zero2", "fsdp")] strategy: &'static str,
    #[values(
        (Call::Accumulate, Call::AccumulateWeighted),
        (Call::Accumulate, Call::StepWeighted),
        (Call::AccumulateWeighted, Call::Accumulate),
        (Call::AccumulateWeighted, Call::Step),
        (Call::AccumulateWeighted, Call::Join)
    )]
    calls: (Call, Call),
) {
    let results = run_at_once(1, move |comm| {
        let mut trainer = trainer(comm, strategy, Echo::model());
        let weighted = |_| Ok((vec![1.0; 3], |output| Ok(((1.0, 7), output))));
        let mut call = |call| match call {
            Call::Accumulate => trainer.accumulate(2, |_| echo(1.0)),
            Call::AccumulateWeighted => trainer.accumulate(2, weighted),
            Call::Step => trainer.step(2, |_| echo(1.0)).map(drop),
            Call::StepWeighted => trainer.step(2, weighted).map(drop),
            Call::Join => trainer.join(1, |_| echo(1.0)).map(drop),
        };
        call(calls.0).unwrap();
        call(calls.1)
    });
    assert!(matches!(results[0], Err(Error::PartlyWeighted)), "{results:?}");
}

/// The second attempt can have other arguments.
#[rstest]
fn a_step_that_panicked_leaves_nothing_for_the_next(
    #[values("ddp", "no_shard", "zero1", "zero2", "fsdp", "hybrid:2")] strategy: &'static str,
    #[values((false, false), (false, true), (true, false), (true, true))] accumulates: (bool, bool),
    #[values(false, true)] joins: bool,
    #[values(false, true)] in_the_loss: bool,
) {
    let outcome = sim::run(1, 4, move |transport| {
        let mut trainer = trainer(Communicator::new(transport), strategy, Echo::model());
        let mut attempt = |fails: bool, accumulates: bool| {
            let mut round = 0;
            let mut batch = |_| {
                let fails_now = fails && round == 1;
                assert!(!fails_now || in_the_loss, "the second micro-batch cannot be read");
                let value = [1.0_f32, 5.0][round];
                round += 1;
                let loss = move |output| {
                    assert!(!fails_now, "the second micro-batch has no loss");
                    Ok((value, output))
                };
                Ok((vec![value; 3], loss))
            };
            if accumulates {
                trainer.accumulate(8, &mut batch).unwrap();
            }
            let own = if accumulates { 0 } else { 2 };
            let report = match joins {
                true => trainer.join(own, batch).unwrap().unwrap(),
                false => trainer.step(4 * own, batch).unwrap(),
            };
            (report.micro_batches, report.loss)
        };
        catch_unwind(AssertUnwindSafe(|| attempt(true, accumulates.0))).unwrap_err();
        let report = attempt(false, accumulates.1);
        (report, mean_gradient(&mut *trainer))
    });
    assert_eq!(outcome.results, [((8, 3.0), 3.0); 4]);
}

/// Instead of another step, the caller updates. This aborts the job, so a rank whose step has not panicked gets an
/// error.
#[rstest]
fn gradients_of_a_step_that_panicked_cannot_be_used(
    #[values("ddp", "zero1", "zero2", "fsdp", "hybrid:2")] strategy: &'static str,
    #[values(false, true)] in_the_loss: bool,
) {
    let outcome = sim::run(1, 4, move |transport| {
        let mut round = 0;
        let batch = |_| {
            round += 1;
            let fails_now = round == 2;
            assert!(!fails_now || in_the_loss, "the second micro-batch cannot be read");
            let loss = move |output| {
                assert!(!fails_now, "the second micro-batch has no loss");
                Ok((1.0_f32, output))
            };
            Ok((vec![1.0; 3], loss))
        };
        let options = TrainerOptions::new(strategy.parse().unwrap());
        // Another rank may have aborted the job before this one has started.
        let built = options.build(Communicator::new(transport), Echo::model(), PlainVectors);
        let Ok(mut trainer) = built else { return true };
        let stepped = catch_unwind(AssertUnwindSafe(|| trainer.step(8, batch).map(drop)));
        let clipped = trainer.clip_gradients(1.0).map(drop);
        let updated = trainer.update(&mut Sgd::new(SgdOptions::default()).unwrap());
        let refused = |result: &Result<(), Error>| matches!(result, Err(Error::StepPanicked));
        match stepped {
            Ok(stepped) => stepped.is_err(),
            Err(_panic) => refused(&clipped) && refused(&updated),
        }
    });
    assert_eq!(outcome.results, [true; 4]);
}

/// The model has the rounded master values, except where the program has written others.
#[rstest]
fn values_that_the_program_writes_into_the_model_are_saved_and_trained(
    #[values("ddp", "zero1", "zero2", "local_sgd:1", "pipeline:1f1b:1")] strategy: &'static str,
) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let outcome = sim::run(1, 2, move |transport| {
        let precision = Precision { master: Some(FloatType::F64), reduce: None };
        let options =
            TrainerOptions::new(strategy.parse().unwrap()).with_precision(precision).with_micro_batches(2);
        let mut trainer = options.build(Communicator::new(transport), Echo::model(), PlainVectors).unwrap();
        let mut checkpoints = Checkpoints::at(&path);
        let mut write = |values: ValuesMut<'_>| match values {
            ValuesMut::F32(values) => values[0] = 64.0,
            other => panic!("the model is not {}", other.dtype()),
        };
        let written = match trainer.pipeline_mut() {
            Some(pipeline) => pipeline.stages_mut().try_for_each(|(_, stage)| stage.write(0, &mut write)),
            None => trainer.model_mut().unwrap().write(0, &mut write),
        };
        written.unwrap();
        trainer.save(&mut checkpoints, None, 1).unwrap();
        let step = |trainer: &mut dyn Trainer<Rows>| {
            trainer.step(2, |_| echo(0.25)).unwrap();
            trainer.update(&mut Sgd::new(SgdOptions { learning_rate: 1.0, ..SgdOptions::default() }).unwrap())
        };
        let mut all = Vec::new();
        for loads in [false, true] {
            if loads {
                trainer.load(&mut checkpoints, None).unwrap();
            }
            step(&mut *trainer).unwrap();
            let mut read = |_, values: Values<'_>| match values {
                Values::F32(values) => all.extend_from_slice(values),
                other => panic!("the model is not {}", other.dtype()),
            };
            trainer.for_each_parameter(&mut read).unwrap();
        }
        all
    });
    assert_eq!(outcome.results, [(); 2].map(|()| [[63.75, -0.25, -0.25]; 2].concat()));
}

//! Invalid arguments of pipelines, and the errors of all ranks if one fails.

use std::time::Duration;

use dist_collectives::Communicator;
use dist_collectives::transport::Chain;
use dist_parallel::checkpoint::Checkpoints;
use dist_parallel::model::{Ready, Saved};
use dist_parallel::pipeline::{Action, Flaw, Pipeline, PlainVectors, ScheduleKind, split_into_stages};
use dist_parallel::step::TrainingCall;
use dist_parallel::{Block, BoxError, Error, Sequence};
use dist_transport::sim::{self, Fault, Link, Network, SimTransport, When};
use rstest::rstest;

use crate::mesh::on_mesh;
use crate::model::{BLOCKS, deep, without_parameters};
use crate::plain::{Linear, Rows, micro_batch, squared_error};
use crate::training::train;

const F: ScheduleKind = ScheduleKind::OneForwardOneBackward;

fn refused(
    ranks: usize,
    make: impl Fn(Communicator) -> Result<Pipeline<Rows>, Error> + Send + Sync + 'static,
) -> Vec<Error> {
    let outcome = sim::run(1, ranks, move |transport| make(Communicator::new(transport)).unwrap_err());
    assert!(outcome.elapsed < Duration::from_secs(1), "a rank waited for {:?}", outcome.elapsed);
    outcome.results
}

#[test]
fn contradicting_arguments_are_rejected() {
    let four = || split_into_stages(BLOCKS, 4).unwrap();
    for error in
        refused(3, move |comm| Pipeline::new(comm, deep(1), F.schedule(4, 4)?, &four(), PlainVectors))
    {
        assert!(matches!(error, Error::PipelineRanks { ranks: 4, world_size: 3 }), "{error}");
    }
    let cuts = [
        vec![0..10, 10..18],
        vec![0..10, 11..19],
        vec![0..10, 10..10],
        split_into_stages(BLOCKS, 1).unwrap(),
        vec![0..19, 0..19],
    ];
    for cut in cuts {
        let given = cut.clone();
        for error in
            refused(2, move |comm| Pipeline::new(comm, deep(1), F.schedule(2, 4)?, &given, PlainVectors))
        {
            assert!(
                matches!(&error, Error::Stages { stages: 2, blocks: BLOCKS, given } if *given == cut),
                "{error}"
            );
        }
    }
    for error in refused(2, move |comm| {
        let schedule = F.schedule(2, 4)?;
        let mut actions = schedule.actions().to_vec();
        actions[1].pop();
        Pipeline::new(comm, deep(1), schedule.with_actions(actions), &[0..1, 1..19], PlainVectors)
    }) {
        let missing = Flaw::Missing { action: Action::ReduceGradients(1) };
        assert!(matches!(&error, Error::PipelineSchedule(flaw) if *flaw == missing), "{error}");
    }
}

#[test]
fn ranks_with_different_requests_get_an_error() {
    type Wanted = fn(usize) -> (ScheduleKind, usize, usize);
    let different: [Wanted; 3] = [
        |rank| (if rank == 1 { ScheduleKind::Gpipe } else { F }, 4, 9),
        |rank| (F, 4 + rank, 9),
        |rank| (F, 4, 9 + rank),
    ];
    for wanted in different {
        for error in refused(2, move |comm| {
            let (kind, micro_batches, cut) = wanted(comm.rank());
            Pipeline::new(comm, deep(1), kind.schedule(2, micro_batches)?, &[0..cut, cut..19], PlainVectors)
        }) {
            assert!(matches!(error, Error::OptionsDiffer { rank: 1, .. }), "{error}");
        }
    }
}

/// One rank alone has a schedule for more ranks, stages without the last block, or a model with tied parameters.
#[rstest]
#[case::ranks(4, BLOCKS, false)]
#[case::stages(3, BLOCKS - 1, false)]
#[case::blocks(3, BLOCKS, true)]
fn inconsistent_arguments_on_one_rank_are_an_error_on_all_ranks(
    #[case] ranks: usize,
    #[case] blocks: usize,
    #[case] in_one: bool,
) {
    for error in refused(3, move |comm| {
        let (ranks, blocks, in_one) =
            if comm.rank() == 2 { (ranks, blocks, in_one) } else { (3, BLOCKS, false) };
        let model = if in_one { Sequence::new(vec![Box::new(deep(1))])? } else { deep(1) };
        let stages = split_into_stages(blocks, ranks)?;
        Pipeline::new(comm, model, F.schedule(ranks, 4)?, &stages, PlainVectors)
    }) {
        assert!(matches!(error, Error::OptionsDiffer { rank: 2, .. }), "{error}");
    }
}

/// A block that changes an activation or a gradient, or fails.
struct Odd {
    forward: fn(usize, Rows) -> Result<Rows, BoxError>,
    backward: fn(usize, Rows) -> Result<Option<Rows>, BoxError>,
    calls: [usize; 2],
}

impl Odd {
    fn new() -> Self {
        Self { forward: |_, rows| Ok(rows), backward: |_, rows| Ok(Some(rows)), calls: [0; 2] }
    }
}

without_parameters!(Odd);

impl Block<Rows> for Odd {
    fn forward(&mut self, input: Rows) -> Result<(Rows, Saved), BoxError> {
        self.calls[0] += 1;
        Ok(((self.forward)(self.calls[0] - 1, input)?, Saved::new(())))
    }
    fn backward(&mut self, _: Saved, gradient: Rows, _: &mut Ready<'_>) -> Result<Option<Rows>, BoxError> {
        self.calls[1] += 1;
        (self.backward)(self.calls[1] - 1, gradient)
    }
}

/// Returns the result of a step on each rank, with three stages. The middle one misbehaves.
fn step_with(odd: impl Fn() -> Odd + Send + Sync + 'static) -> Vec<Error> {
    end_of(odd, |pipeline| {
        let step = pipeline.step(
            |index| Ok(micro_batch(0, index).0),
            |index, output| squared_error(micro_batch(0, index).1)(output),
        );
        step.unwrap_err()
    })
}

/// Returns the result of an evaluation on each rank.
fn evaluate_with(odd: impl Fn() -> Odd + Send + Sync + 'static) -> Vec<Error> {
    end_of(odd, |pipeline| {
        pipeline.evaluate(6, |index| Ok(micro_batch(0, index).0), |_, _| Ok(0.0)).unwrap_err()
    })
}

fn end_of(
    odd: impl Fn() -> Odd + Send + Sync + 'static,
    call: impl Fn(&mut Pipeline<Rows>) -> Error + Send + Sync + 'static,
) -> Vec<Error> {
    let outcome = sim::run(1, 3, move |transport| {
        let blocks: Vec<Box<dyn Block<Rows>>> =
            vec![Box::new(Linear::new("a", 3, 3, 1)), Box::new(odd()), Box::new(Linear::new("b", 3, 2, 2))];
        let model = Sequence::new(blocks).unwrap();
        let stages = [0..1, 1..2, 2..3];
        let schedule = F.schedule(3, 4).unwrap();
        let comm = Communicator::new(transport);
        let mut pipeline = Pipeline::new(comm, model, schedule, &stages, PlainVectors).unwrap();
        call(&mut pipeline)
    });
    assert!(outcome.elapsed < Duration::from_secs(1), "a rank waited for {:?}", outcome.elapsed);
    outcome.results
}

/// Checks that every rank except `culprit` is told that it aborted the job.
#[track_caller]
fn all_other_ranks_get_the_error(results: &[Error], culprit: usize) {
    for (rank, error) in results.iter().enumerate().filter(|(rank, _)| *rank != culprit) {
        let Error::Communication(source) = error else { panic!("rank {rank}: {error}") };
        assert_eq!(source.peer(), Some(culprit), "rank {rank}: {source}");
    }
}

#[test]
fn a_stage_that_fails_ends_the_job_for_all() {
    let results = step_with(|| Odd {
        forward: |call, rows| if call == 2 { Err("this stage has had enough".into()) } else { Ok(rows) },
        ..Odd::new()
    });
    assert!(matches!(&results[1], Error::Compute(source) if source.to_string().contains("had enough")));
    all_other_ranks_get_the_error(&results, 1);
}

#[test]
fn a_stage_that_fails_in_an_evaluation_ends_the_job_for_all() {
    let results = evaluate_with(|| Odd {
        forward: |call, rows| if call == 4 { Err("this stage has had enough".into()) } else { Ok(rows) },
        ..Odd::new()
    });
    assert!(matches!(&results[1], Error::Compute(source) if source.to_string().contains("had enough")));
    all_other_ranks_get_the_error(&results, 1);
}

#[rstest]
fn an_input_or_a_loss_that_fails_in_an_evaluation_ends_the_job_for_all(#[values(0, 2)] culprit: usize) {
    let results = end_of(Odd::new, move |pipeline| {
        let fails =
            |at: usize, index: usize| if culprit == at && index == 3 { Err("no more") } else { Ok(()) };
        let input = |index| {
            fails(0, index)?;
            Ok(micro_batch(0, index).0)
        };
        let loss = |index, _| {
            fails(2, index)?;
            Ok(0.0)
        };
        pipeline.evaluate(6, input, loss).unwrap_err()
    });
    assert!(matches!(&results[culprit], Error::Compute(source) if source.to_string() == "no more"));
    all_other_ranks_get_the_error(&results, culprit);
}

/// In one of several pipelines a rank calls for another step. Training continues afterwards.
#[rstest]
fn ranks_that_evaluate_different_numbers_get_an_error_and_none_waits(
    #[values(0, 1, 2, 3)] other: usize,
    #[values(0, 4, 6)] number: usize,
) {
    let outcome = sim::run(1, 4, move |transport| {
        let world = Communicator::new(transport);
        let own = if world.rank() == other { number } else { 5 };
        let mut pipeline = on_mesh(world, F.schedule(2, 1).unwrap(), [2, 1], false);
        let evaluate = |pipeline: &mut Pipeline<Rows>, count| {
            pipeline.evaluate(count, |index| Ok(micro_batch(0, index).0), |_, _| Ok(1.0))
        };
        let differ = evaluate(&mut pipeline, own).unwrap_err();
        let nothing = evaluate(&mut pipeline, 0).unwrap_err();
        let too_much = evaluate(&mut pipeline, usize::MAX).unwrap_err();
        assert!(matches!(nothing, Error::NoMicroBatches), "{nothing}");
        assert!(matches!(too_much, Error::NoSchedule { ranks: 2, .. }), "{too_much}");
        let report = evaluate(&mut pipeline, 5).unwrap();
        assert_eq!((report.loss, report.micro_batches), (1.0, 5));
        train(&mut pipeline);
        differ
    });
    assert!(outcome.elapsed < Duration::from_secs(1), "a rank waited for {:?}", outcome.elapsed);
    // This is the first rank that differs from the first of all, which can be the odd one itself.
    let named = other.max(1);
    for error in outcome.results {
        let Error::StepsDiffer { rank, there, on_rank_0 } = error else { panic!("{error}") };
        let expected = if other == 0 { (named, 5, number) } else { (named, number, 5) };
        assert_eq!((rank, there.micro_batches, on_rank_0.micro_batches), expected);
        assert_eq!((there.call, there.weighted), (TrainingCall::Evaluation, false));
    }
}

#[test]
fn an_activation_of_another_shape_is_an_error_with_both_shapes() {
    let results = step_with(|| Odd {
        forward: |call, mut rows| {
            rows.extend(vec![0.0; 3 * usize::from(call == 1)]);
            Ok(rows)
        },
        ..Odd::new()
    });
    let Error::ActivationShape { stage: 1, expected, got } = &results[1] else { panic!("{:?}", results[1]) };
    assert_eq!((expected.to_string(), got.to_string()), ("[6] f32".to_owned(), "[9] f32".to_owned()));
    all_other_ranks_get_the_error(&results, 1);
}

#[test]
fn a_gradient_with_another_shape_than_its_activation_is_an_error_with_both_shapes() {
    let results = step_with(|| Odd { backward: |_, rows| Ok(Some(rows[1..].to_vec())), ..Odd::new() });
    let Error::GradientShape { stage: 1, expected, got } = &results[1] else { panic!("{:?}", results[1]) };
    assert_eq!((&expected.shape[..], &got.shape[..]), (&[6][..], &[5][..]));
    all_other_ranks_get_the_error(&results, 1);
}

#[test]
fn a_later_stage_must_have_a_gradient_of_its_input() {
    let results = step_with(|| Odd { backward: |_, _| Ok(None), ..Odd::new() });
    assert!(matches!(results[1], Error::NoInputGradient { stage: 1 }), "{:?}", results[1]);
    all_other_ranks_get_the_error(&results, 1);
}

/// Trains and evaluates three stages long enough for a fault to happen meanwhile.
fn twenty_steps(transport: SimTransport) -> Result<(), Error> {
    let (comm, stages) = (Communicator::new(transport), split_into_stages(BLOCKS, 3)?);
    let mut pipeline =
        Pipeline::new(comm, deep(7), ScheduleKind::Zb1p.schedule(3, 4)?, &stages, PlainVectors)?;
    for step in 0..20 {
        pipeline.step(
            |index| Ok(micro_batch(step, index).0),
            |index, output| squared_error(micro_batch(step, index).1)(output),
        )?;
        pipeline.evaluate(5, |index| Ok(micro_batch(step, index).0), |_, _| Ok(0.0))?;
    }
    Ok(())
}

#[rstest]
fn an_error_names_the_neighbour_by_its_number_in_the_pipeline(
    #[values((0, 1), (1, 2), (2, 1))] (from, to): (usize, usize),
) {
    let fault = Fault::Corrupt { from, to, byte: 0 };
    let link = Link::new(Duration::from_millis(1), 1 << 30);
    let network =
        Network::new(3).with_memory_link(link).with_fault(When::At(Duration::from_millis(50)), fault);
    let outcome = network.try_run(twenty_steps).unwrap_or_else(|failure| panic!("{failure}"));
    assert!(!outcome.faults.is_empty(), "the fault has happened");
    for (rank, result) in outcome.results.iter().enumerate() {
        let Some(Err(Error::Communication(source))) = result else { panic!("rank {rank}: {result:?}") };
        assert_eq!(source.peer(), Some(from), "rank {rank}: {source}");
    }
}

#[rstest]
fn survivors_name_a_rank_that_was_killed(
    #[values(0, 1, 2)] killed: usize,
    #[values(1, 10, 40, 100)] operation: u64,
) {
    let when = When::Operation { rank: killed, number: operation };
    let network = Network::new(3).with_external_coordinator().with_fault(when, Fault::Kill { rank: killed });
    let outcome = network.try_run(twenty_steps).unwrap_or_else(|failure| panic!("{failure}"));
    for (rank, result) in outcome.results.iter().enumerate().filter(|(rank, _)| *rank != killed) {
        let Some(Err(Error::Communication(source))) = result else { panic!("rank {rank}: {result:?}") };
        assert_eq!(source.peer(), Some(killed), "rank {rank}: {source}");
    }
    assert!(outcome.results[killed].is_none());
}

type Call = (&'static str, fn(&mut Pipeline<Rows>, &mut Checkpoints) -> Result<(), Error>);

/// The calls of all ranks.
const CALLS: [Call; 11] = [
    ("step", |pipeline, _| step(pipeline)),
    ("join", |pipeline, _| {
        let loss = |index, output| squared_error(micro_batch(0, index).1)(output);
        pipeline.join(1, |index| Ok(micro_batch(0, index).0), loss).map(drop)
    }),
    ("evaluate", |pipeline, _| {
        pipeline.evaluate(2, |index| Ok(micro_batch(0, index).0), |_, _| Ok(0.0_f32)).map(drop)
    }),
    ("update", |pipeline, _| pipeline.update(&mut crate::model::optimizer())),
    ("update_if_finite", |pipeline, _| pipeline.update_if_finite(&mut crate::model::optimizer()).map(drop)),
    ("gradient_norm", |pipeline, _| pipeline.gradient_norm().map(drop)),
    ("clip_gradients", |pipeline, _| pipeline.clip_gradients(1.0).map(drop)),
    ("for_each", |pipeline, _| pipeline.for_each_parameter(|_, _| ())),
    ("timeline", |pipeline, _| pipeline.timeline().map(drop)),
    ("save", |pipeline, checkpoints| checkpoints.save(pipeline, None, 1)),
    ("load", |pipeline, checkpoints| checkpoints.load(pipeline, None).map(drop)),
];

fn step(pipeline: &mut Pipeline<Rows>) -> Result<(), Error> {
    let loss = |index, output| squared_error(micro_batch(0, index).1)(output);
    pipeline.step(|index| Ok(micro_batch(0, index).0), loss).map(drop)
}

/// The last `others` ranks make another call than the rest. All then continue with a step, because some calls need
/// no other rank.
#[rstest]
#[case::two_stages([1, 1], false, 1)]
#[case::a_stage_of_the_second_pipeline([2, 1], false, 1)]
#[case::the_second_pipeline([2, 1], false, 2)]
#[case::sharded_stages([1, 2], true, 2)]
fn ranks_that_call_different_functions_get_an_error_at_once_that_names_both(
    #[case] degrees: [usize; 2],
    #[case] is_divided: bool,
    #[case] others: usize,
    #[values(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)] first: usize,
) {
    let (first, on_first) = CALLS[first];
    for (second, on_others) in CALLS.into_iter().filter(|(second, _)| *second != first) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        let ranks = 2 * degrees[0] * degrees[1];
        let outcome = sim::run(1, ranks, move |transport| {
            let world = Communicator::new(transport);
            let call = if world.rank() + others < ranks { on_first } else { on_others };
            let mut pipeline = on_mesh(world, F.schedule(2, 2).unwrap(), degrees, is_divided);
            // A rank that is slower gets the error in this step already.
            step(&mut pipeline)?;
            call(&mut pipeline, &mut Checkpoints::at(&path))?;
            step(&mut pipeline)?;
            step(&mut pipeline)
        });
        assert!(outcome.elapsed < Duration::from_secs(1), "{first} and {second}: {:?}", outcome.elapsed);
        for result in outcome.results {
            let error = result.unwrap_err();
            let text = error.to_string();
            // A save and a load compare their requests: rank 0 saves step 1, rank 1 loads the newest checkpoint.
            let is_named =
                |name: &str| text.contains(&format!("called {name}")) || text.contains(&format!("{name}s "));
            assert!(is_named(first) && is_named(second), "{first} and {second}: {}", Chain(&error));
        }
    }
}

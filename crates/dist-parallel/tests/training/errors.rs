//! The errors of all ranks if one fails: at once, not at the deadline.

use std::error::Error as _;
use std::time::Duration;

use dist_collectives::Communicator;
use dist_collectives::transport::Chain;
use dist_parallel::fsdp::{Fsdp, FsdpOptions, ShardingStrategy};
use dist_parallel::local_sgd::{LocalSgd, LocalSgdOptions};
use dist_parallel::model::{Ready, Saved};
use dist_parallel::optim::{Momentum, Sgd, SgdOptions};
use dist_parallel::{
    Block, BoxError, Ddp, DdpOptions, Error, FloatType, ParamInfo, Params, Sequence, Values, ValuesMut,
};
use dist_transport::sim;
use rstest::rstest;

use crate::ddp::options;
use crate::plain::{Bag, batch, micro_batch, model, squared_error};

/// Runs ranks and checks that the simulated clock stays far from a deadline.
pub(crate) fn run_at_once<T: Send + 'static>(
    ranks: usize,
    program: impl Fn(Communicator) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let outcome = sim::run(11, ranks, move |transport| program(Communicator::new(transport)));
    assert!(outcome.elapsed < Duration::from_secs(1), "a rank waited for {:?}", outcome.elapsed);
    outcome.results
}

fn infos() -> Vec<ParamInfo> {
    (0..9).map(|index| ParamInfo::new(format!("layer.{index}"), [2, 3], FloatType::F32)).collect()
}

#[rstest]
#[case::name(|infos: &mut Vec<ParamInfo>| infos[4].name = "other".into(), 4, "other [2, 3] f32")]
#[case::shape(|infos: &mut Vec<ParamInfo>| infos[0].shape = vec![3, 2], 0, "layer.0 [3, 2] f32")]
#[case::dtype(|infos: &mut Vec<ParamInfo>| infos[8].dtype = FloatType::Bf16, 8, "layer.8 [2, 3] bf16")]
#[case::frozen(|infos: &mut Vec<ParamInfo>| infos[5].trainable = false, 5, "layer.5 [2, 3] f32, frozen")]
#[case::tied(
    |infos: &mut Vec<ParamInfo>| infos[7].same_as = Some(2), 7, "layer.7 [2, 3] f32, tied to number 2"
)]
#[case::order(|infos: &mut Vec<ParamInfo>| infos.swap(3, 6), 3, "layer.6 [2, 3] f32")]
#[case::fewer(|infos: &mut Vec<ParamInfo>| infos.truncate(6), 6, "missing")]
#[case::none(|infos: &mut Vec<ParamInfo>| infos.clear(), 0, "missing")]
fn every_rank_names_the_first_parameter_of_models_that_differ(
    #[case] change: fn(&mut Vec<ParamInfo>),
    #[case] first: usize,
    #[case] other: &'static str,
    #[values(2, 3, 5)] ranks: usize,
    #[values(false, true)] rank_0_is_the_other: bool,
) {
    let odd = if rank_0_is_the_other { 0 } else { ranks - 1 };
    let results = run_at_once(ranks, move |comm| {
        let mut infos = infos();
        if comm.rank() == odd {
            change(&mut infos);
        }
        Ddp::new(comm, Bag::new(infos, 1), DdpOptions::default()).unwrap_err()
    });
    let usual = format!("layer.{first} [2, 3] f32");
    for result in results {
        let Error::ModelsDiffer { parameter, index, on_rank_0, rank, on_rank } = result else {
            panic!("{result:?}")
        };
        assert_eq!(index, first);
        let (expected_0, expected) = if odd == 0 { (other, &*usual) } else { (&*usual, other) };
        assert_eq!((&*on_rank_0, &*on_rank), (expected_0, expected));
        assert_eq!(rank, if odd == 0 { 1 } else { odd });
        let named = if expected_0 == "missing" { expected } else { expected_0 };
        assert!(named.starts_with(&parameter) && !parameter.is_empty(), "{parameter}");
    }
}

#[test]
fn options_that_differ_are_an_error_on_every_rank() {
    let results = run_at_once(3, |comm| {
        let options = options(if comm.rank() == 2 { 10 } else { 20 });
        Ddp::new(comm, model(1), options).map(drop)
    });
    assert!(
        results.iter().all(|result| matches!(result, Err(Error::OptionsDiffer { rank: 2, .. }))),
        "{results:?}"
    );
}

#[rstest]
#[case::later(0, 0, "the other does not come first")]
#[case::nowhere(1, 9, "there is no such parameter")]
#[case::chained(3, 2, "the other is itself tied")]
fn ties_that_make_no_sense_are_refused(
    #[case] index: usize,
    #[case] same_as: usize,
    #[case] expected: &'static str,
) {
    let results = run_at_once(2, move |comm| {
        let mut infos = infos();
        infos[2].same_as = Some(1);
        infos[index].same_as = Some(same_as);
        Ddp::new(comm, Bag::new(infos, 1), DdpOptions::default()).map(drop)
    });
    for result in results {
        assert!(matches!(&result, Err(Error::CannotTie { reason, .. }) if *reason == expected), "{result:?}");
    }
}

#[test]
fn two_parameters_of_one_name_are_refused() {
    let results = run_at_once(2, |comm| {
        let mut infos = infos();
        infos[5].name = "layer.1".into();
        Ddp::new(comm, Bag::new(infos, 1), DdpOptions::default()).map(drop)
    });
    let refused = |result: &Result<(), Error>| matches!(result, Err(Error::DuplicateName { name }) if name == "layer.1");
    assert!(results.iter().all(refused), "{results:?}");
}

#[test]
fn an_invalid_model_on_one_rank_is_an_error_on_all_ranks() {
    let results = run_at_once(3, |comm| {
        let mut infos = infos();
        if comm.rank() == 1 {
            infos[5].name = "layer.1".into();
        }
        Ddp::new(comm, Bag::new(infos, 1), DdpOptions::default()).map(drop)
    });
    let told =
        |result: &Result<(), Error>| matches!(result, Err(Error::ModelsDiffer { index: 5, rank: 1, .. }));
    assert!(results.iter().all(told), "{results:?}");
}

/// Takes a step with a mistake on one rank.
fn step_with_fault(
    fault: impl Fn(&Bag, &mut Ready<'_>) -> Result<(), Error> + Send + Sync + 'static,
) -> Vec<Error> {
    const CULPRIT: usize = 1;
    let results = run_at_once(3, move |comm| {
        let rank = comm.rank();
        // The culprit may fail while others still receive the initial parameters.
        let mut ddp = match Ddp::new(comm, Bag::new(infos(), 1), options(30)) {
            Ok(ddp) => ddp,
            Err(error) => return error,
        };
        let step = |ddp: &mut Ddp<Bag>| {
            ddp.step_with(6, |bag, index, ready| {
                if (rank, index) == (CULPRIT, 3) {
                    fault(bag, ready)?;
                }
                bag.report(index, ready)
            })
        };
        let error = step(&mut ddp).unwrap_err();
        // The job is aborted, also for a rank that tries again.
        assert!(
            matches!(step(&mut ddp), Err(Error::Communication(_) | Error::Compute(_))) || rank == CULPRIT
        );
        error
    });
    for (rank, error) in results.iter().enumerate().filter(|(rank, _)| *rank != CULPRIT) {
        let Error::Communication(source) = error else { panic!("rank {rank}: {error:?}") };
        assert_eq!(source.peer(), Some(CULPRIT), "rank {rank} is told who it was: {source}");
    }
    results
}

#[test]
fn a_failing_computation_ends_the_job_on_every_rank() {
    let errors = step_with_fault(|_, _| Err(Error::UnknownName { name: "the data".into() }));
    assert!(matches!(&errors[1], Error::UnknownName { name } if name == "the data"), "{errors:?}");
    let errors = run_at_once(2, |comm| {
        let rank = comm.rank();
        // Rank 1 may still wait for rank 0's parameters when rank 0 fails.
        let mut ddp = Ddp::new(comm, model(1), DdpOptions::default())?;
        if rank == 0 {
            return ddp.accumulate_with(2, |_, _, _| Err::<f32, _>("no more data".into()));
        }
        ddp.step_with(2, |_, _, _| Ok(0.0)).map(drop)
    });
    assert_eq!(errors[0].as_ref().unwrap_err().source().unwrap().to_string(), "no more data");
    let heard = Chain(errors[1].as_ref().unwrap_err()).to_string();
    assert!(heard.contains("rank 0 gave up: computing the gradients failed: no more data"), "{heard}");
}

/// An error of one rank's data source is not an error that all ranks have found in a step.
#[rstest]
#[case::none(|| Error::NoMicroBatches)]
#[case::nothing(|| Error::ZeroWeight { micro_batches: 6 })]
#[case::parts(|| Error::AccumulatedDiffers { micro_batches: 6, computed: 5 })]
fn an_error_that_every_rank_has_ends_the_job_if_one_rank_computes_it(#[case] error: fn() -> Error) {
    let errors = step_with_fault(move |_, _| Err(error()));
    let Error::Compute(source) = &errors[1] else { panic!("{errors:?}") };
    assert_eq!(source.to_string(), error().to_string());
}

#[derive(Clone, Copy, Debug)]
enum Trainer {
    Accumulating,
    Joining,
    Sharded,
    Apart,
}

/// Takes a step that computes from the result of `data`.
fn step_from(
    trainer: Trainer,
    comm: Communicator,
    mut data: impl FnMut() -> Result<(), BoxError>,
) -> Result<(), Error> {
    let ddp = |comm| Ddp::new(comm, model(1), DdpOptions::default());
    match trainer {
        Trainer::Accumulating => {
            let mut ddp = ddp(comm)?;
            ddp.accumulate_with(2, |_, _, _| data().map(|()| 0.0))?;
            ddp.synchronise().map(drop)
        }
        Trainer::Joining => ddp(comm)?.join_with(1, |_, _, _| data().map(|()| 0.0)).map(drop),
        Trainer::Sharded => {
            let options = FsdpOptions::new(ShardingStrategy::FullShard);
            let batch = |index| {
                data()?;
                let (input, target) = micro_batch(0, index);
                Ok((input, squared_error(target)))
            };
            Fsdp::new(comm, model(1), &options)?.step(2, batch).map(drop)
        }
        Trainer::Apart => {
            let mut local = LocalSgd::new(comm, model(1), LocalSgdOptions::average(1))?;
            local.step_with(|_| data().map(|()| 0.0)).map(drop)
        }
    }
}

#[rstest]
fn a_data_source_without_micro_batches_ends_the_job(
    #[values(Trainer::Accumulating, Trainer::Joining, Trainer::Sharded, Trainer::Apart)] trainer: Trainer,
) {
    let results = run_at_once(2, move |mut comm| {
        let rank = comm.rank();
        let data = || if rank == 1 { Err(Error::NoMicroBatches.into()) } else { Ok(()) };
        let result = step_from(trainer, comm.fork().unwrap(), data);
        // This rank has not ended, and yet no rank waits for it.
        assert!(comm.barrier().is_err(), "{result:?}");
        result
    });
    assert!(matches!(&results[1], Err(Error::Compute(_))), "{results:?}");
    assert!(matches!(&results[0], Err(Error::Communication(_))), "{results:?}");
}

#[test]
fn a_gradient_reported_twice_is_an_error_that_names_the_parameter() {
    let errors = step_with_fault(|_, ready| {
        ready(4, Values::F32(&[0.0; 6])).unwrap();
        Ok(())
    });
    assert!(matches!(&errors[1], Error::ReportedTwice { parameter } if parameter == "layer.4"), "{errors:?}");
}

#[test]
fn a_gradient_of_another_shape_is_an_error_that_names_the_parameter() {
    let errors = step_with_fault(|_, ready| match ready(4, Values::F32(&[0.0; 5])) {
        Err(error) => Err(*error.downcast().unwrap()),
        Ok(()) => Ok(()),
    });
    assert!(
        matches!(&errors[1], Error::WrongGradient { parameter, .. } if parameter == "layer.4"),
        "{errors:?}"
    );
}

#[rstest]
#[case(4, 8)]
// The second rank has the number that it expects.
#[case(6, 7)]
#[case(0, 3)]
#[case(5, 0)]
fn ranks_that_disagree_about_the_number_of_micro_batches_get_an_error(
    #[case] first: usize,
    #[case] second: usize,
) {
    for seed in 0..10 {
        let outcome = sim::run(seed, 2, move |transport| {
            let comm = Communicator::new(transport);
            let micro_batches = if comm.rank() == 0 { first } else { second };
            let mut ddp = Ddp::new(comm, Bag::new(infos(), 1), DdpOptions::default()).unwrap();
            let refused = ddp.step_with(micro_batches, |bag, index, ready| bag.report(index, ready));
            let next = ddp.step_with(2, |bag, index, ready| bag.report(index, ready));
            (refused, next.map(|report| report.micro_batches))
        });
        for (refused, next) in &outcome.results {
            let told = refused.as_ref().unwrap_err().to_string();
            let asked =
                format!("for a step of {second} micro-batches, rank 0 for a step of {first} micro-batches");
            assert_eq!(told, format!("the ranks called for different steps: rank 1 {asked}"));
            assert!(matches!(next, Ok(2)), "{:?}", outcome.results);
        }
    }
}

/// The shares of two calls omit or repeat a micro-batch of the share of one call.
#[rstest]
#[case::one_missing(&[1, 1], &[2], 1)]
#[case::one_twice(&[2], &[1, 1], 3)]
fn ranks_that_accumulate_different_parts_of_a_step_get_an_error(
    #[case] first: &'static [usize],
    #[case] second: &'static [usize],
    #[case] together: usize,
) {
    let results = run_at_once(2, move |comm| {
        let parts = if comm.rank() == 0 { first } else { second };
        let mut ddp = Ddp::new(comm, Bag::new(infos(), 1), DdpOptions::default()).unwrap();
        let (last, before) = parts.split_last().unwrap();
        for part in before {
            ddp.accumulate_with(*part, |bag, index, ready| bag.report(index, ready)).unwrap();
        }
        let refused = ddp.step_with(*last, |bag, index, ready| bag.report(index, ready));
        let next = ddp.step_with(2, |bag, index, ready| bag.report(index, ready));
        (refused, next.map(|report| report.micro_batches))
    });
    for (refused, next) in &results {
        let Err(Error::AccumulatedDiffers { micro_batches: 2, computed }) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(*computed, together);
        assert!(matches!(next, Ok(2)), "{next:?}");
    }
}

#[rstest]
#[case::another_number([2, 4], [true, true], "a step of 6 micro-batches, rank 0 for a step of 4 micro-batches")]
#[case::accumulated_by_one(
    [2, 2],
    [false, true],
    "a step of 4 micro-batches, rank 0 for an accumulation of up to 4 micro-batches"
)]
fn an_error_of_sharded_ranks_names_the_step_of_each(
    #[case] micro_batches: [usize; 2],
    #[case] steps: [bool; 2],
    #[case] told: &str,
) {
    let results = run_at_once(2, move |comm| {
        let options = FsdpOptions::new(ShardingStrategy::FullShard);
        let mut fsdp = Fsdp::new(comm, model(1), &options).unwrap();
        let batch = batch(0);
        fsdp.accumulate(2, batch).unwrap();
        let (micro_batches, steps) = (micro_batches[fsdp.rank()], steps[fsdp.rank()]);
        if steps { fsdp.step(micro_batches, batch).map(drop) } else { fsdp.accumulate(micro_batches, batch) }
    });
    for result in &results {
        assert_eq!(
            result.as_ref().unwrap_err().to_string(),
            format!("the ranks called for different steps: rank 1 for {told}")
        );
    }
}

#[test]
fn a_step_without_micro_batches_is_refused_and_training_continues() {
    let results = run_at_once(2, |comm| {
        let mut ddp = Ddp::new(comm, Bag::new(infos(), 1), DdpOptions::default()).unwrap();
        let refused = matches!(ddp.synchronise(), Err(Error::NoMicroBatches));
        refused && ddp.step_with(2, |bag, index, ready| bag.report(index, ready)).is_ok()
    });
    assert_eq!(results, [true, true]);
}

/// A model that contradicts its description.
struct Liar {
    infos: Vec<ParamInfo>,
    lie: Lie,
}

#[derive(Clone, Copy, Debug)]
enum Lie {
    Nothing,
    Shorter,
    Failure,
}

impl Params for Liar {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn read(&self, _: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        f(Values::F32(&[0.0; 6]));
        Ok(())
    }

    fn write(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        let len = match self.lie {
            Lie::Nothing if index == 2 => return Ok(()),
            Lie::Failure if index == 2 => return Err("out of memory".into()),
            Lie::Shorter if index == 2 => 5,
            _ => 6,
        };
        f(ValuesMut::F32(&mut vec![0.0; len]));
        Ok(())
    }
}

#[rstest]
fn a_model_that_does_not_hand_out_a_parameter_ends_the_job(
    #[values(Lie::Nothing, Lie::Shorter, Lie::Failure)] lie: Lie,
) {
    let results = run_at_once(2, move |comm| {
        if comm.rank() == 0 {
            return Ddp::new(comm, Bag::new(infos(), 1), DdpOptions::default()).map(drop);
        }
        Ddp::new(comm, Liar { infos: infos(), lie }, DdpOptions::default()).map(drop)
    });
    assert!(matches!(&results[0], Err(Error::Communication(_))), "{results:?}");
    assert!(
        matches!(&results[1], Err(Error::Model { parameter, .. }) if parameter == "layer.2"),
        "{results:?}"
    );
}

#[test]
fn an_optimizer_that_fails_ends_the_job() {
    let results = run_at_once(2, |comm| {
        let rank = comm.rank();
        let mut ddp = Ddp::new(comm, Bag::new(infos(), 1), DdpOptions::default()).unwrap();
        let step =
            |ddp: &mut Ddp<Bag>| ddp.step_with(2, |bag, index, ready| bag.report(index, ready)).map(drop);
        // Rank 1 may fail while rank 0 is still in this step.
        step(&mut ddp)?;
        let momentum = Momentum::Plain(0.9);
        let mut sgd = Sgd::new(SgdOptions { momentum, ..SgdOptions::default() }).unwrap();
        if rank == 1 {
            use dist_parallel::optim::Optimizer;
            // One of the slices has been used with another length.
            sgd.update(3, ValuesMut::F32(&mut [0.0]), Values::F32(&[0.0])).unwrap();
        }
        ddp.update(&mut sgd).and_then(|()| step(&mut ddp))
    });
    assert!(matches!(&results[0], Err(Error::Communication(_))), "{results:?}");
    assert!(matches!(&results[1], Err(Error::SliceChanged { slice: 3 })), "{results:?}");
}

/// A block with two parameters that reports the gradient of one.
struct Forgetful(Bag);

impl Params for Forgetful {
    fn infos(&self) -> &[ParamInfo] {
        self.0.infos()
    }

    fn read(&self, index: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        self.0.read(index, f)
    }

    fn write(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        self.0.write(index, f)
    }
}

impl Block<f32> for Forgetful {
    fn forward(&mut self, input: f32) -> Result<(f32, Saved), BoxError> {
        Ok((input, Saved::new(())))
    }

    fn backward(&mut self, _: Saved, gradient: f32, ready: &mut Ready<'_>) -> Result<Option<f32>, BoxError> {
        ready(0, Values::F32(&[1.0]))?;
        Ok(Some(gradient))
    }
}

#[rstest]
fn parameters_whose_gradients_are_never_reported_are_named(#[values(0, 1, 2, 3, 4, 5)] strategy: usize) {
    let outcome = sim::run(1, 4, move |transport| {
        let comm = Communicator::new(transport);
        let infos = ["used", "forgotten", "frozen"].map(|name| ParamInfo::new(name, [1], FloatType::F32));
        let mut infos = Vec::from(infos);
        infos[2].trainable = false;
        let block: Box<dyn Block<f32>> = Box::new(Forgetful(Bag::new(infos, 1)));
        let model = Sequence::new(vec![block]).unwrap();
        let batch = |_| Ok((1.0_f32, |output: f32| Ok((output, 1.0_f32))));
        let named = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect::<Vec<_>>();
        match crate::join::STRATEGIES.get(strategy) {
            Some(&strategy) => {
                let mut fsdp = Fsdp::new(comm, model, &FsdpOptions::new(strategy)).unwrap();
                fsdp.step(4, batch).unwrap();
                named(fsdp.without_gradient())
            }
            None => {
                let mut ddp = Ddp::new(comm, model, DdpOptions::default()).unwrap();
                ddp.step(4, batch).unwrap();
                named(ddp.without_gradient())
            }
        }
    });
    assert_eq!(outcome.results, vec![vec!["forgotten".to_owned()]; 4]);
}

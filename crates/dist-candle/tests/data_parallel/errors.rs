//! The errors on all ranks after a mistake on one rank.

use std::time::Duration;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, SGD, VarMap};
use dist_candle::{CandleError, DataParallel};
use dist_collectives::Communicator;
use dist_collectives::transport::Chain;
use dist_parallel::Error;
use dist_parallel::checkpoint::Checkpoints;
use dist_parallel::step::TrainingCall;
use dist_transport::sim;
use rstest::rstest;

use crate::model::{Model, Rows, model};

/// Runs ranks and checks that the run takes less than 3 s of virtual time, so that no call waits for a deadline.
fn run_at_once<T: Send + 'static>(
    ranks: usize,
    program: impl Fn(Communicator) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let outcome = sim::run(11, ranks, move |transport| program(Communicator::new(transport)));
    assert!(outcome.elapsed < Duration::from_secs(3), "a rank waited for {:?}", outcome.elapsed);
    outcome.results
}

fn parallel(error: CandleError) -> Error {
    match error {
        CandleError::Parallel(error) => *error,
        error => panic!("{error:?}"),
    }
}

fn insert(map: &VarMap, name: &str, shape: &[usize], dtype: DType) {
    let var = Var::zeros(shape, dtype, &Device::Cpu).unwrap();
    map.data().lock().unwrap().insert(name.to_owned(), var);
}

#[rstest]
#[case::name(|map: &VarMap| insert(map, "zero", &[1], DType::F32), "zero")]
#[case::shape(|map: &VarMap| insert(map, "left.bias", &[6], DType::F32), "left.bias")]
#[case::dtype(|map: &VarMap| insert(map, "left.bias", &[5], DType::BF16), "left.bias")]
#[case::integers(|map: &VarMap| insert(map, "left.bias", &[5], DType::I64), "left.bias")]
#[case::missing(|map: &VarMap| drop(map.data().lock().unwrap().remove("right.weight")), "right.weight")]
fn variables_that_differ_are_an_error_on_every_rank_that_names_one_and_a_rank(
    #[case] change: fn(&VarMap),
    #[case] name: &'static str,
    #[values(2, 3, 4)] ranks: usize,
) {
    let errors = run_at_once(ranks, move |comm| {
        let (map, _) = model(DType::F32, 3);
        if comm.rank() == ranks - 1 {
            change(&map);
        }
        parallel(DataParallel::new(comm, &map).unwrap_err())
    });
    for error in errors {
        assert!(
            matches!(&error, Error::ModelsDiffer { parameter, rank, .. } if *rank == ranks - 1 && parameter == name),
            "{error}"
        );
    }
}

/// A call of one of three ranks, while the others call `backward`.
type Call = fn(&mut DataParallel, &Tensor) -> Result<(), CandleError>;

#[rstest]
#[case::join(|dp: &mut DataParallel, loss: &Tensor| dp.join(Some(loss)).map(drop), TrainingCall::Join)]
#[case::weighted(|dp: &mut DataParallel, loss: &Tensor| dp.backward((loss, 3)).map(drop), TrainingCall::Step)]
#[case::fewer(|dp: &mut DataParallel, loss: &Tensor| dp.backward_each(2, |_| Ok(loss.clone())).map(drop), TrainingCall::Step)]
#[case::accumulated(
    |dp: &mut DataParallel, loss: &Tensor| {
        dp.accumulate(loss)?;
        dp.backward(loss).map(drop)
    },
    TrainingCall::Step
)]
fn steps_that_differ_are_an_error_on_every_rank_that_names_a_rank_and_the_job_goes_on(
    #[case] call: Call,
    #[case] there: TrainingCall,
    #[values(0, 1, 2)] odd: usize,
) {
    let errors = run_at_once(3, move |comm| {
        let (map, model) = model(DType::F32, 3);
        let mut dp = DataParallel::new(comm, &map).unwrap();
        let loss = model.loss(&Rows::new(0, 2, DType::F32)).unwrap();
        let called = if dp.rank() == odd { call(&mut dp, &loss) } else { dp.backward(&loss).map(drop) };
        let error = parallel(called.unwrap_err());
        dp.backward(&loss).unwrap();
        assert_eq!(dp.report().unwrap().micro_batches, 3, "the accumulated micro-batches are not counted");
        error
    });
    for error in errors {
        let Error::StepsDiffer { rank, there: asked, on_rank_0 } = &error else { panic!("{error}") };
        assert_eq!(*rank, if odd == 0 { 1 } else { odd }, "{error}");
        assert_eq!(if odd == 0 { on_rank_0.call } else { asked.call }, there, "{error}");
    }
}

#[test]
fn a_save_on_one_rank_and_a_step_on_another_are_an_error_with_both_names() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let errors = run_at_once(2, move |comm| {
        let (map, model) = model(DType::F32, 3);
        let mut dp = DataParallel::new(comm, &map).unwrap();
        let loss = model.loss(&Rows::new(0, 2, DType::F32)).unwrap();
        let called = match dp.rank() {
            0 => dp.save(&mut Checkpoints::at(&path), None, 1),
            _ => dp.backward(&loss).map(drop),
        };
        called.and_then(|()| dp.backward(&loss).map(drop)).unwrap_err().to_string()
    });
    for text in errors {
        assert!(text.contains("called save") && text.contains("called step"), "{text}");
    }
}

/// Ranks that change their parameters in different ways.
#[rstest]
#[case::learning_rates(|rank| if rank == 2 { 0.1 } else { 0.2 }, 2)]
#[case::nothing_on_one(|rank| if rank == 1 { 0.0 } else { 0.2 }, 1)]
fn parameters_that_differ_after_a_step_are_an_error_on_every_rank_in_the_next(
    #[case] rate: fn(usize) -> f64,
    #[case] odd: usize,
) {
    let errors = run_at_once(3, move |comm| {
        let (map, model) = model(DType::F32, 3);
        let mut optimizer = SGD::new(map.all_vars(), rate(comm.rank())).unwrap();
        let mut dp = DataParallel::new(comm, &map).unwrap();
        let loss = || model.loss(&Rows::new(0, 2, DType::F32)).unwrap();
        let store = dp.backward(loss()).unwrap();
        optimizer.step(&store).unwrap();
        parallel(dp.backward(loss()).unwrap_err())
    });
    for error in errors {
        assert!(
            matches!(&error, Error::ParametersDiffer { rank, parameter } if *rank == odd && parameter == "right.weight"),
            "{error}"
        );
        assert_eq!(error.peer(), Some(odd));
    }
}

#[test]
fn ranks_that_step_with_their_own_gradients_are_found_out() {
    let errors = run_at_once(2, |comm| {
        let (map, model) = model(DType::F32, 3);
        let mut optimizer = SGD::new(map.all_vars(), 0.1).unwrap();
        let mut dp = DataParallel::new(comm, &map).unwrap();
        let loss = model.loss(&Rows::new(10 * dp.rank(), 2, DType::F32)).unwrap();
        dp.backward(&loss).unwrap();
        optimizer.backward_step(&loss).unwrap();
        parallel(dp.backward(&loss).unwrap_err())
    });
    assert!(
        errors.iter().all(|error| matches!(error, Error::ParametersDiffer { rank: 1, .. })),
        "{errors:?}"
    );
}

#[test]
fn ranks_that_clip_to_different_norms_get_an_error_in_the_next_step() {
    let errors = run_at_once(3, |comm| {
        let (map, model) = model(DType::F32, 3);
        let mut dp = DataParallel::new(comm, &map).unwrap();
        let loss = model.loss(&Rows::new(0, 2, DType::F32)).unwrap();
        let mut store = dp.backward(&loss).unwrap();
        dp.clip_gradients(&mut store, if dp.rank() == 1 { 2.0 } else { 1.0 }).unwrap();
        parallel(dp.backward(&loss).unwrap_err())
    });
    for error in errors {
        let Error::SettingsDiffer { rank: 1, setting, there, on_rank_0 } = &error else { panic!("{error}") };
        assert_eq!((&**there, &**on_rank_0), ("2.0", "1.0"), "{setting}");
    }
}

/// A layer that is created after the `DataParallel`.
#[test]
fn a_variable_that_was_made_too_late_is_an_error_and_not_a_lost_gradient() {
    let errors = run_at_once(2, |comm| {
        let (map, model) = model(DType::F32, 3);
        let rank = comm.rank();
        // Rank 1 may fail while rank 0 waits for it.
        let mut dp = match DataParallel::new(comm, &map) {
            Ok(dp) => dp,
            Err(error) => return error,
        };
        let late = Var::ones((), DType::F32, &Device::Cpu).unwrap();
        let loss = model.loss(&Rows::new(0, 2, DType::F32)).unwrap();
        let loss = if rank == 1 { (loss * late.as_tensor()).unwrap() } else { loss };
        dp.backward(&loss).unwrap_err()
    });
    assert!(matches!(errors[1], CandleError::UnlistedVariable { .. }), "{}", errors[1]);
    let text = Chain(&errors[0]).to_string();
    assert!(text.contains("rank 1") && text.contains("that it does not list"), "{text}");
}

#[test]
fn a_rank_that_fails_before_its_backward_pass_is_named_on_the_others() {
    let results = run_at_once(3, |comm| {
        let (map, model) = model(DType::F32, 3);
        let mut dp = DataParallel::new(comm, &map).map_err(candle_core::Error::from)?;
        let rows = if dp.rank() == 2 { Rows::new(0, 2, DType::F64) } else { Rows::new(0, 2, DType::F32) };
        let store = dp.backward(model.loss(&rows)?)?;
        Ok::<_, candle_core::Error>(store.get_ids().count())
    });
    for (rank, result) in results.into_iter().enumerate() {
        let text = result.unwrap_err().to_string();
        assert!(rank == 2 || text.contains("rank 2"), "rank {rank}: {text}");
    }
}

#[test]
fn an_invalid_loss_is_rejected() {
    let errors = run_at_once(1, |comm| {
        let (map, _): (VarMap, Model) = model(DType::F32, 3);
        let mut dp = DataParallel::new(comm, &map).unwrap();
        let rows = Tensor::ones(2, DType::F32, &Device::Cpu).unwrap();
        let one = Tensor::ones((), DType::F32, &Device::Cpu).unwrap();
        let weightless = dp.backward((&one, 0)).unwrap_err();
        let nothing = dp.synchronise().unwrap_err();
        [weightless, nothing, dp.backward(&rows).unwrap_err()].map(|error| error.to_string())
    });
    let expected = [
        "1 micro-batches have a total weight of 0",
        "there are no micro-batches",
        "the loss is no single number but [2]",
    ];
    assert_eq!(errors[0], expected);
}

#[test]
fn ranks_that_hold_different_batches_are_an_error_on_every_rank() {
    let errors = run_at_once(3, |comm| {
        let (map, model) = model(DType::F32, 3);
        let mut dp = DataParallel::new(comm, &map).unwrap();
        let seed = if dp.rank() == 1 { 7.0 } else { 3.0 };
        let batch = Tensor::full(seed, (6, 2), &Device::Cpu).unwrap();
        assert_eq!(dp.rows(&batch).unwrap().dims(), [2, 2]);
        let loss = model.loss(&Rows::new(0, 2, DType::F32)).unwrap();
        parallel(dp.backward(&loss).unwrap_err())
    });
    assert!(errors.iter().all(|error| matches!(error, Error::BatchesDiffer { rank: 1 })), "{errors:?}");
    assert!(errors.iter().all(|error| error.peer() == Some(1)));
}

#[test]
fn ranks_that_take_rows_of_the_same_inputs_and_labels_train() {
    run_at_once(2, |comm| {
        let (map, model) = model(DType::F32, 3);
        let mut dp = DataParallel::new(comm, &map).unwrap();
        for step in 0..4_u32 {
            let inputs = Tensor::full(step, (5, 2), &Device::Cpu).unwrap();
            let labels = Tensor::arange(0_u32, 5, &Device::Cpu).unwrap();
            let rows = (dp.rows(&inputs).unwrap().dim(0).unwrap(), dp.rows(&labels).unwrap().dim(0).unwrap());
            assert_eq!(rows, if dp.rank() == 0 { (2, 2) } else { (3, 3) });
            dp.backward(model.loss(&Rows::new(0, 2, DType::F32)).unwrap()).unwrap();
        }
    });
}

#[test]
fn a_batch_with_fewer_rows_than_ranks_is_refused_on_every_rank() {
    let errors = run_at_once(2, |comm| {
        let (map, _) = model(DType::F32, 3);
        let mut dp = DataParallel::new(comm, &map).unwrap();
        dp.rows(&Tensor::zeros((1, 2), DType::F32, &Device::Cpu).unwrap()).unwrap_err()
    });
    for error in errors {
        assert!(matches!(error, CandleError::FewRows { rows: 1, ranks: 2 }), "{error}");
    }
}

/// Rank 1 comes a minute late to a step, or dies before it.
#[rstest]
fn an_error_names_the_rank_and_distinguishes_timeouts(#[values(false, true)] is_late: bool) {
    let second = Duration::from_secs(1);
    let network = sim::Network::new(2).with_external_coordinator();
    let network = if is_late {
        network
    } else {
        network.with_fault(sim::When::At(second), sim::Fault::Kill { rank: 1 })
    };
    let outcome = network.try_run(move |transport| {
        let mut comm = Communicator::new(transport);
        comm.set_timeout(10 * second);
        let (map, model) = model(DType::F32, 3);
        let mut dp = DataParallel::new(comm, &map).unwrap();
        if dp.rank() == 1 {
            dp.communicator_mut().runtime().clone().sleep(60 * second);
        }
        let error = dp.backward(model.loss(&Rows::new(0, 2, DType::F32)).unwrap()).unwrap_err();
        (error.peer(), error.is_timeout())
    });
    assert_eq!(outcome.unwrap().results[0], Some((Some(1), is_late)));
    let own = CandleError::UnknownName { place: "the model".to_owned(), name: "w".to_owned() };
    assert_eq!((own.peer(), own.is_timeout()), (None, false));
}

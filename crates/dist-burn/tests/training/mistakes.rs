//! Mistakes of a program, and the errors that they cause.

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use dist_burn::{BurnError, DataParallel};
use dist_collectives::Communicator;
use dist_parallel::Error;

use crate::models::{Mlp, device, on_ranks, results_on_ranks};

fn parallel(error: BurnError) -> Error {
    match error {
        BurnError::Parallel(error) => *error,
        other => panic!("{other:?} is not an error of training"),
    }
}

#[test]
fn models_that_differ_are_refused_with_the_first_tensor_and_rank_that_do() {
    let results = results_on_ranks(3, |comm| {
        let device = device();
        let wide = if comm.rank() == 2 { 9 } else { 8 };
        let hidden = LinearConfig::new(3, 8).init(&device);
        let mut model = Mlp { hidden, output: LinearConfig::new(wide, 2).init(&device) };
        DataParallel::new(comm, &mut model).map(drop)
    });
    for result in results {
        match parallel(result.unwrap_err()) {
            Error::ModelsDiffer { parameter, rank, on_rank_0, on_rank, .. } => {
                assert_eq!((&*parameter, rank), ("output.weight", 2));
                assert_eq!(on_rank_0, "output.weight [8, 2] f32");
                assert_eq!(on_rank, "output.weight [9, 2] f32");
            }
            other => panic!("{other}"),
        }
    }
}

/// Returns the error of rank 1, whose micro-batch is rejected. The error of rank 0 must name rank 1.
fn refused(
    backward: impl Fn(&mut DataParallel, &Mlp, &Device) -> Result<GradientsParams, BurnError>
    + Send
    + Sync
    + 'static,
) -> BurnError {
    let mut results = results_on_ranks(2, move |comm| {
        let device = device();
        let mut model = Mlp::new(&device);
        let mut dp = DataParallel::new(comm, &mut model)?;
        match dp.rank() {
            1 => backward(&mut dp, &model, &device).map(drop),
            _ => dp.backward(model.loss(0, &device), &model).map(drop),
        }
    });
    let own = results.remove(1).unwrap_err();
    let other = parallel(results.remove(0).unwrap_err());
    assert_eq!(other.peer(), Some(1), "{other:?}");
    own
}

#[test]
fn a_loss_of_several_numbers_is_refused() {
    let error = refused(|dp, model, device| {
        let loss = model.loss(0, device);
        dp.backward(Tensor::cat(vec![loss.clone(), loss], 0), model)
    });
    assert!(matches!(error, BurnError::Loss { ref shape } if *shape == [2]), "{error}");
}

#[test]
fn a_loss_that_depends_on_no_parameter_is_refused() {
    let error = refused(|dp, model, device| dp.backward(model.loss(0, device).detach(), model));
    assert!(matches!(error, BurnError::Untracked), "{error}");
    let error = refused(|dp, model, _| dp.backward(model.valid().loss(0, &Device::flex()), model));
    assert!(matches!(error, BurnError::Untracked), "{error}");
}

#[test]
fn gradients_of_other_parameters_are_refused() {
    let error = refused(|dp, model, device| {
        let other = LinearConfig::new(1, 1).init(device);
        let loss = other.forward(Tensor::<2>::ones([1, 1], device)).mean();
        let foreign = GradientsParams::from_grads(loss.backward(), &other);
        dp.average(foreign, model)
    });
    assert!(matches!(error, BurnError::ForeignGradients { count: 2 }), "{error}");
}

#[test]
fn a_model_with_other_tensors_is_refused() {
    let error = refused(|dp, model, device| {
        let other = Mlp { output: LinearConfig::new(8, 3).init(device), ..model.clone() };
        dp.backward(model.loss(0, device), &other)
    });
    let BurnError::ModelChanged { index, expected, found } = error else { panic!("{error}") };
    assert_eq!((index, &*expected, &*found), (2, "output.weight [8, 2]", "output.weight [8, 3]"));
}

#[test]
fn ranks_with_different_steps_get_an_error_and_can_continue() {
    on_ranks(2, |comm| {
        let device = device();
        let mut model = Mlp::new(&device);
        let mut dp = DataParallel::new(comm, &mut model)?;
        if dp.rank() == 1 {
            dp.accumulate(model.loss(0, &device), &model)?;
        }
        let error = parallel(dp.backward(model.loss(1, &device), &model).unwrap_err());
        assert!(matches!(error, Error::StepsDiffer { rank: 1, .. }), "{error}");
        dp.backward(model.loss(1, &device), &model).map(drop)
    });
}

/// Returns the errors of ranks that train with different learning rates, and the number of steps before.
fn with_different_rates(comm: Communicator) -> Result<(usize, Error), BurnError> {
    let device = device();
    let mut model = Mlp::new(&device);
    let rate = 0.1 * (comm.rank() + 1) as f64;
    let mut dp = DataParallel::new(comm, &mut model)?;
    let mut optimizer = SgdConfig::new().init();
    for step in 0..100 {
        match dp.backward(model.loss(step, &device), &model) {
            Ok(grads) => model = optimizer.step(rate, model, grads),
            Err(error) => return Ok((step, parallel(error))),
        }
    }
    panic!("the difference was not detected");
}

#[test]
fn ranks_with_different_learning_rates_get_an_error() {
    for (steps, error) in on_ranks(2, with_different_rates) {
        assert_eq!(steps, 1);
        let Error::ParametersDiffer { rank: 1, parameter } = &error else { panic!("{error}") };
        assert!(parameter.starts_with("output."), "{parameter}");
    }
}

#[test]
fn ranks_that_clip_to_different_norms_get_an_error() {
    let results = results_on_ranks(2, |comm| {
        let device = device();
        let mut model = Mlp::new(&device);
        let mut dp = DataParallel::new(comm, &mut model)?;
        let mut grads = dp.backward(model.loss(0, &device), &model)?;
        dp.clip_gradients(&mut grads, &model, 1e3 + dp.rank() as f64)?;
        dp.backward(model.loss(1, &device), &model).map(drop)
    });
    for result in results {
        let error = parallel(result.unwrap_err());
        assert!(matches!(error, Error::SettingsDiffer { rank: 1, .. }), "{error}");
    }
}

#[test]
fn a_late_rank_is_reported_by_name() {
    let results = results_on_ranks(2, |mut comm| {
        let device = device();
        let mut model = Mlp::new(&device);
        comm.set_timeout(std::time::Duration::from_secs(5));
        let mut dp = DataParallel::new(comm, &mut model)?;
        if dp.rank() == 1 {
            // This rank is busy for a minute of simulated time.
            let runtime = dp.communicator_mut().runtime().clone();
            runtime.sleep(std::time::Duration::from_secs(60));
        }
        dp.backward(model.loss(0, &device), &model).map(drop)
    });
    let error = parallel(results.into_iter().next().unwrap().unwrap_err());
    assert_eq!((error.peer(), error.is_timeout()), (Some(1), true), "{error:?}");
}

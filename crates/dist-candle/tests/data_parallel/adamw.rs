//! The optimizer with state that can be saved: it computes candle's numbers, and a resumed training has the same
//! bits.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use dist_candle::{AdamW, CandleError, DataParallel};
use dist_collectives::Communicator;
use dist_parallel::checkpoint::Checkpoints;
use rstest::rstest;

use crate::model::{Named, Rows, model, numbers, run, values, variable};

/// Returns settings with an epsilon that `f16` can represent: 1e-8 is 0.
fn settings() -> ParamsAdamW {
    ParamsAdamW { lr: 0.02, weight_decay: 0.1, beta2: 0.99, eps: 1e-3, ..ParamsAdamW::default() }
}

/// Variables of two shapes, with values of both signs and some zeros of both.
fn variables(dtype: DType) -> Vec<Var> {
    let values = |shape: &[usize]| {
        let len = shape.iter().product::<usize>();
        let values =
            (0..len).map(|index| if index % 7 == 3 { -0.0 } else { (index as f32 * 1.3).sin() * 2.0 });
        let values = Tensor::from_vec(values.collect::<Vec<f32>>(), shape, &Device::Cpu).unwrap();
        Var::from_tensor(&values.to_dtype(dtype).unwrap()).unwrap()
    };
    vec![values(&[37]), values(&[5, 8])]
}

/// Returns the variables after some steps with gradients of many sizes. Some gradients are missing.
fn stepped<O: Optimizer<Config = ParamsAdamW>>(dtype: DType) -> Vec<Vec<u64>> {
    let vars = variables(dtype);
    let mut optimizer = O::new(vars.clone(), settings()).unwrap();
    let mut seen = Vec::new();
    for step in 0..12 {
        let mut store = GradStore::default();
        for (number, var) in vars.iter().enumerate().filter(|(number, _)| (step + number) % 4 != 2) {
            let values = Tensor::arange(0f32, var.elem_count() as f32, &Device::Cpu).unwrap();
            let values = values.affine(0.7, (step * 3 + number) as f64).unwrap().sin().unwrap();
            let size = 10f64.powi(i32::try_from(step % 5).unwrap() * 2 - 6);
            let gradient = values.affine(size, 0.0).unwrap().reshape(var.shape()).unwrap();
            // A gradient that is not contiguous.
            let gradient = match gradient.dims() {
                [_, _] => gradient.t().unwrap().contiguous().unwrap().t().unwrap(),
                _ => gradient,
            };
            store.insert(var, gradient.to_dtype(dtype).unwrap());
        }
        if step == 6 {
            optimizer.set_learning_rate(0.5);
        }
        optimizer.step(&store).unwrap();
        seen.extend(vars.iter().map(|var| numbers(var).into_iter().map(f64::to_bits).collect()));
    }
    assert_eq!(optimizer.learning_rate(), 0.5);
    seen
}

#[rstest]
fn every_step_has_the_bits_of_candles_adamw(
    #[values(DType::F32, DType::F64, DType::F16, DType::BF16)] dtype: DType,
) {
    let of_candle = stepped::<candle_nn::AdamW>(dtype);
    assert_eq!(stepped::<AdamW>(dtype), of_candle);
    assert!(of_candle[0] != of_candle[2], "nothing happens");
}

#[test]
fn a_gradient_in_the_memory_of_its_variable_is_no_deadlock() {
    let stepped = |of_candle: bool| {
        let var = Var::new(&[1f32, -2.0], &Device::Cpu).unwrap();
        let mut store = GradStore::default();
        store.insert(&var, var.as_detached_tensor());
        if of_candle {
            candle_nn::AdamW::new(vec![var.clone()], settings()).unwrap().step(&store).unwrap();
        } else {
            AdamW::new(vec![var.clone()], settings()).unwrap().step(&store).unwrap();
        }
        numbers(&var)
    };
    assert_eq!(stepped(false), stepped(true));
}

#[test]
fn integers_are_left_out_and_a_gradient_of_another_shape_is_refused() {
    let integers = Var::zeros(2, DType::U32, &Device::Cpu).unwrap();
    let floats = Var::zeros(2, DType::F32, &Device::Cpu).unwrap();
    let mut optimizer = AdamW::new(vec![integers, floats.clone()], settings()).unwrap();
    let mut store = GradStore::default();
    store.insert(&floats, Tensor::ones(3, DType::F32, &Device::Cpu).unwrap());
    assert!(optimizer.step(&store).unwrap_err().to_string().contains("cannot change a variable"));
    let eighths = Var::zeros(2, DType::F8E4M3, &Device::Cpu).unwrap();
    assert!(AdamW::new(vec![eighths], settings()).unwrap_err().to_string().contains("F8E4M3"));
}

/// A way to save a training.
#[derive(Debug, Clone, Copy)]
enum Save {
    Waiting,
    Started,
}

/// Trains from one step to another, starting from the checkpoint of the first.
fn train(
    comm: Communicator,
    path: &std::path::Path,
    steps: std::ops::Range<u64>,
    save: Save,
    dtype: DType,
) -> Named {
    // Initial values, which a resumed training must not use.
    let (map, model) = model(dtype, steps.start + comm.rank() as u64);
    let mut optimizer = AdamW::new(map.all_vars(), settings()).unwrap();
    let mut dp = DataParallel::new(comm, &map).unwrap();
    let mut checkpoints = Checkpoints::at(path);
    let done = if steps.start == 1 {
        dp.load_step(&mut checkpoints, Some(&mut optimizer), 1).unwrap();
        1
    } else {
        dp.load(&mut checkpoints, Some(&mut optimizer)).unwrap().unwrap_or(0)
    };
    assert_eq!(done, steps.start);
    for step in steps {
        let loss_of = |number| {
            Ok(model.loss(&Rows::new(20 * usize::try_from(step).unwrap() + 3 * number, 3, dtype))?)
        };
        let store = dp.backward_each(4, loss_of).unwrap();
        optimizer.step(&store).unwrap();
        match save {
            Save::Waiting => dp.save(&mut checkpoints, Some(&mut optimizer), step + 1).unwrap(),
            Save::Started => {
                let saving = dp.start_save(&mut checkpoints, Some(&mut optimizer), step + 1).unwrap();
                saving.wait().unwrap();
            }
        }
    }
    values(&map)
}

#[rstest]
#[case(1, 2, Save::Waiting)]
#[case(2, 1, Save::Started)]
#[case(4, 2, Save::Waiting)]
#[case(2, 4, Save::Started)]
fn a_training_that_goes_on_from_a_checkpoint_has_the_bits_of_one_that_was_never_interrupted(
    #[case] ranks: usize,
    #[case] then: usize,
    #[case] save: Save,
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
) {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [whole, parts] = folders.each_ref().map(|folder| folder.path().to_owned());
    let expected = run(1, move |comm| train(comm, &whole, 0..5, save, dtype)).remove(0);
    let path = parts.clone();
    run(ranks, move |comm| train(comm, &path, 0..1, save, dtype));
    let path = parts.clone();
    run(then, move |comm| train(comm, &path, 1..3, save, dtype));
    let found = run(ranks, move |comm| train(comm, &parts, 3..5, save, dtype));
    assert_eq!(found, vec![expected; ranks]);
}

#[test]
fn moments_of_a_variable_that_is_not_trained_are_no_silent_loss() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let errors = run(1, move |comm| {
        let (map, model) = model(DType::F32, 3);
        let late = Var::ones(3, DType::F32, &Device::Cpu).unwrap();
        let mut optimizer = AdamW::new([map.all_vars(), vec![late.clone()]].concat(), settings()).unwrap();
        let mut dp = DataParallel::new(comm, &map).unwrap();
        let mut checkpoints = Checkpoints::at(&path);
        let mut store = dp.backward(model.loss(&Rows::new(0, 2, DType::F32)).unwrap()).unwrap();
        optimizer.step(&store).unwrap();
        dp.save(&mut checkpoints, Some(&mut optimizer), 1).unwrap();
        store.insert(&late, late.as_detached_tensor());
        optimizer.step(&store).unwrap();
        dp.save(&mut checkpoints, Some(&mut optimizer), 2).unwrap_err()
    });
    assert!(
        matches!(&errors[0], CandleError::ForeignMoments { shape } if shape.dims() == [3]),
        "{}",
        errors[0]
    );
}

#[test]
fn state_of_another_kind_of_optimizer_is_refused_and_the_parameters_alone_are_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let found = run(1, move |comm| {
        let (map, model) = model(DType::F32, 3);
        let mut optimizer = AdamW::new(map.all_vars(), settings()).unwrap();
        let mut dp = DataParallel::new(comm, &map).unwrap();
        let store = dp.backward(model.loss(&Rows::new(0, 2, DType::F32)).unwrap()).unwrap();
        optimizer.step(&store).unwrap();
        let mut checkpoints = Checkpoints::at(&path);
        dp.save(&mut checkpoints, Some(&mut optimizer), 1).unwrap();
        let saved = values(&map);
        variable(&map, "left.bias").set(&Tensor::ones(5, DType::F32, &Device::Cpu).unwrap()).unwrap();
        let mut other =
            dist_parallel::optim::AdamW::new(dist_parallel::optim::AdamWOptions::default()).unwrap();
        let error = checkpoints.load(&mut dp, Some(&mut other)).unwrap_err().to_string();
        assert!(error.contains("candle_adamw"), "{error}");
        assert_eq!(checkpoints.load(&mut dp, None).unwrap(), Some(1));
        values(&map) == saved
    });
    assert_eq!(found, [true]);
}

//! Checkpoints of a model and of any of burn's optimizers, loaded by other numbers of ranks.

use std::path::PathBuf;

use burn::module::ParamGroup;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, LambConfig, LionConfig,
    ModuleOptimizer, RmsPropConfig, SgdConfig,
};
use dist_burn::{BurnError, DataParallel};
use dist_collectives::Communicator;
use dist_parallel::Error;
use dist_parallel::checkpoint::{CheckpointProblem, Checkpoints};
use tempfile::TempDir;

use crate::models::{Mixed, Mlp, bits, device, named_bits, on_ranks};

const STEPS: u64 = 6;

/// Trains from the newest checkpoint to this step and saves it, if there is a directory. Returns the model's bits.
fn train(
    comm: Communicator,
    mut optimizer: ModuleOptimizer,
    directory: Option<PathBuf>,
    until: u64,
) -> Result<Vec<(String, Vec<u64>)>, BurnError> {
    let device = device();
    let mut model = Mixed::new(&device);
    let mut dp = DataParallel::new(comm, &mut model)?;
    let mut checkpoints = directory.map(Checkpoints::at);
    let mut done = 0;
    if let Some(checkpoints) = &mut checkpoints {
        done = dp.load(checkpoints, &mut model, Some(&mut optimizer))?.unwrap_or(0);
    }
    for step in done..until {
        // Every rank computes the same micro-batch. The results, including running means, are therefore the
        // same as on one rank.
        let loss = model.loss(usize::try_from(step).unwrap(), &device);
        let grads = dp.backward(loss, &model)?;
        model = optimizer.step(0.01, model, grads);
    }
    if let Some(checkpoints) = &mut checkpoints {
        dp.save(checkpoints, &model, Some(&optimizer), until)?;
    }
    Ok(named_bits(&model))
}

fn adam_and_sgd() -> ModuleOptimizer {
    let optimizer: ModuleOptimizer = AdamConfig::new().init();
    let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).build();
    optimizer.with_group(ParamGroup::from_path("heads.1.weight"), momentum, None)
}

/// A function that creates an optimizer on a rank, because optimizers cannot be sent between threads.
type Make = fn() -> ModuleOptimizer;

fn optimizers() -> Vec<(&'static str, Make)> {
    vec![
        ("SGD", || SgdConfig::new().init()),
        ("SGD with momentum", || SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()),
        ("Adam", || AdamConfig::new().init()),
        ("AdamW", || AdamWConfig::new().init()),
        ("RMSprop", || RmsPropConfig::new().init()),
        ("AdaGrad", || AdaGradConfig::new().init()),
        ("Adafactor", || AdafactorConfig::new().init()),
        ("Adan", || AdanConfig::new().init()),
        ("LAMB", || LambConfig::new().init()),
        ("Lion", || LionConfig::new().init()),
        ("Adam, and SGD for one parameter", adam_and_sgd),
    ]
}

#[test]
fn a_resumed_training_has_the_bits_of_an_uninterrupted_one_on_another_number_of_ranks() {
    for (name, optimizer) in optimizers() {
        let whole = on_ranks(1, move |comm| train(comm, optimizer(), None, STEPS)).remove(0);
        for (before, after) in [(1, 2), (2, 1)] {
            let folder = TempDir::new().unwrap();
            let path = folder.path().to_owned();
            let directory = path.clone();
            on_ranks(before, move |comm| train(comm, optimizer(), Some(directory.clone()), STEPS / 2));
            let directory = path.clone();
            let resumed =
                on_ranks(after, move |comm| train(comm, optimizer(), Some(directory.clone()), STEPS));
            for of_rank in resumed {
                assert_eq!(of_rank, whole, "{name}, {before} ranks and then {after}");
            }
        }
    }
}

/// Saves what two ranks have trained with this optimizer, and loads it with another.
fn saved_and_loaded<T: Send + 'static>(
    saved: fn() -> Option<ModuleOptimizer>,
    load: fn(&mut DataParallel, &mut Checkpoints, &mut Mlp) -> T,
) -> (Vec<u64>, Vec<T>) {
    let folder = TempDir::new().unwrap();
    let directory = folder.path().to_owned();
    let trained = on_ranks(2, move |comm| {
        let device = device();
        let mut model = Mlp::new(&device);
        let mut optimizer = saved();
        let mut dp = DataParallel::new(comm, &mut model)?;
        let grads = dp.backward(model.loss(0, &device), &model)?;
        model = match &mut optimizer {
            Some(optimizer) => optimizer.step(0.1, model, grads),
            None => model,
        };
        dp.save(&mut Checkpoints::at(&directory), &model, optimizer.as_ref(), 1)?;
        Ok(bits(&model))
    });
    let directory = folder.path().to_owned();
    let loaded = on_ranks(2, move |comm| {
        let mut model = Mlp::new(&device());
        let mut dp = DataParallel::new(comm, &mut model)?;
        Ok(load(&mut dp, &mut Checkpoints::at(&directory), &mut model))
    });
    (trained.into_iter().next().unwrap(), loaded)
}

fn problem(error: BurnError) -> (CheckpointProblem, Option<String>) {
    match error {
        BurnError::Parallel(error) => match *error {
            Error::Checkpoint(error) => (error.problem, error.tensor),
            other => panic!("{other}"),
        },
        other => panic!("{other}"),
    }
}

#[test]
fn a_model_is_loaded_without_its_optimizer() {
    let (trained, loaded) = saved_and_loaded(
        || Some(AdamConfig::new().init()),
        |dp, checkpoints, model| (dp.load(checkpoints, model, None).unwrap(), bits(model)),
    );
    assert!(loaded.into_iter().all(|of_rank| of_rank == (Some(1), trained.clone())));
}

#[test]
fn the_state_of_another_optimizer_is_refused_and_nothing_changes() {
    let (trained, loaded) = saved_and_loaded(
        || Some(SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()),
        |dp, checkpoints, model| {
            let before = bits(model);
            let mut optimizer = AdamConfig::new().init();
            let error = dp.load(checkpoints, model, Some(&mut optimizer)).unwrap_err();
            assert_eq!(bits(model), before);
            problem(error)
        },
    );
    assert!(!trained.is_empty());
    for (problem, tensor) in loaded {
        assert!(matches!(problem, CheckpointProblem::NotInCheckpoint), "{problem:?}");
        assert!(tensor.as_ref().unwrap().starts_with("optimizer:hidden.weight:"), "{tensor:?}");
    }
}

#[test]
fn loading_an_optimizer_from_a_checkpoint_without_one_is_an_error() {
    let (_, loaded) = saved_and_loaded(
        || None,
        |dp, checkpoints, model| {
            let mut optimizer = AdamConfig::new().init();
            problem(dp.load(checkpoints, model, Some(&mut optimizer)).unwrap_err())
        },
    );
    for (problem, tensor) in loaded {
        assert!(matches!(problem, CheckpointProblem::NotInCheckpoint), "{problem:?}");
        assert_eq!(tensor.as_deref(), Some("optimizer:hidden.weight:is_present"));
    }
}

#[test]
fn nothing_is_loaded_where_there_is_no_checkpoint() {
    on_ranks(2, |comm| {
        let folder = TempDir::new().unwrap();
        let mut model = Mlp::new(&device());
        let before = bits(&model);
        let mut dp = DataParallel::new(comm, &mut model)?;
        let mut optimizer = AdamConfig::new().init();
        let mut checkpoints = Checkpoints::at(folder.path());
        assert_eq!(dp.load(&mut checkpoints, &mut model, Some(&mut optimizer))?, None);
        assert_eq!((bits(&model), optimizer.to_record().len()), (before, 0));
        Ok(())
    });
}

#[test]
fn an_optimizer_of_another_model_is_refused() {
    let errors = on_ranks(1, |comm| {
        let device = device();
        let folder = TempDir::new().unwrap();
        let mut model = Mlp::new(&device);
        let mut optimizer = AdamConfig::new().init();
        let mut dp = DataParallel::new(comm, &mut model)?;
        let grads = dp.backward(model.loss(0, &device), &model)?;
        drop(optimizer.step(0.1, model, grads));
        let other = Mlp::new(&device);
        Ok(dp.save(&mut Checkpoints::at(folder.path()), &other, Some(&optimizer), 1).unwrap_err())
    });
    assert!(matches!(errors[0], BurnError::ForeignState { .. }), "{}", errors[0]);
}

#[test]
fn a_model_with_other_tensors_is_neither_saved_nor_loaded() {
    let errors = on_ranks(1, |comm| {
        let device = device();
        let folder = TempDir::new().unwrap();
        let mut checkpoints = Checkpoints::at(folder.path());
        let mut model = Mlp::new(&device);
        let mut dp = DataParallel::new(comm, &mut model)?;
        let mut other = Mixed::new(&device);
        let saved = dp.save(&mut checkpoints, &other, None, 1).unwrap_err();
        Ok([saved, dp.load(&mut checkpoints, &mut other, None).unwrap_err()])
    });
    for error in errors.iter().flatten() {
        assert!(matches!(error, BurnError::ModelChanged { index: 0, .. }), "{error}");
    }
}

#[test]
fn a_save_goes_on_while_training_does() {
    let folder = TempDir::new().unwrap();
    let directory = folder.path().to_owned();
    let seen = on_ranks(2, move |comm| {
        let device = device();
        let mut model = Mlp::new(&device);
        let mut optimizer = AdamWConfig::new().init();
        let mut dp = DataParallel::new(comm, &mut model)?;
        let mut checkpoints = Checkpoints::at(&directory);
        let mut saved = Vec::new();
        let mut saving = None;
        for step in 0..3 {
            let grads = dp.backward(model.loss(step, &device), &model)?;
            model = optimizer.step(0.1, model, grads);
            if step == 1 {
                saved = bits(&model);
                saving = Some(dp.start_save(&mut checkpoints, &model, Some(&optimizer), 2)?);
            }
        }
        saving.unwrap().wait()?;
        dp.load_step(&mut checkpoints, &mut model, Some(&mut optimizer), 2)?;
        assert_eq!(bits(&model), saved);
        // Training continues with the loaded model.
        let grads = dp.backward(model.loss(3, &device), &model)?;
        Ok(bits(&optimizer.step(0.1, model, grads)))
    });
    assert_eq!(seen[0], seen[1]);
}

//! Training that continues from a checkpoint, on other ranks and with another strategy, compared with uninterrupted
//! training: equal to the last bit.

use std::path::Path;

use dist_collectives::Communicator;
use dist_parallel::checkpoint::{Checkpoints, WeightOptions};
use dist_parallel::fsdp::{Fsdp, FsdpOptions, Precision, ShardingStrategy, Units};
use dist_parallel::half::bf16;
use dist_parallel::optim::schedule::{self, Decay};
use dist_parallel::optim::{AdamW, AdamWOptions, Momentum, Optimizer, Sgd, SgdOptions};
use dist_parallel::trainer::Trainer;
use dist_parallel::{Ddp, DdpOptions, FloatType, ParamInfo, Params, Sequence, Values};
use dist_transport::sim;
use rstest::rstest;

use crate::by_hand::{ByHand, grouped};
use crate::plain::{Bag, Rows, batch, bits, model};

/// The way to train a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum TrainingWay {
    Ddp,
    Sharded(ShardingStrategy),
}

impl TrainingWay {
    /// Returns a trainer of this kind. `Ddp` uses none of the options.
    pub(crate) fn trainer<A: 'static>(
        self,
        comm: Communicator,
        model: Sequence<A>,
        mut options: FsdpOptions,
    ) -> Box<dyn Trainer<A>> {
        match self {
            Self::Ddp => Box::new(Ddp::new(comm, model, DdpOptions::default()).unwrap()),
            Self::Sharded(strategy) => {
                options.strategy = strategy;
                Box::new(Fsdp::new(comm, model, &options).unwrap())
            }
        }
    }
}

pub(crate) const WAYS: [TrainingWay; 6] = [
    TrainingWay::Ddp,
    TrainingWay::Sharded(ShardingStrategy::FullShard),
    TrainingWay::Sharded(ShardingStrategy::ShardGradOp),
    TrainingWay::Sharded(ShardingStrategy::ShardOptimizer),
    TrainingWay::Sharded(ShardingStrategy::NoShard),
    TrainingWay::Sharded(ShardingStrategy::HybridShard { shard_degree: 2 }),
];

pub(crate) const STEPS: u64 = 6;
const MICRO_BATCHES: usize = 4;

fn optimizer(name: &str) -> Box<dyn Optimizer> {
    match name {
        "sgd" => {
            let options = SgdOptions { momentum: Momentum::Nesterov(0.9), ..SgdOptions::default() };
            Box::new(Sgd::new(options).unwrap())
        }
        "groups" => Box::new(grouped(model(0).infos(), "again.weight")),
        "by hand" => Box::new(ByHand::new(model(0).infos(), "again.weight")),
        _ => Box::new(AdamW::new(AdamWOptions::default()).unwrap()),
    }
}

/// Takes step `number` of a training with a learning-rate schedule.
fn step(trainer: &mut dyn Trainer<Rows>, number: u64, optimizer: &mut dyn Optimizer) {
    let schedule = schedule::cosine(Decay { peak: 0.05, warmup: 2, steps: STEPS, to: 0.1 });
    optimizer.set_learning_rate(schedule(number)).unwrap();
    let step = usize::try_from(number).unwrap();
    let batch = batch(step);
    trainer.step(MICRO_BATCHES, batch).unwrap();
    trainer.update(optimizer).unwrap();
}

/// Ends a training and returns its parameters.
fn end(trainer: Box<dyn Trainer<Rows>>) -> Vec<u32> {
    bits(&trainer.into_parts().unwrap().1[0])
}

/// Trains from the newest checkpoint, or from the beginning, up to a step, and saves.
pub(crate) fn train(
    directory: &Path,
    ranks: usize,
    way: TrainingWay,
    name: &'static str,
    until: u64,
) -> Vec<Vec<u32>> {
    let directory = directory.to_owned();
    let program = move |transport| {
        let comm = Communicator::new(transport);
        let mut checkpoints = Checkpoints::at(&directory);
        let mut optimizer = optimizer(name);
        // A new training starts with other values, so that the load has an effect.
        let seed = if checkpoints.steps().unwrap().is_empty() { 7 } else { 99 };
        let mut trainer = way.trainer(comm, model(seed), FsdpOptions::default());
        let done = checkpoints.load(trainer.shards().unwrap(), Some(&mut *optimizer)).unwrap();
        for step in done.unwrap_or(0) + 1..=until {
            self::step(&mut *trainer, step, &mut *optimizer);
        }
        checkpoints.save(trainer.shards().unwrap(), Some(&*optimizer), until).unwrap();
        end(trainer)
    };
    sim::run(ranks as u64, ranks, program).results
}

pub(crate) fn ranks_of(way: TrainingWay) -> usize {
    if way == TrainingWay::Ddp { 2 } else { 4 }
}

#[rstest]
fn training_goes_on_by_any_strategy_as_if_it_had_never_been_interrupted(
    #[values(0, 1, 2, 3, 4, 5)] before: usize,
    #[values(0, 1, 2, 3, 4, 5)] after: usize,
) {
    let name = if (before + after).is_multiple_of(2) { "adamw" } else { "sgd" };
    let [directory, whole] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let expected = train(whole.path(), 1, TrainingWay::Ddp, name, STEPS).remove(0);
    let (before, after) = (WAYS[before], WAYS[after]);
    train(directory.path(), ranks_of(before), before, name, 3);
    let trained = train(directory.path(), ranks_of(after), after, name, STEPS);
    assert!(trained.iter().all(|bits| *bits == expected), "{before:?} to {after:?}");
}

/// The frozen parameters are those of the model into which the checkpoint is loaded.
#[rstest]
fn state_and_trained_parameters_alone_are_saved_and_loaded_by_every_strategy(
    #[values(0, 1, 2, 3, 4, 5)] before: usize,
    #[values(0, 1, 2, 3, 4, 5)] after: usize,
) {
    let folder = tempfile::tempdir().unwrap();
    let run = |way: TrainingWay, seed: u64, loads: bool| {
        let directory = folder.path().to_owned();
        let program = move |transport| {
            let mut trainer = way.trainer(Communicator::new(transport), model(seed), FsdpOptions::default());
            let mut checkpoints = Checkpoints::at(&directory).only_trained().only_finite();
            if loads {
                checkpoints.load(trainer.shards().unwrap(), None).unwrap();
                assert_eq!(checkpoints.state::<(u64, f32)>("position and best loss").unwrap(), (17, 0.1));
            } else {
                checkpoints.set_state("position and best loss", &(17_u64, 0.1_f32)).unwrap();
                checkpoints.save(trainer.shards().unwrap(), None, 1).unwrap();
            }
            end(trainer)
        };
        sim::run(1, ranks_of(way), program).results.remove(0)
    };
    let saved = run(WAYS[before], 7, false);
    let loaded = run(WAYS[after], 99, true);
    let mut of_parameters = Vec::new();
    for info in model(0).infos() {
        of_parameters.extend(vec![info.trainable; info.len()]);
    }
    let fresh = bits(&model(99));
    let expected: Vec<u32> =
        (0..saved.len()).map(|at| if of_parameters[at] { saved[at] } else { fresh[at] }).collect();
    assert!(loaded == expected && loaded != saved);
}

/// Worlds whose sums have the bits of one process, and others, which are compared with themselves.
#[rstest]
fn a_load_restores_a_save_on_any_number_of_ranks(
    #[values(1, 2, 3, 4, 5, 6)] before: usize,
    #[values(1, 2, 3, 4, 5, 6)] after: usize,
) {
    for way in [
        TrainingWay::Ddp,
        TrainingWay::Sharded(ShardingStrategy::FullShard),
        TrainingWay::Sharded(ShardingStrategy::ShardOptimizer),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let saved = train(directory.path(), before, way, "adamw", 2);
        // Only the load and another save are left.
        let loaded = train(directory.path(), after, way, "adamw", 2);
        assert!(loaded.iter().all(|bits| *bits == saved[0]), "{way:?}");
        let again = train(directory.path(), 1, TrainingWay::Ddp, "adamw", STEPS);
        let [once, _] =
            [directory.path().join("checkpoint-1-step-2"), directory.path().join("checkpoint-2-step-2")];
        std::fs::rename(once, directory.path().join("checkpoint-9-step-2")).unwrap();
        assert_eq!(train(directory.path(), 1, TrainingWay::Ddp, "adamw", STEPS), again, "{way:?}");
    }
}

/// The master values in full precision are saved.
#[rstest]
fn a_half_precision_model_goes_on_from_its_full_precision_parameters(
    #[values(ShardingStrategy::FullShard, ShardingStrategy::ShardOptimizer, ShardingStrategy::NoShard)]
    strategy: ShardingStrategy,
) {
    let directory = tempfile::tempdir().unwrap();
    let precision = Precision { master: Some(FloatType::F64), reduce: None };
    let options = FsdpOptions::new(strategy).with_precision(precision).with_units(Units::OneForAll);
    let run = |ranks: usize, from: u64, until: u64| {
        let (path, options) = (directory.path().to_owned(), options.clone());
        let program = move |transport| {
            let mut trainer = TrainingWay::Sharded(strategy).trainer(
                Communicator::new(transport),
                model(from),
                options.clone(),
            );
            let mut checkpoints = Checkpoints::at(&path);
            let mut optimizer = optimizer("adamw");
            if from > 0 {
                checkpoints.load_step(from, trainer.shards().unwrap(), Some(&mut *optimizer)).unwrap();
            }
            for step in from + 1..=until {
                self::step(&mut *trainer, step, &mut *optimizer);
            }
            checkpoints.save(trainer.shards().unwrap(), Some(&*optimizer), until).unwrap();
            end(trainer)
        };
        sim::run(1, ranks, program).results.remove(0)
    };
    let through = run(4, 0, STEPS);
    run(4, 0, 2);
    assert_eq!(run(2, 2, STEPS), through);
}

#[test]
fn the_parameters_that_a_consolidated_file_has_are_the_models() {
    let directory = tempfile::tempdir().unwrap();
    let way = TrainingWay::Sharded(ShardingStrategy::FullShard);
    let trained = train(directory.path(), 4, way, "adamw", 2).remove(0);
    let file = directory.path().join("model.safetensors");
    Checkpoints::at(directory.path()).consolidate(None, &file).unwrap();
    let program = move |transport| {
        let mut trainer = way.trainer(Communicator::new(transport), model(99), FsdpOptions::default());
        trainer.load_weights(&file, &WeightOptions::new()).unwrap();
        end(trainer)
    };
    assert_eq!(sim::run(1, 3, program).results, vec![trained; 3]);
}

/// Weights of another program: in half precision, under other names, with an unused tensor.
#[rstest]
fn half_precision_weights_of_other_names_are_loaded_by_every_strategy(
    #[values(0, 1, 2, 3, 4, 5)] way: usize,
    #[values(1, 2, 3)] ranks: usize,
) {
    use safetensors::{Dtype, tensor::TensorView};
    let way = WAYS[way];
    let is_divisible =
        ranks == 2 || way != TrainingWay::Sharded(ShardingStrategy::HybridShard { shard_degree: 2 });
    if !is_divisible {
        // Groups of two need an even number of ranks.
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("model.safetensors");
    let saved = model(7);
    let mut tensors = vec![("lm_head.weight".to_owned(), vec![1], vec![0; 2])];
    let mut expected = Vec::new();
    for (index, info) in saved.infos().iter().enumerate() {
        let mut halves = Vec::new();
        let mut keep = |values: Values<'_>| match values {
            Values::F32(values) => halves.extend(values.iter().copied().map(bf16::from_f32)),
            other => panic!("the model is not {}", other.dtype()),
        };
        saved.read(index, &mut keep).unwrap();
        expected.extend(halves.iter().map(|half| half.to_f32().to_bits()));
        let bytes = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
        if info.same_as.is_none() {
            tensors.push((format!("model.{}", info.name), info.shape.clone(), bytes));
        }
    }
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| (&**name, TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap()));
    std::fs::write(&file, safetensors::serialize(views, None).unwrap()).unwrap();
    let program = move |transport| {
        let mut trainer = way.trainer(Communicator::new(transport), model(99), FsdpOptions::default());
        let options = WeightOptions::new().rename("model.", "").convert().ignore("lm_head.");
        let report = trainer.load_weights(&file, &options).unwrap();
        assert_eq!(report.left_out, ["lm_head.weight"]);
        end(trainer)
    };
    assert_eq!(sim::run(1, ranks, program).results, vec![expected; ranks]);
}

#[rstest]
fn accumulated_gradients_are_not_lost_by_a_save(#[values(0, 1, 3)] way: usize) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let batch = batch(0);
    let outcome = sim::run(1, 2, move |transport| {
        let comm = Communicator::new(transport);
        let mut checkpoints = Checkpoints::at(&path);
        let mut trainer = WAYS[way].trainer(comm, model(1), FsdpOptions::default());
        trainer.accumulate(2, batch).unwrap();
        let refused = trainer.save(&mut checkpoints, None, 1).unwrap_err().to_string();
        trainer.step(0, batch).unwrap();
        trainer.save(&mut checkpoints, None, 2).unwrap();
        refused
    });
    for refused in outcome.results {
        assert!(refused.contains("the gradients of 2 accumulated micro-batches"), "{refused}");
    }
}

#[test]
fn a_frozen_parameter_without_values_is_saved_and_loaded_as_one_with_values() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_owned();
    let outcome = sim::run(1, 2, move |transport| {
        let mut infos: Vec<ParamInfo> =
            [0, 3].map(|len| ParamInfo::new(format!("p{len}"), [len], FloatType::F32)).into();
        infos[0].trainable = false;
        let mut fork = Communicator::new(transport);
        let mut trainer = |seed| {
            Ddp::new(fork.fork().unwrap(), Bag::new(infos.clone(), seed), DdpOptions::default()).unwrap()
        };
        let mut checkpoints = Checkpoints::at(&directory);
        let mut saved = trainer(1);
        checkpoints.save(&mut saved, None, 1).unwrap();
        let mut loaded = trainer(2);
        assert_ne!(bits(loaded.model()), bits(saved.model()));
        assert_eq!(checkpoints.load(&mut loaded, None).unwrap(), Some(1));
        bits(loaded.model()) == bits(saved.model())
    });
    assert_eq!(outcome.results, [true; 2]);
    let file = folder.path().join("all.safetensors");
    Checkpoints::at(folder.path()).consolidate(None, &file).unwrap();
}

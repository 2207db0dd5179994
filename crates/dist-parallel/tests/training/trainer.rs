//! Every feature with every strategy through one interface, compared with one process.
//!
//! The table in docs/book/src/strategy.md is made of the results.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use dist_collectives::transport::Chain;
use dist_collectives::{Communicator, ReductionOrder};
use dist_parallel::buckets::BucketBytes;
use dist_parallel::checkpoint::Checkpoints;
use dist_parallel::compress::Compression;
use dist_parallel::fsdp::{Precision, Reshard, Units};
use dist_parallel::model::{Pass, Ready, Saved, Slot};
use dist_parallel::optim::{AdamW, AdamWOptions, OptimizerState, ParamGroups, Sgd, SgdOptions};
use dist_parallel::pipeline::PlainVectors;
use dist_parallel::trainer::{Strategy, Trainer, TrainerOptions};
use dist_parallel::{
    Block, BoxError, Error, FloatType, ParamInfo, Params, Result, Sequence, Values, ValuesMut,
};
use dist_transport::sim;
use rstest::rstest;

use crate::errors::run_at_once;
use crate::plain::{Linear, Relu, Rows, micro_batch, model, squared_error};

const RANKS: usize = 4;
const MICRO_BATCHES: usize = 8;
const STEPS: usize = 2;

/// The strategies of the table, each with its name there. An outer step without momentum whose learning rate is 1
/// averages the parameters, so that its result is known.
const STRATEGIES: [(&str, &str); 11] = [
    ("single", "single"),
    ("ddp", "ddp"),
    ("zero1", "zero1"),
    ("zero2", "zero2"),
    ("fsdp", "fsdp"),
    ("hybrid", "hybrid:2"),
    ("pipeline", "pipeline:1f1b"),
    ("pipelines", "pipeline:1f1b:2"),
    ("sharded pipelines", "pipeline:1f1b:2:sharded"),
    ("local_sgd", "local_sgd:1"),
    ("diloco", "diloco:1:1:0"),
];

/// A feature: its name in the table, a training that uses it, and the comparison of the result with one process.
struct Feature {
    name: &'static str,
    train: fn(Setup) -> Result<Vec<f32>>,
    compare: Compare,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Compare {
    /// The same bits, except for local SGD, which averages parameters instead of gradients.
    Bits,
    /// Differences of at most this much, because sums have another order or are rounded.
    Close(f32),
    /// The same bits, except for local SGD, of which the first values are those of a rank's own micro-batches.
    OwnGradients { values: usize },
}

const FEATURES: [Feature; 19] = [
    Feature { name: "`step`", train: |setup| setup.train(blocks()), compare: Compare::Bits },
    Feature { name: "`step_with`", train: step_with, compare: Compare::Bits },
    Feature { name: "`accumulate`", train: accumulate, compare: Compare::Close(1e-5) },
    Feature { name: "uneven inputs (`join`)", train: join, compare: Compare::Close(1e-5) },
    Feature { name: "losses with weights", train: weighted, compare: Compare::Bits },
    Feature { name: "`evaluate`", train: evaluate, compare: Compare::Bits },
    Feature { name: "`clip_gradients`", train: clip, compare: Compare::OwnGradients { values: 2 } },
    Feature { name: "`scale_gradients`, `update_if_finite`", train: scale, compare: Compare::Bits },
    Feature { name: "compression", train: compress, compare: Compare::Close(1e-2) },
    Feature { name: "mixed precision", train: mix_precision, compare: Compare::Bits },
    Feature { name: "a type of activations", train: round_activations, compare: Compare::Bits },
    Feature { name: "parameter groups", train: group, compare: Compare::Bits },
    Feature {
        name: "frozen and tied parameters",
        train: |setup| setup.train(model(7)),
        compare: Compare::Bits,
    },
    Feature { name: "parameters without a gradient", train: unused, compare: Compare::Bits },
    Feature {
        name: "parameters without values",
        train: |setup| setup.train(with_extra(Extra::new("empty", [0], true))),
        compare: Compare::Bits,
    },
    Feature {
        name: "scalar parameters",
        train: |setup| setup.train(with_extra(Extra::new("scalar", [], true))),
        compare: Compare::Bits,
    },
    Feature { name: "buffers", train: buffers, compare: Compare::Bits },
    Feature { name: "random numbers of a micro-batch", train: draw, compare: Compare::Bits },
    Feature { name: "`model` and `model_mut`", train: whole_model, compare: Compare::Bits },
];

/// The communicator, the options and the micro-batches of a training.
struct Setup {
    comm: Communicator,
    options: TrainerOptions,
    micro_batches: Range<usize>,
}

impl Setup {
    fn build(self, model: Sequence<Rows>) -> Result<Training> {
        let Self { comm, options, micro_batches } = self;
        let trainer = options.build(comm, model, PlainVectors)?;
        assert_eq!(trainer.strategy(), options.strategy);
        Ok(Training { trainer, micro_batches, sgd: sgd() })
    }

    fn train(self, model: Sequence<Rows>) -> Result<Vec<f32>> {
        self.build(model)?.train()
    }
}

fn sgd() -> Sgd {
    Sgd::new(SgdOptions { learning_rate: 0.1, ..SgdOptions::default() }).unwrap()
}

struct Training {
    trainer: Box<dyn Trainer<Rows>>,
    micro_batches: Range<usize>,
    sgd: Sgd,
}

impl Training {
    fn step(&mut self, step: usize) -> Result<f32> {
        let first = self.micro_batches.start;
        let report = self.trainer.step(self.micro_batches.len(), |index| batch(step, first + index))?;
        Ok(report.loss)
    }

    fn train(mut self) -> Result<Vec<f32>> {
        let mut losses = Vec::new();
        for step in 0..STEPS {
            losses.push(self.step(step)?);
            self.trainer.update(&mut self.sgd)?;
        }
        // With local SGD, each rank has losses of its own.
        if matches!(self.trainer.strategy(), Strategy::LocalSgd(_)) {
            losses.clear();
        }
        losses.extend(self.parameters()?);
        Ok(losses)
    }

    /// Returns the values of all parameters, and ends the training.
    fn parameters(mut self) -> Result<Vec<f32>> {
        self.trainer.synchronise_parameters()?;
        let mut all = vec![Vec::new(); self.trainer.infos().len()];
        self.trainer.for_each_parameter(&mut |index, values| all[index] = f32s(values).to_vec())?;
        self.trainer.into_parts()?;
        Ok(all.concat())
    }
}

fn f32s(values: Values<'_>) -> &[f32] {
    let Values::F32(values) = values else { panic!("the model is not {}", values.dtype()) };
    values
}

/// The input of a micro-batch, and the function that computes its loss.
type Batch = (Rows, Box<dyn FnOnce(Rows) -> Result<(f32, Rows), BoxError>>);

fn batch(step: usize, index: usize) -> Result<Batch, BoxError> {
    let (input, target) = micro_batch(step, index);
    Ok((input, Box::new(squared_error(target))))
}

fn layers() -> Vec<Box<dyn Block<Rows>>> {
    vec![
        Box::new(Linear::new("first", 3, 4, 7)),
        Box::new(Relu),
        Box::new(Linear::new("second", 4, 4, 8)),
        Box::new(Relu),
        Box::new(Linear::new("last", 4, 2, 9)),
    ]
}

fn blocks() -> Sequence<Rows> {
    Sequence::new(layers()).unwrap()
}

fn with_extra(extra: Extra) -> Sequence<Rows> {
    let mut layers = layers();
    layers.insert(2, Box::new(extra));
    Sequence::new(layers).unwrap()
}

/// A block with one unusual parameter, by whose first value it multiplies, if it is trained and has one. It sets a
/// buffer to 1.
struct Extra {
    infos: [ParamInfo; 1],
    slots: [Slot; 1],
    reports: bool,
}

impl Extra {
    fn new(name: &str, shape: impl Into<Vec<usize>>, reports: bool) -> Self {
        let info = ParamInfo::new(name, shape, FloatType::F32);
        Self { slots: [Slot::from(vec![0.75_f32; info.len()])], infos: [info], reports }
    }

    fn buffer() -> Self {
        Self { infos: [ParamInfo::buffer("buffer", [2], FloatType::F32)], ..Self::new("", [2], false) }
    }

    fn factor(&self) -> Result<f32, BoxError> {
        let factor = f32s(self.slots[0].values()?).first().copied();
        Ok(factor.filter(|_| self.reports).unwrap_or(1.0))
    }
}

impl Params for Extra {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn slots(&self) -> &[Slot] {
        &self.slots
    }

    fn slots_mut(&mut self) -> &mut [Slot] {
        &mut self.slots
    }
}

impl Block<Rows> for Extra {
    fn forward(&mut self, input: Rows) -> Result<(Rows, Saved), BoxError> {
        if self.infos[0].buffer.is_some() {
            self.slots[0].write(&mut |values| {
                let ValuesMut::F32(values) = values else { panic!("the buffer is f32") };
                values.fill(1.0);
            })?;
        }
        let factor = self.factor()?;
        Ok((input.iter().map(|x| factor * x).collect(), Saved::new(input)))
    }

    fn backward(
        &mut self,
        saved: Saved,
        gradient: Rows,
        ready: &mut Ready<'_>,
    ) -> Result<Option<Rows>, BoxError> {
        let input: Rows = saved.take()?;
        if self.reports {
            let of_factor: f32 = input.iter().zip(&gradient).map(|(x, g)| x * g).sum();
            ready(0, Values::F32(&vec![of_factor; self.infos[0].len()]))?;
        }
        let factor = self.factor()?;
        Ok(Some(gradient.iter().map(|g| factor * g).collect()))
    }
}

/// A block that multiplies by a number which depends on the step and the micro-batch, as a dropout does.
struct Noise(Pass);

impl Noise {
    fn factor(&self) -> Result<f32, BoxError> {
        assert!(self.0.training);
        let (step, micro_batch) = (u16::try_from(self.0.step)?, u16::try_from(self.0.micro_batch)?);
        Ok(1.0 + f32::from(step) / 16.0 + f32::from(micro_batch) / 64.0)
    }
}

impl Params for Noise {
    fn infos(&self) -> &[ParamInfo] {
        &[]
    }

    fn begin_forward(&mut self, pass: Pass) {
        self.0 = pass;
    }
}

impl Block<Rows> for Noise {
    fn forward(&mut self, input: Rows) -> Result<(Rows, Saved), BoxError> {
        let factor = self.factor()?;
        Ok((input.iter().map(|x| factor * x).collect(), Saved::new(factor)))
    }

    fn backward(
        &mut self,
        saved: Saved,
        gradient: Rows,
        _: &mut Ready<'_>,
    ) -> Result<Option<Rows>, BoxError> {
        let factor: f32 = saved.take()?;
        Ok(Some(gradient.iter().map(|g| factor * g).collect()))
    }
}

fn draw(setup: Setup) -> Result<Vec<f32>> {
    let mut layers = layers();
    layers.insert(1, Box::new(Noise(Pass { training: false, step: 0, micro_batch: 0 })));
    setup.train(Sequence::new(layers).unwrap())
}

fn step_with(setup: Setup) -> Result<Vec<f32>> {
    let mut training = setup.build(blocks())?;
    let count = training.micro_batches.len();
    training.trainer.step_with(count, |model, index, ready| {
        let (input, loss) = batch(0, index)?;
        let (output, saved) = model.forward(input)?;
        let (loss, gradient) = loss(output)?;
        model.backward(saved, gradient, ready)?;
        Ok(loss)
    })?;
    training.trainer.update(&mut training.sgd)?;
    training.parameters()
}

fn accumulate(setup: Setup) -> Result<Vec<f32>> {
    let half = setup.micro_batches.len() / 2;
    let options = setup.options.with_micro_batches(half);
    let mut training = Setup { options, ..setup }.build(blocks())?;
    training.trainer.accumulate(half, |index| batch(0, index))?;
    training.trainer.step(half, |index| batch(0, half + index))?;
    training.trainer.update(&mut training.sgd)?;
    training.parameters()
}

/// Rank r of four has `COUNTS[r]` micro-batches in the first step and one fewer in the second. A pipeline has those of its
/// ranks, and one process has all of them.
fn join(setup: Setup) -> Result<Vec<f32>> {
    const COUNTS: [usize; RANKS] = [2, 0, 1, 1];
    let mut training = setup.build(blocks())?;
    let trainer = &mut training.trainer;
    let (rank, world_size) = (trainer.rank(), trainer.world_size());
    let together = match trainer.strategy() {
        Strategy::Pipeline { ranks, .. } => ranks.unwrap_or(world_size),
        _ => 1,
    };
    let (replica, replicas) = (rank / together, world_size / together);
    let ranks = replica * RANKS / replicas..(replica + 1) * RANKS / replicas;
    for step in 0.. {
        let of_rank = |rank: usize| (0..COUNTS[rank].saturating_sub(step)).map(move |own| 10 * rank + own);
        let own: Vec<usize> = ranks.clone().flat_map(of_rank).collect();
        if trainer.join(own.len(), |index| batch(step, own[index]))?.is_none() {
            assert_eq!(step, 2, "the ranks have data for two steps");
            break;
        }
        trainer.update(&mut training.sgd)?;
    }
    training.parameters()
}

/// Micro-batches of different numbers of tokens, whose gradients are sums over their tokens.
fn weighted(setup: Setup) -> Result<Vec<f32>> {
    let mut training = setup.build(blocks())?;
    let count = training.micro_batches.len();
    training.trainer.step(count, |index| {
        let (input, loss) = batch(0, index)?;
        let tokens = u16::try_from(1 + index % 3)?;
        Ok((input, move |output| {
            let (loss, mut gradient) = loss(output)?;
            gradient.iter_mut().for_each(|value| *value *= f32::from(tokens));
            Ok(((loss * f32::from(tokens), u64::from(tokens)), gradient))
        }))
    })?;
    training.trainer.update(&mut training.sgd)?;
    training.parameters()
}

/// Evaluates between a step and its update, and after it.
fn evaluate(setup: Setup) -> Result<Vec<f32>> {
    let mut training = setup.build(blocks())?;
    let mut losses = Vec::new();
    let find = |trainer: &mut dyn Trainer<Rows>, of: usize| {
        let loss = |index, output| Ok(squared_error(micro_batch(9, index).1)(output)?.0);
        trainer.evaluate(of, |index| Ok(micro_batch(9, index).0), loss).map(|report| report.loss)
    };
    training.step(0)?;
    losses.push(find(&mut *training.trainer, 5)?);
    training.trainer.update(&mut training.sgd)?;
    losses.push(find(&mut *training.trainer, 3)?);
    losses.extend(training.parameters()?);
    Ok(losses)
}

#[expect(clippy::cast_possible_truncation, reason = "f32 is enough to compare")]
fn clip(setup: Setup) -> Result<Vec<f32>> {
    let mut training = setup.build(blocks())?;
    training.step(0)?;
    let norm = training.trainer.clip_gradients(0.01)?;
    assert!(norm > 0.02, "{norm} would hardly be clipped");
    let clipped = training.trainer.gradient_norm()?;
    training.trainer.update(&mut training.sgd)?;
    let mut result = vec![norm as f32, clipped as f32];
    result.extend(training.parameters()?);
    Ok(result)
}

/// The second step is skipped.
fn scale(setup: Setup) -> Result<Vec<f32>> {
    let mut training = setup.build(blocks())?;
    for (step, factor, is_applied) in [(0, 4.0, true), (1, f64::INFINITY, false), (2, 0.5, true)] {
        training.step(step)?;
        training.trainer.scale_gradients(factor);
        assert_eq!(training.trainer.update_if_finite(&mut training.sgd)?, is_applied);
    }
    training.parameters()
}

fn compress(setup: Setup) -> Result<Vec<f32>> {
    let options = setup.options.with_compression(Compression::Bf16);
    Setup { options, ..setup }.train(blocks())
}

/// The model has `f32`. Master parameters in `f64` keep changes that are too small for `f32`.
fn mix_precision(setup: Setup) -> Result<Vec<f32>> {
    let precision = Precision { master: Some(FloatType::F64), reduce: Some(FloatType::F64) };
    let options = setup.options.with_precision(precision);
    Setup { options, ..setup }.train(blocks())
}

/// Blocks compute in `f32`. Activations and their gradients are rounded to `bf16` between them.
fn round_activations(setup: Setup) -> Result<Vec<f32>> {
    let options = setup.options.with_activations(FloatType::Bf16);
    let mut training = Setup { options, ..setup }.build(blocks())?;
    let count = training.micro_batches.len();
    training.trainer.step(count, |index| {
        let (input, loss) = batch(0, index)?;
        Ok((input, move |output: Rows| {
            assert!(output.iter().all(|value| value.to_bits() % (1 << 16) == 0), "{output:?}");
            loss(output)
        }))
    })?;
    training.trainer.update(&mut training.sgd)?;
    training.parameters()
}

fn group(setup: Setup) -> Result<Vec<f32>> {
    let mut training = setup.build(blocks())?;
    let mut groups = ParamGroups::new(training.trainer.infos())?;
    groups.named("second.weight")?.learning_rate_factor = 0.5;
    groups.named("last.bias")?.weight_decay = Some(0.25);
    training.sgd = training.sgd.with_groups(groups)?;
    training.train()
}

fn unused(setup: Setup) -> Result<Vec<f32>> {
    let mut training = setup.build(with_extra(Extra::new("unused", [3], false)))?;
    training.step(0)?;
    let found = training.trainer.without_gradient().iter().filter(|name| **name == "unused").count();
    // In a pipeline, the rank with the block reports it.
    let has_block = training.trainer.model().is_ok()
        || training
            .trainer
            .pipeline_mut()
            .unwrap()
            .stages()
            .any(|(_, stage)| stage.infos().iter().any(|info| info.name == "unused"));
    assert_eq!(found, usize::from(has_block));
    training.train()
}

fn buffers(setup: Setup) -> Result<Vec<f32>> {
    let trained = setup.train(with_extra(Extra::buffer()))?;
    assert!(trained.windows(2).any(|values| values == [1.0, 1.0]), "the buffer keeps its values");
    Ok(trained)
}

fn whole_model(setup: Setup) -> Result<Vec<f32>> {
    let mut training = setup.build(blocks())?;
    assert_eq!(training.trainer.model()?.blocks().len(), blocks().blocks().len());
    training.trainer.model_mut()?;
    training.train()
}

/// Trains by a strategy. Returns the result of every rank.
fn run(
    strategy: &str,
    ranks: usize,
    feature: &Feature,
    micro_batches: Range<usize>,
) -> Vec<Result<Vec<f32>>> {
    let (train, strategy) = (feature.train, strategy.parse().unwrap());
    let program = move |transport| {
        let options = TrainerOptions::new(strategy).with_micro_batches(micro_batches.len());
        train(Setup { comm: Communicator::new(transport), options, micro_batches: micro_batches.clone() })
    };
    sim::run(1, ranks, program).results
}

/// Returns the reason that all ranks give why a feature does not work, or their values if it does.
#[track_caller]
fn values_or_reason(results: Vec<Result<Vec<f32>>>, what: &str) -> Result<Vec<Vec<f32>>, &'static str> {
    let refused = |result: &Result<_>| match result {
        Err(Error::NotWithStrategy { reason, .. }) => Some(*reason),
        Err(error) => panic!("{what}: {error}"),
        Ok(_) => None,
    };
    let reasons: Vec<_> = results.iter().map(refused).collect();
    assert!(reasons.iter().all(|reason| *reason == reasons[0]), "{what}: {reasons:?}");
    reasons[0].map_or_else(|| Ok(results.into_iter().map(Result::unwrap).collect()), Err)
}

/// Returns for each strategy the reason why a feature does not work with it. If it works, the values are compared with
/// those of one process.
fn check_feature(feature: &Feature) -> Vec<Option<&'static str>> {
    let alone = |micro_batches| run("single", 1, feature, micro_batches).remove(0).unwrap();
    let whole = alone(0..MICRO_BATCHES);
    let check = |strategy: &str| {
        let what = format!("{} with {strategy}", feature.name);
        let ranks = if strategy == "single" { 1 } else { RANKS };
        let results = values_or_reason(run(strategy, ranks, feature, 0..MICRO_BATCHES), &what)?;
        let is_local = strategy.contains("local") || strategy.contains("diloco");
        for (rank, values) in results.iter().enumerate() {
            match feature.compare {
                Compare::OwnGradients { values: count } if is_local => {
                    let share = MICRO_BATCHES / RANKS;
                    let expected = alone(rank * share..(rank + 1) * share);
                    assert_eq!(values[..count], expected[..count], "{what}, rank {rank}");
                }
                Compare::Close(limit) => assert_close(values, &whole, limit, &what),
                Compare::Bits | Compare::OwnGradients { .. } if is_local => {
                    assert_close(values, &whole, 1e-5, &what);
                }
                Compare::Bits | Compare::OwnGradients { .. } => {
                    assert_eq!(*values, whole, "{what}, rank {rank}");
                }
            }
        }
        Ok(())
    };
    STRATEGIES.iter().map(|(_, strategy)| check(strategy).err()).collect()
}

/// Compares values with the last ones of `expected`, which begins with losses if `values` has none.
#[track_caller]
fn assert_close(values: &[f32], expected: &[f32], limit: f32, what: &str) {
    let expected = &expected[expected.len() - values.len()..];
    let apart = values.iter().zip(expected).map(|(value, expected)| (value - expected).abs());
    assert!(apart.fold(0.0, f32::max) <= limit, "{what}: {values:?} instead of {expected:?}");
}

/// The optimizer of a training that is saved.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stored {
    /// With its state, which a checkpoint has.
    Optimizer,
    /// Without state.
    Parameters,
}

/// Trains from the newest checkpoint in a directory, or from the beginning. Returns the parameters.
fn continued(strategy: &str, directory: &Path, stored: Stored, saves: bool) -> Vec<Result<Vec<f32>>> {
    trained(strategy, directory, stored, STEPS, saves)
}

/// Takes `steps` steps from the newest checkpoint in a directory, or from the beginning. Returns the parameters.
fn trained(
    strategy: &str,
    directory: &Path,
    stored: Stored,
    steps: usize,
    saves: bool,
) -> Vec<Result<Vec<f32>>> {
    let (strategy, directory): (Strategy, _) = (strategy.parse().unwrap(), directory.to_owned());
    let ranks = if strategy == Strategy::Single { 1 } else { RANKS };
    let program = move |transport| {
        let options = TrainerOptions::new(strategy).with_micro_batches(MICRO_BATCHES);
        let mut trainer = options.build(Communicator::new(transport), model(7), PlainVectors)?;
        let mut checkpoints = Checkpoints::at(&directory);
        let (mut adamw, mut sgd) = (AdamW::new(AdamWOptions::default()).unwrap(), sgd());
        let done = match stored {
            Stored::Optimizer => trainer.load(&mut checkpoints, Some(&mut adamw))?,
            Stored::Parameters => trainer.load_parameters(&mut checkpoints)?,
        };
        let done = usize::try_from(done.unwrap_or(0)).unwrap();
        for step in done..done + steps {
            trainer.step(MICRO_BATCHES, |index| batch(step, index))?;
            match stored {
                Stored::Optimizer => trainer.update(&mut adamw)?,
                Stored::Parameters => trainer.update(&mut sgd)?,
            }
        }
        if saves {
            let optimizer: Option<&dyn OptimizerState> = match stored {
                Stored::Optimizer => Some(&adamw),
                Stored::Parameters => None,
            };
            trainer.save(&mut checkpoints, optimizer, (done + steps) as u64)?;
        }
        Training { trainer, micro_batches: 0..0, sgd }.parameters()
    };
    sim::run(1, ranks, program).results
}

/// Returns a directory in which it costs nothing to sync a file, if the system has one.
fn directory_in_memory() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory).unwrap() } else { tempfile::tempdir().unwrap() }
}

/// Returns for each strategy the reason why its checkpoints do not work. Each saves and one process continues, and the
/// other way round.
fn check_checkpoints(stored: Stored) -> Vec<Option<&'static str>> {
    let begun = directory_in_memory();
    let alone = |directory: &Path, saves| continued("single", directory, stored, saves).remove(0).unwrap();
    alone(begun.path(), true);
    let expected = alone(begun.path(), false);
    let check = |strategy: &str| {
        let what = format!("a checkpoint of {stored:?} with {strategy}");
        let directory = directory_in_memory();
        values_or_reason(continued(strategy, directory.path(), stored, true), &what)?;
        let is_local = matches!(strategy.parse().unwrap(), Strategy::LocalSgd(_));
        if is_local && stored == Stored::Optimizer {
            // Each rank has an optimizer of its own, so the training is compared with itself.
            let values = values_or_reason(continued(strategy, directory.path(), stored, false), &what)?;
            let empty = directory_in_memory();
            let whole = values_or_reason(trained(strategy, empty.path(), stored, 2 * STEPS, false), &what)?;
            assert_eq!(values, whole, "{what}");
            return Ok(());
        }
        let mut values = values_or_reason(continued(strategy, begun.path(), stored, false), &what)?;
        values.push(alone(directory.path(), false));
        for values in &values {
            match strategy.parse().unwrap() {
                Strategy::LocalSgd(_) => assert_close(values, &expected, 1e-5, &what),
                _ => assert_eq!(*values, expected, "{what}"),
            }
        }
        Ok(())
    };
    STRATEGIES.iter().map(|(_, strategy)| check(strategy).err()).collect()
}

/// Takes one step with master parameters in `f64` from the newest checkpoint in a directory, or from the beginning, and
/// saves. Returns the parameters.
fn step_of_mixed_precision(strategy: &str, directory: &Path) -> Vec<Vec<f32>> {
    let (strategy, directory): (Strategy, _) = (strategy.parse().unwrap(), directory.to_owned());
    let ranks = if strategy == Strategy::Single { 1 } else { RANKS };
    let program = move |transport| {
        let precision = Precision { master: Some(FloatType::F64), reduce: Some(FloatType::F64) };
        let options =
            TrainerOptions::new(strategy).with_micro_batches(MICRO_BATCHES).with_precision(precision);
        let mut trainer = options.build(Communicator::new(transport), blocks(), PlainVectors).unwrap();
        let (mut checkpoints, mut adamw) =
            (Checkpoints::at(&directory), AdamW::new(AdamWOptions::default()).unwrap());
        let step = trainer.load(&mut checkpoints, Some(&mut adamw)).unwrap().unwrap_or(0);
        trainer.step(MICRO_BATCHES, |index| batch(usize::try_from(step)?, index)).unwrap();
        trainer.update(&mut adamw).unwrap();
        trainer.save(&mut checkpoints, Some(&adamw), step + 1).unwrap();
        Training { trainer, micro_batches: 0..0, sgd: sgd() }.parameters().unwrap()
    };
    sim::run(1, ranks, program).results
}

/// A checkpoint has the master values, which have more digits than the model.
#[rstest]
fn a_checkpoint_of_mixed_precision_continues_with_the_same_bits(
    #[values("single", "fsdp", "pipeline:1f1b", "pipeline:1f1b:2", "pipeline:1f1b:2:sharded")] before: &str,
    #[values("ddp", "pipeline:1f1b", "pipeline:1f1b:2:sharded")] after: &str,
) {
    let trained = |strategies: [&str; 3]| {
        let directory = directory_in_memory();
        let steps = strategies.map(|strategy| step_of_mixed_precision(strategy, directory.path()));
        steps.into_iter().last().unwrap()
    };
    let expected = trained(["single"; 3]).remove(0);
    for (rank, values) in trained([before, after, before]).into_iter().enumerate() {
        assert_eq!(values, expected, "rank {rank}");
    }
}

/// The checkpoints in the table.
const CHECKPOINTS: [(&str, Stored); 2] = [
    ("checkpoints with the optimizer", Stored::Optimizer),
    ("checkpoints of parameters", Stored::Parameters),
];

/// A row of the table: the name of a feature, and for each strategy the reason why it does not work.
type Row = (String, Vec<Option<String>>);

fn row(number: usize) -> Row {
    let (name, reasons) = match FEATURES.get(number) {
        Some(feature) => (feature.name, check_feature(feature)),
        None => {
            let (name, stored) = CHECKPOINTS[number - FEATURES.len()];
            (name, check_checkpoints(stored))
        }
    };
    (name.to_owned(), reasons.into_iter().map(|reason| reason.map(str::to_owned)).collect())
}

/// Returns the table in Markdown, with a numbered list of reasons.
fn table(rows: &[Row]) -> String {
    let mut all: Vec<&str> = Vec::new();
    let names = STRATEGIES.map(|(name, _)| name);
    let mut text = format!("| | {} |\n|---|{}\n", names.join(" | "), "---|".repeat(names.len()));
    for (name, reasons) in rows {
        let cells = reasons.iter().map(|reason| {
            let Some(reason) = reason else { return "yes".to_owned() };
            let number = all.iter().position(|known| known == reason).unwrap_or_else(|| {
                all.push(reason);
                all.len() - 1
            });
            format!("no ({})", number + 1)
        });
        let cells: Vec<String> = cells.collect();
        text += &format!("| {name} | {} |\n", cells.join(" | "));
    }
    text += "\n";
    for (index, reason) in all.iter().enumerate() {
        text += &format!("{}. {}{}.\n", index + 1, reason[..1].to_uppercase(), &reason[1..]);
    }
    text
}

/// Returns the rows of a table that [`table`] has made.
fn parse(table: &str) -> Vec<Row> {
    let reason = |cell: &str| {
        let number = cell.strip_prefix("no (")?.strip_suffix(')')?;
        let (_, rest) = table.split_once(&format!("\n{number}. ")).expect("the list has every reason");
        let text = rest.split_once(".\n").expect("a reason ends with a full stop").0;
        Some(text[..1].to_lowercase() + &text[1..])
    };
    let row = |line: &str| {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        (cells.next().unwrap_or_default().to_owned(), cells.map(reason).collect())
    };
    table.lines().skip(2).take_while(|line| line.starts_with('|')).map(row).collect()
}

/// The page, and the comments before and after the table.
const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/strategy.md");
const BEGIN: &str = "<!-- The table is generated by dist-parallel/tests/training/trainer.rs. -->\n\n";
const END: &str = "\n<!-- The end of the generated table. -->\n";

/// Returns the page before the table, the table, and the rest.
fn page() -> [String; 3] {
    let page = fs::read_to_string(PAGE).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect("the page has the comment before the table");
    let (table, after) = rest.split_once(END).expect("the page has the comment after the table");
    [before, table, after].map(str::to_owned)
}

#[rstest]
fn the_page_on_strategies_says_what_works_with_what(
    #[values(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20)] number: usize,
) {
    let [_, table, _] = page();
    let (name, reasons) = row(number);
    let written = parse(&table).into_iter().find(|(written, _)| *written == name);
    let advice = "run the_table_has_all_features with DIST_WRITE_TABLE=1 to write the table";
    assert_eq!(written, Some((name, reasons)), "{advice}");
}

/// With the variable DIST_WRITE_TABLE set, this writes the table into the page.
#[test]
fn the_table_has_all_features() {
    let [before, written, after] = page();
    if std::env::var_os("DIST_WRITE_TABLE").is_some() {
        let rows: Vec<Row> = (0..FEATURES.len() + CHECKPOINTS.len()).map(row).collect();
        fs::write(PAGE, format!("{before}{BEGIN}{}{END}{after}", table(&rows))).unwrap();
        return;
    }
    let rows = parse(&written);
    assert_eq!(table(&rows), written);
    let names = FEATURES.iter().map(|feature| feature.name).chain(CHECKPOINTS.map(|(name, _)| name));
    assert!(rows.iter().map(|(name, _)| name).eq(names), "{rows:?}");
    assert_eq!(rows.len(), 21, "the_page_on_strategies_says_what_works_with_what tries each of the rows");
}

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

/// Builds a trainer on every rank and returns the error of each.
fn refusals(ranks: usize, options: impl Fn(usize) -> TrainerOptions + Send + Sync + 'static) -> Vec<String> {
    let results = run_at_once(ranks, move |comm| {
        let options = options(comm.rank());
        options.build(comm, blocks(), PlainVectors).unwrap_err().to_string()
    });
    assert!(results.iter().all(|refusal| *refusal == results[0]), "{results:?}");
    results
}

#[rstest]
#[case::single(2, "single", |options: TrainerOptions| options, "a world of several processes does not work with the strategy single: it is for one process: use ddp")]
#[case::micro_batches(
    2,
    "pipeline:zb1p",
    |options: TrainerOptions| options,
    "an open number of micro-batches does not work with the strategy pipeline:zb1p"
)]
#[case::buckets(
    2,
    "fsdp",
    |options: TrainerOptions| options.with_bucket_bytes(BucketBytes::default()),
    "a size of buckets does not work with the strategy fsdp"
)]
#[case::units(2, "ddp", |options: TrainerOptions| options.with_units(Units::OneForAll), "a choice of units does not work with the strategy ddp")]
#[case::prefetch(2, "zero2", |options: TrainerOptions| options.with_prefetch(2), "prefetch does not work with the strategy zero2")]
#[case::reshard(
    2,
    "zero1",
    |options: TrainerOptions| options.with_reshard(Reshard::Nothing),
    "a choice of resharding does not work with the strategy zero1"
)]
#[case::stages(
    2,
    "local_sgd:2",
    |options: TrainerOptions| options.with_stages(vec![0..2, 2..5]),
    "a choice of stages does not work with the strategy local_sgd:2"
)]
#[case::groups(3, "hybrid:2", |options: TrainerOptions| options, "3 ranks cannot be divided into groups of 2")]
#[case::pipelines(3, "pipeline:1f1b:2", |options: TrainerOptions| options.with_micro_batches(8), "3 ranks cannot be divided into groups of 2")]
#[case::shares(
    3,
    "pipeline:1f1b:1",
    |options: TrainerOptions| options.with_micro_batches(8),
    "8 micro-batches cannot be divided evenly among 3 pipelines"
)]
#[case::blocks(3, "pipeline:zbv", |options: TrainerOptions| options.with_micro_batches(8), "5 layers cannot be divided into 6 stages")]
#[case::steps(2, "local_sgd:0", |options: TrainerOptions| options, "the number of inner steps cannot be 0")]
fn options_that_do_not_work_are_refused_on_every_rank(
    #[case] ranks: usize,
    #[case] strategy: &str,
    #[case] change: fn(TrainerOptions) -> TrainerOptions,
    #[case] expected: &str,
) {
    let strategy: Strategy = strategy.parse().unwrap();
    let options = move |_| change(TrainerOptions::new(strategy));
    let refused = refusals(ranks, options);
    assert!(refused[0].starts_with(expected), "{}", refused[0]);
}

#[test]
fn ranks_with_different_strategies_are_named() {
    let options = |rank| TrainerOptions::new(if rank == 2 { Strategy::Fsdp } else { Strategy::Ddp });
    let expected = "the options differ between ranks: the strategy is fsdp on rank 2 and ddp on rank 0";
    assert_eq!(refusals(3, options), [expected; 3]);
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

/// With weights on some ranks only, parameters would be averaged with weights of different kinds.
#[test]
fn local_training_refuses_weights_on_only_some_ranks() {
    let results = run_at_once(2, |comm| {
        let rank = comm.rank();
        let options = TrainerOptions::new("local_sgd:1".parse().unwrap());
        let mut trainer = options.build(comm, blocks(), PlainVectors).unwrap();
        let report = if rank == 0 {
            trainer.step(2, |index| batch(0, index))
        } else {
            trainer.step(2, |index| {
                let (input, loss) = batch(0, index)?;
                Ok((input, move |output| loss(output).map(|(loss, gradient)| ((loss, 7), gradient))))
            })
        };
        assert_eq!(report.unwrap().micro_batches, 1);
        trainer.update(&mut sgd())
    });
    assert!(results.iter().all(|result| matches!(result, Err(Error::PartlyWeighted))), "{results:?}");
}

#[test]
fn local_training_refuses_weights_of_only_some_steps_before_a_synchronisation() {
    let results = run_at_once(1, |comm| {
        let options = TrainerOptions::new("local_sgd:2".parse().unwrap());
        let mut trainer = options.build(comm, blocks(), PlainVectors).unwrap();
        trainer.step(1, |index| batch(0, index)).unwrap();
        trainer.update(&mut sgd()).unwrap();
        trainer.step_with(1, |_, _, _| Ok((1.0, 7))).map(drop)
    });
    assert!(matches!(results[0], Err(Error::PartlyWeighted)), "{results:?}");
}

/// A rank without a micro-batch takes part in the average with weight 0.
#[test]
fn a_rank_without_micro_batches_gets_the_parameters_of_the_others() {
    let train = |ranks: usize| {
        sim::run(1, ranks, |transport| {
            let options = TrainerOptions::new("local_sgd:2".parse().unwrap());
            let mut trainer = options.build(Communicator::new(transport), blocks(), PlainVectors).unwrap();
            let mut sgd = sgd();
            for step in 0..STEPS {
                trainer.step(1, |index| batch(step, index)).unwrap();
                trainer.update(&mut sgd).unwrap();
            }
            assert!(matches!(trainer.step(0, |index| batch(0, index)), Err(Error::NoMicroBatches)));
            Training { trainer, micro_batches: 0..0, sgd }.parameters().unwrap()
        })
    };
    let alone = train(1).results.remove(0);
    assert_eq!(train(3).results, [(); 3].map(|()| alone.clone()));
}

#[test]
fn ranks_of_local_training_are_evaluated_when_they_have_synchronised() {
    let results = run_at_once(2, |comm| {
        let options = TrainerOptions::new("diloco:2".parse().unwrap());
        let mut trainer = options.build(comm, blocks(), PlainVectors).unwrap();
        trainer.step(2, |index| batch(0, index)).unwrap();
        trainer.update(&mut sgd()).unwrap();
        let find = |trainer: &mut dyn Trainer<Rows>| {
            trainer.evaluate(2, |index| Ok(micro_batch(0, index).0), |_, output: Rows| Ok(output[0]))
        };
        let refused = find(&mut *trainer).unwrap_err();
        assert!(matches!(refused, Error::NotSynchronised { steps: 1 }), "{refused}");
        trainer.synchronise_parameters().unwrap();
        find(&mut *trainer).unwrap().loss
    });
    assert_eq!(results[0], results[1]);
}

#[rstest]
fn trained_parameters_are_copied_into_a_whole_model(#[values("ddp", "fsdp", "pipeline:zbv")] strategy: &str) {
    let strategy: Strategy = strategy.parse().unwrap();
    let results = run_at_once(2, move |comm| {
        let options = TrainerOptions::new(strategy).with_micro_batches(2);
        let mut trainer = options.build(comm, model(7), PlainVectors).unwrap();
        trainer.step(2, |index| batch(0, index)).unwrap();
        trainer.update(&mut sgd()).unwrap();
        let mut copy = model(99);
        trainer.copy_parameters(&mut copy).unwrap();
        let mut copied = vec![Vec::new(); copy.infos().len()];
        for index in (0..copy.infos().len()).filter(|&index| copy.infos()[index].same_as.is_none()) {
            copy.read(index, &mut |values| copied[index] = f32s(values).to_vec()).unwrap();
        }
        copied
    });
    let alone = run_at_once(1, |comm| {
        let options = TrainerOptions::new(Strategy::Single);
        let mut training = Setup { comm, options, micro_batches: 0..2 }.build(model(7)).unwrap();
        training.step(0).unwrap();
        training.trainer.update(&mut training.sgd).unwrap();
        training.parameters().unwrap()
    });
    assert!(results.iter().all(|copied| copied.concat() == alone[0]), "{results:?}");
}

#[test]
fn parameters_are_not_copied_into_another_model() {
    let results = run_at_once(1, |comm| {
        let options = TrainerOptions::new(Strategy::Single);
        let mut trainer = options.build(comm, model(7), PlainVectors).unwrap();
        trainer.copy_parameters(&mut blocks()).unwrap_err()
    });
    let source = std::error::Error::source(&results[0]).unwrap().to_string();
    let expected = "the model to copy to has first.weight [4, 3] f32 instead of first.weight [3, 3] f32";
    assert_eq!(source, expected);
}

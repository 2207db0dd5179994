//! The features in the table of strategies: a training with each of them.

use std::ops::Range;

use dist_collectives::Communicator;
use dist_parallel::compress::Compression;
use dist_parallel::fsdp::Precision;
use dist_parallel::model::{Pass, Ready, Saved, Slot};
use dist_parallel::optim::ParamGroups;
use dist_parallel::trainer::{Strategy, Trainer, TrainerOptions};
use dist_parallel::{Block, BoxError, FloatType, ParamInfo, Params, Result, Sequence, Values, ValuesMut};
use dist_transport::sim;

use super::{
    MICRO_BATCHES, RANKS, STRATEGIES, Setup, assert_close, batch, blocks, f32s, layers, values_or_reason,
};
use crate::plain::{Rows, micro_batch, model, params_in_slots, squared_error};

/// A feature: its name in the table, a training that uses it, and the comparison of the result with one process.
pub(super) struct Feature {
    pub(super) name: &'static str,
    train: fn(Setup) -> Result<Vec<f32>>,
    compare: Compare,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Compare {
    /// The same bits, except for local SGD, which averages parameters instead of gradients.
    Bits,
    /// Differences of at most this much, because sums have another order or are rounded.
    Close(f32),
    /// The same bits, except for local SGD. There the first values come from a rank's own micro-batches.
    OwnGradients { values: usize },
}

pub(super) const FEATURES: [Feature; 19] = [
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

fn with_extra(extra: Extra) -> Sequence<Rows> {
    let mut layers = layers();
    layers.insert(2, Box::new(extra));
    Sequence::new(layers).unwrap()
}

/// A block with one unusual parameter. It multiplies by the parameter's first value, if it is trained and has one. It sets a
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

params_in_slots!(Extra);

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

/// Returns for each strategy the reason why a feature does not work with it. If it works, the values are compared with
/// those of one process.
pub(super) fn check_feature(feature: &Feature) -> Vec<Option<&'static str>> {
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

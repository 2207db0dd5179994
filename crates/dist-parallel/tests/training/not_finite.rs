//! Steps whose gradients are not finite, and the scaler of losses that reacts to them.

use dist_collectives::Communicator;
use dist_parallel::checkpoint::{Checkpoints, Shards};
use dist_parallel::fsdp::{Fsdp, FsdpOptions, Precision};
use dist_parallel::optim::{LossScaler, LossScalerOptions, Optimizer, Sgd, SgdOptions};
use dist_parallel::pipeline::{Pipeline, PlainVectors, ScheduleKind};
use dist_parallel::{Block, BoxError, Ddp, DdpOptions, Error, FloatType, Result, Sequence, Values};
use dist_transport::sim;
use rstest::rstest;

use crate::checkpoint::{TrainingWay, WAYS};
use crate::halves::Scale;
use crate::plain::Rows;

/// The common interface of all trainers.
trait Trainer: Shards {
    /// Takes a step of four micro-batches. The last one alone has gradients: four times `gradient`.
    fn step(&mut self, gradient: f32) -> Result<()>;
    fn norm(&mut self) -> f64;
    fn scale(&mut self, factor: f64);
    fn update(&mut self, optimizer: &mut dyn Optimizer);
    fn update_if_finite(&mut self, optimizer: &mut dyn Optimizer) -> bool;
    fn values(&mut self) -> Vec<f32>;
}

/// The input of a micro-batch of one row of ones.
fn input() -> Rows {
    vec![1.0; 2]
}

fn differentiate(index: usize, gradient: f32) -> Result<(f32, Rows), BoxError> {
    Ok((0.0, vec![if index == 3 { 4.0 * gradient } else { 0.0 }; 2]))
}

macro_rules! trainer {
    ($trainer:ty, |$own:ident, $gradient:ident| $step:expr, |$norm:ident| $of_norm:expr) => {
        impl Trainer for $trainer {
            fn step(&mut self, $gradient: f32) -> Result<()> {
                let $own = self;
                $step.map(drop)
            }

            fn norm(&mut self) -> f64 {
                let $norm = self.gradient_norm();
                $of_norm
            }

            fn scale(&mut self, factor: f64) {
                self.scale_gradients(factor);
            }

            fn update(&mut self, optimizer: &mut dyn Optimizer) {
                <$trainer>::update(self, optimizer).unwrap();
            }

            fn update_if_finite(&mut self, optimizer: &mut dyn Optimizer) -> bool {
                <$trainer>::update_if_finite(self, optimizer).unwrap()
            }

            fn values(&mut self) -> Vec<f32> {
                let mut all = Vec::new();
                self.for_each_parameter(|_, values| match values {
                    Values::F32(values) => all.extend(values),
                    Values::F16(values) => all.extend(values.iter().map(|value| value.to_f32())),
                    other => panic!("the model is not {}", other.dtype()),
                })
                .unwrap();
                all
            }
        }
    };
}

trainer!(
    Ddp<Sequence<Rows>>,
    |own, gradient| Self::step(own, 4, |index| Ok((input(), move |_| differentiate(index, gradient)))),
    |norm| norm.unwrap()
);
trainer!(
    Fsdp<Rows>,
    |own, gradient| Self::step(own, 4, |index| Ok((input(), move |_| differentiate(index, gradient)))),
    |norm| norm.unwrap()
);
trainer!(
    Pipeline<Rows>,
    |own, gradient| Self::step(own, |_| Ok(input()), |index, _| differentiate(index, gradient)),
    |norm| norm.unwrap()
);

/// The number of the pipeline among the ways to train.
const PIPELINE: usize = WAYS.len();

/// Two blocks, the first with values of this type.
fn model(dtype: FloatType) -> Sequence<Rows> {
    let scale =
        |name: &str, dtype, seed| -> Box<dyn Block<Rows>> { Box::new(Scale::new(name, 2, dtype, seed)) };
    Sequence::new(vec![scale("first", dtype, 1), scale("second", dtype, 2)]).unwrap()
}

fn trainer(comm: Communicator, way: usize, dtype: FloatType) -> Box<dyn Trainer> {
    let precision = Precision { master: Some(FloatType::F32), reduce: Some(FloatType::F32) };
    match WAYS.get(way) {
        Some(TrainingWay::Ddp) => Box::new(Ddp::new(comm, model(dtype), DdpOptions::default()).unwrap()),
        Some(&TrainingWay::Sharded(strategy)) => {
            let options = FsdpOptions::new(strategy).with_precision(precision);
            Box::new(Fsdp::new(comm, model(dtype), &options).unwrap())
        }
        None => {
            let schedule = ScheduleKind::OneForwardOneBackward.schedule(2, 4).unwrap();
            Box::new(Pipeline::new(comm, model(dtype), schedule, &[0..1, 1..2], PlainVectors).unwrap())
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "f32 holds every scale")]
fn scaled(gradient: f32, scaler: &LossScaler) -> f32 {
    gradient * scaler.scale() as f32
}

fn sgd(learning_rate: f64) -> Sgd {
    Sgd::new(SgdOptions { learning_rate, ..SgdOptions::default() }).unwrap()
}

/// One rank alone computes the gradients that are not finite.
#[rstest]
fn a_step_with_gradients_that_are_not_finite_is_skipped_on_all_ranks(
    #[values(0, 1, 2, 3, 4, 5, PIPELINE)] way: usize,
    #[values(f32::NAN, f32::INFINITY)] odd: f32,
) {
    let outcome = sim::run(1, 2, move |transport| {
        let mut trainer = trainer(Communicator::new(transport), way, FloatType::F32);
        let mut optimizer = sgd(0.5);
        let mut steps = Vec::new();
        for gradient in [1.0, odd, 1.0] {
            trainer.step(gradient).unwrap();
            let is_applied = trainer.update_if_finite(&mut optimizer);
            steps.push((is_applied, trainer.values()));
        }
        steps
    });
    for steps in &outcome.results {
        let [(true, first), (false, second), (true, third)] = &steps[..] else { panic!("{steps:?}") };
        assert!(first == second && second != third && third.iter().all(|value| value.is_finite()));
        assert_eq!(steps, &outcome.results[0]);
    }
}

const OPTIONS: LossScalerOptions =
    LossScalerOptions { scale: 65536.0, growth: 2.0, growth_interval: 2, backoff: 0.5 };

/// The gradients of f16 vanish below 2⁻²⁵ and are infinite from 65520 on. Each row is a step: its gradient before
/// scaling, whether it is applied, and the scale after it.
const SEQUENCE: [(f32, bool, f64); 6] = [
    (TINY, true, 65536.0),
    (TINY, true, 131_072.0),
    (LARGE, false, 65536.0),
    (LARGE, false, 32768.0),
    (TINY, true, 32768.0),
    (TINY, true, 65536.0),
];
const TINY: f32 = 1.0 / (1 << 28) as f32;
const LARGE: f32 = 1.0;

/// Changes a parameter by 2⁻⁶ in a step with `TINY`.
const LEARNING_RATE: f64 = (1 << 22) as f64;

/// Takes steps with these gradients. Returns them with whether each was applied, and the scale after it.
fn trained(
    trainer: &mut dyn Trainer,
    scaler: &mut LossScaler,
    steps: &[(f32, bool, f64)],
) -> Vec<(f32, bool, f64)> {
    let mut optimizer = sgd(LEARNING_RATE);
    let mut seen = Vec::new();
    for &(gradient, ..) in steps {
        trainer.step(scaled(gradient, scaler)).unwrap();
        let factor = scaler.end_step(trainer.norm());
        if let Some(factor) = factor {
            trainer.scale(factor);
            trainer.update(&mut optimizer);
        }
        seen.push((gradient, factor.is_some(), scaler.scale()));
    }
    seen
}

/// After half of the steps, the training continues from a checkpoint.
#[rstest]
fn the_loss_scaler_makes_the_decisions_of_a_hand_computed_sequence_on_all_ranks(
    #[values(0, 1, 2, 3, 4, 5, PIPELINE)] way: usize,
    #[values(FloatType::F16, FloatType::F32)] dtype: FloatType,
) {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_owned();
    let outcome = sim::run(1, 2, move |transport| {
        let mut comm = Communicator::new(transport);
        let mut checkpoints = Checkpoints::at(&directory).only_finite();
        let mut first = trainer(comm.fork().unwrap(), way, dtype);
        let mut scaler = LossScaler::new(OPTIONS).unwrap();
        let mut seen = trained(&mut *first, &mut scaler, &SEQUENCE[..3]);
        checkpoints.set_state("loss scaler", &scaler).unwrap();
        checkpoints.save(&mut *first, None, 3).unwrap();
        let mut second = trainer(comm, way, dtype);
        checkpoints.load(&mut *second, None).unwrap();
        let mut scaler = checkpoints.state("loss scaler").unwrap();
        seen.extend(trained(&mut *second, &mut scaler, &SEQUENCE[3..]));
        (seen, second.values())
    });
    for (seen, values) in &outcome.results {
        if dtype == FloatType::F16 {
            assert_eq!(seen[..], SEQUENCE);
        } else {
            assert!(seen.iter().all(|(_, is_applied, _)| *is_applied), "f32 does not overflow");
        }
        assert!(values.iter().all(|value| value.is_finite()));
        assert_eq!(values, &outcome.results[0].1);
    }
}

/// The optimizer updates parameters of f32, so an f16 model learns what vanishes in f16.
#[rstest]
fn a_half_precision_model_learns_from_gradients_that_vanish_or_overflow_without_the_scaler(
    #[values(1, 2, 3, 4, 5)] way: usize,
) {
    let run = move |scale: Option<f32>| {
        let outcome = sim::run(1, 2, move |transport| {
            let mut trainer = trainer(Communicator::new(transport), way, FloatType::F16);
            let before = trainer.values();
            match scale {
                None => drop(trained(&mut *trainer, &mut LossScaler::new(OPTIONS).unwrap(), &SEQUENCE)),
                Some(scale) => {
                    trainer.step(TINY * scale).unwrap();
                    trainer.update(&mut sgd(LEARNING_RATE));
                    let vanished = trainer.values() == before;
                    trainer.step(LARGE * scale).unwrap();
                    assert!(vanished != trainer.norm().is_infinite());
                }
            }
            (before, trainer.values())
        });
        outcome.results
    };
    for (before, after) in run(None) {
        assert!(before != after && after.iter().all(|value| value.is_finite()), "{after:?}");
    }
    // Without a scaler the small gradients vanish, and with a fixed scale the large ones overflow.
    run(Some(1.0));
    run(Some(65536.0));
}

#[rstest]
fn training_in_f32_has_the_same_bits_with_and_without_a_scaler(#[values(0, 1, 3, PIPELINE)] way: usize) {
    let outcome = sim::run(1, 2, move |transport| {
        let mut comm = Communicator::new(transport);
        let mut with = trainer(comm.fork().unwrap(), way, FloatType::F32);
        let mut without = trainer(comm, way, FloatType::F32);
        let (mut scaler, mut optimizer) = (LossScaler::new(OPTIONS).unwrap(), sgd(0.1));
        for step in 1..6_u8 {
            let gradient = 0.3 / f32::from(step);
            with.step(scaled(gradient, &scaler)).unwrap();
            let factor = scaler.end_step(with.norm()).unwrap();
            with.scale(factor);
            with.update(&mut optimizer);
            without.step(gradient).unwrap();
            without.update(&mut optimizer);
        }
        assert!(scaler.scale() > OPTIONS.scale);
        (with.values(), without.values())
    });
    assert!(outcome.results.iter().all(|(with, without)| with == without), "{:?}", outcome.results);
}

#[rstest]
fn gradients_that_are_scaled_differently_are_the_same_error_on_every_rank(
    #[values(0, 1, 2, 3, 4, 5, PIPELINE)] way: usize,
) {
    let outcome = sim::run(1, 2, move |transport| {
        let mut trainer = trainer(Communicator::new(transport), way, FloatType::F32);
        trainer.step(1.0).unwrap();
        let rank = trainer.communicator_mut().rank();
        trainer.scale(if rank == 1 { 0.5 } else { 2.0 });
        trainer.step(1.0)
    });
    for result in outcome.results {
        let Err(Error::SettingsDiffer { rank: 1, setting, there, on_rank_0 }) = result else {
            panic!("{result:?}")
        };
        assert_eq!(setting, "the factor that gradients are scaled by");
        assert_eq!((&*there, &*on_rank_0), ("0.5", "2.0"));
    }
}

//! Steps whose gradients are not finite, and the scaler of losses that reacts to them.

use dist_collectives::Communicator;
use dist_parallel::checkpoint::Checkpoints;
use dist_parallel::fsdp::{FsdpOptions, Precision};
use dist_parallel::optim::{LossScaler, LossScalerOptions, Sgd, SgdOptions};
use dist_parallel::pipeline::PlainVectors;
use dist_parallel::trainer::{Trainer, TrainerOptions};
use dist_parallel::{Block, Error, FloatType, Result, Sequence};
use dist_transport::sim;
use rstest::rstest;

use crate::checkpoint::WAYS;
use crate::halves::Scale;
use crate::plain::{Rows, floats};

/// Takes a step of four micro-batches. The last one alone has gradients: four times `gradient`.
fn step(trainer: &mut dyn Trainer<Rows>, gradient: f32) -> Result<()> {
    let batch = |index| {
        let of_output = if index == 3 { 4.0 * gradient } else { 0.0 };
        Ok((vec![1.0; 2], move |_| Ok((0.0, vec![of_output; 2]))))
    };
    trainer.step(4, batch).map(drop)
}

fn values(trainer: &mut dyn Trainer<Rows>) -> Vec<f32> {
    let mut all = Vec::new();
    trainer.for_each_parameter(&mut |_, values| all.extend(floats(values))).unwrap();
    all
}

/// The number of the pipeline among the ways to train.
const PIPELINE: usize = WAYS.len();

/// Two blocks, the first with values of this type.
fn model(dtype: FloatType) -> Sequence<Rows> {
    let scale =
        |name: &str, dtype, seed| -> Box<dyn Block<Rows>> { Box::new(Scale::new(name, 2, dtype, seed)) };
    Sequence::new(vec![scale("first", dtype, 1), scale("second", dtype, 2)]).unwrap()
}

fn trainer(comm: Communicator, way: usize, dtype: FloatType) -> Box<dyn Trainer<Rows>> {
    let precision = Precision { master: Some(FloatType::F32), reduce: Some(FloatType::F32) };
    match WAYS.get(way) {
        Some(way) => way.trainer(comm, model(dtype), FsdpOptions::default().with_precision(precision)),
        None => {
            let options = TrainerOptions::new("pipeline:1f1b".parse().unwrap()).with_micro_batches(4);
            options.build(comm, model(dtype), PlainVectors).unwrap()
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
            step(&mut *trainer, gradient).unwrap();
            let is_applied = trainer.update_if_finite(&mut optimizer).unwrap();
            steps.push((is_applied, values(&mut *trainer)));
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
    trainer: &mut dyn Trainer<Rows>,
    scaler: &mut LossScaler,
    steps: &[(f32, bool, f64)],
) -> Vec<(f32, bool, f64)> {
    let mut optimizer = sgd(LEARNING_RATE);
    let mut seen = Vec::new();
    for &(gradient, ..) in steps {
        step(trainer, scaled(gradient, scaler)).unwrap();
        let factor = scaler.end_step(trainer.gradient_norm().unwrap());
        if let Some(factor) = factor {
            trainer.scale_gradients(factor);
            trainer.update(&mut optimizer).unwrap();
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
        first.save(&mut checkpoints, None, 3).unwrap();
        let mut second = trainer(comm, way, dtype);
        second.load(&mut checkpoints, None).unwrap();
        let mut scaler = checkpoints.state("loss scaler").unwrap();
        seen.extend(trained(&mut *second, &mut scaler, &SEQUENCE[3..]));
        (seen, values(&mut *second))
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
            let before = values(&mut *trainer);
            match scale {
                None => drop(trained(&mut *trainer, &mut LossScaler::new(OPTIONS).unwrap(), &SEQUENCE)),
                Some(scale) => {
                    step(&mut *trainer, TINY * scale).unwrap();
                    trainer.update(&mut sgd(LEARNING_RATE)).unwrap();
                    let vanished = values(&mut *trainer) == before;
                    step(&mut *trainer, LARGE * scale).unwrap();
                    assert!(vanished != trainer.gradient_norm().unwrap().is_infinite());
                }
            }
            (before, values(&mut *trainer))
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
        for number in 1..6_u8 {
            let gradient = 0.3 / f32::from(number);
            step(&mut *with, scaled(gradient, &scaler)).unwrap();
            let factor = scaler.end_step(with.gradient_norm().unwrap()).unwrap();
            with.scale_gradients(factor);
            with.update(&mut optimizer).unwrap();
            step(&mut *without, gradient).unwrap();
            without.update(&mut optimizer).unwrap();
        }
        assert!(scaler.scale() > OPTIONS.scale);
        (values(&mut *with), values(&mut *without))
    });
    assert!(outcome.results.iter().all(|(with, without)| with == without), "{:?}", outcome.results);
}

#[rstest]
fn gradients_that_are_scaled_differently_are_the_same_error_on_every_rank(
    #[values(0, 1, 2, 3, 4, 5, PIPELINE)] way: usize,
) {
    let outcome = sim::run(1, 2, move |transport| {
        let mut trainer = trainer(Communicator::new(transport), way, FloatType::F32);
        step(&mut *trainer, 1.0).unwrap();
        trainer.scale_gradients(if trainer.rank() == 1 { 0.5 } else { 2.0 });
        step(&mut *trainer, 1.0)
    });
    for result in outcome.results {
        let Err(Error::SettingsDiffer { rank: 1, setting, there, on_rank_0 }) = result else {
            panic!("{result:?}")
        };
        assert_eq!(setting, "the factor that gradients are scaled by");
        assert_eq!((&*there, &*on_rank_0), ("0.5", "2.0"));
    }
}

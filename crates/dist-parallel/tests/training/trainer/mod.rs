//! Every feature with every strategy through one interface, compared with one process.

mod checkpoints;
mod copy;
mod features;
mod local;
mod options;
mod steps;
mod table;

use std::ops::Range;

use dist_collectives::Communicator;
use dist_parallel::optim::{Sgd, SgdOptions};
use dist_parallel::pipeline::PlainVectors;
use dist_parallel::trainer::{Strategy, Trainer, TrainerOptions};
use dist_parallel::{Block, BoxError, Error, Result, Sequence, Values};

use crate::plain::{Linear, Relu, Rows, micro_batch, squared_error};

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

/// Compares values with the last ones of `expected`, which begins with losses if `values` has none.
#[track_caller]
fn assert_close(values: &[f32], expected: &[f32], limit: f32, what: &str) {
    let expected = &expected[expected.len() - values.len()..];
    let apart = values.iter().zip(expected).map(|(value, expected)| (value - expected).abs());
    assert!(apart.fold(0.0, f32::max) <= limit, "{what}: {values:?} instead of {expected:?}");
}

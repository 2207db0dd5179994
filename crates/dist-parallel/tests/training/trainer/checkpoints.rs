//! Checkpoints of one strategy that another continues.

use std::path::Path;

use dist_collectives::Communicator;
use dist_parallel::checkpoint::Checkpoints;
use dist_parallel::fsdp::Precision;
use dist_parallel::optim::{AdamW, AdamWOptions, OptimizerState};
use dist_parallel::pipeline::PlainVectors;
use dist_parallel::trainer::{Strategy, TrainerOptions};
use dist_parallel::{FloatType, Result};
use dist_transport::sim;
use rstest::rstest;

use super::{
    MICRO_BATCHES, RANKS, STEPS, STRATEGIES, Training, assert_close, batch, blocks, sgd, values_or_reason,
};
use crate::plain::model;

/// The optimizer of a training that is saved.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Stored {
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
pub(super) fn check_checkpoints(stored: Stored) -> Vec<Option<&'static str>> {
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

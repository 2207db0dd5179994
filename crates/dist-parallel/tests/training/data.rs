//! Training on a shuffled data set with a sampler.

use std::path::{Path, PathBuf};

use dist_collectives::Communicator;
use dist_parallel::checkpoint::Checkpoints;
use dist_parallel::data::{LastStep, Sampler};
use dist_parallel::optim::{Sgd, SgdOptions};
use dist_parallel::{Ddp, DdpOptions};
use dist_transport::sim;

use crate::plain::{bits, micro_batch, model, squared_error};

/// Trains up to a step, from the newest checkpoint if there is one, and saves.
fn train(directory: &Path, ranks: usize, last: LastStep, until: u64) -> Vec<Vec<u32>> {
    let directory: PathBuf = directory.to_owned();
    let program = move |transport| {
        let mut comm = Communicator::new(transport);
        let sampler = Sampler { len: 13, seed: 5, batch: 1, micro_batches: 4, last, ..Sampler::default() };
        sampler.check(&mut comm).unwrap();
        let mut ddp = Ddp::new(comm, model(7), DdpOptions::default()).unwrap();
        let mut sgd = Sgd::new(SgdOptions { learning_rate: 0.01, ..SgdOptions::default() }).unwrap();
        let mut checkpoints = Checkpoints::at(&directory);
        let done = checkpoints.load(&mut ddp, Some(&mut sgd)).unwrap().unwrap_or(0);
        let steps = sampler.after(done).unwrap().endless_steps().unwrap();
        for (_, step) in (done..until).zip(steps) {
            let report = ddp.step(step.micro_batches(), |index| {
                let example = step.examples(index)?[0];
                let (input, target) = micro_batch(example, 0);
                Ok((input, squared_error(target)))
            });
            report.unwrap();
            ddp.update(&mut sgd).unwrap();
        }
        checkpoints.save(&mut ddp, Some(&sgd), until).unwrap();
        bits(ddp.model())
    };
    sim::run(ranks as u64, ranks, program).results
}

#[test]
fn a_training_stopped_in_the_middle_of_an_epoch_goes_on_with_other_ranks_to_the_same_bits() {
    for last in [LastStep::Pad, LastStep::Drop] {
        let [whole, parts] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let expected = train(whole.path(), 1, last, 9).remove(0);
        // Epochs have 4 steps, or 3.
        let unfinished = train(parts.path(), 4, last, 5);
        assert!(unfinished.iter().all(|bits| *bits != expected));
        train(parts.path(), 1, last, 6);
        let resumed = train(parts.path(), 2, last, 9);
        assert!(resumed.iter().all(|bits| *bits == expected), "{last:?}");
    }
}

#[test]
fn an_epoch_whose_last_step_is_uneven_is_trained_by_more_ranks_than_it_has_micro_batches() {
    let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [few, many] = [2, 3].map(|ranks| train(directories[ranks - 2].path(), ranks, LastStep::Keep, 8));
    for results in [few, many] {
        assert!(results.iter().all(|bits| *bits == results[0]), "all ranks have the same bits");
    }
}

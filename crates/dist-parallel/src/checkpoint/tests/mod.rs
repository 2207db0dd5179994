//! Checkpoints of a trainer that holds arbitrary chunks of a model.

mod beside;
mod chunks;
mod dropped;
mod faults;
mod holder;
mod kill;
mod lies;
mod owner;
mod plain;
mod program_state;
mod round_trip;
mod selected;
mod weights;

use std::path::Path;

use dist_transport::sim;

use self::holder::{Holder, ModelDivision};
use super::{CheckpointError, Checkpoints};
use crate::{Communicator, Error};

/// Runs a program on simulated ranks, each of which holds its share of the model.
fn on_ranks<T: Send + 'static>(
    ranks: usize,
    division: ModelDivision,
    program: impl Fn(&mut Holder) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let run = move |transport| program(&mut Holder::new(Communicator::new(transport), division));
    sim::run(ranks as u64, ranks, run).results
}

/// Saves the values of these steps, one after the other.
fn saved(directory: &Path, ranks: usize, division: ModelDivision, steps: &'static [u64]) {
    let directory = directory.to_owned();
    on_ranks(ranks, division, move |holder| {
        let mut checkpoints = Checkpoints::at(&directory);
        for &step in steps {
            holder.fill(step);
            save(&mut checkpoints, holder, step).unwrap();
        }
    });
}

fn save(checkpoints: &mut Checkpoints, holder: &mut Holder, step: u64) -> crate::Result<()> {
    let (mut trainer, optimizer) = holder.parts();
    checkpoints.save(&mut trainer, Some(optimizer), step)
}

fn load(checkpoints: &mut Checkpoints, holder: &mut Holder) -> crate::Result<Option<u64>> {
    let (mut trainer, optimizer) = holder.parts();
    checkpoints.load(&mut trainer, Some(optimizer))
}

/// Returns the checkpoint error that every rank has.
#[track_caller]
fn same_fault<T: std::fmt::Debug>(results: Vec<crate::Result<T>>) -> CheckpointError {
    let mut faults = results.into_iter().map(|result| match result {
        Err(Error::Checkpoint(fault)) => *fault,
        other => panic!("{other:?}"),
    });
    let first = faults.next().unwrap();
    assert!(faults.all(|fault| fault == first));
    first
}

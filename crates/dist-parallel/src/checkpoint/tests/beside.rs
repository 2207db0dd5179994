//! Several groups with the same state; only the first saves.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use dist_transport::sim;

use super::holder::{Holder, HolderTrainer, ModelDivision};
use crate::checkpoint::disk::DiskOperation;
use crate::checkpoint::{Checkpoints, Chunk, ShardMetadata, Shards, Slice};
use crate::{Communicator, ParamInfo, Result, Values, ValuesMut};

/// A rank of one of several groups with the same state.
struct Beside<'a> {
    trainer: HolderTrainer<'a>,
    replicas: &'a mut Communicator,
}

impl Shards for Beside<'_> {
    fn infos(&self) -> &[ParamInfo] {
        self.trainer.infos()
    }

    fn parameters(&self) -> ShardMetadata<Chunk> {
        self.trainer.parameters()
    }

    fn slices(&self) -> ShardMetadata<Slice> {
        self.trainer.slices()
    }

    fn read(&self, chunk: Chunk, f: &mut dyn FnMut(Values<'_>)) -> Result<()> {
        self.trainer.read(chunk, f)
    }

    fn write(&mut self, chunk: Chunk, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<()> {
        self.trainer.write(chunk, f)
    }

    fn loaded(&mut self) -> Result<()> {
        self.trainer.loaded()
    }

    fn communicator_mut(&mut self) -> &mut Communicator {
        self.trainer.communicator_mut()
    }

    fn replicas_mut(&mut self) -> Option<&mut Communicator> {
        Some(self.replicas)
    }
}

/// Rank 0 of the saving group takes almost the whole timeout in each phase, and far longer to remove old checkpoints.
#[test]
fn other_groups_wait_for_the_phases_of_a_save_and_not_for_removals() {
    const TIMEOUT: Duration = Duration::from_secs(10);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let outcome = sim::run(1, 4, move |transport| {
        let mut world = Communicator::new(transport);
        let rank = world.rank();
        let (first, other) = (rank / 2 * 2, (rank + 2) % 4);
        let group = world.subgroup(&[first, first + 1]).unwrap().unwrap();
        let mut replicas = world.subgroup(&[rank.min(other), rank.max(other)]).unwrap().unwrap();
        let runtime = world.runtime().clone();
        let keep = NonZeroUsize::MIN;
        let mut checkpoints = Checkpoints::at(&path).with_timeout(TIMEOUT).keep_last(keep);
        if rank == 0 {
            let runtime = runtime.clone();
            checkpoints.disk.mutation_check = Some(Arc::new(move |act, _| {
                match act {
                    DiskOperation::List | DiskOperation::Create => runtime.sleep(TIMEOUT / 5 * 4),
                    DiskOperation::Remove => runtime.sleep(10 * TIMEOUT),
                    _ => {}
                }
                Ok(())
            }));
        }
        let mut holder = Holder::new(group, ModelDivision::Even);
        let mut times = Vec::new();
        for step in 1..=2 {
            world.set_timeout(20 * TIMEOUT);
            world.barrier().unwrap();
            let began = runtime.now();
            let (trainer, optimizer) = holder.parts();
            let mut beside = Beside { trainer, replicas: &mut replicas };
            checkpoints.save(&mut beside, Some(optimizer), step).unwrap();
            times.push(runtime.now() - began);
        }
        times
    });
    for times in &outcome.results[2..] {
        assert!(times.iter().all(|time| *time > TIMEOUT && *time < 3 * TIMEOUT), "{times:?}");
    }
    assert!(outcome.results[0][1] > 10 * TIMEOUT, "old checkpoints were removed");
}

//! The state of a rank of local SGD after a synchronisation point: all values, equal on every rank.

use super::{Chunk, ShardMetadata, Shards, Slice};
use crate::local_sgd::SyncedModel;
use crate::{Communicator, Error, ParamInfo, Params, Result, Values, ValuesMut};

impl<M: Params> Shards for SyncedModel<'_, M> {
    fn infos(&self) -> &[ParamInfo] {
        Shards::infos(&self.0.engine)
    }

    fn parameters(&self) -> ShardMetadata<Chunk> {
        self.0.engine.parameters()
    }

    fn slices(&self) -> ShardMetadata<Slice> {
        self.0.engine.slices()
    }

    fn untrained_to_save(&self) -> Vec<Chunk> {
        self.0.engine.untrained_to_save()
    }

    fn unsaved(&self) -> Option<String> {
        self.0.engine.unsaved()
    }

    fn read(&self, chunk: Chunk, f: &mut dyn FnMut(Values<'_>)) -> Result<()> {
        match self.0.steps() {
            0 => Shards::read(&self.0.engine, chunk, f),
            steps => Err(Error::NotSynchronised { steps }),
        }
    }

    fn write(&mut self, chunk: Chunk, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<()> {
        Shards::write(&mut self.0.engine, chunk, f)
    }

    fn loaded(&mut self) -> Result<()> {
        self.0.engine.loaded()?;
        self.0.start_here()
    }

    fn steps(&self) -> u64 {
        Shards::steps(&self.0.engine)
    }

    fn set_steps(&mut self, steps: u64) {
        self.0.set_steps(steps);
    }

    fn communicator_mut(&mut self) -> &mut Communicator {
        self.0.communicator_mut()
    }
}

/// Describes the gradients of `micro_batches` accumulated micro-batches, if there are any.
pub(crate) fn accumulated(micro_batches: usize) -> Option<String> {
    (micro_batches > 0).then(|| {
        format!("the gradients of {micro_batches} accumulated micro-batches, which no step has used yet,")
    })
}

//! The state of a rank of local SGD after a synchronisation point: all values, equal on every rank.

use super::{Chunk, ShardMetadata, Shards, Slice};
use crate::local_sgd::SyncedModel;
use crate::{Communicator, Error, ParamInfo, Params, Result, Values, ValuesMut, params};

impl<M: Params> Shards for SyncedModel<'_, M> {
    fn infos(&self) -> &[ParamInfo] {
        self.0.model().infos()
    }

    fn parameters(&self) -> ShardMetadata<Chunk> {
        everything(self.0.communicator(), chunks(self.0.model()))
    }

    fn slices(&self) -> ShardMetadata<Slice> {
        everything(self.0.communicator(), trained(self.0.model()))
    }

    fn read(&self, chunk: Chunk, f: &mut dyn FnMut(Values<'_>)) -> Result<()> {
        match self.0.steps() {
            0 => params::read(self.0.model(), chunk.parameter, f),
            steps => Err(Error::NotSynchronised { steps }),
        }
    }

    fn write(&mut self, chunk: Chunk, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<()> {
        write(self.0.model_mut(), chunk, f)
    }

    fn loaded(&mut self) -> Result<()> {
        self.0.start_here()
    }

    fn steps(&self) -> u64 {
        self.0.steps_before()
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

/// Returns the metadata of chunks that every rank of the group holds.
fn everything<T>(comm: &Communicator, chunks: Vec<T>) -> ShardMetadata<T> {
    ShardMetadata { chunks, copy: comm.rank(), copies: comm.world_size() }
}

fn chunks(model: &impl Params) -> Vec<Chunk> {
    stored(model.infos()).map(|(_, chunk)| chunk).collect()
}

/// Returns the optimizer's slices, by the number of the parameter.
fn trained(model: &impl Params) -> Vec<Slice> {
    let trained = stored(model.infos()).filter(|(info, _)| info.trainable);
    trained.map(|(_, chunk)| Slice { number: chunk.parameter, chunk }).collect()
}

fn write(model: &mut impl Params, chunk: Chunk, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<()> {
    params::write(model, chunk.parameter, |values| {
        f(values);
        Ok(())
    })
}

/// Returns the parameters that are not tied to an earlier one, each as one chunk.
fn stored(infos: &[ParamInfo]) -> impl Iterator<Item = (&ParamInfo, Chunk)> {
    let all = infos.iter().enumerate();
    all.filter(|(_, info)| info.same_as.is_none())
        .map(|(parameter, info)| (info, Chunk { parameter, offset: 0, len: info.len() }))
}

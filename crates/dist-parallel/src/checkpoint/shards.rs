//! The interface between trainers and checkpoints.
//!
//! A checkpoint is independent of strategies: a rank holds chunks of parameters, and its optimizer holds the state of
//! chunks of parameters.

use super::CheckpointProblem;
use crate::{Communicator, ParamInfo, Result, Values, ValuesMut};

/// The state that one rank holds of a model and its training.
///
/// All ranks together hold every value of every parameter that is not tied to an earlier one.
pub trait Shards {
    /// Returns all parameters of the model, the same list on every rank, with the types in which chunks are read.
    fn infos(&self) -> &[ParamInfo];

    /// Returns the chunks of parameters that this rank holds. The list never changes.
    fn parameters(&self) -> ShardMetadata<Chunk>;

    /// Returns the chunks of [`parameters`](Self::parameters) that this rank saves of frozen parameters and buffers.
    /// One rank must save each value, because ranks can have different ones. By default the first rank that holds the
    /// chunks saves all of them.
    fn untrained_to_save(&self) -> Vec<Chunk> {
        let ShardMetadata { mut chunks, copy, .. } = self.parameters();
        let untrained = |chunk: &Chunk| self.infos().get(chunk.parameter).is_some_and(|info| !info.trainable);
        chunks.retain(|chunk| copy == 0 && untrained(chunk));
        chunks
    }

    /// Returns the slices of this rank's optimizer. The list never changes.
    fn slices(&self) -> ShardMetadata<Slice>;

    /// Describes state that is in none of the chunks and would be lost, such as accumulated gradients. A save then
    /// fails with this description. The same on every rank.
    fn unsaved(&self) -> Option<String> {
        None
    }

    /// Returns `true` if a load must ignore the tensor of this name in a checkpoint. Otherwise a load fails if a
    /// checkpoint has a tensor that the model lacks. The same on every rank; `false` by default.
    fn leaves_out(&self, _tensor: &str) -> bool {
        false
    }

    /// Calls `f` once with the values of a chunk of [`parameters`](Self::parameters). It is called for every chunk,
    /// so it should not search that list.
    ///
    /// # Errors
    /// The values are not accessible.
    fn read(&self, chunk: Chunk, f: &mut dyn FnMut(Values<'_>)) -> Result<()>;

    /// Calls `f` once with the memory of a chunk of that list, which `f` may overwrite.
    ///
    /// # Errors
    /// The memory is not accessible.
    fn write(&mut self, chunk: Chunk, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<()>;

    /// Returns the index and a checksum of each frozen parameter that every rank holds in full and saves in part. A
    /// save fails if the checksums differ between ranks. There are none by default.
    ///
    /// # Errors
    /// The values are not accessible.
    fn frozen_checksums(&self) -> Result<Vec<(usize, u32)>> {
        Ok(Vec::new())
    }

    /// Checks on every rank, before a synchronous save, that the ranks have trained alike. May communicate. By
    /// default nothing is compared.
    ///
    /// # Errors
    /// The ranks have trained differently; then nothing is saved.
    fn check_alike(&mut self) -> Result<()> {
        Ok(())
    }

    /// Returns a hash that is equal on ranks with equal updates; 0 by default. Started saves compare it.
    fn updates(&self) -> u64 {
        0
    }

    /// Drops gradients and copies of the old values, on every rank, after all chunks have been overwritten. May
    /// communicate.
    ///
    /// # Errors
    /// The trainer cannot continue from these values; the job is then aborted.
    fn loaded(&mut self) -> Result<()>;

    /// Returns the number of steps that were taken, which a checkpoint saves; 0 by default. The same on every rank.
    fn steps(&self) -> u64 {
        0
    }

    /// Continues after this number of steps, once a checkpoint was loaded. Does nothing by default.
    fn set_steps(&mut self, _steps: u64) {}

    /// Returns the group whose ranks hold the model.
    fn communicator_mut(&mut self) -> &mut Communicator;

    /// Returns the ranks that hold the same state in other such groups, if any, in the same order for all ranks of a
    /// group. The first group saves and all load. If one group fails, none continues.
    fn replicas_mut(&mut self) -> Option<&mut Communicator> {
        None
    }
}

/// A contiguous range of one parameter's values, in row-major order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// The parameter's index.
    pub parameter: usize,
    /// The index of the first value in the parameter.
    pub offset: usize,
    /// The number of values.
    pub len: usize,
}

impl Chunk {
    /// Returns the parameter of the chunk, unless the chunk exceeds it or it is tied to another.
    pub(super) fn parameter(self, infos: &[ParamInfo]) -> Result<&ParamInfo, CheckpointProblem> {
        let inside =
            |info: &&ParamInfo| self.offset.checked_add(self.len).is_some_and(|end| end <= info.len());
        let info = infos.get(self.parameter).filter(|info| info.same_as.is_none()).filter(inside);
        info.ok_or_else(|| CheckpointProblem::Trainer(format!("no parameter has {self:?}")))
    }
}

/// A chunk of a parameter that is one slice of the optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// The optimizer's number of the slice.
    pub number: usize,
    /// The chunk.
    pub chunk: Chunk,
}

/// The chunks that a rank holds, and the ranks that hold the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardMetadata<T> {
    /// The chunks, without overlap. A rank can hold none.
    pub chunks: Vec<T>,
    /// This rank's number among the ranks with exactly these chunks in this order.
    pub copy: usize,
    /// The number of these ranks.
    pub copies: usize,
}

impl<T> ShardMetadata<T> {
    /// Returns the metadata of chunks that no other rank holds.
    pub const fn alone(chunks: Vec<T>) -> Self {
        Self { chunks, copy: 0, copies: 1 }
    }
}

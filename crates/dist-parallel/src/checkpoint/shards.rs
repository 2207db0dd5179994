//! What a trainer hands out to be saved, and takes back.
//!
//! A checkpoint knows nothing of strategies: a rank holds pieces of parameters, and its optimizer holds the state of
//! pieces of parameters.

use super::CheckpointProblem;
use crate::{Communicator, ParamInfo, Result, Values, ValuesMut};

/// What one rank holds of a model and its training.
///
/// All ranks together hold every value of every parameter that is not another name of an earlier one.
pub trait Shards {
    /// All parameters of the model, the same list on every rank, of the types in which pieces are handed out.
    fn infos(&self) -> &[ParamInfo];

    /// What this rank holds of the parameters. The list never changes.
    fn parameters(&self) -> ShardMetadata<Chunk>;

    /// The pieces of [`parameters`](Self::parameters) that this rank saves of frozen parameters and buffers. Every value is saved
    /// by one rank, since ranks may have different ones. By default the first of the ranks that hold the same pieces saves all
    /// of them.
    fn untrained_to_save(&self) -> Vec<Chunk> {
        let ShardMetadata { mut chunks, copy, .. } = self.parameters();
        let untrained = |chunk: &Chunk| self.infos().get(chunk.parameter).is_some_and(|info| !info.trainable);
        chunks.retain(|chunk| copy == 0 && untrained(chunk));
        chunks
    }

    /// What this rank's optimizer is given to step, each piece as a slice of its own. The list never changes.
    fn slices(&self) -> ShardMetadata<Slice>;

    /// What the trainer has that is in none of its pieces and would be lost, such as accumulated gradients, as an error says it: a
    /// save then fails. The same on every rank.
    fn unsaved(&self) -> Option<String> {
        None
    }

    /// Whether a load leaves out the tensor of this name in a checkpoint. Without it, a load fails if a checkpoint has a tensor that
    /// the model does not have. The same on every rank; `false` by default.
    fn leaves_out(&self, _tensor: &str) -> bool {
        false
    }

    /// Calls `f` once with the values of a piece of the list of [`parameters`](Self::parameters). It is called for every piece,
    /// so it should not search that list.
    ///
    /// # Errors
    /// If the values cannot be reached.
    fn read(&self, chunk: Chunk, f: &mut dyn FnMut(Values<'_>)) -> Result<()>;

    /// Calls `f` once with the memory of a piece of that list, which `f` may overwrite.
    ///
    /// # Errors
    /// If the memory cannot be reached.
    fn write(&mut self, chunk: Chunk, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<()>;

    /// Called on every rank before a synchronous save, to make sure that the ranks have trained alike. May communicate. By default
    /// nothing is compared.
    ///
    /// # Errors
    /// If they have not; then nothing is saved.
    fn check_alike(&mut self) -> Result<()> {
        Ok(())
    }

    /// A number that all ranks have alike if they have updated their parameters alike; 0 by default. Saves that were started
    /// compare it.
    fn updates(&self) -> u64 {
        0
    }

    /// Called on every rank once all pieces have been overwritten: gradients and copies that were made of the old values
    /// are of no use any more. May communicate.
    ///
    /// # Errors
    /// If the trainer cannot go on from these values; the job is then aborted.
    fn loaded(&mut self) -> Result<()>;

    /// The group whose ranks hold the model.
    fn communicator_mut(&mut self) -> &mut Communicator;

    /// The ranks that hold what this one does in other such groups, if there are any, in the same order for all ranks of a
    /// group. The first group saves, all load, and none goes on where another fails.
    fn replicas_mut(&mut self) -> Option<&mut Communicator> {
        None
    }
}

/// Neighbouring values of one parameter, which is read in row-major order. A piece can begin and end anywhere.
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
    /// The parameter that it is from, if that has such a piece, and memory of its own.
    pub(super) fn parameter(self, infos: &[ParamInfo]) -> Result<&ParamInfo, CheckpointProblem> {
        let inside =
            |info: &&ParamInfo| self.offset.checked_add(self.len).is_some_and(|end| end <= info.len());
        let info = infos.get(self.parameter).filter(|info| info.same_as.is_none()).filter(inside);
        info.ok_or_else(|| CheckpointProblem::Trainer(format!("no parameter has the {self:?}")))
    }
}

/// A piece of a parameter that is a slice of the optimizer, with nothing before it and nothing after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// The number by which the optimizer knows it.
    pub number: usize,
    /// What it is a piece of.
    pub chunk: Chunk,
}

/// What a rank holds, and who else holds exactly the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardMetadata<T> {
    /// The pieces. They do not overlap; a rank may hold none.
    pub chunks: Vec<T>,
    /// Which of the ranks that hold exactly these pieces, in this order, this one is.
    pub copy: usize,
    /// How many such ranks there are.
    pub copies: usize,
}

impl<T> ShardMetadata<T> {
    /// Pieces that no other rank holds.
    pub const fn alone(chunks: Vec<T>) -> Self {
        Self { chunks, copy: 0, copies: 1 }
    }
}

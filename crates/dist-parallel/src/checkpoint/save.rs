//! Saving a checkpoint on all ranks.
//!
//! Rank 0 creates a directory with a temporary name. Every rank writes its file into it and syncs it to the disk.
//! Rank 0 writes the index, syncs it, and removes `.tmp` from the directory's name. The checkpoint exists from this
//! rename on. Before it, the previous one is the newest. Between these phases all ranks agree that the last phase has
//! succeeded on every rank.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::agree::{self, Ranks};
use super::directory::{self, Name, Unfinished};
use super::disk::{Disk, DiskError};
use super::index::{Index, StoredState, StoredTensor, TensorName};
use super::owner::Owner;
use super::part::{self, Entry, PartMeta, WriteBytes};
use super::rank_request::RankRequest;
use super::state::ProgramState;
use super::{CheckpointError, INDEX};
use crate::{Communicator, ParamInfo, Result};

/// The plan to write a checkpoint.
pub(super) struct SavePlan {
    pub(super) disk: Disk,
    pub(super) directory: PathBuf,
    pub(super) owner: Arc<Mutex<Owner>>,
    pub(super) keep: Option<NonZeroUsize>,
    pub(super) step: u64,
    /// The number of steps that the trainer has taken.
    pub(super) steps: u64,
    /// The kinds of the shared optimizer and of each rank's own.
    pub(super) optimizers: [Option<&'static str>; 2],
    /// The request that the ranks compare.
    pub(super) request: Result<RankRequest, CheckpointError>,
    /// The parameters that are saved: those of the model that are not tied to an earlier one.
    pub(super) parameters: Vec<ParamInfo>,
    /// The entries that this rank writes. An error is known only to this rank. It is reported when the entries are
    /// written.
    pub(super) entries: Result<Vec<Entry>, CheckpointError>,
    /// The encoded state of the program, on the rank that writes it, if there is any.
    pub(super) state: Option<Vec<u8>>,
}

impl SavePlan {
    /// Writes the checkpoint together with the other ranks, if this group saves. `read` returns the values of this
    /// rank's entries.
    pub(super) fn run(
        &self,
        ranks: &mut Ranks,
        read: impl FnMut(&Entry, &mut WriteBytes<'_>) -> Result<(), CheckpointError>,
    ) -> Result<()> {
        ranks.compare(&self.directory, self.request.clone())?;
        let saved = if ranks.saves() { self.save(&mut ranks.group, read).map(Some) } else { Ok(None) };
        let saved = ranks.propagate(saved)?;
        if let Some(saved) = saved.filter(|_| ranks.is_first()) {
            self.prune(saved.owner);
        }
        Ok(())
    }

    fn save(
        &self,
        comm: &mut Communicator,
        read: impl FnMut(&Entry, &mut WriteBytes<'_>) -> Result<(), CheckpointError>,
    ) -> Result<Unfinished> {
        let begun = self.begin(comm)?;
        let written = self.write(comm, begun, read);
        let state = written.as_ref().ok().and(self.state.as_ref());
        let state = state.map(|state| ProgramState::write(&self.disk, &begun.path(&self.directory), state));
        let (written, state) = match state.transpose() {
            Ok(state) => (written, state),
            Err(error) => (Err(error), None),
        };
        let parts = agree::agree(comm, written).and_then(|part| agree::collect(comm, &part));
        let parts = self.clean_up(comm, begun, parts)?;
        let committed = if comm.rank() == 0 { self.commit(begun, &parts, state) } else { Ok(()) };
        let committed = agree::agree(comm, committed);
        self.clean_up(comm, begun, committed)?;
        tracing::debug!(step = self.step, directory = %self.directory.display(), "checkpoint saved");
        Ok(begun)
    }

    /// Creates the directory on rank 0 and broadcasts its name.
    fn begin(&self, comm: &mut Communicator) -> Result<Unfinished> {
        let unfinished =
            |[number, owner]: [u64; 2]| Unfinished { name: Name { number, step: self.step }, owner };
        let begun = match comm.rank() {
            0 => directory::begin(&self.disk, &self.directory, self.step, &mut self.owner()),
            _ => Ok(unfinished([0, 0])),
        };
        let begun = agree::agree(comm, begun)?;
        let mut told = [begun.name.number, begun.owner];
        comm.broadcast(&mut told, 0).map_err(crate::Error::communication)?;
        Ok(unfinished(told))
    }

    /// Returns the ownership of the directory, on the rank that chooses the path.
    fn owner(&self) -> MutexGuard<'_, Owner> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes this rank's file and returns its metadata for the index.
    fn write(
        &self,
        comm: &Communicator,
        unfinished: Unfinished,
        read: impl FnMut(&Entry, &mut WriteBytes<'_>) -> Result<(), CheckpointError>,
    ) -> Result<Vec<u8>, CheckpointError> {
        let file = format!("part-{}-of-{}.safetensors", comm.rank() + 1, comm.world_size());
        let path = unfinished.path(&self.directory).join(file);
        let entries = self.entries.as_ref().map_err(Clone::clone);
        let written = entries.and_then(|entries| part::write(&self.disk, &path, entries, read));
        let (file, tensors) = written.map_err(|error| error.at(&path))?;
        serde_json::to_vec(&PartMeta { file, tensors })
            .map_err(|error| CheckpointError::malformed(path, error))
    }

    /// Writes the index and makes the checkpoint exist.
    fn commit(
        &self,
        unfinished: Unfinished,
        parts: &[Vec<u8>],
        state: Option<StoredState>,
    ) -> Result<(), CheckpointError> {
        let path = unfinished.path(&self.directory).join(INDEX);
        let failed = |error: DiskError| CheckpointError::unwritten(&path, &error);
        let index = self.index(&path, parts, state)?;
        let bytes = index.encode().map_err(|error| CheckpointError::malformed(&path, error))?;
        let mut file = self.disk.create(&path).map_err(failed)?;
        self.disk.write(&mut file, &path, &bytes).map_err(failed)?;
        self.disk.sync(&file, &path).map_err(failed)?;
        self.owner().check(&self.disk, &self.directory)?;
        directory::commit(&self.disk, &self.directory, unfinished)
    }

    /// Returns the index of these files, which together contain the whole model.
    fn index(
        &self,
        path: &Path,
        parts: &[Vec<u8>],
        state: Option<StoredState>,
    ) -> Result<Index, CheckpointError> {
        let decode = |bytes: &Vec<u8>| {
            serde_json::from_slice(bytes).map_err(|error| CheckpointError::malformed(path, error))
        };
        let parts: Vec<PartMeta> = parts.iter().map(decode).collect::<Result<_, _>>()?;
        let files = parts.iter().map(|part| part.file.clone()).collect();
        let tensors = merge(&self.parameters, parts);
        let [optimizer, rank_optimizer] = self.optimizers.map(|kind| kind.map(str::to_owned));
        let Self { step, steps, .. } = *self;
        let index = Index { step, steps, optimizer, rank_optimizer, files, tensors, state };
        index.check(path)?;
        Ok(index)
    }

    /// Removes the files after a failure that all ranks know of.
    fn clean_up<T>(&self, comm: &Communicator, unfinished: Unfinished, outcome: Result<T>) -> Result<T> {
        if let (Err(crate::Error::Checkpoint(_)), 0) = (&outcome, comm.rank()) {
            let path = unfinished.path(&self.directory);
            if let Err(error) = self.disk.remove(&path) {
                // The next save tries again.
                tracing::debug!(%error, path = %path.display(), "an unfinished checkpoint cannot be removed");
            }
        }
        outcome
    }

    /// Removes the oldest checkpoints. A failure does not affect the save, and no rank waits for this.
    fn prune(&self, owner: u64) {
        if let Some(keep) = self.keep
            && let Err(error) = directory::prune(&self.disk, &self.directory, keep.get(), owner)
        {
            tracing::warn!(%error, "an old checkpoint cannot be removed");
        }
    }
}

/// Merges the tensors of all files: the parameters, then the optimizer state, each with its runs in order.
pub(super) fn merge(parameters: &[ParamInfo], parts: Vec<PartMeta>) -> Vec<StoredTensor> {
    let mut tensors: Vec<StoredTensor> = parameters
        .iter()
        .map(|info| StoredTensor {
            name: TensorName::parameter(&info.name),
            dtype: info.dtype.into(),
            shape: info.shape.clone(),
            runs: Vec::new(),
        })
        .collect();
    let mut places: HashMap<TensorName, usize> =
        tensors.iter().enumerate().map(|(place, tensor)| (tensor.name.clone(), place)).collect();
    for (number, part) in parts.into_iter().enumerate() {
        for tensor in part.tensors {
            let place = *places.entry(tensor.name.clone()).or_insert_with(|| {
                let part::PartTensor { name, dtype, shape, .. } = tensor.clone();
                tensors.push(StoredTensor { name, dtype: dtype.into(), shape, runs: Vec::new() });
                tensors.len() - 1
            });
            tensors[place].runs.push(super::index::StoredRun { file: number, ..tensor.run });
        }
    }
    for tensor in &mut tensors {
        tensor.runs.sort_by_key(|run| run.offset);
    }
    tensors
}

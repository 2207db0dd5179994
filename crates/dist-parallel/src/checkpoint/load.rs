//! How all ranks together go on from a checkpoint.
//!
//! The first rank says which checkpoint, and gives every rank its index. Each rank makes sure that the index is about its
//! model, reads what it holds into memory of its own, and compares it with the checksums. When all ranks have all that
//! they need, and only then, they put it in place.

use std::collections::HashMap;
use std::path::Path;

use dist_collectives::Chain;

use super::agree::Ranks;
use super::claim::Claim;
use super::disk::Disk;
use super::fetch::{Wanted, fetch};
use super::index::{Index, StoredTensor, TensorName};
use super::{CheckpointError, CheckpointProblem, INDEX, INDEX_BYTES_MAX, Piece, Shards, Slice, directory};
use crate::{Communicator, Error, FloatType, Optimizer, ParamInfo, Result, ValuesMut};

/// Loads the newest checkpoint, or the newest of a step, and tells its step; `None` if there is no checkpoint at all.
pub(super) fn load(
    disk: &Disk,
    ranks: &mut Ranks,
    directory: &Path,
    step: Option<u64>,
    shards: &mut dyn Shards,
    optimizer: Option<&mut dyn Optimizer>,
) -> Result<Option<u64>> {
    let claim = Claim::of_load(step, optimizer.as_deref().map(Optimizer::name));
    ranks.compare(directory, Ok(claim))?;
    let found = if ranks.is_first() { find(disk, directory, step) } else { Ok(None) };
    let found = ranks.agree(found)?;
    let found = found.map(|(name, index)| [name.directory().as_bytes(), b"/", &index].concat());
    let told = ranks.share(found.unwrap_or_default())?;
    let Some(end) = told.iter().position(|&byte| byte == b'/') else { return Ok(None) };
    let path = directory.join(&*String::from_utf8_lossy(&told[..end])).join(INDEX);
    let index = ranks.agree(Index::decode(&path, &told[end + 1..]))?;
    let checkpoint = Checkpoint { disk, path: &path, index: &index };
    checkpoint.put_in_place(ranks, shards, optimizer)?;
    Ok(Some(index.step))
}

/// The checkpoint that is meant, and its index as it lies on the disk.
pub(super) fn find(
    disk: &Disk,
    directory: &Path,
    step: Option<u64>,
) -> Result<Option<(directory::Name, Vec<u8>)>, CheckpointError> {
    let names = directory::list(disk, directory)?;
    let name = names.into_iter().rfind(|name| step.is_none_or(|step| step == name.step));
    let Some(name) = name else {
        let none = |step| {
            let path = directory.join(format!("checkpoint-*-step-{step}"));
            Err(CheckpointError::new(path, CheckpointProblem::Missing))
        };
        return step.map_or(Ok(None), none);
    };
    let path = directory.join(name.directory()).join(INDEX);
    let bytes =
        disk.read_all(&path, INDEX_BYTES_MAX).map_err(|error| CheckpointError::unread(&path, &error))?;
    let bytes = bytes.ok_or_else(|| {
        CheckpointError::malformed(&path, format!("an index has at most {INDEX_BYTES_MAX} bytes"))
    })?;
    Ok(Some((name, bytes)))
}

/// A checkpoint whose index has been checked.
#[derive(Clone, Copy)]
pub(super) struct Checkpoint<'a> {
    pub(super) disk: &'a Disk,
    /// Of what says which tensors there are: the index, or a plain file itself. The files lie beside it.
    pub(super) path: &'a Path,
    pub(super) index: &'a Index,
}

impl Checkpoint<'_> {
    /// Puts what it has in place of what this rank holds, if every rank can.
    pub(super) fn put_in_place(
        self,
        ranks: &mut Ranks,
        shards: &mut dyn Shards,
        optimizer: Option<&mut dyn Optimizer>,
    ) -> Result<()> {
        let staged = self.stage(&ranks.group, shards, optimizer.as_deref());
        let staged = ranks.agree(staged)?;
        let placed = staged.place(shards, optimizer);
        if let Err(error) = &placed {
            // Other ranks have other values by now.
            ranks.group.abort(Chain(error));
        }
        placed
    }

    /// Reads and checks all that this rank needs.
    fn stage(
        self,
        comm: &Communicator,
        shards: &mut dyn Shards,
        optimizer: Option<&dyn Optimizer>,
    ) -> Result<Staged, CheckpointError> {
        let stored: HashMap<&TensorName, &StoredTensor> =
            self.index.tensors.iter().map(|tensor| (&tensor.name, tensor)).collect();
        self.check_parameters(&stored, shards.infos())?;
        let mut wanted = Vec::new();
        for (number, piece) in shards.parameters().pieces.into_iter().enumerate() {
            let info = piece.parameter(shards.infos()).map_err(|problem| self.fault(problem))?;
            wanted.push(Wanted::new(stored[&TensorName::parameter(&info.name)], piece.offset, piece.len));
            self.try_to_write(shards, number, piece)?;
        }
        let states = match optimizer {
            Some(optimizer) => self.want_states(&stored, shards, optimizer, &mut wanted)?,
            None => Vec::new(),
        };
        fetch(self, &mut wanted, comm.rank(), comm.world_size())?;
        Ok(Staged { values: wanted.into_iter().map(|wanted| wanted.bytes).collect(), states })
    }

    /// Makes sure that the model has the tensors that the checkpoint has, and they look alike.
    fn check_parameters(
        self,
        stored: &HashMap<&TensorName, &StoredTensor>,
        infos: &[ParamInfo],
    ) -> Result<(), CheckpointError> {
        let mut known = HashMap::new();
        for info in infos {
            known.insert(&*info.name, info);
            let name = TensorName::parameter(&info.name);
            match stored.get(&name) {
                Some(tensor) => self.check_looks(tensor, info.dtype, &info.shape)?,
                // Another name of an earlier one has no values of its own.
                None if info.same_as.is_some() => {}
                None => return Err(self.fault(CheckpointProblem::NotInCheckpoint).about(name)),
            }
        }
        let foreign = self.index.tensors.iter().find(|tensor| !known.contains_key(&*tensor.name.parameter));
        match foreign {
            Some(tensor) => Err(self.fault(CheckpointProblem::NotInModel).about(&tensor.name)),
            None => Ok(()),
        }
    }

    fn check_looks(
        self,
        tensor: &StoredTensor,
        dtype: FloatType,
        shape: &[usize],
    ) -> Result<(), CheckpointError> {
        if tensor.dtype == dtype && tensor.shape == shape {
            return Ok(());
        }
        let looks = |dtype: FloatType, shape: &[usize]| format!("{shape:?} {dtype}");
        let (model, checkpoint) = (looks(dtype, shape), looks(tensor.dtype, &tensor.shape));
        Err(self.fault(CheckpointProblem::Looks { model, checkpoint }).about(&tensor.name))
    }

    /// Makes sure that a piece can be written, without changing it.
    fn try_to_write(
        self,
        shards: &mut dyn Shards,
        number: usize,
        piece: Piece,
    ) -> Result<(), CheckpointError> {
        let ParamInfo { name, dtype, .. } = shards.infos()[piece.parameter].clone();
        let mut looks = None;
        let outcome = shards.write(number, &mut |values| looks = Some((values.dtype(), values.len())));
        let reason = match (outcome, looks) {
            (Err(error), _) => error.to_string(),
            (Ok(()), Some(looks)) if looks == (dtype, piece.len) => return Ok(()),
            (Ok(()), looks) => format!("{looks:?} where there should be {:?}", (dtype, piece.len)),
        };
        Err(self.fault(CheckpointProblem::Trainer(reason)).about(name))
    }

    /// Adds what the optimizer keeps of this rank's slices to what is wanted, and tells of which.
    fn want_states<'i>(
        self,
        stored: &HashMap<&TensorName, &'i StoredTensor>,
        shards: &dyn Shards,
        optimizer: &dyn Optimizer,
        wanted: &mut Vec<Wanted<'i>>,
    ) -> Result<Vec<State>, CheckpointError> {
        let kind = self.index.optimizer.as_deref();
        if kind != Some(optimizer.name()) {
            let training = optimizer.name().to_owned();
            let checkpoint = kind.unwrap_or("none").to_owned();
            return Err(self.fault(CheckpointProblem::Optimizer { training, checkpoint }));
        }
        let kept = self.check_states(stored, shards.infos(), optimizer)?;
        let mut states = Vec::new();
        for slice in shards.slices().pieces {
            let Slice { number, piece: Piece { parameter, offset, len } } = slice;
            let info = slice.piece.parameter(shards.infos()).map_err(|problem| self.fault(problem))?;
            if !kept[parameter] {
                continue;
            }
            let layout = optimizer.layout(info.dtype);
            for (name, _) in &layout.arrays {
                wanted.push(Wanted::new(stored[&TensorName::state(&info.name, name)], offset, len));
            }
            for name in &layout.scalars {
                wanted.push(Wanted::new(stored[&TensorName::state(&info.name, name)], 0, 1));
            }
            states.push(State { slice: number, dtype: info.dtype, len });
        }
        Ok(states)
    }

    /// Tells of which parameters the checkpoint has what an optimizer keeps: all of it or nothing.
    fn check_states(
        self,
        stored: &HashMap<&TensorName, &StoredTensor>,
        infos: &[ParamInfo],
        optimizer: &dyn Optimizer,
    ) -> Result<Vec<bool>, CheckpointError> {
        let mut known = 0;
        let mut kept = vec![false; infos.len()];
        for (info, kept) in infos.iter().zip(&mut kept) {
            let layout = optimizer.layout(info.dtype);
            let arrays = layout.arrays.iter().map(|&(name, dtype)| (name, dtype, &*info.shape));
            let scalars = layout.scalars.iter().map(|&name| (name, FloatType::F64, &[][..]));
            let mut missing = None;
            for (name, dtype, shape) in arrays.chain(scalars) {
                let name = TensorName::state(&info.name, name);
                match stored.get(&name) {
                    Some(tensor) => {
                        self.check_looks(tensor, dtype, shape)?;
                        (known, *kept) = (known + 1, true);
                    }
                    None => missing = Some(name),
                }
            }
            if let (true, Some(name)) = (*kept, missing) {
                return Err(self.fault(CheckpointProblem::NotInCheckpoint).about(name));
            }
        }
        let mut states = self.index.tensors.iter().filter(|tensor| tensor.name.state.is_some());
        if states.clone().count() > known {
            let foreign = states.find(|tensor| {
                let info = infos.iter().find(|info| info.name == tensor.name.parameter);
                let layout = info.map(|info| optimizer.layout(info.dtype)).unwrap_or_default();
                let mut names = layout.arrays.iter().map(|(name, _)| *name).chain(layout.scalars);
                !names.any(|name| tensor.name.state.as_deref() == Some(name))
            });
            let name = foreign.map(|tensor| tensor.name.to_string()).unwrap_or_default();
            return Err(self.fault(CheckpointProblem::NotInModel).about(name));
        }
        Ok(kept)
    }

    /// An error about what the index says.
    fn fault(self, problem: CheckpointProblem) -> CheckpointError {
        CheckpointError::new(self.path, problem)
    }
}

/// A slice of which the optimizer will have kept something.
struct State {
    slice: usize,
    dtype: FloatType,
    len: usize,
}

/// All that a rank needs, as bytes: the pieces of its parameters, then the arrays and numbers of its states.
struct Staged {
    values: Vec<Vec<u8>>,
    states: Vec<State>,
}

impl Staged {
    fn place(self, shards: &mut dyn Shards, optimizer: Option<&mut dyn Optimizer>) -> Result<()> {
        let mut values = self.values.into_iter();
        for number in 0..shards.parameters().pieces.len() {
            let bytes = values.next().expect(STAGED);
            let mut outcome = Ok(());
            shards.write(number, &mut |into| outcome = overwrite(into, &bytes))?;
            outcome?;
        }
        if let Some(optimizer) = optimizer {
            optimizer.clear_state();
            for State { slice, dtype, len } in self.states {
                let into = optimizer.make_state(slice, dtype, len);
                for array in into.arrays {
                    overwrite(array, &values.next().expect(STAGED))?;
                }
                for scalar in into.scalars {
                    overwrite(ValuesMut::F64(std::slice::from_mut(scalar)), &values.next().expect(STAGED))?;
                }
            }
        }
        shards.loaded()
    }
}

fn overwrite(mut values: ValuesMut<'_>, bytes: &[u8]) -> Result<()> {
    let (expected, expected_len) = (values.dtype(), bytes.len() / values.dtype().size());
    let (got, got_len) = (values.dtype(), values.len());
    let into = values.as_bytes_mut();
    if into.len() != bytes.len() {
        return Err(Error::ValuesDiffer { expected_len, expected, got_len, got });
    }
    into.copy_from_slice(bytes);
    Ok(())
}

const STAGED: &str = "everything was wanted in the order in which it is placed";

//! Loading a checkpoint on all ranks.
//!
//! The first rank chooses the checkpoint and broadcasts its index. Each rank checks that the index fits its model,
//! reads its values into separate memory and verifies their checksums. When all ranks have succeeded, they overwrite
//! their state.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use dist_collectives::transport::Chain;

use super::agree::Ranks;
use super::disk::Disk;
use super::fetch::{Wanted, fetch};
use super::index::{Index, StoredTensor, TensorName};
use super::part::StateOwner;
use super::rank_request::RankRequest;
use super::state::ProgramState;
use super::{CheckpointError, CheckpointProblem, Chunk, INDEX, INDEX_BYTES_MAX, Shards, Slice, directory};
use crate::{Communicator, Error, FloatType, OptimizerState, ParamInfo, Result, SliceStates, ValuesMut};

/// The treatment of the optimizer state in a checkpoint.
pub(crate) enum States<'o> {
    /// Loads it into these states of an optimizer.
    Into(&'o mut SliceStates),
    /// Loads the state of a rank's own optimizer into `own`, and that of all ranks into `shared`. A state that all ranks
    /// share is loaded into `own` if it is of its kind, and if there are no states of ranks; `shared` is then empty.
    IntoOwn { shared: Option<&'o mut SliceStates>, own: &'o mut SliceStates },
    /// Ignores it, at the caller's request.
    LeaveOut,
    /// Fails if there is any.
    Refuse,
}

impl<'o> States<'o> {
    /// Returns `Into` for an optimizer with state, `Refuse` for an optimizer without state, and `LeaveOut` without an
    /// optimizer.
    pub(crate) fn of(optimizer: Option<&'o mut dyn OptimizerState>) -> Self {
        optimizer.map_or(Self::LeaveOut, |optimizer| optimizer.states_mut().map_or(Self::Refuse, Self::Into))
    }

    /// Returns the kinds of the shared optimizer and of this rank's own.
    fn kinds(&self) -> [Option<&'static str>; 2] {
        match self {
            Self::Into(states) => [Some(states.optimizer()), None],
            Self::IntoOwn { shared, own } => {
                [shared.as_ref().map(|states| states.optimizer()), Some(own.optimizer())]
            }
            Self::LeaveOut | Self::Refuse => [None; 2],
        }
    }
}

/// The differences between a checkpoint and a model that the user allows.
#[derive(Debug, Clone, Default)]
pub(super) struct Allowed {
    /// Parameters whose tensors are ignored with their optimizer state.
    pub(super) left_out: BTreeSet<String>,
    /// Parameters whose optimizer state alone is ignored.
    pub(super) states_left_out: BTreeSet<String>,
    /// Parameters that stay unchanged.
    pub(super) kept: BTreeSet<String>,
    /// `true` if frozen parameters that are missing stay unchanged.
    pub(super) only_trained: bool,
    /// `true` if values may be converted to the types of the parameters.
    pub(super) converts: bool,
}

impl Allowed {
    fn leaves_out(&self, name: &TensorName) -> bool {
        let is_state = name.state.is_some() && self.states_left_out.contains(&name.parameter);
        is_state || self.left_out.contains(&name.parameter)
    }

    fn keeps(&self, info: &ParamInfo) -> bool {
        self.kept.contains(&info.name) || (self.only_trained && info.is_constant())
    }
}

/// Loads the newest checkpoint, or the newest of a step. Returns its step and the state of the program. `None` if
/// there is no checkpoint.
pub(super) fn load(
    (disk, directory, allowed): (&Disk, &Path, &Allowed),
    ranks: &mut Ranks,
    step: Option<u64>,
    shards: &mut dyn Shards,
    states: States<'_>,
) -> Result<Option<(u64, ProgramState)>> {
    ranks.compare(directory, Ok(RankRequest::of_load(step, states.kinds(), allowed)))?;
    let found = if ranks.is_first() { find(disk, directory, step) } else { Ok(None) };
    let found = ranks.agree(found)?;
    let found = found.map(|(name, index)| [name.directory().as_bytes(), b"/", &index].concat());
    let told = ranks.share(found.unwrap_or_default())?;
    let Some(end) = told.iter().position(|&byte| byte == b'/') else { return Ok(None) };
    let path = directory.join(&*String::from_utf8_lossy(&told[..end])).join(INDEX);
    let index = ranks.agree(Index::decode(&path, &told[end + 1..]))?;
    let state = ranks.agree(ProgramState::read(disk, &path, index.state.as_ref()))?;
    let checkpoint = Checkpoint { disk, path: &path, index: &index, allowed };
    checkpoint.put_in_place(ranks, shards, states)?;
    shards.set_steps(index.steps);
    Ok(Some((index.step, state)))
}

/// Returns the chosen checkpoint and the bytes of its index.
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
        CheckpointError::malformed(&path, format!("the index is longer than {INDEX_BYTES_MAX} bytes"))
    })?;
    Ok(Some((name, bytes)))
}

/// A checkpoint with a verified index.
#[derive(Clone, Copy)]
pub(super) struct Checkpoint<'a> {
    pub(super) disk: &'a Disk,
    /// The path of the list of tensors: the index, or a plain file itself. The files are in the same directory.
    pub(super) path: &'a Path,
    pub(super) index: &'a Index,
    pub(super) allowed: &'a Allowed,
}

/// The tensors of a checkpoint by name, without ignored ones.
type Stored<'i> = HashMap<&'i TensorName, &'i StoredTensor>;

/// The checkpoint's tensors that the model has tied to each parameter.
type Tied<'i> = HashMap<usize, Vec<&'i StoredTensor>>;

impl Checkpoint<'_> {
    /// Overwrites this rank's state by the checkpoint, if every rank can.
    pub(super) fn put_in_place(
        self,
        ranks: &mut Ranks,
        shards: &mut dyn Shards,
        states: States<'_>,
    ) -> Result<()> {
        let staged = self.stage(&ranks.group, shards, &states);
        let staged = ranks.agree(staged)?;
        let placed = staged.place(shards, states);
        if let Err(error) = &placed {
            // Other ranks have been overwritten already.
            ranks.group.abort(Chain(error));
        }
        placed
    }

    /// Reads and verifies all values that this rank needs.
    fn stage(
        self,
        comm: &Communicator,
        shards: &mut dyn Shards,
        states: &States<'_>,
    ) -> Result<Staged, CheckpointError> {
        let is_left_out =
            |name: &TensorName| self.allowed.leaves_out(name) || shards.leaves_out(&name.parameter);
        let tensors = self.index.tensors.iter().filter(|tensor| !is_left_out(&tensor.name));
        let stored: Stored<'_> = tensors.map(|tensor| (&tensor.name, tensor)).collect();
        let tied = self.check_parameters(&stored, shards.infos())?;
        let (mut wanted, mut chunks) = (Vec::new(), Vec::new());
        for chunk in shards.parameters().chunks {
            let info = chunk.parameter(shards.infos()).map_err(|problem| self.fault(problem))?;
            // A parameter without a tensor stays unchanged.
            let Some(tensor) = stored.get(&TensorName::parameter(&info.name)) else { continue };
            wanted.push(Wanted::new(tensor, chunk.offset, chunk.len));
            chunks.push(chunk);
            self.try_to_write(shards, chunk)?;
        }
        let states = self.want_states(&stored, shards, (states, comm.rank()), &mut wanted)?;
        let first_tied = wanted.len();
        let mut originals = Vec::new();
        for (number, chunk) in chunks.iter().enumerate() {
            for tensor in tied.get(&chunk.parameter).into_iter().flatten() {
                wanted.push(Wanted::new(tensor, chunk.offset, chunk.len));
                originals.push(number);
            }
        }
        fetch(self, &mut wanted, comm.rank(), comm.world_size())?;
        let infos = shards.infos();
        let of_tied = originals.iter().enumerate().map(|(at, &original)| (first_tied + at, original));
        for (number, original) in (0..chunks.len()).map(|number| (number, number)).chain(of_tied) {
            self.convert(&mut wanted[number], infos[chunks[original].parameter].dtype)?;
        }
        for (tied, original) in wanted.split_off(first_tied).iter().zip(originals) {
            if tied.bytes != wanted[original].bytes {
                let same_as = shards.infos()[chunks[original].parameter].name.clone();
                return Err(self.fault_of(tied.tensor, CheckpointProblem::Tied { same_as }));
            }
        }
        let mut values: Vec<Vec<u8>> = wanted.into_iter().map(|wanted| wanted.bytes).collect();
        let of_states = values.split_off(chunks.len());
        Ok(Staged { chunks: chunks.into_iter().zip(values).collect(), states, of_states })
    }

    /// Returns an error unless model and checkpoint have the same tensors, with equal shapes and types. Returns the
    /// tensors that the model has tied to other parameters, which have no memory for separate values.
    fn check_parameters<'i>(
        self,
        stored: &Stored<'i>,
        infos: &[ParamInfo],
    ) -> Result<Tied<'i>, CheckpointError> {
        let mut known = HashMap::new();
        let mut tied: Tied<'_> = HashMap::new();
        for info in infos {
            known.insert(&*info.name, info);
            let name = TensorName::parameter(&info.name);
            match (stored.get(&name).copied(), info.same_as) {
                (Some(tensor), same_as) => {
                    self.check_meta(tensor, info.dtype, &info.shape)?;
                    if let Some(original) = same_as {
                        tied.entry(original).or_default().push(tensor);
                        let same_as = infos[original].name.clone();
                        if !stored.contains_key(&TensorName::parameter(&same_as)) {
                            return Err(self.fault(CheckpointProblem::Tied { same_as }).about(name));
                        }
                    }
                }
                (None, Some(_)) => {}
                (None, None) if self.allowed.keeps(info) => {}
                (None, None) => return Err(self.fault(CheckpointProblem::NotInCheckpoint).about(name)),
            }
        }
        let mut tensors = self.index.tensors.iter().filter(|tensor| stored.contains_key(&tensor.name));
        match tensors.find(|tensor| !known.contains_key(&*tensor.name.parameter)) {
            Some(foreign) => Err(self.fault(CheckpointProblem::NotInModel).about(&foreign.name)),
            None => Ok(tied),
        }
    }

    fn check_meta(
        self,
        tensor: &StoredTensor,
        dtype: FloatType,
        shape: &[usize],
    ) -> Result<(), CheckpointError> {
        let is_converted = self.allowed.converts && tensor.dtype.is_convertible();
        if (tensor.dtype == dtype.into() || is_converted) && tensor.shape == shape {
            return Ok(());
        }
        let model = format!("{shape:?} {dtype}");
        let checkpoint = format!("{:?} {}", tensor.shape, tensor.dtype);
        Err(self.fault_of(tensor, CheckpointProblem::MetaDiffers { model, checkpoint }))
    }

    /// Converts values to the type of their parameter.
    fn convert(self, wanted: &mut Wanted<'_>, to: FloatType) -> Result<(), CheckpointError> {
        let Wanted { tensor, bytes, .. } = wanted;
        if tensor.dtype != to.into() {
            let converted = tensor.dtype.convert(bytes, to);
            let lost = |value| CheckpointProblem::Lost { value, to: to.to_string() };
            *bytes = converted.map_err(|value| self.fault_of(tensor, lost(value)))?;
        }
        Ok(())
    }

    /// Checks that a chunk is writable, without changing it.
    fn try_to_write(self, shards: &mut dyn Shards, chunk: Chunk) -> Result<(), CheckpointError> {
        let mut looks = None;
        let outcome = shards.write(chunk, &mut |values| looks = Some((values.dtype(), values.len())));
        let info = &shards.infos()[chunk.parameter];
        let reason = match (outcome, looks) {
            (Err(error), _) => error.to_string(),
            (Ok(()), Some(looks)) if looks == (info.dtype, chunk.len) => return Ok(()),
            (Ok(()), looks) => format!("{looks:?} where there should be {:?}", (info.dtype, chunk.len)),
        };
        Err(self.fault(CheckpointProblem::Trainer(reason)).about(&info.name))
    }

    /// Adds the optimizer state of this rank's slices to the needed ranges and returns these slices.
    fn want_states<'i>(
        self,
        stored: &Stored<'i>,
        shards: &dyn Shards,
        (states, rank): (&States<'_>, usize),
        wanted: &mut Vec<Wanted<'i>>,
    ) -> Result<Vec<SliceToLoad>, CheckpointError> {
        let mut slices = Vec::new();
        let mut want = |states: &SliceStates, owner, is_own| {
            let of_optimizer = self.want_states_of(stored, shards, (states, owner), wanted)?;
            slices.extend(of_optimizer.into_iter().map(|slice| SliceToLoad { is_own, ..slice }));
            Ok::<(), CheckpointError>(())
        };
        match states {
            States::Refuse if stored.keys().any(|name| name.state.is_some()) => {
                let Index { optimizer, rank_optimizer, .. } = self.index;
                return Err(self.other_kind("none", optimizer.as_ref().or(rank_optimizer.as_ref())));
            }
            States::LeaveOut | States::Refuse => {}
            States::Into(states) => want(states, StateOwner::Shared, false)?,
            States::IntoOwn { own, .. } if self.index.has_shared_state_alone(own.optimizer()) => {
                want(own, StateOwner::Shared, true)?;
            }
            States::IntoOwn { shared, own } => {
                match shared {
                    Some(shared) => want(shared, StateOwner::Shared, false)?,
                    None if self.index.optimizer.is_some() => {
                        return Err(self.other_kind("none", self.index.optimizer.as_ref()));
                    }
                    None => {}
                }
                // Each rank has written a file. If there are more ranks now, several begin with the state of one.
                want(own, StateOwner::Rank(rank % self.index.files.len().max(1)), true)?;
            }
        }
        Ok(slices)
    }

    /// Returns the error of a training with another kind of optimizer than the checkpoint.
    fn other_kind(self, training: &str, kind: Option<&String>) -> CheckpointError {
        let checkpoint = kind.cloned().unwrap_or_else(|| "none".to_owned());
        self.fault(CheckpointProblem::Optimizer { training: training.to_owned(), checkpoint })
    }

    /// Adds the state of one optimizer to the needed ranges and returns the slices.
    fn want_states_of<'i>(
        self,
        stored: &Stored<'i>,
        shards: &dyn Shards,
        (of_optimizer, owner): (&SliceStates, StateOwner),
        wanted: &mut Vec<Wanted<'i>>,
    ) -> Result<Vec<SliceToLoad>, CheckpointError> {
        let kind = match owner {
            StateOwner::Shared => self.index.optimizer.as_ref(),
            StateOwner::Rank(_) => self.index.rank_optimizer.as_ref(),
        };
        if kind.is_none_or(|kind| kind != of_optimizer.optimizer()) {
            return Err(self.other_kind(of_optimizer.optimizer(), kind));
        }
        let kept = self.check_states(stored, shards.infos(), (of_optimizer, owner))?;
        let mut states = Vec::new();
        for slice in shards.slices().chunks {
            let Slice { number, chunk: Chunk { parameter, offset, len } } = slice;
            let info = slice.chunk.parameter(shards.infos()).map_err(|problem| self.fault(problem))?;
            if !kept[parameter] {
                continue;
            }
            for (name, _) in of_optimizer.arrays(info.dtype) {
                wanted.push(Wanted::new(stored[&owner.tensor(&info.name, name)], offset, len));
            }
            for name in of_optimizer.scalars() {
                wanted.push(Wanted::new(stored[&owner.tensor(&info.name, name)], 0, 1));
            }
            states.push(SliceToLoad { is_own: false, slice: number, dtype: info.dtype, len });
        }
        Ok(states)
    }

    /// Returns an error unless the optimizer has a place for all state in the checkpoint. Returns for each parameter
    /// whether it has state: all of it, or none.
    fn check_states(
        self,
        stored: &Stored<'_>,
        infos: &[ParamInfo],
        (states, owner): (&SliceStates, StateOwner),
    ) -> Result<Vec<bool>, CheckpointError> {
        let numbers: HashMap<&str, usize> =
            infos.iter().enumerate().map(|(number, info)| (&*info.name, number)).collect();
        let mut kept = vec![false; infos.len()];
        for tensor in self.index.tensors.iter().filter(|tensor| stored.contains_key(&tensor.name)) {
            let Some((_, state)) = StateOwner::of(&tensor.name).filter(|(of, _)| *of == owner) else {
                continue;
            };
            let fault = |problem| self.fault(problem).about(&tensor.name);
            let number = numbers.get(&*tensor.name.parameter).copied();
            let number = number.ok_or_else(|| fault(CheckpointProblem::NotInModel))?;
            let info = &infos[number];
            if let Some(original) = info.same_as {
                return Err(fault(CheckpointProblem::Tied { same_as: infos[original].name.clone() }));
            }
            if !info.trainable {
                return Err(fault(CheckpointProblem::NotTrained));
            }
            if let Some((_, dtype)) = states.arrays(info.dtype).find(|(name, _)| *name == state) {
                self.check_meta(tensor, dtype, &info.shape)?;
            } else if states.scalars().any(|name| name == state) {
                self.check_meta(tensor, FloatType::F64, &[])?;
            } else {
                return Err(fault(CheckpointProblem::NotInModel));
            }
            kept[number] = true;
        }
        for (info, _) in infos.iter().zip(&kept).filter(|(_, kept)| **kept) {
            let names = states.arrays(info.dtype).map(|(name, _)| name).chain(states.scalars());
            let mut names = names.map(|name| owner.tensor(&info.name, name));
            if let Some(missing) = names.find(|name| !stored.contains_key(name)) {
                return Err(self.fault(CheckpointProblem::NotInCheckpoint).about(missing));
            }
        }
        Ok(kept)
    }

    /// Returns an error about a tensor. It names the tensor's file if there is no index.
    fn fault_of(self, tensor: &StoredTensor, problem: CheckpointProblem) -> CheckpointError {
        let files = tensor.runs.first().map(|run| &self.index.files[run.file]);
        let file = files.filter(|file| file.header_crc32.is_none());
        let path = file.map_or_else(|| self.path.to_owned(), |file| self.path.with_file_name(&file.name));
        CheckpointError::new(path, problem).about(&tensor.name)
    }

    /// Returns an error about the index.
    fn fault(self, problem: CheckpointProblem) -> CheckpointError {
        CheckpointError::new(self.path, problem)
    }
}

/// A slice for which the optimizer will have state.
struct SliceToLoad {
    /// `true` for this rank's own optimizer.
    is_own: bool,
    slice: usize,
    dtype: FloatType,
    len: usize,
}

/// All values that a rank needs, as bytes.
struct Staged {
    chunks: Vec<(Chunk, Vec<u8>)>,
    states: Vec<SliceToLoad>,
    /// The arrays and scalars of the states, one after the other.
    of_states: Vec<Vec<u8>>,
}

impl Staged {
    fn place(self, shards: &mut dyn Shards, states: States<'_>) -> Result<()> {
        for (chunk, bytes) in self.chunks {
            let mut outcome = Ok(());
            shards.write(chunk, &mut |into| outcome = overwrite(into, &bytes))?;
            outcome?;
        }
        let mut optimizers = match states {
            States::Into(states) => vec![states],
            States::IntoOwn { shared, own } => shared.into_iter().chain([own]).collect(),
            States::LeaveOut | States::Refuse => Vec::new(),
        };
        optimizers.iter_mut().for_each(|states| states.clear());
        let mut values = self.of_states.into_iter();
        let mut next = || values.next().expect(STAGED);
        for SliceToLoad { is_own, slice, dtype, len } in self.states {
            // The rank's own optimizer is the last one.
            let states = if is_own { optimizers.last_mut() } else { optimizers.first_mut() }.expect(STAGED);
            let state = states.restart(slice, dtype, len);
            for array in state.arrays_mut() {
                overwrite(array, &next())?;
            }
            for scalar in state.scalars_mut() {
                overwrite(ValuesMut::F64(std::slice::from_mut(scalar)), &next())?;
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

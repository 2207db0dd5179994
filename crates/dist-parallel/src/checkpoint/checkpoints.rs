//! The directory of a training's checkpoints.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dist_collectives::transport::Chain;
use dist_transport::runtime::{Mailbox, Receiver};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::agree::Ranks;
use super::disk::Disk;
use super::load::{Allowed, States};
use super::owner::Owner;
use super::part::{Entry, SavedStates};
use super::rank_request::{ComparedChunk, ONLY_TRAINED, RankRequest};
use super::save::SavePlan;
use super::state::ProgramState;
use super::{CheckpointError, Saving, Shards, directory, load, part, plain};
use crate::{Error, OptimizerState, ParamInfo, Result, Values};

/// A directory in which a training saves checkpoints and from which it continues.
///
/// All ranks must see the same directory: a local disk of one host, or a shared file system. One training at a time
/// saves to it, from its first save until its `Checkpoints` are dropped or its process ends. Meanwhile saves of any
/// other fail with [`InUse`](crate::CheckpointProblem::InUse), which names the owner.
///
/// ```
/// use dist_parallel::checkpoint::{Checkpoints, Shards};
/// use dist_parallel::optim::OptimizerState;
/// use dist_parallel::Result;
///
/// fn train(trainer: &mut dyn Shards, optimizer: &mut dyn OptimizerState) -> Result<()> {
///     let mut checkpoints = Checkpoints::at("checkpoints");
///     let done = checkpoints.load(trainer, Some(optimizer))?.unwrap_or(0);
///     for step in done + 1..=1000 {
///         // Train, and now and then:
///         if step % 100 == 0 {
///             checkpoints.save(trainer, Some(optimizer), step)?;
///         }
///     }
///     Ok(())
/// }
/// ```
///
/// # Format
///
/// A checkpoint is a directory with a safetensors file per rank and an index. Replicated values are divided evenly
/// between the files. The index has names, shapes, types, places and checksums, the step, and the kind of the
/// optimizer. It does not depend on the number of ranks or the strategy.
///
/// # Crash safety
///
/// A checkpoint exists once all of it is on the disk. If a process or a host dies at any time, earlier checkpoints
/// stay intact. If a rank cannot write its file, every rank gets the same error, and the files are removed.
///
/// # Verification
///
/// A save fails if the ranks have updated parameters with different settings, or if they hold different values of a
/// replicated parameter. Each rank writes a part of it, so the checkpoint would be a mixture. Several pipelines are
/// compared in the same way. For this, each rank reads all of its values once.
///
/// A load changes nothing until every rank has read its values into separate memory and verified the checksums, and
/// all have agreed that everything fits. Until then a rank needs twice the memory of its parameters and its
/// optimizer's state. Each rank reads only the blocks of 256 KiB that it needs.
pub struct Checkpoints {
    directory: PathBuf,
    keep: Option<NonZeroUsize>,
    timeout: Duration,
    allowed: Allowed,
    only_finite: bool,
    state: ProgramState,
    pub(super) disk: Disk,
    /// The ownership of the directory, on the rank that chooses the path of a checkpoint.
    owner: Arc<Mutex<Owner>>,
    /// Closed when the save that was started last has ended.
    latest: Option<Receiver<()>>,
}

impl Checkpoints {
    /// Returns the checkpoints in `directory`, which the first save creates. An empty path is the current directory.
    /// All checkpoints are kept.
    pub fn at(directory: impl Into<PathBuf>) -> Self {
        let (directory, timeout) = (directory.into(), TIMEOUT);
        let directory = if directory.as_os_str().is_empty() { PathBuf::from(".") } else { directory };
        Self {
            directory,
            keep: None,
            timeout,
            allowed: Allowed::default(),
            only_finite: false,
            state: ProgramState::default(),
            disk: Disk::default(),
            owner: Arc::default(),
            latest: None,
        }
    }

    /// Removes all but the last `keep` checkpoints after each save. Rank 0 does this, and the others do not wait:
    /// after [`save`](Self::save) rank 0 is late for the next call by this time.
    #[must_use]
    pub fn keep_last(self, keep: NonZeroUsize) -> Self {
        Self { keep: Some(keep), ..self }
    }

    /// Sets the time that a rank waits for another to write or read its file; ten minutes by default. If several
    /// pipelines are saved, those that do not save wait three times as long. A rank that dies is noticed at once.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Lets loads ignore these tensors of a checkpoint and their optimizer state. Otherwise a load fails if the
    /// checkpoint has a tensor that the model lacks, or other values for a tied parameter.
    #[must_use]
    pub fn leave_out<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.allowed.left_out.extend(names.into_iter().map(Into::into));
        self
    }

    /// Lets loads ignore the optimizer state of these parameters, but not the parameters. Otherwise a load with an
    /// optimizer fails if the checkpoint has state of a parameter that the model does not train.
    #[must_use]
    pub fn leave_out_state_of<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.allowed.states_left_out.extend(names.into_iter().map(Into::into));
        self
    }

    /// Leaves out frozen parameters, for example those of a model that is adapted by a few trained ones. Saves then
    /// contain trained parameters and [buffers](crate::ParamInfo::buffer) only. Loads keep a frozen parameter that
    /// the checkpoint lacks unchanged, so give it its values first. Without this setting such a load fails.
    #[must_use]
    pub fn only_trained(mut self) -> Self {
        self.allowed.only_trained = true;
        self
    }

    /// Refuses to save trained parameters with infinite values or NaN. Such a save fails on every rank with the first
    /// parameter, value and rank, and earlier checkpoints are unchanged. For this, each rank reads the values that it
    /// saves one more time. Frozen parameters, buffers and the optimizer's state are not checked.
    #[must_use]
    pub fn only_finite(self) -> Self {
        Self { only_finite: true, ..self }
    }

    /// Sets state of the program, such as the position in the data or the best score. Every later save contains it,
    /// until it is set again or [removed](Self::remove_state). It is as atomic as the rest of a checkpoint. All ranks
    /// set the same state: a save fails if they have not.
    ///
    /// A load replaces all state by that of the checkpoint, on every rank. The state does not depend on the number of
    /// ranks, the strategy or the optimizer. It is encoded as MessagePack, with all bits of floats.
    ///
    /// ```
    /// use dist_parallel::checkpoint::Checkpoints;
    ///
    /// let mut checkpoints = Checkpoints::at("checkpoints");
    /// checkpoints.set_state("best loss", &f64::INFINITY)?;
    /// checkpoints.set_state("position", &(3_u64, "shard-07.txt"))?;
    /// let (line, file): (u64, String) = checkpoints.state("position")?;
    /// assert_eq!((line, &*file), (3, "shard-07.txt"));
    /// # Ok::<_, dist_parallel::Error>(())
    /// ```
    ///
    /// # Errors
    /// The value cannot be encoded.
    pub fn set_state<T: Serialize + ?Sized>(&mut self, name: impl Into<String>, value: &T) -> Result<()> {
        Ok(self.state.set_value(name.into(), value).map_err(|error| error.at(&self.directory))?)
    }

    /// Sets state like [`set_state`](Self::set_state), as bytes in a format of the program.
    ///
    /// # Errors
    /// The name is `__metadata__`.
    pub fn set_state_bytes(&mut self, name: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Result<()> {
        let set = self.state.set_bytes(name.into(), bytes.into());
        Ok(set.map_err(|error| error.at(&self.directory))?)
    }

    /// Sets state like [`set_state`](Self::set_state), as a copy of a tensor, such as an averaged parameter. Other
    /// programs can read the file `state.safetensors` of a checkpoint.
    ///
    /// # Errors
    /// The shape does not match the number of values.
    pub fn set_state_tensor(
        &mut self,
        name: impl Into<String>,
        shape: &[usize],
        values: Values<'_>,
    ) -> Result<()> {
        let set = self.state.set_tensor(name.into(), shape, values);
        Ok(set.map_err(|error| error.at(&self.directory))?)
    }

    /// Returns state of the program that was set or loaded.
    ///
    /// # Errors
    /// [`NoState`](crate::CheckpointProblem::NoState) if there is none of this name.
    /// [`StateForm`](crate::CheckpointProblem::StateForm) if it is of another type.
    pub fn state<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        Ok(self.state.value(name).map_err(|error| error.at(&self.directory))?)
    }

    /// Returns state as bytes.
    ///
    /// # Errors
    /// The errors of [`state`](Self::state).
    pub fn state_bytes(&self, name: &str) -> Result<&[u8]> {
        Ok(self.state.bytes(name).map_err(|error| error.at(&self.directory))?)
    }

    /// Returns the shape and the values of a tensor of the state.
    ///
    /// # Errors
    /// The errors of [`state`](Self::state).
    pub fn state_tensor(&self, name: &str) -> Result<(&[usize], Values<'_>)> {
        Ok(self.state.tensor(name).map_err(|error| error.at(&self.directory))?)
    }

    /// Removes state, which later saves then lack. Returns `false` if there was none of this name.
    pub fn remove_state(&mut self, name: &str) -> bool {
        self.state.remove(name)
    }

    /// Saves the state of all ranks and returns when it is on the disk. All ranks call this with the same step.
    ///
    /// # Errors
    /// The ranks requested different steps or optimizers, or a rank cannot write its file: every rank gets the error.
    /// Earlier checkpoints are unchanged.
    pub fn save(
        &mut self,
        shards: &mut dyn Shards,
        optimizer: Option<&dyn OptimizerState>,
        step: u64,
    ) -> Result<()> {
        self.save_states(shards, SavedStates::of(optimizer), step)
    }

    /// [Saves](Self::save) the state of all ranks with these states of optimizers.
    pub(crate) fn save_states(
        &mut self,
        shards: &mut dyn Shards,
        states: SavedStates<'_>,
        step: u64,
    ) -> Result<()> {
        end(self.latest.take());
        let mut ranks = Ranks::of(shards, self.timeout, "save")?;
        // Requests are compared first, because the trainer's comparison needs every rank in the same call.
        ranks.compare(&self.directory, Ok(self.request(SAVES, states, step)))?;
        shards.check_alike()?;
        let plan = self.plan(SAVES, &ranks, shards, states, step);
        plan.run(&mut ranks, |entry, write| part::read(shards, states, entry, write))
    }

    /// Copies the state of all ranks and saves the copy while training continues. All ranks call this with the same
    /// step. Started saves run one after the other, in order.
    ///
    /// # Errors
    /// The copy fails, or the thread for the save cannot be started.
    pub fn start_save(
        &mut self,
        shards: &mut dyn Shards,
        optimizer: Option<&dyn OptimizerState>,
        step: u64,
    ) -> Result<Saving> {
        self.start_save_states(shards, SavedStates::of(optimizer), step)
    }

    /// [Starts to save](Self::start_save) the state of all ranks with these states of optimizers.
    pub(crate) fn start_save_states(
        &mut self,
        shards: &mut dyn Shards,
        states: SavedStates<'_>,
        step: u64,
    ) -> Result<Saving> {
        let mut ranks = Ranks::of(shards, self.timeout, "start_save")?;
        let plan = self.plan("starts to save", &ranks, shards, states, step);
        let copy = if ranks.saves() { copy(&plan, shards, states) } else { Ok(Vec::new()) };
        let runtime = ranks.group.runtime().clone();
        let (sender, ended) = runtime.mailbox();
        let before = self.latest.replace(ended);
        let save = move || save(&plan, &mut ranks, copy, before, sender);
        let task = runtime.spawn("dist-checkpoint", save).map_err(|error| {
            let operation = "start a thread that saves to";
            Error::from(CheckpointError::io(&self.directory, operation, &self.directory, &error))
        });
        if let Err(error) = &task {
            shards.communicator_mut().abort(Chain(error));
        }
        Ok(Saving::new(task?, runtime, step))
    }

    /// Replaces the state of all ranks by the newest checkpoint and returns its step. Returns `None` and changes
    /// nothing if there is no checkpoint. All ranks call this. It first waits for a [started](Self::start_save) save.
    ///
    /// With an optimizer, its state is loaded too. Without one, only the parameters are. Everything else in a
    /// checkpoint must be used, or [left out](Self::leave_out) explicitly.
    ///
    /// # Errors
    /// Data are missing, changed or do not fit the model, or the ranks requested different steps or optimizers: every
    /// rank gets the error, with the file and the tensor, and nothing changes on any rank. Communication fails.
    pub fn load(
        &mut self,
        shards: &mut dyn Shards,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<Option<u64>> {
        self.load_states(None, shards, States::of(optimizer))
    }

    /// Loads like [`load`](Self::load), from the newest checkpoint of this step.
    ///
    /// # Errors
    /// The errors of [`load`](Self::load), and there is no checkpoint of this step.
    pub fn load_step(
        &mut self,
        step: u64,
        shards: &mut dyn Shards,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<()> {
        self.load_states(Some(step), shards, States::of(optimizer)).map(drop)
    }

    /// Loads the newest checkpoint, or the newest of a step. `states` decides about the optimizer state in it.
    pub(crate) fn load_states(
        &mut self,
        step: Option<u64>,
        shards: &mut dyn Shards,
        states: States<'_>,
    ) -> Result<Option<u64>> {
        end(self.latest.take());
        let mut ranks = Ranks::of(shards, self.timeout, "load")?;
        let loaded =
            load::load((&self.disk, &self.directory, &self.allowed), &mut ranks, step, shards, states)?;
        Ok(loaded.map(|(step, state)| {
            self.state = state;
            step
        }))
    }

    /// Returns the steps of the checkpoints in this directory, oldest first. An unfinished save is not among them.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let names = directory::list(&self.disk, &self.directory)?;
        Ok(names.into_iter().map(|name| name.step).collect())
    }

    /// Writes the parameters of the newest checkpoint, or of the newest of this step, as one safetensors file. One
    /// process calls this. It needs little memory. The file exists once all of it is on the disk.
    ///
    /// # Errors
    /// There is no such checkpoint, parameters are missing or changed, or the file cannot be written.
    pub fn consolidate(&self, step: Option<u64>, file: impl AsRef<Path>) -> Result<()> {
        Ok(plain::consolidate(&self.disk, &self.directory, step, file.as_ref())?)
    }

    fn request(&self, saves: &str, states: SavedStates<'_>, step: u64) -> RankRequest {
        let mut what = String::new();
        if self.allowed.only_trained {
            what += ONLY_TRAINED;
        }
        let names: Vec<&str> = self.state.names().collect();
        if !names.is_empty() {
            what += &format!(", with the state {}", names.join(", "));
        }
        RankRequest::of_save(saves, step, states.kinds(), &what)
    }

    fn plan(
        &self,
        saves: &str,
        ranks: &Ranks,
        shards: &dyn Shards,
        states: SavedStates<'_>,
        step: u64,
    ) -> SavePlan {
        let only_trained = self.allowed.only_trained;
        let is_saved = |info: &&ParamInfo| info.same_as.is_none() && !(only_trained && info.is_constant());
        let entries = part::entries(shards, states, only_trained);
        let state = if ranks.is_first() { self.state.encode() } else { Ok(None) };
        let (state, request) = match state
            .and_then(|state| Ok((state, self.compared(ranks, shards, &entries)?)))
        {
            Ok((state, held)) => (state, Ok(self.request(saves, states, step).after(shards.updates(), held))),
            Err(error) => (None, Err(error)),
        };
        SavePlan {
            disk: self.disk.clone(),
            directory: self.directory.clone(),
            owner: Arc::clone(&self.owner),
            keep: self.keep,
            step,
            steps: shards.steps(),
            optimizers: states.kinds(),
            request,
            parameters: shards.infos().iter().filter(is_saved).cloned().collect(),
            entries,
            state,
        }
    }

    /// Returns all values that must be equal on several ranks, with checksums. Fails if
    /// [`only_finite`](Self::only_finite) is set and a value is not finite.
    fn compared(
        &self,
        ranks: &Ranks,
        shards: &dyn Shards,
        entries: &Result<Vec<Entry>, CheckpointError>,
    ) -> Result<Vec<ComparedChunk>, CheckpointError> {
        // An error of the entries is known only to this rank. It is reported when the entries are written.
        if let (true, Ok(entries)) = (self.only_finite, entries) {
            part::check_finite(shards, entries)?;
        }
        Ok(part::held(shards, ranks)?.into_iter().chain(self.state.compared()).collect())
    }
}

/// Returns the values of all entries of a plan, one after the other.
fn copy(plan: &SavePlan, shards: &dyn Shards, states: SavedStates<'_>) -> Result<Vec<u8>, CheckpointError> {
    let entries = plan.entries.as_ref().map_err(Clone::clone)?;
    let mut copy = Vec::with_capacity(entries.iter().map(Entry::bytes).sum());
    for entry in entries {
        part::read(shards, states, entry, &mut |bytes| {
            copy.extend_from_slice(bytes);
            Ok(())
        })?;
    }
    Ok(copy)
}

/// Saves a copy after the previous save has ended. Dropping the sender signals the end.
fn save(
    plan: &SavePlan,
    ranks: &mut Ranks,
    copy: Result<Vec<u8>, CheckpointError>,
    before: Option<Receiver<()>>,
    _ended: Mailbox<()>,
) -> Result<()> {
    end(before);
    let mut done = 0;
    plan.run(ranks, |entry, write| {
        // An error of the copy is known only to this rank. It is reported when the copy is written.
        let copy = copy.as_ref().map_err(Clone::clone)?;
        let start = done;
        done += entry.bytes();
        write(&copy[start..done])
    })
}

/// Waits until a started save has ended.
fn end(save: Option<Receiver<()>>) {
    if let Some(mut save) = save {
        // The mailbox closes without a message.
        let _closed = save.receive(None);
    }
}

impl fmt::Debug for Checkpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checkpoints({})", self.directory.display())
    }
}

/// The description of a call of [`Checkpoints::save`] in errors.
const SAVES: &str = "saves";

/// The default time that ranks wait for each other's files.
pub(super) const TIMEOUT: Duration = Duration::from_secs(600);

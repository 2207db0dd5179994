//! The directory of a training's checkpoints.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dist_collectives::transport::Chain;
use dist_transport::runtime::{Mailbox, Receiver};

use super::agree::Ranks;
use super::disk::Disk;
use super::load::{Allowed, States};
use super::owner::Owner;
use super::rank_request::RankRequest;
use super::save::SavePlan;
use super::{CheckpointError, Saving, Shards, directory, load, part, plain};
use crate::{Error, OptimizerState, Result, SliceStates};

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
        end(self.latest.take());
        let states = optimizer.and_then(OptimizerState::states);
        let mut ranks = Ranks::of(shards, self.timeout, "save")?;
        self.check_alike(
            &mut ranks,
            shards,
            RankRequest::of_save(SAVES, step, states.map(SliceStates::optimizer), Vec::new()),
        )?;
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
        let states = optimizer.and_then(OptimizerState::states);
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
        load::load((&self.disk, &self.directory, &self.allowed), &mut ranks, step, shards, states)
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

    /// Returns an error unless all ranks have trained alike. Requests are compared first, because the trainer's
    /// comparison needs every rank in the same call.
    fn check_alike(&self, ranks: &mut Ranks, shards: &mut dyn Shards, request: RankRequest) -> Result<()> {
        ranks.compare(&self.directory, Ok(request))?;
        shards.check_alike()
    }

    fn plan(
        &self,
        saves: &str,
        ranks: &Ranks,
        shards: &dyn Shards,
        states: Option<&SliceStates>,
        step: u64,
    ) -> SavePlan {
        let parameters = shards.infos().iter().filter(|info| info.same_as.is_none());
        let kind = states.map(SliceStates::optimizer);
        SavePlan {
            disk: self.disk.clone(),
            directory: self.directory.clone(),
            owner: Arc::clone(&self.owner),
            keep: self.keep,
            step,
            steps: shards.steps(),
            optimizer: kind,
            request: part::held(shards, ranks)
                .map(|held| RankRequest::of_save(saves, step, kind, held).after(shards.updates())),
            parameters: parameters.cloned().collect(),
            entries: part::entries(shards, states),
        }
    }
}

/// Returns the values of all entries of a plan, one after the other.
fn copy(
    plan: &SavePlan,
    shards: &dyn Shards,
    states: Option<&SliceStates>,
) -> Result<Vec<u8>, CheckpointError> {
    let entries = plan.entries.as_ref().map_err(Clone::clone)?;
    let mut copy = Vec::with_capacity(entries.iter().map(part::Entry::bytes).sum());
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
        // Only this rank knows the error of its copy until it would write it.
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

/// What a rank does that calls [`Checkpoints::save`], as errors describe it.
const SAVES: &str = "saves";

/// The default time that ranks wait for each other's files.
pub(super) const TIMEOUT: Duration = Duration::from_secs(600);

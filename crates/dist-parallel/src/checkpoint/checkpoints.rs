//! A directory of checkpoints, as a training uses it.

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
use crate::{Error, Optimizer, Result};

/// A directory in which a training saves checkpoints, and from which it goes on.
///
/// All ranks see the same directory: a disk of the host, or a file system that hosts share. One training at a time saves to
/// it: from its first save until these `Checkpoints` are dropped or its process ends, saves of any other, and by other
/// `Checkpoints`, fail with [`InUse`](crate::CheckpointProblem::InUse), which names the one that saves there.
///
/// ```
/// use dist_parallel::{Checkpoints, Optimizer, Result, Shards};
///
/// fn train(trainer: &mut dyn Shards, optimizer: &mut dyn Optimizer) -> Result<()> {
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
/// # What a checkpoint is
///
/// A directory with a safetensors file per rank, each with as equal a share of what is held more than once as
/// possible, and an index with names, shapes, types, places and checksums, the step, and the kind of the optimizer.
/// Nothing in it says by how many ranks, and by which strategy, it is to be loaded.
///
/// # What survives
///
/// A checkpoint exists from one moment on, when all of it is on the disk; a process, or a host, that dies at any time
/// leaves the checkpoints before it whole. When a rank cannot write its part, every rank gets the same error, and
/// what was written is removed.
///
/// # What is checked
///
/// Saving fails if the ranks have changed parameters with different settings of their optimizers, or hold different values of
/// a parameter that they should hold in common: each writes a share of it, and a mixture of both would be saved. Pipelines beside each other are compared in the same way. For that each rank
/// reads all of it once.
///
/// Loading changes nothing until every rank has read all that it needs into memory of its own and compared it with
/// the checksums, and all have agreed that everything fits. For that long a rank needs the memory of its parameters
/// and of its optimizer's state twice. Each rank reads only what it needs of the parts, rounded up to 256 KiB.
pub struct Checkpoints {
    directory: PathBuf,
    keep: Option<NonZeroUsize>,
    timeout: Duration,
    allowed: Allowed,
    pub(super) disk: Disk,
    /// On the rank that says where a checkpoint goes: what this job has of the directory.
    owner: Arc<Mutex<Owner>>,
    /// Closed when the save that was started last has ended.
    latest: Option<Receiver<()>>,
}

impl Checkpoints {
    /// The checkpoints in `directory`, which is made when the first is saved; none named is the one that the process is in.
    /// All are kept.
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

    /// Removes all but the last `keep` checkpoints, after each that was saved. Rank 0 does, and the others do not wait for it here:
    /// after [`save`](Self::save) it is late for the next call by as long as that takes.
    #[must_use]
    pub fn keep_last(self, keep: NonZeroUsize) -> Self {
        Self { keep: Some(keep), ..self }
    }

    /// How long a rank waits for another to have written or read its part: by default ten minutes. Where pipelines beside
    /// each other are saved, those that do not save wait three times as long, for all that the others do. A rank that dies is
    /// noticed at once.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Lets loads leave out these tensors of a checkpoint, and what an optimizer has kept of them. Without it, a load fails
    /// if a checkpoint has a tensor that the model has not, or has as another name of a parameter with other values.
    #[must_use]
    pub fn leave_out<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.allowed.left_out.extend(names.into_iter().map(Into::into));
        self
    }

    /// Lets loads leave out what an optimizer has kept of these parameters, which are loaded themselves. Without it, a load
    /// with an optimizer fails if a checkpoint has such state of a parameter that the model does not train.
    #[must_use]
    pub fn leave_out_state_of<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.allowed.states_left_out.extend(names.into_iter().map(Into::into));
        self
    }

    /// Saves what all ranks hold, and returns when it is on the disk. All ranks call this with the same step.
    ///
    /// # Errors
    /// On every rank, if they were asked for different steps or optimizers, or any cannot write its part. The checkpoints
    /// before it are as they were.
    pub fn save(
        &mut self,
        shards: &mut dyn Shards,
        optimizer: Option<&dyn Optimizer>,
        step: u64,
    ) -> Result<()> {
        end(self.latest.take());
        let mut ranks = Ranks::of(shards, self.timeout, "save")?;
        self.check_alike(
            &mut ranks,
            shards,
            RankRequest::of_save(step, optimizer.map(Optimizer::name), Vec::new()),
        )?;
        let plan = self.plan(&ranks, shards, optimizer, step);
        plan.run(&mut ranks, |entry, write| part::read(shards, optimizer, entry, write))
    }

    /// Copies what all ranks hold, and saves the copy while training goes on. All ranks call this with the same
    /// step. Saves that were started are done one after the other, in order.
    ///
    /// # Errors
    /// If the copy cannot be made, or the thread that would write it.
    pub fn start_save(
        &mut self,
        shards: &mut dyn Shards,
        optimizer: Option<&dyn Optimizer>,
        step: u64,
    ) -> Result<Saving> {
        let mut ranks = Ranks::of(shards, self.timeout, "start_save")?;
        let plan = self.plan(&ranks, shards, optimizer, step);
        let copy = if ranks.saves() { copy(&plan, shards, optimizer) } else { Ok(Vec::new()) };
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

    /// Puts what the newest checkpoint has in place of what all ranks hold, and tells its step; `None` if there is no
    /// checkpoint, and nothing is changed. All ranks call this. A save that was [started](Self::start_save) ends before.
    ///
    /// With an optimizer, its state is loaded too. Without one, only the parameters are. Nothing else of a checkpoint is left
    /// out unless it was [said](Self::leave_out).
    ///
    /// # Errors
    /// On every rank, with the file and the tensor at fault, if anything is missing, changed or does not fit the model, or if
    /// the ranks were asked for different steps or optimizers; then nothing is changed on any rank. If communication fails.
    pub fn load(
        &mut self,
        shards: &mut dyn Shards,
        optimizer: Option<&mut dyn Optimizer>,
    ) -> Result<Option<u64>> {
        self.load_states(None, shards, States::of(optimizer))
    }

    /// As [`load`](Self::load), from the newest checkpoint of this step.
    ///
    /// # Errors
    /// As for [`load`](Self::load), and if there is no checkpoint of this step.
    pub fn load_step(
        &mut self,
        step: u64,
        shards: &mut dyn Shards,
        optimizer: Option<&mut dyn Optimizer>,
    ) -> Result<()> {
        self.load_states(Some(step), shards, States::of(optimizer)).map(drop)
    }

    /// Loads the newest checkpoint, or the newest of a step, and does this with the optimizer's state in it.
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

    /// The steps of the checkpoints in this directory, oldest first; without that of a save that has not ended.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let names = directory::list(&self.disk, &self.directory)?;
        Ok(names.into_iter().map(|name| name.step).collect())
    }

    /// Writes the parameters of the newest checkpoint, or of the newest of this step, as one safetensors file. This is
    /// for one process, which needs no memory to speak of; the file exists when all of it is on the disk.
    ///
    /// # Errors
    /// If there is no such checkpoint, any part of the parameters is missing or changed, or the file cannot be written.
    pub fn consolidate(&self, step: Option<u64>, file: impl AsRef<Path>) -> Result<()> {
        Ok(plain::consolidate(&self.disk, &self.directory, step, file.as_ref())?)
    }

    /// Makes sure that all ranks have trained alike. First they compare what they were asked for: trainers compare by
    /// communicators of their own, where nobody may be whose call is another.
    fn check_alike(&self, ranks: &mut Ranks, shards: &mut dyn Shards, request: RankRequest) -> Result<()> {
        ranks.compare(&self.directory, Ok(request))?;
        shards.check_alike()
    }

    fn plan(
        &self,
        ranks: &Ranks,
        shards: &dyn Shards,
        optimizer: Option<&dyn Optimizer>,
        step: u64,
    ) -> SavePlan {
        let parameters = shards.infos().iter().filter(|info| info.same_as.is_none());
        let kind = optimizer.map(Optimizer::name);
        SavePlan {
            disk: self.disk.clone(),
            directory: self.directory.clone(),
            owner: Arc::clone(&self.owner),
            keep: self.keep,
            step,
            optimizer: kind,
            request: part::held(shards, ranks)
                .map(|held| RankRequest::of_save(step, kind, held).after(shards.updates())),
            parameters: parameters.cloned().collect(),
            entries: part::entries(shards, optimizer),
        }
    }
}

/// The values of all entries of a plan, one after the other.
fn copy(
    plan: &SavePlan,
    shards: &dyn Shards,
    optimizer: Option<&dyn Optimizer>,
) -> Result<Vec<u8>, CheckpointError> {
    let entries = plan.entries.as_ref().map_err(Clone::clone)?;
    let mut copy = Vec::with_capacity(entries.iter().map(part::Entry::bytes).sum());
    for entry in entries {
        part::read(shards, optimizer, entry, &mut |bytes| {
            copy.extend_from_slice(bytes);
            Ok(())
        })?;
    }
    Ok(copy)
}

/// Saves a copy, once the save before it has ended. The sender is dropped at the end.
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
        // What could not be copied is known to this rank only, until it would have written it.
        let copy = copy.as_ref().map_err(Clone::clone)?;
        let start = done;
        done += entry.bytes();
        write(&copy[start..done])
    })
}

/// Waits until a save has ended that was started.
fn end(save: Option<Receiver<()>>) {
    if let Some(mut save) = save {
        // It closes without a message.
        let _closed = save.receive(None);
    }
}

impl fmt::Debug for Checkpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checkpoints({})", self.directory.display())
    }
}

/// How long ranks wait for each other's files unless something else is said.
pub(super) const TIMEOUT: Duration = Duration::from_secs(600);

//! The handle of a save that is running.

use std::any::Any;
use std::fmt;
use std::time::Duration;

use dist_transport::Runtime;
use dist_transport::runtime::Task;

use crate::Result;

/// The handle of a save that runs while training continues.
///
/// Dropping it waits until the save has ended. A failure is then only logged.
#[must_use = "wait returns whether the checkpoint was saved; dropping waits too"]
pub struct Saving {
    state: State,
    runtime: Runtime,
    step: u64,
}

enum State {
    Running(Task<Result<()>>),
    Done(Result<()>),
    /// The result was returned.
    Taken,
}

impl Saving {
    pub(super) const fn new(task: Task<Result<()>>, runtime: Runtime, step: u64) -> Self {
        Self { state: State::Running(task), runtime, step }
    }

    /// Returns the step of the checkpoint.
    pub const fn step(&self) -> u64 {
        self.step
    }

    /// Waits until the checkpoint is on the disk.
    ///
    /// # Errors
    /// The errors of [`Checkpoints::save`](crate::Checkpoints::save).
    pub fn wait(mut self) -> Result<()> {
        self.end()
    }

    /// Waits until the checkpoint is on the disk, for `limit` at most. The save continues after the limit.
    ///
    /// # Errors
    /// The outer error is the handle, if the save has not ended. The inner errors are those of [`wait`](Self::wait).
    pub fn wait_timeout(mut self, limit: Duration) -> Result<Result<()>, Self> {
        if self.has_ended_within(limit) { Ok(self.end()) } else { Err(self) }
    }

    /// Returns `true` if the save has ended, so that [`wait`](Self::wait) would not block.
    pub fn is_done(&mut self) -> bool {
        self.has_ended_within(Duration::ZERO)
    }

    fn has_ended_within(&mut self, limit: Duration) -> bool {
        let state = std::mem::replace(&mut self.state, State::Taken);
        self.state = match state {
            State::Running(task) => task
                .join_by(self.runtime.deadline(limit))
                .map_or_else(State::Running, |end| State::Done(unwound(end))),
            ended => ended,
        };
        !matches!(self.state, State::Running(_))
    }

    fn end(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.state, State::Taken) {
            State::Running(task) => unwound(task.join()),
            State::Done(outcome) => outcome,
            State::Taken => Ok(()),
        }
    }
}

/// Returns the result of a save. Panics if the save has panicked.
fn unwound(end: Result<Result<()>, Box<dyn Any + Send>>) -> Result<()> {
    end.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl Drop for Saving {
    fn drop(&mut self) {
        // A panic does not wait. The checkpoint is then unfinished, as if the process had died.
        if std::thread::panicking() {
            return;
        }
        if let Err(error) = self.end() {
            tracing::warn!(%error, step = self.step, "a checkpoint was not saved");
        }
    }
}

impl fmt::Debug for Saving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if matches!(self.state, State::Running(_)) { "running" } else { "done" };
        write!(f, "Saving(step {}, {state})", self.step)
    }
}

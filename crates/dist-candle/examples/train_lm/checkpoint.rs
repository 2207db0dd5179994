//! Saves the training at intervals, and loads it.

use std::num::NonZeroUsize;
use std::path::Path;

use candle_core::Tensor;
use dist_parallel::Result;
use dist_parallel::checkpoint::{Checkpoints, Saving};
use dist_parallel::optim::AdamW;
use dist_parallel::trainer::Trainer;

use crate::options::Options;

/// A writer of checkpoints in the background of the training.
pub(crate) struct Saver {
    checkpoints: Checkpoints,
    every: usize,
    steps: usize,
    /// The save that was started last.
    saving: Option<Saving>,
}

impl Saver {
    /// Returns `None` if the options do not ask for checkpoints.
    pub(crate) fn new(options: &Options) -> Option<Self> {
        let keep = NonZeroUsize::new(2).expect("two are more than none");
        let checkpoints = Checkpoints::at(options.save.as_ref()?).keep_last(keep);
        Some(Self { checkpoints, every: options.save_every, steps: options.steps, saving: None })
    }

    /// Starts to save if a save is due. It first waits for the previous save, so at most one copy exists.
    pub(crate) fn after_step(
        &mut self,
        step: usize,
        trainer: &mut dyn Trainer<Tensor>,
        optimizer: &AdamW,
    ) -> Result<()> {
        if step.is_multiple_of(self.every) || step == self.steps {
            self.wait()?;
            self.saving = Some(trainer.start_save(&mut self.checkpoints, Some(optimizer), step as u64)?);
        }
        Ok(())
    }

    /// Waits until all started saves are on the disk.
    pub(crate) fn wait(&mut self) -> Result<()> {
        self.saving.take().map_or(Ok(()), Saving::wait)
    }
}

/// Loads the newest checkpoint in a directory. Returns its number of completed steps.
pub(crate) fn load(
    directory: &Path,
    trainer: &mut dyn Trainer<Tensor>,
    optimizer: &mut AdamW,
) -> Result<Option<u64>> {
    trainer.load(&mut Checkpoints::at(directory), Some(optimizer))
}

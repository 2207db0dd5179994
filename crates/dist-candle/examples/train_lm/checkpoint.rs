//! Saving the training now and then, and going on from what was saved.

use std::num::NonZeroUsize;
use std::path::Path;

use candle_core::Tensor;
use dist_parallel::Result;
use dist_parallel::checkpoint::{Checkpoints, Saving};
use dist_parallel::optim::AdamW;
use dist_parallel::trainer::Trainer;

use crate::options::Options;

/// Saves while training goes on.
pub(crate) struct Saver {
    checkpoints: Checkpoints,
    every: usize,
    steps: usize,
    /// The one that was begun last.
    saving: Option<Saving>,
}

impl Saver {
    /// `None` if nothing is to be saved.
    pub(crate) fn new(options: &Options) -> Option<Self> {
        let keep = NonZeroUsize::new(2).expect("two are more than none");
        let checkpoints = Checkpoints::at(options.save.as_ref()?).keep_last(keep);
        Some(Self { checkpoints, every: options.save_every, steps: options.steps, saving: None })
    }

    /// Begins to save if it is time. At most one checkpoint is on its way, so that there is at most one copy.
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

    /// Waits until everything that was begun is on the disk.
    pub(crate) fn wait(&mut self) -> Result<()> {
        self.saving.take().map_or(Ok(()), Saving::wait)
    }
}

/// Goes on from the newest checkpoint in a directory; the number of steps that were done there.
pub(crate) fn load(
    directory: &Path,
    trainer: &mut dyn Trainer<Tensor>,
    optimizer: &mut AdamW,
) -> Result<Option<u64>> {
    trainer.load(&mut Checkpoints::at(directory), Some(optimizer))
}

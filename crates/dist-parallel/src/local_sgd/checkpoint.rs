//! Checkpoints of local SGD: the state that all ranks share right after a synchronisation point.

use std::path::Path;

use super::LocalSgd;
use crate::checkpoint::{Checkpoints, Saving, States, WeightOptions, WeightReport, load_weights};
use crate::{OptimizerState, Params, Result, Sgd};

/// The state that all ranks share right after a synchronisation point. The trainer itself does not implement
/// [`Shards`]: only the outer optimizer may be saved with it, because the ranks' own optimizers differ.
///
/// [`Shards`]: crate::Shards
pub(crate) struct SyncedModel<'a, M>(pub(crate) &'a mut LocalSgd<M>);

impl<M: Params> LocalSgd<M> {
    /// Saves the state that all ranks share, and returns when it is on the disk. All ranks call this, right after a
    /// synchronisation point.
    ///
    /// # Errors
    /// The errors of [`Checkpoints::save`]. There were steps since the last synchronisation point, or it had no
    /// weight and the ranks differ; then nothing is saved.
    pub fn save(&mut self, checkpoints: &mut Checkpoints, step: u64) -> Result<()> {
        self.with_synced_model(|mut with_synced_model, outer| {
            checkpoints.save(
                &mut with_synced_model,
                outer.map(|outer| -> &dyn OptimizerState { outer }),
                step,
            )
        })
    }

    /// Saves like [`save`](Self::save), while training continues.
    ///
    /// # Errors
    /// The errors of [`Checkpoints::start_save`] and of [`save`](Self::save).
    pub fn start_save(&mut self, checkpoints: &mut Checkpoints, step: u64) -> Result<Saving> {
        self.with_synced_model(|mut with_synced_model, outer| {
            checkpoints.start_save(
                &mut with_synced_model,
                outer.map(|outer| -> &dyn OptimizerState { outer }),
                step,
            )
        })
    }

    /// Loads the newest checkpoint on any number of ranks and returns its step, or `None` if there is none. All ranks
    /// call this. DiLoCo continues from a checkpoint of DiLoCo, with its velocity. Local SGD continues from one
    /// without an optimizer's state. For any other checkpoint use [`load_parameters`](Self::load_parameters).
    ///
    /// # Errors
    /// The errors of [`Checkpoints::load`].
    pub fn load(&mut self, checkpoints: &mut Checkpoints) -> Result<Option<u64>> {
        self.with_synced_model(|mut with_synced_model, outer| {
            checkpoints.load_states(None, &mut with_synced_model, all(outer))
        })
    }

    /// Loads like [`load`](Self::load), from the newest checkpoint of this step.
    ///
    /// # Errors
    /// The errors of [`Checkpoints::load_step`].
    pub fn load_step(&mut self, checkpoints: &mut Checkpoints, step: u64) -> Result<()> {
        self.with_synced_model(|mut with_synced_model, outer| {
            checkpoints.load_states(Some(step), &mut with_synced_model, all(outer))
        })
        .map(drop)
    }

    /// Starts with the parameters of the newest checkpoint of any trainer and returns its step, or `None` if there is
    /// none. DiLoCo then has no velocity. All ranks call this.
    ///
    /// # Errors
    /// The errors of [`Checkpoints::load`].
    pub fn load_parameters(&mut self, checkpoints: &mut Checkpoints) -> Result<Option<u64>> {
        let step = checkpoints.load(&mut SyncedModel(self), None)?;
        if step.is_some() {
            self.clear_velocity();
        }
        Ok(step)
    }

    /// Loads like [`load_parameters`](Self::load_parameters), from the newest checkpoint of this step.
    ///
    /// # Errors
    /// The errors of [`Checkpoints::load_step`].
    pub fn load_parameters_of(&mut self, checkpoints: &mut Checkpoints, step: u64) -> Result<()> {
        checkpoints.load_step(step, &mut SyncedModel(self), None)?;
        self.clear_velocity();
        Ok(())
    }

    /// Starts with the parameters of safetensors files, as [`load_weights`] does. DiLoCo then
    /// has no velocity. All ranks call this.
    ///
    /// # Errors
    /// The errors of [`load_weights`].
    pub fn load_weights(&mut self, path: impl AsRef<Path>, options: &WeightOptions) -> Result<WeightReport> {
        let report = load_weights(path, &mut SyncedModel(self), options)?;
        self.clear_velocity();
        Ok(report)
    }

    /// Drops the velocity of DiLoCo.
    fn clear_velocity(&mut self) {
        if let Some(states) = self.outer.as_mut().and_then(Sgd::states_mut) {
            states.clear();
        }
    }

    /// Calls `f` with the shared state and the outer optimizer.
    fn with_synced_model<T>(&mut self, f: impl FnOnce(SyncedModel<'_, M>, Option<&mut Sgd>) -> T) -> T {
        let mut outer = self.outer.take();
        let result = f(SyncedModel(self), outer.as_mut());
        self.outer = outer;
        result
    }
}

/// Loads all optimizer state of a checkpoint into the outer optimizer. Without one, refuses a checkpoint with state.
fn all(outer: Option<&mut Sgd>) -> States<'_> {
    outer.and_then(Sgd::states_mut).map_or(States::Refuse, States::Into)
}

//! Checkpoints of local SGD: the state that all ranks share right after a synchronisation point.

use std::path::Path;

use super::LocalSgd;
use crate::checkpoint::{
    Checkpoints, SavedStates, Saving, States, WeightOptions, WeightReport, load_weights,
};
use crate::{OptimizerState, Params, Result, Sgd, SliceStates};

/// The state that all ranks share right after a synchronisation point. The trainer itself does not implement
/// [`Shards`]: the outer optimizer is saved with it, and the ranks' own optimizers have states of their own.
///
/// [`Shards`]: crate::Shards
pub(crate) struct SyncedModel<'a, M>(pub(crate) &'a mut LocalSgd<M>);

impl<M: Params> LocalSgd<M> {
    /// Saves the state that all ranks share, and returns when it is on the disk. All ranks call this, right after a
    /// synchronisation point.
    ///
    /// With the optimizer of the ranks' own updates, each rank also saves its state of it.
    ///
    /// # Errors
    /// The errors of [`Checkpoints::save`]. There were steps since the last synchronisation point, or it had no
    /// weight and the ranks differ; then nothing is saved.
    pub fn save(
        &mut self,
        checkpoints: &mut Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        step: u64,
    ) -> Result<()> {
        let own = optimizer.and_then(|optimizer| optimizer.states());
        self.with_synced_model(|mut synced_model, outer| {
            checkpoints.save_states(&mut synced_model, to_save(outer, own), step)
        })
    }

    /// Saves like [`save`](Self::save), while training continues.
    ///
    /// # Errors
    /// The errors of [`Checkpoints::start_save`] and of [`save`](Self::save).
    pub fn start_save(
        &mut self,
        checkpoints: &mut Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        step: u64,
    ) -> Result<Saving> {
        let own = optimizer.and_then(|optimizer| optimizer.states());
        self.with_synced_model(|mut synced_model, outer| {
            checkpoints.start_save_states(&mut synced_model, to_save(outer, own), step)
        })
    }

    /// Loads the newest checkpoint on any number of ranks and returns its step, or `None` if there is none. All ranks
    /// call this. DiLoCo continues from a checkpoint of DiLoCo, with its velocity.
    ///
    /// With the optimizer of the ranks' own updates, each rank continues with the state that it has saved. Of a checkpoint
    /// of W ranks, rank r loads the state of rank r mod W: further ranks begin with the state of an earlier one, and states
    /// of ranks that no longer exist are dropped. A checkpoint of another strategy with a state of this kind of optimizer
    /// gives all ranks that state, and DiLoCo no velocity.
    ///
    /// Without an optimizer, local SGD continues from a checkpoint without an optimizer's state, and DiLoCo from its own. For
    /// any other checkpoint use [`load_parameters`](Self::load_parameters).
    ///
    /// # Errors
    /// The errors of [`Checkpoints::load`].
    pub fn load(
        &mut self,
        checkpoints: &mut Checkpoints,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<Option<u64>> {
        let own = optimizer.and_then(|optimizer| optimizer.states_mut());
        self.with_synced_model(|mut synced_model, outer| {
            checkpoints.load_states(None, &mut synced_model, to_load(outer, own))
        })
    }

    /// Loads like [`load`](Self::load), from the newest checkpoint of this step.
    ///
    /// # Errors
    /// The errors of [`Checkpoints::load_step`].
    pub fn load_step(
        &mut self,
        checkpoints: &mut Checkpoints,
        step: u64,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<()> {
        let own = optimizer.and_then(|optimizer| optimizer.states_mut());
        self.with_synced_model(|mut synced_model, outer| {
            checkpoints.load_states(Some(step), &mut synced_model, to_load(outer, own))
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

/// Returns the states that a checkpoint has: that of the outer optimizer, and that of this rank's own.
fn to_save<'a>(outer: Option<&'a mut Sgd>, own: Option<&'a SliceStates>) -> SavedStates<'a> {
    SavedStates { shared: outer.and_then(|outer| outer.states()), own }
}

/// Loads the optimizer states of a checkpoint into the outer optimizer and into this rank's own. Without both, refuses a
/// checkpoint with state.
fn to_load<'a>(outer: Option<&'a mut Sgd>, own: Option<&'a mut SliceStates>) -> States<'a> {
    match (outer.and_then(Sgd::states_mut), own) {
        (shared, Some(own)) => States::IntoOwn { shared, own },
        (Some(shared), None) => States::Into(shared),
        (None, None) => States::Refuse,
    }
}

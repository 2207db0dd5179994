//! Saving and loading what ranks that train by themselves have in common.

use std::path::Path;

use super::LocalSgd;
use crate::checkpoint::{Checkpoints, Saving, States, WeightOptions, WeightReport, load_weights};
use crate::{Optimizer, Params, Result};

/// What all ranks have in common right after a meeting. It is not the trainer itself that hands out [`Shards`]: beside the
/// outer optimizer no other may be saved, since what those of the ranks keep differs.
///
/// [`Shards`]: crate::Shards
pub(crate) struct SyncedModel<'a, M>(pub(crate) &'a mut LocalSgd<M>);

impl<M: Params> LocalSgd<M> {
    /// Saves what all ranks have in common, and returns when it is on the disk. All ranks call this, right after a meeting.
    ///
    /// # Errors
    /// As for [`Checkpoints::save`], and if there were steps since the last meeting, or ranks differ since nothing counted at
    /// it; nothing is saved then.
    pub fn save(&mut self, checkpoints: &mut Checkpoints, step: u64) -> Result<()> {
        self.with_synced_model(|mut with_synced_model, outer| {
            checkpoints.save(&mut with_synced_model, outer.map(|outer| &*outer), step)
        })
    }

    /// As [`save`](Self::save), while training goes on.
    ///
    /// # Errors
    /// As for [`Checkpoints::start_save`], and as for [`save`](Self::save).
    pub fn start_save(&mut self, checkpoints: &mut Checkpoints, step: u64) -> Result<Saving> {
        self.with_synced_model(|mut with_synced_model, outer| {
            checkpoints.start_save(&mut with_synced_model, outer.map(|outer| &*outer), step)
        })
    }

    /// Goes on from the newest checkpoint, by any number of ranks, and tells its step; `None` if there is none. All ranks
    /// call this. DiLoCo goes on from a checkpoint of DiLoCo, with its velocity, and local SGD from one without an
    /// optimizer's state; from any other they [begin](Self::load_parameters).
    ///
    /// # Errors
    /// As for [`Checkpoints::load`].
    pub fn load(&mut self, checkpoints: &mut Checkpoints) -> Result<Option<u64>> {
        self.with_synced_model(|mut with_synced_model, outer| {
            checkpoints.load_states(None, &mut with_synced_model, all(outer))
        })
    }

    /// As [`load`](Self::load), from the newest checkpoint of this step.
    ///
    /// # Errors
    /// As for [`Checkpoints::load_step`].
    pub fn load_step(&mut self, checkpoints: &mut Checkpoints, step: u64) -> Result<()> {
        self.with_synced_model(|mut with_synced_model, outer| {
            checkpoints.load_states(Some(step), &mut with_synced_model, all(outer))
        })
        .map(drop)
    }

    /// Begins with the parameters of the newest checkpoint, by whatever it was saved, and tells its step; `None` if there is
    /// none. DiLoCo has no velocity then. All ranks call this.
    ///
    /// # Errors
    /// As for [`Checkpoints::load`].
    pub fn load_parameters(&mut self, checkpoints: &mut Checkpoints) -> Result<Option<u64>> {
        let step = checkpoints.load(&mut SyncedModel(self), None)?;
        if step.is_some() {
            self.clear_velocity();
        }
        Ok(step)
    }

    /// As [`load_parameters`](Self::load_parameters), from the newest checkpoint of this step.
    ///
    /// # Errors
    /// As for [`Checkpoints::load_step`].
    pub fn load_parameters_of(&mut self, checkpoints: &mut Checkpoints, step: u64) -> Result<()> {
        checkpoints.load_step(step, &mut SyncedModel(self), None)?;
        self.clear_velocity();
        Ok(())
    }

    /// Begins with the parameters of safetensors files, as [`load_weights`](crate::load_weights) does. DiLoCo has no velocity
    /// then. All ranks call this.
    ///
    /// # Errors
    /// As for [`load_weights`](crate::load_weights).
    pub fn load_weights(&mut self, path: impl AsRef<Path>, options: &WeightOptions) -> Result<WeightReport> {
        let report = load_weights(path, &mut SyncedModel(self), options)?;
        self.clear_velocity();
        Ok(report)
    }

    /// What DiLoCo has of the meetings before.
    fn clear_velocity(&mut self) {
        if let Some(outer) = &mut self.outer {
            outer.clear_state();
        }
    }

    /// Calls `f` with what the ranks have in common, and the outer optimizer.
    fn with_synced_model<T>(
        &mut self,
        f: impl FnOnce(SyncedModel<'_, M>, Option<&mut dyn Optimizer>) -> T,
    ) -> T {
        let mut outer = self.outer.take();
        let result = f(SyncedModel(self), outer.as_mut().map(|outer| -> &mut dyn Optimizer { outer }));
        self.outer = outer;
        result
    }
}

/// All state that a checkpoint has, for the outer optimizer or for nobody.
fn all(outer: Option<&mut dyn Optimizer>) -> States<'_> {
    outer.map_or(States::Refuse, States::Into)
}

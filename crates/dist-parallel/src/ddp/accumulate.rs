//! Gradient accumulation: micro-batches that are computed before their step.

use super::{Ddp, StepReport};
use crate::block_range::whole;
use crate::engine::Work;
use crate::trainer::{with_batches, with_computation};
use crate::{Block, BoxError, Loss, Params, Ready, Result};

impl<M: Params> Ddp<M> {
    /// Computes this rank's share of `micro_batches` micro-batches without communication. The next step adds its own.
    ///
    /// Several calls and a step give the result of one step with all their micro-batches, if both assign the same
    /// micro-batches to each rank. All micro-batches of a step have a [loss](Loss) of one type.
    ///
    /// Take the data of a micro-batch from its number. An iterator that the closure advances gives every rank the
    /// same examples: [`data`](crate::data) shows that mistake and the correct form.
    ///
    /// # Errors
    /// The errors of [`step_with`](Self::step_with).
    #[doc(alias = "no_sync")]
    pub fn accumulate_with<C: Loss>(
        &mut self,
        micro_batches: usize,
        compute: impl FnMut(&mut M, usize, &mut Ready<'_>) -> Result<C, BoxError>,
    ) -> Result<()> {
        with_computation(compute, |computation| {
            self.engine.accumulate::<()>(micro_batches, computation.into())
        })
    }

    /// Accumulates like [`accumulate_with`](Self::accumulate_with), for a model that is a [`Block`].
    ///
    /// # Errors
    /// The errors of [`step_with`](Self::step_with).
    pub fn accumulate<A, C: Loss, L>(
        &mut self,
        micro_batches: usize,
        batch: impl FnMut(usize) -> Result<(A, L), BoxError>,
    ) -> Result<()>
    where
        M: Block<A>,
        L: FnOnce(A) -> Result<(C, A), BoxError>,
    {
        with_batches(batch, |batches| self.engine.accumulate(micro_batches, Work::of_batches(whole, batches)))
    }

    /// Computes the mean gradients of the accumulated micro-batches.
    ///
    /// # Errors
    /// Nothing was accumulated, and the errors of [`step_with`](Self::step_with).
    pub fn synchronise(&mut self) -> Result<StepReport> {
        self.engine.synchronise()
    }
}

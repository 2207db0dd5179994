//! Micro-batches that are computed before the step that they belong to.

use super::{Compute, Ddp, StepReport, forward_backward, weighted};
use crate::step_consensus::{STEP, StepDescriptor, TrainingCall};
use crate::{Block, BoxError, Loss, Params, Ready, Result};

impl<M: Params> Ddp<M> {
    /// Computes this rank's share of `micro_batches` micro-batches without communicating; the next step adds its
    /// own. Several calls and a step give what one step with all their micro-batches gives, if that one deals
    /// each rank the same. All micro-batches of a step have [losses](Loss) of one kind.
    ///
    /// Take the data of a micro-batch from its number. An iterator that the closure advances gives every rank the same examples:
    /// [`data`](crate::data) shows that mistake and what to write instead.
    ///
    /// # Errors
    /// As for [`step_with`](Self::step_with).
    #[doc(alias = "no_sync")]
    pub fn accumulate_with<C: Loss>(
        &mut self,
        micro_batches: usize,
        compute: impl FnMut(&mut M, usize, &mut Ready<'_>) -> Result<C, BoxError>,
    ) -> Result<()> {
        self.begin();
        let result = self.accumulate_share(micro_batches, C::WEIGHTED, &mut weighted(compute));
        self.computes = false;
        self.or_abort(result)
    }

    /// As [`accumulate_with`](Self::accumulate_with), for a model that is a [`Block`].
    ///
    /// Take the data of a micro-batch from its number. An iterator that the closure advances gives every rank the same examples:
    /// [`data`](crate::data) shows that mistake and what to write instead.
    ///
    /// # Errors
    /// As for [`step_with`](Self::step_with).
    pub fn accumulate<A, C: Loss, L>(
        &mut self,
        micro_batches: usize,
        mut batch: impl FnMut(usize) -> Result<(A, L), BoxError>,
    ) -> Result<()>
    where
        M: Block<A>,
        L: FnOnce(A) -> Result<(C, A), BoxError>,
    {
        self.accumulate_with(micro_batches, |model, index, ready| {
            forward_backward(model, batch(index)?, ready)
        })
    }

    /// Computes the mean gradients of what was accumulated.
    ///
    /// # Errors
    /// If nothing was accumulated, or as for [`step_with`](Self::step_with).
    pub fn synchronise(&mut self) -> Result<StepReport> {
        self.comm.announce(STEP, "synchronise");
        self.begin();
        let descriptor = StepDescriptor::new(TrainingCall::Step, self.micro_batches, self.weighted);
        self.synchronise_after(0..0, descriptor, &mut |_, _, _| unreachable!("nobody has a share of nothing"))
    }

    /// Adds this rank's share of these micro-batches to what was accumulated.
    fn accumulate_share(
        &mut self,
        micro_batches: usize,
        weighted: bool,
        compute: &mut Compute<'_, M>,
    ) -> Result<()> {
        self.check_weighted(weighted)?;
        (self.micro_batches, self.weighted) = (self.micro_batches + micro_batches, weighted);
        self.share(micro_batches).try_for_each(|index| self.run(index, compute, None))
    }
}

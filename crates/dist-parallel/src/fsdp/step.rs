//! One step of sharded training.

use super::Fsdp;
use crate::engine::{Stage, StepAction, StepEngine, Work};
use crate::trainer::with_batches;
use crate::{BoxError, Error, Loss, Result, Sequence, StepReport};

impl<A> Fsdp<A> {
    /// Computes the mean gradients of `micro_batches` micro-batches of all ranks, accumulated ones included.
    ///
    /// `batch` receives the number of a micro-batch. It returns the input and a function that computes the [`Loss`]
    /// and its gradient from the model's output. The type of the loss decides between a mean over micro-batches and a
    /// weighted mean.
    ///
    /// Take the data of a micro-batch from its number. An iterator that the closure advances gives every rank the
    /// same examples: [`data`](crate::data) shows that mistake and the correct form.
    ///
    /// # Errors
    /// `batch`, a block or the loss fails. A gradient is reported twice, or differs from its parameter in type or length.
    /// A block [changes a sharded parameter](Error::ChangedByBlock). The ranks call for different numbers of
    /// micro-batches, or all for none. Only some micro-batches have a weight, or the sum of weights is 0. Communication
    /// fails.
    pub fn step<C: Loss, L>(
        &mut self,
        micro_batches: usize,
        batch: impl FnMut(usize) -> Result<(A, L), BoxError>,
    ) -> Result<StepReport>
    where
        L: FnOnce(A) -> Result<(C, A), BoxError>,
    {
        with_batches(batch, |batches| {
            self.engine.step(micro_batches, Work::of_batches(Sequence::block, batches))
        })
    }

    /// Computes the mean gradients of the micro-batches that the ranks have, accumulated ones included: `own` on this
    /// rank, 0 if it has run out. Returns `None` on every rank if no rank has any: training is over.
    ///
    /// A rank that has run out has no weight. Sums are divided by the number of micro-batches that were computed, or
    /// by their [weights](Loss). The rank still takes every step, because the others need its shard of the
    /// parameters. The ranks of a replica run as many rounds as their longest rank needs. Each round sums the ranks
    /// that have a micro-batch in it. Then the rounds are summed.
    ///
    /// `batch` receives the number of a micro-batch among this rank's own. If all ranks read the same data, each must
    /// take other examples from it: [`data`](crate::data) shows how, and the mistake that gives all ranks the same.
    ///
    /// # Errors
    /// The errors of [`step`](Self::step), and a step of another kind on some ranks.
    #[doc(alias = "Join")]
    pub fn join<C: Loss, L>(
        &mut self,
        own: usize,
        batch: impl FnMut(usize) -> Result<(A, L), BoxError>,
    ) -> Result<Option<StepReport>>
    where
        L: FnOnce(A) -> Result<(C, A), BoxError>,
    {
        with_batches(batch, |batches| self.engine.join(own, Work::of_batches(Sequence::block, batches)))
    }

    /// Computes gradients that the next step adds to its own. If gradients are sharded, each rank keeps its shard of
    /// them.
    ///
    /// Several calls and a step give the result of one step with all their micro-batches, if both assign them alike.
    /// All micro-batches of a step have a [loss](Loss) of one type.
    ///
    /// Take the data of a micro-batch from its number. An iterator that the closure advances gives every rank the
    /// same examples: [`data`](crate::data) shows that mistake and the correct form.
    ///
    /// # Errors
    /// The errors of [`step`](Self::step).
    #[doc(alias = "no_sync")]
    pub fn accumulate<C: Loss, L>(
        &mut self,
        micro_batches: usize,
        batch: impl FnMut(usize) -> Result<(A, L), BoxError>,
    ) -> Result<()>
    where
        L: FnOnce(A) -> Result<(C, A), BoxError>,
    {
        with_batches(batch, |batches| {
            self.engine.accumulate(micro_batches, Work::of_batches(Sequence::block, batches))
        })
    }

    /// Computes the mean gradients of the accumulated micro-batches.
    ///
    /// # Errors
    /// Nothing was accumulated, and the errors of [`step`](Self::step).
    pub fn synchronise(&mut self) -> Result<StepReport> {
        self.engine.synchronise()
    }

    /// Starts to gather the first units of the next forward. Otherwise the forward itself does. Nothing happens if
    /// this rank shares its replica with no other, as in a world of one. Every rank calls this.
    ///
    /// # Errors
    /// The strategy does not shard parameters. There is no memory. An earlier prefetch is unused: a forward uses it.
    /// An [update](Self::update), [`set_shard`](Self::set_shard), [`for_each_parameter`](Self::for_each_parameter) or
    /// loading a checkpoint frees it.
    pub fn prefetch(&mut self) -> Result<()> {
        self.engine.announce("prefetch");
        let Self { engine } = self;
        if !engine.stage().plan.options.strategy.shards_parameters() {
            return Err(Error::Prefetch { reason: "every rank has all parameters" });
        }
        if engine.prefetched.is_some() {
            return Err(Error::Prefetch { reason: "an earlier prefetch has not been used by a forward" });
        }
        engine.follow();
        let mut taken = 0;
        while let Some(&StepAction::Gather(unit)) = engine.actions.step.get(taken) {
            let StepEngine { stages, groups, .. } = &mut *engine;
            let Stage { parameters, plan, .. } = &mut stages[0];
            let gathered = parameters.gather(&plan.layout, unit.unit, groups);
            engine.or_abort(gathered)?;
            taken += 1;
        }
        engine.prefetched = Some(taken);
        Ok(())
    }
}

//! The micro-batches of a step or an accumulation of a pipeline.

use super::{Activations, Pipeline, ties};
use crate::engine::{AssignedMicroBatch, StepAction, StepEngine, Work};
use crate::fsdp::Groups;
use crate::gradients::RoundRole;
use crate::{BoxError, Loss, Params, Result, Sequence, StepReport, TrainingCall};

impl<A> Pipeline<A> {
    /// Computes the mean gradients of the schedule's micro-batches, over all pipelines.
    ///
    /// `input` returns the input of a micro-batch, on the rank of the first stage. `loss` computes the [`Loss`] and
    /// its gradient from the model's output, on the rank of the last stage. The type of the loss decides between a
    /// mean over micro-batches and a weighted mean. Both receive the number of a micro-batch of this pipeline's
    /// [`share`](Self::share).
    ///
    /// `input` and `loss` run on different ranks. Take the data of a micro-batch from its number in both: iterators
    /// that advance by themselves give pipelines the same examples. [`data`](crate::data) shows that mistake and the
    /// correct form.
    ///
    /// # Errors
    /// The total weight is 0, or only some pipelines have weights: every rank gets this error, and the next step can
    /// follow. `input`, `loss`, a block or communication fails; a gradient is reported twice or differs from its
    /// parameter in type or length; an activation or its gradient has another shape than those before: the job is
    /// aborted.
    pub fn step<C: Loss>(
        &mut self,
        input: impl FnMut(usize) -> Result<A, BoxError>,
        loss: impl FnMut(usize, A) -> Result<(C, A), BoxError>,
    ) -> Result<StepReport> {
        let Self { engine, activations } = self;
        with_stages(&**activations, input, loss, |work| engine.step(engine.scheduled(), work))
    }

    /// Computes the mean gradients of the micro-batches that the pipelines have, accumulated ones included: `own` in this
    /// pipeline, at most as many as the schedule has, and 0 if it has run out. Returns `None` on every rank if no pipeline
    /// has any: training is over.
    ///
    /// The ranks of one pipeline compute the same micro-batches, so they pass the same number. A pipeline that has run out
    /// still takes every step and has no weight in the means. `input` and `loss` are as in [`step`](Self::step). They
    /// receive the number of a micro-batch among this pipeline's own. Every rank sends 16 bytes more to all others than in
    /// a step, before the first activation.
    ///
    /// # Errors
    /// The errors of [`step`](Self::step). [`JoinsDiffer`](crate::Error::JoinsDiffer) if the ranks of a pipeline pass different
    /// numbers, and [`JoinedMicroBatches`](crate::Error::JoinedMicroBatches) if a pipeline has more than its schedule: every rank
    /// gets these errors, and training can continue.
    #[doc(alias = "Join")]
    pub fn join<C: Loss>(
        &mut self,
        own: usize,
        input: impl FnMut(usize) -> Result<A, BoxError>,
        loss: impl FnMut(usize, A) -> Result<(C, A), BoxError>,
    ) -> Result<Option<StepReport>> {
        let Self { engine, activations } = self;
        with_stages(&**activations, input, loss, |work| engine.join(own, work))
    }

    /// Computes gradients that the next step adds to its own, of as many micro-batches as the schedule has.
    ///
    /// Several calls and a step give the result of one step with all their micro-batches. If there are several
    /// pipelines, each computes its [`share`](Self::share) of each call. All micro-batches of a step have a [loss](Loss)
    /// of one type. `input` and `loss` are as in [`step`](Self::step). Their numbers begin at 0 in each call.
    ///
    /// # Errors
    /// The errors of [`step`](Self::step). [`PartlyWeighted`](crate::Error::PartlyWeighted) if only some micro-batches since
    /// the last step have weights.
    #[doc(alias = "no_sync")]
    pub fn accumulate<C: Loss>(
        &mut self,
        input: impl FnMut(usize) -> Result<A, BoxError>,
        loss: impl FnMut(usize, A) -> Result<(C, A), BoxError>,
    ) -> Result<()> {
        let Self { engine, activations } = self;
        with_stages(&**activations, input, loss, |work| engine.accumulate(engine.scheduled(), work))
    }
}

/// Calls `f` with steps whose losses have their weights.
fn with_stages<A, C: Loss, T>(
    activations: &dyn Activations<A>,
    mut input: impl FnMut(usize) -> Result<A, BoxError>,
    mut loss: impl FnMut(usize, A) -> Result<(C, A), BoxError>,
    f: impl FnOnce(Work<'_, '_, Sequence<A>, A>) -> T,
) -> T {
    let mut loss = |index, output| loss(index, output).map(|(loss, gradient)| (loss.weighted(), gradient));
    f(Work::of_stages(C::WEIGHTED, &mut input, &mut loss, activations))
}

impl<M: Params> StepEngine<M> {
    /// Returns the number of this pipeline and the number of all pipelines.
    pub(crate) fn replica(&self) -> (usize, usize) {
        let Groups { shards, replicas, .. } = &self.groups;
        let count = shards.world_size();
        (replicas.rank() * count + shards.rank(), replicas.world_size() * count)
    }

    /// Returns the number of micro-batches of all pipelines in a call.
    pub(crate) fn scheduled(&self) -> usize {
        let of_one = self.pipeline.as_ref().map_or(0, |pipeline| pipeline.schedule.micro_batches());
        of_one * self.replica().1
    }

    /// Computes the micro-batches of the schedule or, in a join, the first `own` of them.
    pub(crate) fn run_schedule<A>(
        &mut self,
        call: TrainingCall,
        own: usize,
        work: &mut Work<'_, '_, M, A>,
    ) -> Result<()> {
        let (before, before_of_all, passes) =
            (self.stages[0].gradients.ended(), self.micro_batches, self.passes);
        let (replica, replicas) = self.replica();
        let Some(pipeline) = &mut self.pipeline else { return Ok(()) };
        let scheduled = pipeline.schedule.micro_batches();
        let (accumulates, joins) = (call == TrainingCall::Accumulate, call == TrainingCall::Join);
        let count = if joins { own } else { scheduled };
        pipeline.begin(before, count);
        let mut actions = self.actions.step.to_vec();
        // The ranks that shard a stage gather it together, even if some have no micro-batch for it.
        actions.retain(|action| action.micro_batch().is_none_or(|micro_batch| micro_batch < count));
        actions.retain(|action| !(accumulates && matches!(action, StepAction::Reduce(_))));
        let assigned = |micro_batch| {
            let (index, in_call) = match joins {
                true => (micro_batch, micro_batch * replicas + replica),
                false => (replica * scheduled + micro_batch, replica * scheduled + micro_batch),
            };
            let (number, pass) = (before + micro_batch, passes.in_step(before_of_all + in_call));
            AssignedMicroBatch { index: Some(index), number, role: RoundRole::Inner, pass }
        };
        let mut losses = self.interpret(&actions, work, &assigned)?;
        losses.sort_by_key(|(micro_batch, _)| *micro_batch);
        losses.into_iter().for_each(|(_, loss)| self.record_loss(true, loss));
        self.waiting(|engine| {
            let pipeline = engine.pipeline.as_mut();
            pipeline.map_or(Ok(()), |pipeline| ties::pass_on(&mut pipeline.nodes, true))?;
            if accumulates { engine.finish_messages() } else { Ok(()) }
        })
    }
}

//! Evaluation of a pipeline: forward passes without a backward.

use super::stage::actions_of;
use super::{Pipeline, PipelineState};
use crate::engine::{AssignedMicroBatch, StepEngine, Work};
use crate::evaluation::{EvaluationLosses, mean};
use crate::fsdp::{Groups, share};
use crate::gradients::RoundRole;
use crate::trainer::with_evaluation;
use crate::{BoxError, Error, Loss, Params, Result, Sequence, StepReport};

impl<A> Pipeline<A> {
    /// Evaluates `micro_batches` micro-batches and returns their mean loss, on all ranks. Every rank of all pipelines
    /// calls this with the same number.
    ///
    /// `input` returns the input of a micro-batch, on the rank of the first stage. `loss` receives the model's output
    /// on the rank of the last stage and can compute other metrics too. The type of the [`Loss`] decides between a
    /// mean and a weighted mean. Both receive the number of the micro-batch. If there are several pipelines, each
    /// computes a contiguous share, as equal as possible and possibly empty.
    ///
    /// Losses are summed in the canonical order. The mean has the bits of one process, with any number of pipelines
    /// and any shares.
    ///
    /// Evaluation does not change parameters, gradients, [`timeline`](Self::timeline) or [`kept`](Self::kept), also
    /// between a step and its update. The activations can differ in shape from those of steps, and from each other.
    ///
    /// # Memory and messages
    ///
    /// The activations that a block saves are dropped before the next block begins. A stage sends an output once the
    /// previous one has been received. A rank therefore holds at most two micro-batches per stage: one that is
    /// computed or waits, and one in flight. With S stages at most 2S − 1 micro-batches are in progress. Socket
    /// buffers come on top. Sharded stages are gathered and freed as in a step, with the same maximum.
    ///
    /// Every activation is preceded by its shape and type, 80 bytes. Before the first one, every rank sends 8 bytes
    /// with its request to all others. At the end the ranks of the last stage of all pipelines sum a list of 4 bytes
    /// per micro-batch and 8 bytes more. The mean is broadcast in 16 bytes.
    ///
    /// Take the data of a micro-batch from its number. An iterator that the closure advances gives every rank the
    /// same examples: [`data`](crate::data) shows that mistake and the correct form.
    ///
    /// # Errors
    /// There are no micro-batches, or more than a schedule supports; the ranks call for different numbers; the weight
    /// is 0: every rank gets this error, and training can continue. `input`, `loss`, a block or communication fails,
    /// or an activation has too many dims: the job is aborted.
    #[doc(alias = "eval")]
    pub fn evaluate<C: Loss>(
        &mut self,
        micro_batches: usize,
        input: impl FnMut(usize) -> Result<A, BoxError>,
        loss: impl FnMut(usize, A) -> Result<C, BoxError>,
    ) -> Result<StepReport> {
        with_evaluation(input, loss, |evaluation| {
            let work = Work::of_evaluation(Sequence::block, evaluation);
            self.engine.evaluate(micro_batches, work.with_activations(&*self.activations))
        })
    }
}

impl<M: Params> StepEngine<M> {
    /// Computes this pipeline's share of the micro-batches of an evaluation. Returns the losses of this rank.
    pub(crate) fn run_forwards<A>(
        &mut self,
        work: &mut Work<'_, '_, M, A>,
        micro_batches: usize,
    ) -> Result<EvaluationLosses> {
        let (pipeline, pipelines) = self.replica();
        let passes = self.passes;
        let own = share(micro_batches, pipelines, pipeline);
        let Self { pipeline: Some(PipelineState { schedule, links, .. }), world, stages, .. } = self else {
            return Ok(EvaluationLosses::new(0));
        };
        let list = schedule.forwards(world.rank(), micro_batches.div_ceil(pipelines))?;
        let mut actions = actions_of(&list, stages, schedule.stages() - 1);
        // The ranks that shard a stage gather it together, even if some have no micro-batch for it.
        actions.retain(|action| action.micro_batch().is_none_or(|micro_batch| micro_batch < own.len()));
        links.begin_evaluation(own.len());
        let assigned = |micro_batch| {
            let index = own.start + micro_batch;
            let pass = passes.in_evaluation(index);
            AssignedMicroBatch { index: Some(index), number: micro_batch, role: RoundRole::Inner, pass }
        };
        let computed = self.interpret(&actions, work, &assigned)?;
        self.waiting(Self::finish_messages)?;
        let mut losses = EvaluationLosses::new(micro_batches);
        computed.into_iter().for_each(|(index, loss)| losses.add(own.start + index, loss));
        Ok(losses)
    }

    /// Returns the mean loss on all ranks. Only those of the last stage have losses.
    pub(crate) fn mean_of_evaluation(&mut self, losses: EvaluationLosses) -> Result<f32> {
        let Self { world, groups: Groups { shards, replicas, .. }, pipeline, .. } = self;
        let last = pipeline.as_ref().map_or(0, PipelineState::last_rank);
        let (micro_batches, mut totals) = (losses.len(), [0, 0]);
        if world.rank() == last {
            let (sum, count) = losses.sum(&mut [shards, replicas])?;
            totals = [sum.to_bits().into(), count];
        }
        world.broadcast(&mut totals, last).map_err(Error::communication)?;
        let sum = f32::from_bits(u32::try_from(totals[0]).expect("it was made of as many bits"));
        mean(sum, totals[1], micro_batches)
    }
}

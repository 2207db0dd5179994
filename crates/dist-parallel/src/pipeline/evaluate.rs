//! Evaluation of a pipeline: forward passes without a backward.

use super::Pipeline;
use super::consensus::PipelineCall;
use super::pass::Clock;
use super::stage::actions_of;
use crate::engine::Work;
use crate::evaluation::{EvaluationLosses, mean};
use crate::fsdp::{Groups, share};
use crate::trainer::{Evaluation, with_evaluation};
use crate::{BoxError, Error, Loss, Result, Sequence, StepDescriptor, StepReport, TrainingCall};

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
        with_evaluation(input, loss, |evaluation| self.evaluate_batches(micro_batches, evaluation))
    }

    /// [Evaluates](Self::evaluate) micro-batches.
    pub(crate) fn evaluate_batches(
        &mut self,
        micro_batches: usize,
        evaluation: Evaluation<'_, A>,
    ) -> Result<StepReport> {
        self.announce("evaluate");
        let mut clock = Clock::new(&self.comm);
        let sent_before = self.bytes_sent();
        let descriptor = StepDescriptor::new(TrainingCall::Evaluation, micro_batches, evaluation.weighted);
        let agreed = clock.waiting(|| self.agree_to_evaluate(descriptor));
        self.or_abort(agreed)?;
        let (pipeline, pipelines) = self.replica_position();
        let own = share(micro_batches, pipelines, pipeline);
        let list = self.schedule.forwards(self.comm.rank(), micro_batches.div_ceil(pipelines))?;
        let mut actions = actions_of(&list, &self.stages, self.schedule.stages() - 1);
        // The ranks that shard a stage gather it together, even if some have no micro-batch for it.
        actions.retain(|action| action.micro_batch().is_none_or(|micro_batch| micro_batch < own.len()));
        self.links.begin_evaluation(own.len());
        let mut work = Work::of_evaluation(Sequence::block, evaluation);
        let passed = self.run(&actions, own.start, &mut work, &mut clock);
        let result = passed.and_then(|computed| {
            let mut losses = EvaluationLosses::new(micro_batches);
            computed.into_iter().for_each(|(index, loss)| losses.add(own.start + index, loss));
            clock.waiting(|| {
                self.links.finish()?;
                self.mean_of_evaluation(losses, micro_batches)
            })
        });
        let loss = self.or_abort(result)?;
        self.begin_forward(self.passes.outside());
        Ok(self.report(loss, micro_batches, &clock, sent_before))
    }

    /// Returns the mean loss on all ranks. Only those of the last stage have losses.
    fn mean_of_evaluation(&mut self, losses: EvaluationLosses, micro_batches: usize) -> Result<f32> {
        let last = self.last_rank();
        let mut totals = [0, 0];
        if self.comm.rank() == last {
            let Groups { shards, replicas, .. } = &mut self.groups;
            let (sum, count) = losses.sum(&mut [shards, replicas])?;
            totals = [sum.to_bits().into(), count];
        }
        self.comm.broadcast(&mut totals, last).map_err(Error::communication)?;
        let sum = f32::from_bits(u32::try_from(totals[0]).expect("it was made of as many bits"));
        mean(sum, totals[1], micro_batches)
    }

    /// Returns an error unless all ranks of all pipelines have called for the same evaluation, with at least one
    /// micro-batch.
    fn agree_to_evaluate(&mut self, descriptor: StepDescriptor) -> Result<()> {
        // If updates are equal, the numbers differ exactly if the requests differ, and vice versa.
        let number = descriptor.encode() ^ self.updates.number();
        self.compare_calls(PipelineCall { name: "evaluate", descriptor: Some(descriptor) }, number)?;
        if descriptor.micro_batches == 0 { Err(Error::NoMicroBatches) } else { Ok(()) }
    }
}

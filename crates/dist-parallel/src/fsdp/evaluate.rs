//! Evaluation of a sharded model: forward passes without a backward.

use super::Fsdp;
use super::order::UnitAction;
use super::step::MicroBatchPass;
use crate::evaluation::EvaluationLosses;
use crate::step_consensus::STEP;
use crate::{BoxError, Error, Loss, Params, Result, StepDescriptor, StepReport, TrainingCall};

impl<A> Fsdp<A> {
    /// Runs the model forward on this rank's own input, to evaluate it. Every rank calls this equally often, because
    /// the ranks gather parameters together. [`evaluate`](Self::evaluate) assigns any number of micro-batches to the
    /// ranks. Blocks are in evaluation mode unless [`train`](Self::train) was called.
    ///
    /// # Errors
    /// A block or communication fails.
    pub fn forward(&mut self, input: A) -> Result<A> {
        self.announce("forward");
        let result = self.try_forward(input);
        self.or_abort(result)
    }

    fn try_forward(&mut self, input: A) -> Result<A> {
        self.follow();
        self.model.begin_forward(self.passes.outside());
        let output = self.forward_through(&self.forward_alone(), Some(input))?;
        self.parameters.rest(&mut self.groups)?;
        Ok(output.expect("forward gives an output for an input"))
    }

    /// Evaluates `micro_batches` micro-batches and returns their mean loss, on all ranks. Every rank calls this with
    /// the same number.
    ///
    /// Each rank computes the micro-batches that a [`step`](Self::step) of this size would assign to it, possibly
    /// none. `input` returns the input of a micro-batch. `loss` receives the model's output and can compute other
    /// metrics too. Both receive the number of the micro-batch. The type of the [`Loss`] decides between a mean and a
    /// weighted mean.
    ///
    /// Losses are summed in the canonical order over all micro-batches. The mean has the bits of one process, with
    /// any strategy and any number of ranks.
    ///
    /// Evaluation does not change parameters or gradients, neither accumulated ones nor those between a step and its
    /// update. The activations that a block saves are dropped before the next unit begins. At the end the ranks sum a
    /// list of 4 bytes per micro-batch and 8 bytes more.
    ///
    /// Take the data of a micro-batch from its number. An iterator that the closure advances gives every rank the
    /// same examples: [`data`](crate::data) shows that mistake and the correct form.
    ///
    /// # Errors
    /// There are no micro-batches or their weight is 0: every rank gets this error and training can continue. The
    /// ranks called for different evaluations: every rank gets this error, and accumulated gradients are dropped.
    /// `input`, `loss`, a block or communication fails: the job is aborted.
    #[doc(alias = "eval")]
    pub fn evaluate<C: Loss>(
        &mut self,
        micro_batches: usize,
        mut input: impl FnMut(usize) -> Result<A, BoxError>,
        mut loss: impl FnMut(usize, A) -> Result<C, BoxError>,
    ) -> Result<StepReport> {
        self.world.announce(STEP, "evaluate");
        self.reported(|fsdp| match fsdp.try_to_evaluate(micro_batches, &mut input, &mut loss) {
            // Every rank gets this error, and nothing has changed.
            Err(error @ (Error::NoMicroBatches | Error::ZeroWeight { .. })) => Err(error),
            result => fsdp.or_abort(result).map(|loss| (loss, micro_batches)),
        })
    }

    fn try_to_evaluate<C: Loss>(
        &mut self,
        micro_batches: usize,
        input: &mut impl FnMut(usize) -> Result<A, BoxError>,
        loss: &mut impl FnMut(usize, A) -> Result<C, BoxError>,
    ) -> Result<f32> {
        self.agree(StepDescriptor::new(TrainingCall::Evaluation, micro_batches, C::WEIGHTED), 0)?;
        self.follow();
        let assignment = self.plan.assignment(self.world.rank());
        let actions = self.forward_alone();
        let mut losses = EvaluationLosses::new(micro_batches);
        for round in 0..assignment.rounds(micro_batches) {
            let index = assignment.micro_batch(micro_batches, round);
            self.model.begin_forward(self.passes.in_evaluation(index.unwrap_or(0)));
            let given = index.map(&mut *input).transpose().map_err(Error::compute)?;
            let output = self.forward_through(&actions, given)?;
            if let (Some(index), Some(output)) = (index, output) {
                losses.add(index, loss(index, output).map_err(Error::compute)?);
            }
        }
        self.parameters.rest(&mut self.groups)?;
        self.model.begin_forward(self.passes.outside());
        losses.mean(&mut self.world)
    }

    /// Returns the actions of a forward without a backward.
    fn forward_alone(&self) -> Vec<UnitAction> {
        self.plan.uses().forward(&self.plan.layout, false)
    }

    /// Runs a forward with an input, or the part of the other ranks' forward that needs this rank.
    fn forward_through(&mut self, actions: &[UnitAction], input: Option<A>) -> Result<Option<A>> {
        let mut pass = MicroBatchPass { current: input, saved: Vec::new() };
        // A prefetch has already executed the first actions.
        let taken = self.prefetched.take().unwrap_or(0);
        for &action in &actions[taken..] {
            self.act(action, &mut pass)?;
            pass.saved.clear();
        }
        Ok(pass.current)
    }
}

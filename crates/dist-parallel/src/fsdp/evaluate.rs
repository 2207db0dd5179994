//! Evaluation of a sharded model: forward passes without a backward.

use super::Fsdp;
use crate::engine::Work;
use crate::trainer::{Evaluation, with_evaluation};
use crate::{BoxError, Loss, Result, Sequence, StepReport};

impl<A> Fsdp<A> {
    /// Runs the model forward on this rank's own input, to evaluate it. Every rank calls this equally often, because
    /// the ranks gather parameters together. [`evaluate`](Self::evaluate) assigns any number of micro-batches to the
    /// ranks. Blocks are in evaluation mode unless [`train`](Self::train) was called.
    ///
    /// # Errors
    /// A block or communication fails.
    pub fn forward(&mut self, input: A) -> Result<A> {
        self.engine.announce("forward");
        self.engine.follow();
        let (mut input, mut output) = (Some(input), None);
        let mut take_input = |_| input.take().ok_or_else(|| "an input is for one forward".into());
        let mut take_output = |_, of_model| {
            output = Some(of_model);
            Ok((0.0, 1))
        };
        let evaluation = Evaluation { weighted: false, input: &mut take_input, loss: &mut take_output };
        let passed = self.engine.forward(Work::of_evaluation(Sequence::block, evaluation));
        self.engine.or_abort(passed)?;
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
    /// ranks called for different evaluations: every rank gets this error, and training can continue.
    /// `input`, `loss`, a block or communication fails: the job is aborted.
    #[doc(alias = "eval")]
    pub fn evaluate<C: Loss>(
        &mut self,
        micro_batches: usize,
        input: impl FnMut(usize) -> Result<A, BoxError>,
        loss: impl FnMut(usize, A) -> Result<C, BoxError>,
    ) -> Result<StepReport> {
        with_evaluation(input, loss, |evaluation| {
            self.engine.evaluate(micro_batches, Work::of_evaluation(Sequence::block, evaluation))
        })
    }
}

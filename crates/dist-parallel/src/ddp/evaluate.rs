//! Evaluation: forward passes without a backward.

use super::{Ddp, StepReport};
use crate::block_range::whole;
use crate::engine::Work;
use crate::trainer::with_evaluation;
use crate::{Block, BoxError, Loss, Params, Result};

impl<M: Params> Ddp<M> {
    /// Evaluates `micro_batches` micro-batches and returns their mean loss, on all ranks. Every rank calls this with
    /// the same number, and computes its [`share`](Self::share).
    ///
    /// `input` returns the input of a micro-batch. `loss` receives the model's output and can compute other metrics
    /// too. Both receive the number of the micro-batch. The type of the [`Loss`] decides between a mean and a weighted
    /// mean.
    ///
    /// Losses are summed in the canonical order over all micro-batches. The mean has the bits of one process, with any
    /// number of ranks. Evaluation does not change parameters or gradients, neither accumulated ones nor those between
    /// a step and its update. At the end the ranks sum a list of 4 bytes per micro-batch and 8 bytes more.
    ///
    /// # Errors
    /// There are no micro-batches or their weight is 0, or the ranks called for different evaluations: every rank gets
    /// this error and training can continue. `input`, `loss`, the model or communication fails: the job is aborted.
    #[doc(alias = "eval")]
    pub fn evaluate<A, C: Loss>(
        &mut self,
        micro_batches: usize,
        input: impl FnMut(usize) -> Result<A, BoxError>,
        loss: impl FnMut(usize, A) -> Result<C, BoxError>,
    ) -> Result<StepReport>
    where
        M: Block<A>,
    {
        with_evaluation(input, loss, |evaluation| {
            self.engine.evaluate(micro_batches, Work::of_evaluation(whole, evaluation))
        })
    }
}

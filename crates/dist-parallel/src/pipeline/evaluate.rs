//! Evaluating a model whose stages are on different ranks: a pass there, without the way back.

use dist_collectives::ReduceOp;

use super::Pipeline;
use super::pass::{Clock, Output, Pass};
use crate::fsdp::share;
use crate::{BoxError, Error, Result, StepReport};

impl<A> Pipeline<A> {
    /// Goes forward only, through all stages, with as many micro-batches as are wanted: the mean of their losses, on all
    /// ranks. Every rank of all pipelines calls this, with the same number. `input` gives a micro-batch's input and is called
    /// on the rank of the first stage; `loss` is given the model's output, for whatever is to be found out of it, and
    /// is called on the rank of the last. Both are given the micro-batch's number. Of several pipelines beside each other,
    /// each computes a contiguous share, as equal as can be, which may be nothing.
    ///
    /// Losses are summed in the canonical order. The mean is bit for bit that of one process, with any number of
    /// pipelines, whatever their shares.
    ///
    /// Training goes on afterwards as if nothing had been: parameters, gradients, [`timeline`](Self::timeline) and
    /// [`kept`](Self::kept) stay as they are, between a step and its update too. Micro-batches may look different from those
    /// of steps, and from each other.
    ///
    /// # Memory and messages
    ///
    /// Nothing is kept for a backward: what a block keeps is dropped before the next one begins. A stage's output leaves
    /// once the one before it has been received, so that of each of its stages a rank has at most two micro-batches at
    /// a time, one that is computed or waits and one that is under way, and with S stages there are at most 2S − 1 that have
    /// begun and not ended. Where the system holds what is under way, as sockets do, its buffers come on top. Stages that
    /// are divided are gathered and freed as in a step, as many at once.
    ///
    /// Every activation travels with what it looks like, 80 bytes. Before the first one, ranks compare how many
    /// micro-batches they are asked for, 16 bytes each; at the end the last stage's ranks of all pipelines add up
    /// a list of 4 bytes for each micro-batch, and the mean is sent to all.
    ///
    /// # Errors
    /// If there are no micro-batches, more than a schedule is made for, or not as many on all ranks: every rank then has
    /// such an error, and the next step can be taken. If `input`, `loss` or a block fails, an activation has too many
    /// dims, or communication fails, which ends the job.
    #[doc(alias = "eval")]
    pub fn evaluate(
        &mut self,
        micro_batches: usize,
        mut input: impl FnMut(usize) -> Result<A, BoxError>,
        mut loss: impl FnMut(usize, A) -> Result<f32, BoxError>,
    ) -> Result<StepReport> {
        let mut clock = Clock::new(&self.comm);
        let sent_before = self.bytes_sent();
        let agreed = clock.waiting(|| self.agree_to_evaluate(micro_batches));
        self.or_abort(agreed)?;
        let (pipeline, pipelines) = self.beside();
        let own = share(micro_batches, pipelines, pipeline);
        // Ranks that divide a stage gather it together, whether or not they have a micro-batch for it.
        let mut list = self.schedule.forwards(self.comm.rank(), micro_batches.div_ceil(pipelines))?;
        list.retain(|action| action.micro_batch().is_none_or(|micro_batch| micro_batch < own.len()));
        self.links.begin_evaluation(own.len());
        // What another pipeline computes is a zero here, the one that even leaves −0 as it is when it is added.
        let mut losses = vec![-0.0; micro_batches];
        let mut take = |index: usize, output: A| {
            losses[index] = loss(index, output)?;
            Ok(())
        };
        let output = Output::Evaluation(&mut take);
        let pass = &mut Pass { first: own.start, input: &mut input, output, clock: &mut clock };
        let passed = self.run(list, pass);
        let result = passed.and_then(|()| {
            clock.waiting(|| {
                self.links.finish()?;
                self.mean_loss(losses, micro_batches)
            })
        });
        let loss = self.or_abort(result)?;
        Ok(self.report(loss, micro_batches, &clock, sent_before))
    }

    /// Makes sure that all ranks of all pipelines are asked for as many micro-batches, and for some.
    fn agree_to_evaluate(&mut self, micro_batches: usize) -> Result<()> {
        let own = micro_batches as u64;
        // The most, and from what is most of the complements, the least.
        let mut most = [own, !own];
        let groups = [Some(&mut self.comm), self.shards.as_mut(), self.data.as_mut()];
        for group in groups.into_iter().flatten() {
            group.all_reduce(&mut most, ReduceOp::Max).map_err(Error::communication)?;
        }
        match most {
            [0, _] => Err(Error::NoMicroBatches),
            [most, rest] if most != !rest => Err(Error::EvaluationsDiffer { own, least: !rest, most }),
            _ => Ok(()),
        }
    }
}

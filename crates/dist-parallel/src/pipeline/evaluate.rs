//! Evaluating a model whose stages are on different ranks: a pass there, without the way back.

use super::Pipeline;
use super::pass::{Clock, Output, PipelinePass};
use super::step::{Losses, Totals};
use crate::fsdp::share;
use crate::{BoxError, Error, Loss, Result, StepDescriptor, StepReport, TrainingCall};

impl<A> Pipeline<A> {
    /// Goes forward only, through all stages, with as many micro-batches as are wanted: the mean of their losses, on all
    /// ranks. Every rank of all pipelines calls this, with the same number. `input` gives a micro-batch's input and is
    /// called on the rank of the first stage; `loss` is given the model's output, for whatever is to be found out of it,
    /// and is called on the rank of the last. Its [`Loss`] says what the mean is over. Both are given the micro-batch's
    /// number. Of several pipelines beside each other, each computes a contiguous share, as equal as can be, which may be
    /// nothing.
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
    /// Every activation travels with what it looks like, 80 bytes. Before the first one, every rank tells all others in 8
    /// bytes what it is asked for. At the end the last stage's ranks of all pipelines add up a list of 4 bytes for each
    /// micro-batch and 16 bytes more, and the mean is sent to all, in 24 bytes.
    ///
    /// Take the data of a micro-batch from its number. An iterator that the closure advances gives every rank the same examples:
    /// [`data`](crate::data) shows that mistake and what to write instead.
    ///
    /// # Errors
    /// If there are no micro-batches, more than a schedule is made for, not as many on all ranks, or if they count for
    /// nothing: every rank then has this error, and training can go on. If `input`, `loss` or a block fails, an
    /// activation has too many dims, or communication fails, which ends the job.
    #[doc(alias = "eval")]
    pub fn evaluate<C: Loss>(
        &mut self,
        micro_batches: usize,
        mut input: impl FnMut(usize) -> Result<A, BoxError>,
        mut loss: impl FnMut(usize, A) -> Result<C, BoxError>,
    ) -> Result<StepReport> {
        self.announce("evaluate");
        let mut clock = Clock::new(&self.comm);
        let sent_before = self.bytes_sent();
        let descriptor = StepDescriptor::new(TrainingCall::Evaluation, micro_batches, C::WEIGHTED);
        let agreed = clock.waiting(|| self.agree_to_evaluate(descriptor));
        self.or_abort(agreed)?;
        let (pipeline, pipelines) = self.replica_position();
        let own = share(micro_batches, pipelines, pipeline);
        // Ranks that divide a stage gather it together, whether or not they have a micro-batch for it.
        let mut list = self.schedule.forwards(self.comm.rank(), micro_batches.div_ceil(pipelines))?;
        list.retain(|action| action.micro_batch().is_none_or(|micro_batch| micro_batch < own.len()));
        self.links.follow(&self.comm);
        self.links.begin_evaluation(own.len());
        // What another pipeline computes is a zero here, the one that even leaves −0 as it is when it is added.
        let mut losses = Losses { losses: vec![-0.0; micro_batches], count: 0, descriptor };
        let mut take = |index: usize, output: A| {
            let (loss, count) = loss(index, output)?.weighted();
            losses.losses[index] = loss;
            losses.count = losses.count.saturating_add(count);
            Ok(())
        };
        let output = Output::Evaluation(&mut take);
        let pass = &mut PipelinePass { first: own.start, input: &mut input, output, clock: &mut clock };
        let passed = self.run(list, pass);
        let result = passed.and_then(|()| {
            clock.waiting(|| {
                self.links.finish()?;
                self.mean_loss(losses)
            })
        });
        let Totals { loss, .. } = self.or_abort(result)?;
        Ok(self.report(loss, micro_batches, &clock, sent_before))
    }

    /// Makes sure that all ranks of all pipelines are asked for the same, and for something.
    fn agree_to_evaluate(&mut self, descriptor: StepDescriptor) -> Result<()> {
        // If updates are alike, the numbers of ranks differ where they were asked for something else, and the other way round.
        let all = self.of_all(descriptor.encode() ^ self.updates.number())?;
        if all.iter().any(|there| *there != all[0]) {
            return Err(self.disagree(descriptor));
        }
        if descriptor.micro_batches == 0 { Err(Error::NoMicroBatches) } else { Ok(()) }
    }

    /// The error of ranks that are not all asked for the same, or have not updated their parameters alike. All ranks of all
    /// pipelines call this.
    pub(super) fn disagree(&mut self, descriptor: StepDescriptor) -> Error {
        match self.of_all(descriptor.encode()) {
            Ok(all) if all.iter().all(|there| *there == all[0]) => self.updates_differ(),
            Ok(all) => self.differ(&all),
            Err(error) => error,
        }
    }

    /// For all pipelines, one after the other, the number of each of their ranks. All of them call this.
    fn of_all(&mut self, number: i64) -> Result<Vec<i64>> {
        let mut all = vec![number];
        let groups = [Some(&mut self.comm), self.shards.as_mut(), self.data.as_mut()];
        for group in groups.into_iter().flatten() {
            let mut of_group = vec![0; all.len() * group.world_size()];
            group.all_gather(&all, &mut of_group).map_err(Error::communication)?;
            all = of_group;
        }
        Ok(all)
    }

    /// The error of ranks that are not all asked for the same.
    fn differ(&self, all: &[i64]) -> Error {
        let at = all.iter().position(|there| *there != all[0]).unwrap_or_default();
        let (pipeline, rank) = (at / self.schedule.ranks(), at % self.schedule.ranks());
        let (there, on_first) = (StepDescriptor::decode(all[at]), StepDescriptor::decode(all[0]));
        Error::PipelinesDiffer { pipeline, rank, there, on_first }
    }
}

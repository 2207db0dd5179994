//! Evaluating a model of which each rank keeps only a part: passes without the way back.

use dist_collectives::ReduceOp;

use super::Fsdp;
use super::order::UnitAction;
use super::step::MicroBatchPass;
use crate::loss::to_be_summed;
use crate::step_consensus::STEP;
use crate::tree::sum_of;
use crate::{BoxError, Error, Loss, Result, StepDescriptor, StepReport, TrainingCall, ValuesMut};

impl<A> Fsdp<A> {
    /// Goes forward only, to evaluate the model. Every rank calls this, each with an input of its own, and equally often;
    /// [`evaluate`](Self::evaluate) deals any number of micro-batches to the ranks.
    ///
    /// # Errors
    /// If a block fails, or communication.
    pub fn forward(&mut self, input: A) -> Result<A> {
        self.announce("forward");
        let result = self.try_forward(input);
        self.or_abort(result)
    }

    fn try_forward(&mut self, input: A) -> Result<A> {
        self.follow();
        let output = self.forward_through(&self.forward_alone(), Some(input))?;
        self.parameters.rest(&mut self.groups)?;
        Ok(output.expect("forward gives an output for an input"))
    }

    /// Goes forward only, with as many micro-batches as are wanted: the mean of their losses, on all ranks. Every rank calls
    /// this, with the same number. Each computes those that a [`step`](Self::step) of so many would deal to it, which may be
    /// none: `input` gives a micro-batch's input, and `loss` is given the model's output, for whatever is to be found out of
    /// it. Both are given the micro-batch's number. The [`Loss`] says what the mean is over.
    ///
    /// Losses are summed in the canonical order over all micro-batches. The mean is bit for bit that of one process, with any
    /// strategy and any number of ranks, whatever their shares.
    ///
    /// Training goes on afterwards as if nothing had been: parameters and gradients stay as they are, those that were
    /// accumulated and those of a step before its update too. What a block keeps for its backward is dropped before the next
    /// unit begins. At the end ranks add up a list of 4 bytes for each micro-batch, and 8 bytes more.
    ///
    /// Take the data of a micro-batch from its number. An iterator that the closure advances gives every rank the same examples:
    /// [`data`](crate::data) shows that mistake and what to write instead.
    ///
    /// # Errors
    /// If there are no micro-batches or they count for nothing: every rank has this error, and training can go on. If the ranks
    /// were not all asked for the same, which they are told, too; what was accumulated is then forgotten. If `input`, `loss`
    /// or a block fails, or communication, which ends the job.
    #[doc(alias = "eval")]
    pub fn evaluate<C: Loss>(
        &mut self,
        micro_batches: usize,
        mut input: impl FnMut(usize) -> Result<A, BoxError>,
        mut loss: impl FnMut(usize, A) -> Result<C, BoxError>,
    ) -> Result<StepReport> {
        self.world.announce(STEP, "evaluate");
        self.reported(|fsdp| match fsdp.try_to_evaluate(micro_batches, &mut input, &mut loss) {
            // Every rank has this error, and nothing was changed.
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
        // What another rank computes is a zero here, the one that even leaves −0 as it is when it is added.
        let mut losses = vec![-0.0; micro_batches];
        let mut count = 0_u64;
        for round in 0..assignment.rounds(micro_batches) {
            let index = assignment.micro_batch(micro_batches, round);
            let given = index.map(&mut *input).transpose().map_err(Error::compute)?;
            let output = self.forward_through(&actions, given)?;
            if let (Some(index), Some(output)) = (index, output) {
                let counted = loss(index, output).map_err(Error::compute)?.weighted();
                losses[index] = counted.0;
                count = count.saturating_add(counted.1);
            }
        }
        self.parameters.rest(&mut self.groups)?;
        let mut counts = [to_be_summed(count)];
        self.world.all_reduce(&mut losses, ReduceOp::Sum).map_err(Error::communication)?;
        self.world.all_reduce(&mut counts, ReduceOp::Sum).map_err(Error::communication)?;
        let count = usize::try_from(counts[0]).unwrap_or(0);
        if count == 0 {
            return Err(Error::ZeroWeight { micro_batches });
        }
        let mut loss = [sum_of(losses)];
        ValuesMut::F32(&mut loss).divide(count);
        Ok(loss[0])
    }

    /// The actions of a forward without a backward.
    fn forward_alone(&self) -> Vec<UnitAction> {
        self.plan.uses().forward(&self.plan.layout, false)
    }

    /// Goes forward with an input, or does what others need this rank for in theirs.
    fn forward_through(&mut self, actions: &[UnitAction], input: Option<A>) -> Result<Option<A>> {
        let mut pass = MicroBatchPass { current: input, saved: Vec::new() };
        // What was gathered ahead is what this begins with, too.
        let taken = self.prefetched.take().unwrap_or(0);
        for &action in &actions[taken..] {
            self.act(action, &mut pass)?;
            pass.saved.clear();
        }
        Ok(pass.current)
    }
}

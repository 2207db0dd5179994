//! The evaluation of a replicated model: every rank has a copy.

use std::time::Duration;

use dist_collectives::{Communicator, ReduceOp};

use crate::abort::or_abort;
use crate::fsdp::{bytes_sent, share};
use crate::loss::{WeightedLoss, to_be_summed};
use crate::pass::Passes;
use crate::trainer::Evaluation;
use crate::tree::sum_of;
use crate::updates::Updates;
use crate::{Block, Error, Result, StepDescriptor, StepReport, TrainingCall, ValuesMut, agreement};

/// Evaluates micro-batches on all ranks and returns their mean loss. Each rank computes a contiguous share.
///
/// Errors that every rank gets do not abort the job, and nothing has changed.
pub(crate) fn evaluate<A>(
    comm: &mut Communicator,
    (model, passes): (&mut impl Block<A>, &Passes),
    updates: &Updates,
    micro_batches: usize,
    Evaluation { weighted, input, loss }: Evaluation<'_, A>,
) -> Result<StepReport> {
    let runtime = comm.runtime().clone();
    let (started, sent_before) = (runtime.now(), bytes_sent(comm));
    let descriptor = StepDescriptor::new(TrainingCall::Evaluation, micro_batches, weighted);
    let agreed = agree(comm, model, updates, descriptor);
    or_abort(comm, agreed)?;
    let computing = runtime.now();
    let mut losses = EvaluationLosses::new(micro_batches);
    let computed = share(micro_batches, comm.world_size(), comm.rank()).try_for_each(|index| {
        model.begin_forward(passes.in_evaluation(index));
        let (output, _) = model.forward(input(index)?)?;
        losses.add(index, loss(index, output)?);
        Ok(())
    });
    model.begin_forward(passes.outside());
    or_abort(comm, computed.map_err(Error::compute))?;
    let waiting = runtime.now();
    let mean = losses.mean(comm);
    let loss = or_abort(comm, mean)?;
    let ended = runtime.now();
    let between = |from: Duration, to: Duration| to.saturating_sub(from);
    Ok(StepReport {
        loss,
        micro_batches,
        elapsed: between(started, ended),
        exposed: between(started, computing) + between(waiting, ended),
        bytes_sent: bytes_sent(comm) - sent_before,
    })
}

/// Returns an error unless all ranks have called for the same evaluation, with at least one micro-batch.
fn agree<A>(
    comm: &mut Communicator,
    model: &impl Block<A>,
    updates: &Updates,
    descriptor: StepDescriptor,
) -> Result<()> {
    // If updates are equal, the numbers differ exactly if the calls differ, and vice versa.
    let all = agreement::gather(comm, [descriptor.encode() ^ updates.number()])?;
    if all.iter().any(|there| *there != all[0]) {
        return Err(descriptor.differ(comm, updates, model.infos()));
    }
    if descriptor.micro_batches == 0 { Err(Error::NoMicroBatches) } else { Ok(()) }
}

/// The losses of an evaluation. Each rank computes some of them.
#[derive(Debug)]
pub(crate) struct EvaluationLosses {
    /// The losses of other ranks are −0 here: the neutral element of addition, also for −0.
    losses: Vec<f32>,
    count: u64,
}

impl EvaluationLosses {
    pub(crate) fn new(micro_batches: usize) -> Self {
        Self { losses: vec![-0.0; micro_batches], count: 0 }
    }

    /// Adds the loss of a micro-batch that this rank has computed.
    pub(crate) fn add(&mut self, index: usize, (loss, count): WeightedLoss) {
        self.losses[index] = loss;
        self.count = self.count.saturating_add(count);
    }

    /// Returns the mean over the micro-batches of all ranks, summed in the canonical order. All ranks call this.
    pub(crate) fn mean(self, comm: &mut Communicator) -> Result<f32> {
        let Self { mut losses, count } = self;
        let micro_batches = losses.len();
        let mut counts = [to_be_summed(count)];
        comm.all_reduce(&mut losses, ReduceOp::Sum).map_err(Error::communication)?;
        comm.all_reduce(&mut counts, ReduceOp::Sum).map_err(Error::communication)?;
        let count = usize::try_from(counts[0]).unwrap_or(0);
        if count == 0 {
            return Err(Error::ZeroWeight { micro_batches });
        }
        let mut loss = [sum_of(losses)];
        ValuesMut::F32(&mut loss).divide(count);
        Ok(loss[0])
    }
}

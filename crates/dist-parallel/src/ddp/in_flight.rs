//! Buckets in flight: from a rank's own sums to the means over all ranks.

use dist_collectives::{Buffer, Communicator, Pending, ReduceOp};

use crate::flat::{self, Flat, PendingFlat};
use crate::gradients::BucketedGradients;
use crate::hook_worker::{HookWorker, WorkHandle};
use crate::mean::Mean;
use crate::step_consensus::{StepConsensus, StepDescriptor, TrainingCall};
use crate::updates::Updates;
use crate::{FloatType, ParamInfo, Result, ValuesMut};

/// The reductions of a step that were launched.
#[derive(Debug, Default)]
pub(super) struct InFlightBuckets {
    /// The launched buckets, a prefix of the plan.
    buckets: Vec<InFlightBucket>,
    loss: Option<Pending<Buffer<f32>>>,
    consensus: Option<Pending<Buffer<i64>>>,
}

/// A bucket that is being summed over all ranks.
#[derive(Debug)]
enum InFlightBucket {
    Plain(PendingFlat),
    Hooked(WorkHandle),
}

/// The result of the reductions of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReducedStep {
    /// The mean loss.
    pub(super) loss: f32,
    /// The number of micro-batches that all ranks have computed.
    pub(super) micro_batches: usize,
}

impl InFlightBuckets {
    /// Launches the buckets that are final, in the order of the plan.
    pub(super) fn launch_final(
        &mut self,
        gradients: &mut BucketedGradients,
        comm: &mut Communicator,
        hook_worker: Option<&HookWorker>,
    ) -> Result<()> {
        while self.buckets.len() < gradients.bucket_count() && gradients.is_final(self.buckets.len()) {
            self.launch(gradients, comm, hook_worker)?;
        }
        Ok(())
    }

    /// Launches the remaining buckets, the loss and the counts of the step.
    pub(super) fn launch_rest(
        &mut self,
        gradients: &mut BucketedGradients,
        comm: &mut Communicator,
        hook_worker: Option<&HookWorker>,
        descriptor: StepDescriptor,
        updates: &Updates,
    ) -> Result<()> {
        while self.buckets.len() < gradients.bucket_count() {
            self.launch(gradients, comm, hook_worker)?;
        }
        let (loss, consensus) = gradients.take_totals(descriptor, updates);
        self.loss = Some(comm.start_all_reduce(vec![loss], ReduceOp::Sum));
        self.consensus = Some(comm.start_all_reduce(consensus, ReduceOp::Sum));
        Ok(())
    }

    /// Waits for everything in flight and divides the sums by the total weight.
    pub(super) fn wait(
        &mut self,
        gradients: &mut BucketedGradients,
        comm: &mut Communicator,
        descriptor: StepDescriptor,
        (updates, infos): (&Updates, &[ParamInfo]),
    ) -> Result<ReducedStep> {
        // If the ranks agree on an unweighted step, the divisor is known before the counts arrive.
        let known = (descriptor.call == TrainingCall::Step && !descriptor.weighted)
            .then_some(descriptor.micro_batches);
        let mut sums = Vec::new();
        let mut means = Vec::with_capacity(self.buckets.len());
        for (bucket, in_flight) in self.buckets.drain(..).enumerate() {
            let sum = match in_flight {
                InFlightBucket::Plain(pending) => pending.wait()?,
                InFlightBucket::Hooked(work) => work.wait()?,
            };
            match known {
                Some(count) => means.push(Mean::of(sum, gradients.dtype(bucket), count)),
                None => sums.push(sum),
            }
        }
        let mut loss = [0.0];
        if let Some(sum) = self.loss.take() {
            loss.copy_from_slice(&flat::wait(sum)?);
        }
        let numbers = self.consensus.take().map_or_else(|| Ok(Vec::new().into()), flat::wait)?;
        let consensus = StepConsensus::decode(&numbers);
        if !consensus.agrees(comm.world_size()) {
            return Err(descriptor.differ(comm, updates, infos));
        }
        let counted = consensus.divisor(descriptor)?;
        ValuesMut::F32(&mut loss).divide(counted);
        let sums = sums.into_iter().enumerate();
        means.extend(sums.map(|(bucket, sum)| Mean::of(sum, gradients.dtype(bucket), counted)));
        gradients.synchronised(means, consensus.used());
        Ok(ReducedStep { loss: loss[0], micro_batches: consensus.micro_batches() })
    }

    /// Launches the next bucket.
    fn launch(
        &mut self,
        gradients: &mut BucketedGradients,
        comm: &mut Communicator,
        hook_worker: Option<&HookWorker>,
    ) -> Result<()> {
        let bucket = self.buckets.len();
        let sum = gradients.take_sum(bucket, &mut |dtype, len| memory(comm, hook_worker, dtype, len))?;
        self.buckets.push(match hook_worker {
            None => InFlightBucket::Plain(sum.start_sum(comm)),
            Some(hook_worker) => InFlightBucket::Hooked(hook_worker.send(bucket, sum, comm)),
        });
        Ok(())
    }
}

/// Allocates memory for a bucket. Without a hook it is memory that the ranks of a host share.
pub(super) fn memory(
    comm: &mut Communicator,
    hook_worker: Option<&HookWorker>,
    dtype: FloatType,
    len: usize,
) -> Result<Flat> {
    match hook_worker {
        None => Flat::allocated(comm, dtype, len),
        Some(_) => Ok(Flat::zeros(dtype, len)),
    }
}

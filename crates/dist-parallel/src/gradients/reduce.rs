//! The reductions of gradients over the ranks.

use std::time::Duration;

use dist_collectives::Communicator;

use super::layout::GradientBucket;
use super::{BucketSum, GradientMemory, Gradients, SumState, merge};
use crate::flat::{Flat, PendingFlat};
use crate::flat_storage::Allocator;
use crate::hook_worker::{HookWorker, WorkHandle};
use crate::mean::Mean;
use crate::{FloatType, Result};

/// The reduce-scatter of gradients inside a replica of the model, if each rank keeps a shard of them. The sums of the
/// step are then summed over the replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scatter {
    /// Each rank keeps all gradients.
    Never,
    /// Each round of micro-batches is reduce-scattered.
    EachRound,
    /// The sum of a rank's micro-batches is reduce-scattered.
    EachStep,
}

/// The ranks that gradients are reduced over. A group of one rank is `None`.
#[derive(Debug)]
pub(crate) struct ReduceGroups<'a> {
    /// The ranks that have a shard each.
    shards: Option<&'a mut Communicator>,
    /// The ranks with the same shard in each replica.
    replicas: Option<&'a mut Communicator>,
    /// The worker that sums over the replicas in place of an all-reduce.
    hook: Option<&'a HookWorker>,
    /// The source of the storage of gradients.
    pub(super) allocator: &'a Allocator,
    /// The time that this rank has waited.
    waited: &'a mut Duration,
}

/// The last reduction of a bucket in a step.
#[derive(Debug)]
pub(super) enum Reduction {
    /// The sum is reduce-scattered, and then summed over the replicas.
    Scatter(PendingFlat),
    /// The sum, or this rank's shard of it, is summed over the replicas.
    AllReduce(PendingFlat),
    /// A communication hook sums over the replicas.
    Hook(WorkHandle),
    /// There is nothing to reduce.
    Done(Flat),
}

impl Gradients {
    /// Starts the reductions that have not started. All micro-batches have ended.
    pub(crate) fn start_reductions(&mut self, groups: &mut ReduceGroups<'_>) -> Result<()> {
        while self.started < self.layout.order().len() {
            self.start_next(groups)?;
        }
        Ok(())
    }

    /// Waits for all reductions and divides the sums by `count`, the total weight.
    pub(crate) fn finish(&mut self, count: usize, groups: &mut ReduceGroups<'_>) -> Result<()> {
        self.start_reductions(groups)?;
        for index in 0..self.started {
            self.start_over_replicas(self.layout.order()[index], groups)?;
        }
        for &unit in self.layout.order() {
            for (sum, bucket) in self.sums[unit].iter_mut().zip(&self.layout.units()[unit].buckets) {
                let SumState::Reducing(reduction) = std::mem::replace(&mut sum.state, SumState::Summing)
                else {
                    unreachable!("every reduction has started")
                };
                let reduced = match reduction {
                    Reduction::Scatter(pending) | Reduction::AllReduce(pending) => {
                        groups.timed(|| pending.wait())?
                    }
                    Reduction::Hook(work) => groups.timed(|| work.wait())?,
                    Reduction::Done(sum) => sum,
                };
                sum.state = SumState::Mean(Mean::of(reduced, bucket.mean_dtype, count));
            }
        }
        (self.started, self.ended) = (0, 0);
        Ok(())
    }

    /// Starts the reductions that are due in a last micro-batch: those of closed units that come before all others.
    pub(super) fn start_due(&mut self, at: usize, groups: &mut ReduceGroups<'_>) -> Result<()> {
        let is_due = |gradients: &Self| {
            let next = gradients.layout.order().get(gradients.started);
            next.is_some_and(|&unit| {
                gradients.open[at].units[unit].closed && gradients.in_flight != Some(unit)
            })
        };
        while self.open[at].role.is_last() && is_due(self) {
            self.start_next(groups)?;
        }
        Ok(())
    }

    /// Waits for the round in flight, and adds this rank's shard to those of earlier rounds.
    pub(super) fn finish_round(&mut self, groups: &mut ReduceGroups<'_>) -> Result<()> {
        let Some(unit) = self.in_flight.take() else { return Ok(()) };
        let Self { layout, sums, memory, open, ended, .. } = self;
        for (bucket, sum) in layout.units()[unit].buckets.iter().zip(&mut sums[unit]) {
            let SumState::ScatteringRound(pending) = std::mem::replace(&mut sum.state, SumState::Summing)
            else {
                unreachable!("a unit in flight is reduce-scattered")
            };
            let gradient = groups.timed(|| pending.wait())?;
            let recycled = sum.recycled.take();
            let part = groups.own_shard(&gradient, bucket, recycled)?;
            sum.tree.add(*ended, part, |left, right| merge(left, right, &mut sum.pool, memory));
            match memory {
                GradientMemory::Shared(pool) => pool.give(gradient),
                GradientMemory::OfEachBucket => sum.pool.push(gradient),
            }
        }
        let number = *ended;
        match open.iter().position(|open| open.number == number) {
            Some(at) => self.start_due(at, groups),
            None => Ok(()),
        }
    }

    /// Starts the last reduction of the next unit.
    fn start_next(&mut self, groups: &mut ReduceGroups<'_>) -> Result<()> {
        let unit = self.layout.order()[self.started];
        self.started += 1;
        let number = self.first_bucket + self.layout.buckets_before(unit);
        for (index, bucket) in self.layout.units()[unit].buckets.iter().enumerate() {
            let sum = &mut self.sums[unit][index];
            let whole = sum.tree.finish(|left, right| merge(left, right, &mut sum.pool, &self.memory));
            let whole = match whole {
                Some(whole) => whole,
                None => sum.nothing(bucket, self.scatter, groups)?,
            };
            sum.state = SumState::Reducing(match (self.scatter, groups.shards()) {
                (Scatter::EachStep, Some(shards)) => Reduction::Scatter(whole.start_scattered_sum(shards)),
                _ => groups.start_over_replicas(number + index, whole),
            });
        }
        Ok(())
    }

    /// Waits for a unit's reduce-scatter, if that was its last reduction, and starts to sum this rank's shards over the
    /// replicas.
    fn start_over_replicas(&mut self, unit: usize, groups: &mut ReduceGroups<'_>) -> Result<()> {
        let number = self.first_bucket + self.layout.buckets_before(unit);
        for (index, bucket) in self.layout.units()[unit].buckets.iter().enumerate() {
            let state = &mut self.sums[unit][index].state;
            match std::mem::replace(state, SumState::Summing) {
                SumState::Reducing(Reduction::Scatter(pending)) => {
                    let sum = groups.timed(|| pending.wait())?;
                    let part = groups.own_shard(&sum, bucket, None)?;
                    *state = SumState::Reducing(groups.start_over_replicas(number + index, part));
                }
                other => *state = other,
            }
        }
        Ok(())
    }
}

impl BucketSum {
    /// Returns the sum of a rank without micro-batches.
    pub(super) fn nothing(
        &mut self,
        bucket: &GradientBucket,
        scatter: Scatter,
        groups: &mut ReduceGroups<'_>,
    ) -> Result<Flat> {
        let len = if scatter == Scatter::EachRound { bucket.shard_len } else { bucket.padded_len };
        let mut nothing = match self.recycled.take() {
            Some(recycled) => recycled,
            // It is reduced with the sums of ranks that have gradients, so it needs memory of the same kind.
            None => groups.allocate(bucket.sum_dtype(), len)?,
        };
        nothing.slice_mut(0, len).clear();
        nothing.slice_mut(0, len.min(bucket.len())).fill_neutral();
        Ok(nothing)
    }
}

impl<'a> ReduceGroups<'a> {
    /// Returns the groups.
    pub(crate) fn new(
        shards: Option<&'a mut Communicator>,
        replicas: Option<&'a mut Communicator>,
        hook: Option<&'a HookWorker>,
        allocator: &'a Allocator,
        waited: &'a mut Duration,
    ) -> Self {
        Self {
            shards: shards.filter(|group| group.world_size() > 1),
            replicas: replicas.filter(|group| group.world_size() > 1),
            hook,
            allocator,
            waited,
        }
    }

    pub(super) fn shards(&mut self) -> Option<&mut Communicator> {
        self.shards.as_deref_mut()
    }

    /// Returns the group of the first reduction.
    pub(super) fn first(&mut self) -> Option<&mut Communicator> {
        self.shards.as_deref_mut().or(self.replicas.as_deref_mut())
    }

    /// Allocates zeros that the ranks of a host share, unless only a hook copies them.
    pub(super) fn allocate(&mut self, dtype: FloatType, len: usize) -> Result<Flat> {
        match self.hook.is_some() && self.shards.is_none() {
            true => Ok(self.allocator.zeros(dtype, len)),
            false => self.allocate_shared(dtype, len),
        }
    }

    /// Allocates zeros that the ranks of a host share, if there are other ranks.
    pub(super) fn allocate_shared(&mut self, dtype: FloatType, len: usize) -> Result<Flat> {
        let allocator = self.allocator;
        match self.first() {
            Some(group) => allocator.shared_zeros(group, dtype, len),
            None => Ok(allocator.zeros(dtype, len)),
        }
    }

    /// Starts to sum bucket `number` over the replicas.
    fn start_over_replicas(&mut self, number: usize, sum: Flat) -> Reduction {
        match (self.hook, &mut self.replicas) {
            (Some(hook), _) => Reduction::Hook(hook.send(number, sum)),
            (None, Some(replicas)) => Reduction::AllReduce(sum.start_sum(replicas)),
            (None, None) => Reduction::Done(sum),
        }
    }

    /// Returns this rank's shard of a reduced bucket, in `recycled` if given.
    fn own_shard(&mut self, sum: &Flat, bucket: &GradientBucket, recycled: Option<Flat>) -> Result<Flat> {
        let rank = self.shards.as_ref().map_or(0, |shards| shards.rank());
        let (start, len) = (rank * bucket.shard_len, bucket.shard_len);
        let mut part = match (recycled, &mut self.replicas) {
            (Some(recycled), _) => recycled,
            (None, None) => return Ok(sum.part(sum.dtype(), start, len)),
            // The shard is reduced across replicas later.
            (None, Some(replicas)) => self.allocator.shared_zeros(replicas, sum.dtype(), len)?,
        };
        part.slice_mut(0, len).convert_from(sum.slice(start, len));
        Ok(part)
    }

    /// Runs `wait` and adds its duration to the waiting time.
    fn timed<T>(&mut self, wait: impl FnOnce() -> T) -> T {
        let Some(runtime) = self.first().map(|group| group.runtime().clone()) else { return wait() };
        let began = runtime.now();
        let done = wait();
        *self.waited += runtime.now().saturating_sub(began);
        done
    }
}

//! The gradients of one rank, from the first micro-batch of a step to the mean over all ranks.
//!
//! This module does not communicate. The gradients of a micro-batch are stored in one buffer per bucket. The buffers
//! of successive micro-batches are summed as a tree. A parameter without a gradient in a micro-batch counts as +0, on
//! every rank and in every strategy. The result therefore does not depend on the rank that computed it.

mod slots;

pub(crate) use slots::{GradientSlots, merge};

use crate::flat::Flat;
use crate::mean::Mean;
use crate::step_consensus::{StepConsensus, StepDescriptor};
use crate::tree::TreeSum;
use crate::updates::Updates;
use crate::{Bucket, BucketPlan, FloatType, ParamInfo, Result, Values};

#[derive(Debug)]
pub(crate) struct BucketedGradients {
    slots: GradientSlots,
    buckets: Vec<BucketSum>,
    losses: TreeSum<f32>,
    /// The number of micro-batches since the last synchronisation; `weight` is their total weight.
    micro_batches: usize,
    count: u64,
    /// For each parameter, `true` if its gradient was reported in the current micro-batch.
    reported: Vec<bool>,
    /// For each parameter that is not tied to an earlier one, `true` if it has had a gradient since the last
    /// synchronisation. That is on this rank, or on any rank once synchronised.
    used: Vec<bool>,
    /// For each parameter, `true` if any synchronisation has had a gradient for it. `None` if the hook keeps no
    /// residuals.
    ever_used: Option<Vec<bool>>,
    synchronised: bool,
}

#[derive(Debug)]
struct BucketSum {
    sum: TreeSum<Flat>,
    /// The gradients of the current micro-batch.
    gradient: Option<Flat>,
    /// For each place, `true` if `gradient` has values for it.
    written: Vec<bool>,
    /// The number of parameters that can report a gradient to this bucket, and the number that have not yet done so.
    reporters: usize,
    outstanding: usize,
    /// The mean over all ranks, until the next micro-batch.
    mean: Option<Mean>,
    /// The buffer of the first micro-batch. It is the leftmost leaf of the tree and every sum is accumulated into the
    /// left side, so this is the only buffer that is communicated.
    recycled: Option<Flat>,
    /// Buffers for other micro-batches.
    pool: Vec<Flat>,
}

/// A function that allocates zeroed memory for communication.
pub(crate) type Allocate<'a> = dyn FnMut(FloatType, usize) -> Result<Flat> + 'a;

impl BucketedGradients {
    pub(crate) fn new(infos: &[ParamInfo], plan: BucketPlan, keeps_residual: bool) -> Self {
        let slots = GradientSlots::new(infos, plan);
        let sum = |planned: &Bucket| BucketSum::new(planned.places.len());
        let mut buckets: Vec<BucketSum> = slots.buckets().iter().map(sum).collect();
        slots.of_all().for_each(|slot| buckets[slot.bucket].reporters += 1);
        Self {
            slots,
            buckets,
            losses: TreeSum::new(),
            micro_batches: 0,
            count: 0,
            reported: vec![false; infos.len()],
            used: vec![false; infos.len()],
            ever_used: keeps_residual.then(|| vec![false; infos.len()]),
            synchronised: false,
        }
    }

    /// Returns the parameters that are not tied to an earlier one.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = usize> + Clone {
        let places = self.slots.buckets().iter().flat_map(|bucket| &bucket.places);
        places.map(|place| place.parameter)
    }

    /// Returns the type of a bucket's gradients.
    pub(crate) fn dtype(&self, bucket: usize) -> FloatType {
        self.slots.buckets()[bucket].dtype
    }

    pub(crate) fn bucket_count(&self) -> usize {
        self.buckets.len()
    }

    /// Starts a micro-batch and drops the result of the last synchronisation.
    ///
    /// # Errors
    /// There is no memory.
    pub(crate) fn begin(&mut self, allocate: &mut Allocate<'_>) -> Result<()> {
        self.begin_step();
        self.reported.fill(false);
        for (bucket, planned) in self.buckets.iter_mut().zip(self.slots.buckets()) {
            bucket.written.fill(false);
            bucket.outstanding = bucket.reporters;
            bucket.gradient = Some(if self.micro_batches == 0 {
                bucket.recycled(planned, allocate)?
            } else {
                bucket.pool.pop().unwrap_or_else(|| planned.zeros())
            });
        }
        Ok(())
    }

    /// Drops the result of the last synchronisation.
    pub(crate) fn begin_step(&mut self) {
        if std::mem::take(&mut self.synchronised) {
            self.used.fill(false);
            for bucket in &mut self.buckets {
                bucket.recycled = bucket.mean.take().map(Mean::into_memory);
            }
        }
    }

    /// Stores the gradient of one parameter for the current micro-batch.
    pub(crate) fn report(&mut self, parameter: usize, values: Values<'_>) -> Result<()> {
        let Some(slot) = self.slots.reported(parameter, &mut self.reported)? else { return Ok(()) };
        let bucket = &mut self.buckets[slot.bucket];
        let gradient =
            bucket.gradient.as_mut().expect("a bucket is closed once every parameter has reported");
        let owner = self.slots.put(parameter, slot, values, (gradient, &mut bucket.written))?;
        bucket.outstanding -= 1;
        self.used[owner] = true;
        Ok(())
    }

    /// Ends a micro-batch with this weight: its gradients are added to the sum.
    pub(crate) fn end(&mut self, loss: f32, count: u64) {
        for index in 0..self.buckets.len() {
            self.finish_gradient(index);
        }
        self.losses.add(self.micro_batches, loss, |left, right| *left += right);
        self.micro_batches += 1;
        self.count = self.count.saturating_add(count);
    }

    /// Returns `true` if all gradients of a bucket have been reported in the current micro-batch.
    pub(crate) fn is_final(&self, bucket: usize) -> bool {
        self.buckets[bucket].outstanding == 0
    }

    /// Returns this rank's sum of a bucket, including the current micro-batch.
    ///
    /// # Errors
    /// There is no memory for a new buffer.
    pub(crate) fn take_sum(&mut self, index: usize, allocate: &mut Allocate<'_>) -> Result<Flat> {
        self.finish_gradient(index);
        let BucketSum { sum, pool, .. } = &mut self.buckets[index];
        if let Some(sum) = sum.finish(|left, right| merge(left, right, pool)) {
            return Ok(sum);
        }
        let planned = &self.slots.buckets()[index];
        let mut zeros = self.buckets[index].recycled(planned, allocate)?;
        zeros.slice_mut(0, planned.len()).clear();
        Ok(zeros)
    }

    /// Returns this rank's sum of losses and the encoded counts of the step.
    pub(crate) fn take_totals(&mut self, descriptor: StepDescriptor, updates: &Updates) -> (f32, Vec<i64>) {
        let loss = self.losses.finish(|left, right| *left += right).unwrap_or(0.0);
        let (micro_batches, count) =
            (std::mem::take(&mut self.micro_batches), std::mem::take(&mut self.count));
        (loss, StepConsensus::encode(micro_batches, count, descriptor, updates, &self.used))
    }

    /// Stores the result of a synchronisation: for each bucket the mean over all ranks, and for each parameter
    /// whether it has had a gradient on any rank.
    pub(crate) fn synchronised(&mut self, means: Vec<Mean>, used: impl Iterator<Item = bool>) {
        for (bucket, mean) in self.buckets.iter_mut().zip(means) {
            bucket.mean = Some(mean);
        }
        self.used = used.collect();
        if let Some(ever_used) = &mut self.ever_used {
            for (used, ever_used) in self.used.iter_mut().zip(ever_used) {
                *ever_used |= *used;
                *used = *ever_used;
            }
        }
        self.synchronised = true;
    }

    /// Returns the mean gradient of a parameter, or `None`.
    pub(crate) fn mean(&self, parameter: usize) -> Option<Values<'_>> {
        self.slots.mean(parameter, &self.used, |bucket| self.buckets[bucket].mean.as_ref())
    }

    /// Scales all mean gradients.
    pub(crate) fn scale(&mut self, factor: f64) {
        for mean in self.buckets.iter_mut().filter_map(|bucket| bucket.mean.as_mut()) {
            mean.scale(factor);
        }
    }

    /// Drops all sums.
    pub(crate) fn forget(&mut self) {
        for bucket in &mut self.buckets {
            *bucket = BucketSum { reporters: bucket.reporters, ..BucketSum::new(bucket.written.len()) };
        }
        self.losses = TreeSum::new();
        self.micro_batches = 0;
        self.count = 0;
        self.used.fill(false);
        self.synchronised = false;
    }

    /// Records that the hook has no residuals any more.
    pub(crate) fn forget_residuals(&mut self) {
        if let Some(ever_used) = &mut self.ever_used {
            ever_used.fill(false);
        }
    }

    /// Adds a bucket's gradient to its sum, if that has not been done.
    fn finish_gradient(&mut self, index: usize) {
        let BucketSum { sum, gradient, written, pool, .. } = &mut self.buckets[index];
        let Some(mut closed) = gradient.take() else { return };
        self.slots.clear_unwritten(index, &mut closed, written);
        sum.add(self.micro_batches, closed, |left, right| merge(left, right, pool));
    }
}

impl BucketSum {
    fn new(places: usize) -> Self {
        Self {
            sum: TreeSum::new(),
            gradient: None,
            written: vec![false; places],
            reporters: 0,
            outstanding: 0,
            mean: None,
            recycled: None,
            pool: Vec::new(),
        }
    }

    /// Returns the buffer that is communicated. Its contents are unspecified.
    fn recycled(&mut self, planned: &Bucket, allocate: &mut Allocate<'_>) -> Result<Flat> {
        self.recycled.take().map_or_else(|| allocate(planned.dtype.sum_dtype(), planned.len()), Ok)
    }
}

#[cfg(test)]
mod tests;

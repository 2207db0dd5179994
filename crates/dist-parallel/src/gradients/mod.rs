//! The gradients of one rank, from the first micro-batch of a step to the mean over all ranks.
//!
//! Nothing here communicates. A micro-batch's gradients go into one buffer per bucket, the leaf; leaves are summed
//! as a tree. A parameter without a gradient in a micro-batch counts as +0 there, on every rank and in every
//! strategy, so that it cannot matter who computed what.

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
    /// Micro-batches that this rank has summed since the last synchronisation, and what they count together.
    micro_batches: usize,
    count: u64,
    /// For each parameter: whether its gradient was reported in the present micro-batch.
    reported: Vec<bool>,
    /// For each parameter with a home of its own: whether it has had a gradient since the last synchronisation,
    /// on this rank; on any rank once synchronised.
    used: Vec<bool>,
    /// For each parameter: whether any synchronisation has had a gradient for it. `None` if that does not matter,
    /// because nothing of a gradient comes later.
    ever_used: Option<Vec<bool>>,
    synchronised: bool,
}

#[derive(Debug)]
struct BucketSum {
    sum: TreeSum<Flat>,
    /// The gradients of the present micro-batch.
    gradient: Option<Flat>,
    /// For each place: whether the leaf has a gradient there.
    written: Vec<bool>,
    /// How many parameters could report a gradient that goes here, and how many have not yet done so.
    reporters: usize,
    outstanding: usize,
    /// The mean over all ranks, from one synchronisation to the next micro-batch.
    mean: Option<Mean>,
    /// What the first leaf goes into, and with it every sum: it is the leftmost, and sums are made on the left. So this is
    /// the one memory that travels.
    recycled: Option<Flat>,
    /// What other leaves go into.
    pool: Vec<Flat>,
}

/// Memory to travel in, all zero.
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

    /// Parameters with a gradient of their own.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = usize> + Clone {
        let places = self.slots.buckets().iter().flat_map(|bucket| &bucket.places);
        places.map(|place| place.parameter)
    }

    /// The type of a bucket's gradients.
    pub(crate) fn dtype(&self, bucket: usize) -> FloatType {
        self.slots.buckets()[bucket].dtype
    }

    pub(crate) fn bucket_count(&self) -> usize {
        self.buckets.len()
    }

    /// Begins a micro-batch; what the last synchronisation gave is gone.
    ///
    /// # Errors
    /// If there is no memory.
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

    /// Forgets the last synchronisation's result, if it has not been forgotten.
    pub(crate) fn begin_step(&mut self) {
        if std::mem::take(&mut self.synchronised) {
            self.used.fill(false);
            for bucket in &mut self.buckets {
                bucket.recycled = bucket.mean.take().map(Mean::into_memory);
            }
        }
    }

    /// Takes the gradient of one parameter for the present micro-batch.
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

    /// Ends a micro-batch, which counts so much: what was reported is added to the sum.
    pub(crate) fn end(&mut self, loss: f32, count: u64) {
        for index in 0..self.buckets.len() {
            self.finish_gradient(index);
        }
        self.losses.add(self.micro_batches, loss, |left, right| *left += right);
        self.micro_batches += 1;
        self.count = self.count.saturating_add(count);
    }

    /// Whether all gradients of a bucket have been reported in the present micro-batch.
    pub(crate) fn is_final(&self, bucket: usize) -> bool {
        self.buckets[bucket].outstanding == 0
    }

    /// This rank's sum of a bucket, the present micro-batch included, if there is one.
    ///
    /// # Errors
    /// If there is no memory for one.
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

    /// This rank's sum of losses, and what the sums contain.
    pub(crate) fn take_totals(&mut self, descriptor: StepDescriptor, updates: &Updates) -> (f32, Vec<i64>) {
        let loss = self.losses.finish(|left, right| *left += right).unwrap_or(0.0);
        let (micro_batches, count) =
            (std::mem::take(&mut self.micro_batches), std::mem::take(&mut self.count));
        (loss, StepConsensus::encode(micro_batches, count, descriptor, updates, &self.used))
    }

    /// Takes what the synchronisation gave: for each bucket the mean over all ranks, and which parameters have had
    /// a gradient on any.
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

    /// The mean gradient of a parameter; `None` if there is none.
    pub(crate) fn mean(&self, parameter: usize) -> Option<Values<'_>> {
        self.slots.mean(parameter, &self.used, |bucket| self.buckets[bucket].mean.as_ref())
    }

    /// Multiplies all mean gradients by a factor.
    pub(crate) fn scale(&mut self, factor: f64) {
        for mean in self.buckets.iter_mut().filter_map(|bucket| bucket.mean.as_mut()) {
            mean.scale(factor);
        }
    }

    /// Forgets everything that was summed.
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

    /// Forgets that something of earlier steps may come later.
    pub(crate) fn forget_residuals(&mut self) {
        if let Some(ever_used) = &mut self.ever_used {
            ever_used.fill(false);
        }
    }

    /// Adds a bucket's leaf to its sum, if it has not been added.
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

    /// The memory that travels; its contents are unspecified.
    fn recycled(&mut self, planned: &Bucket, allocate: &mut Allocate<'_>) -> Result<Flat> {
        self.recycled.take().map_or_else(|| allocate(planned.dtype.sum_dtype(), planned.len()), Ok)
    }
}

#[cfg(test)]
mod tests;

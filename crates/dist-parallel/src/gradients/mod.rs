//! The gradients of one rank, from the first micro-batch of a step to the mean over all ranks.
//!
//! Gradients lie in buckets. A bucket is a contiguous buffer for some parameters of one type, and the buckets of a unit
//! are filled and reduced together. One gradient goes this way:
//!
//! 1. The backward of a micro-batch reports it, and it is written to its place in the bucket's buffer.
//! 2. The unit is closed: when all of its parameters have reported, or when the backward is past it. A parameter
//!    without a gradient counts as +0. A rank without a micro-batch adds −0, which changes no sum.
//! 3. The buffers of successive micro-batches are summed as a tree ([`TreeSum`]). If the strategy
//!    [scatters](Scatter::EachRound) each round, the buffer is reduce-scattered first, and the tree sums this rank's
//!    shards.
//! 4. Once a step the sum is reduced over the ranks: during the backward of the last micro-batch, as soon as the unit
//!    and all units before it are closed.
//! 5. The sum is divided once, and is a mean until the next step begins.
//!
//! Every rank therefore starts its reductions in the same order, and the result does not depend on the rank that
//! computed a micro-batch.

mod layout;
mod reduce;

pub(crate) use layout::GradientLayout;
pub(crate) use reduce::{ReduceGroups, Scatter};

use self::layout::GradientBucket;
use self::reduce::Reduction;
use crate::buffer_pool::BufferPool;
use crate::flat::{Flat, PendingFlat};
use crate::mean::Mean;
use crate::tree::TreeSum;
use crate::{BucketTensor, ParamInfo, Result, Values};

#[derive(Debug)]
pub(crate) struct Gradients {
    layout: GradientLayout,
    /// The sums of all buckets, unit by unit.
    sums: Vec<Vec<BucketSum>>,
    /// The micro-batches whose backward has begun, and the memory of earlier ones.
    open: Vec<MicroBatch>,
    unused: Vec<MicroBatch>,
    scatter: Scatter,
    /// This rank's number among those with a shard each.
    rank: usize,
    /// The number of the first bucket among those that a hook sums. The buckets of other stages come before.
    first_bucket: usize,
    memory: GradientMemory,
    /// The unit whose round is being reduce-scattered.
    in_flight: Option<usize>,
    /// The number of units whose last reduction has started: a prefix of the layout's order.
    started: usize,
    /// The number of micro-batches, or of rounds, since the last step.
    ended: usize,
    /// For each parameter that is not tied to an earlier one, `true` if it has had a gradient since the last step.
    /// That is on this rank, or on any rank after the end of a step.
    used: Vec<bool>,
    /// For each parameter, `true` if any step has had a gradient for it. `None` if no hook keeps residuals.
    ever_used: Option<Vec<bool>>,
}

/// The gradients of one micro-batch.
#[derive(Debug)]
struct MicroBatch {
    number: usize,
    role: RoundRole,
    /// For each parameter, `true` if its gradient was reported.
    reported: Vec<bool>,
    units: Vec<UnitGradient>,
}

/// The part of a micro-batch in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RoundRole {
    /// Others follow it, or its reduction is started elsewhere.
    Inner,
    /// It is the last one of this rank in the step.
    Last,
    /// This rank has no micro-batch in this round, but others have. `true` if it is the last round.
    Absent { last: bool },
}

#[derive(Debug)]
struct UnitGradient {
    /// The number of parameters that have not yet reported.
    outstanding: usize,
    /// `true` if the gradients are final.
    closed: bool,
    buckets: Vec<BucketGradient>,
}

#[derive(Debug)]
struct BucketGradient {
    gradient: Option<Flat>,
    /// For each place, `true` if `gradient` has values for it.
    written: Vec<bool>,
}

/// The sum of a bucket over micro-batches and ranks.
#[derive(Debug)]
struct BucketSum {
    /// The sum of this rank's micro-batches, or of its shards of all rounds.
    tree: TreeSum<Flat>,
    state: SumState,
    /// The memory of the last mean.
    recycled: Option<Flat>,
    /// Buffers for other micro-batches than the first.
    pool: Vec<Flat>,
}

/// The state of a bucket. New micro-batches are added in the first one only.
#[derive(Debug)]
enum SumState {
    /// This rank sums its micro-batches.
    Summing,
    /// The gradients of one round are being reduce-scattered, and the tree has those of earlier rounds.
    ScatteringRound(PendingFlat),
    /// The sum of the step is being reduced. The tree is empty.
    Reducing(Reduction),
    /// The mean over all ranks, until the next step begins.
    Mean(Mean),
}

/// The memory of gradients between micro-batches and steps.
#[derive(Debug)]
pub(crate) enum GradientMemory {
    /// Each bucket keeps its buffers. Only the buffer of the first micro-batch is communicated: it is the leftmost leaf
    /// of the tree, and every sum is accumulated into the left side.
    OfEachBucket,
    /// Buckets use one buffer in turn, which is freed at the end of a pass.
    Shared(BufferPool),
}

impl GradientMemory {
    pub(crate) const fn shared() -> Self {
        Self::Shared(BufferPool::new())
    }
}

impl Gradients {
    pub(crate) fn new(
        layout: GradientLayout,
        scatter: Scatter,
        memory: GradientMemory,
        keeps_residual: bool,
        rank: usize,
    ) -> Self {
        let sums = layout.units().iter().map(|unit| unit.buckets.iter().map(|_| BucketSum::new()).collect());
        let parameters = layout.len();
        Self {
            sums: sums.collect(),
            open: Vec::new(),
            unused: Vec::new(),
            scatter,
            rank,
            first_bucket: 0,
            memory,
            in_flight: None,
            started: 0,
            ended: 0,
            used: vec![false; parameters],
            ever_used: keeps_residual.then(|| vec![false; parameters]),
            layout,
        }
    }

    /// Returns the parameters with a place in a bucket, in the order of the buckets.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = usize> + Clone {
        self.layout.buckets().flat_map(|bucket| &bucket.places).map(|place| place.parameter)
    }

    /// Returns the tensors of each bucket, as a hook receives them.
    pub(crate) fn tensors(&self, infos: &[ParamInfo]) -> Vec<Vec<BucketTensor>> {
        self.layout.tensors(infos)
    }

    /// Prepares for a hook that knows the first bucket by the number `first_bucket`.
    pub(crate) fn set_hook(&mut self, first_bucket: usize, keeps_residual: bool) {
        self.first_bucket = first_bucket;
        self.ever_used = keeps_residual.then(|| vec![false; self.layout.len()]);
    }

    /// Returns `true` if a hook keeps residuals.
    pub(crate) const fn keeps_residual(&self) -> bool {
        self.ever_used.is_some()
    }

    pub(crate) fn bucket_count(&self) -> usize {
        self.layout.buckets().count()
    }

    /// Returns the number of micro-batches, or of rounds, since the last step.
    pub(crate) const fn ended(&self) -> usize {
        self.ended
    }

    /// Drops the result of the last step.
    pub(crate) fn begin_step(&mut self) {
        if self.ended == 0 {
            self.used.fill(false);
        }
        // Memory of another size than the next sum is not kept, and if units share memory, theirs is kept only if
        // the mean is a shard.
        let keeps = match (self.scatter, &self.memory) {
            (Scatter::EachRound, _) => true,
            (Scatter::Never, memory) => matches!(memory, GradientMemory::OfEachBucket),
            (Scatter::EachStep, _) => false,
        };
        for sum in self.sums.iter_mut().flatten() {
            if matches!(sum.state, SumState::Mean(_))
                && let SumState::Mean(mean) = std::mem::replace(&mut sum.state, SumState::Summing)
            {
                sum.recycled = Some(mean.into_memory()).filter(|_| keeps);
            }
        }
    }

    /// Starts a micro-batch, unless it has started. Sequential micro-batches have the number of those that have
    /// [`ended`](Self::ended).
    pub(crate) fn begin(&mut self, number: usize, role: RoundRole) {
        if self.open.iter().any(|open| open.number == number) {
            return;
        }
        let mut micro_batch = self.unused.pop().unwrap_or_else(|| MicroBatch::new(&self.layout));
        (micro_batch.number, micro_batch.role) = (number, role);
        micro_batch.reported.fill(false);
        for (unit, of) in micro_batch.units.iter_mut().zip(self.layout.units()) {
            (unit.outstanding, unit.closed) = (of.reporters, false);
            unit.buckets.iter_mut().for_each(|bucket| bucket.written.fill(false));
        }
        self.open.push(micro_batch);
    }

    /// Stores the gradient of one parameter.
    pub(crate) fn report(
        &mut self,
        number: usize,
        parameter: usize,
        values: Values<'_>,
        groups: &mut ReduceGroups<'_>,
    ) -> Result<()> {
        let at = self.place_of(number);
        let slot = self.layout.reported(parameter, &mut self.open[at].reported)?;
        // A frozen parameter has no gradient.
        let Some(slot) = slot else { return Ok(()) };
        self.allocate(at, slot.unit, groups)?;
        let unit = &mut self.open[at].units[slot.unit];
        let (bucket, place) = self.layout.place(slot);
        let (BucketGradient { gradient, written }, at) =
            (&mut unit.buckets[slot.bucket], bucket.places[place]);
        let gradient = gradient.as_mut().expect("a unit is closed once every parameter has reported");
        let taken =
            gradient.slice_mut(at.offset, at.len).take_gradients(values, bucket.dtype, !written[place]);
        taken.map_err(|source| self.layout.wrong_gradient(parameter, source))?;
        written[place] = true;
        unit.outstanding -= 1;
        self.used[at.parameter] = true;
        if unit.outstanding == 0 && !self.layout.units()[slot.unit].is_root {
            self.close(number, slot.unit, groups)?;
        }
        Ok(())
    }

    /// Makes a unit's gradients of a micro-batch final, unless they are, and adds them to the sum. In the last
    /// micro-batch, the reductions that are due start.
    pub(crate) fn close(&mut self, number: usize, unit: usize, groups: &mut ReduceGroups<'_>) -> Result<()> {
        let at = self.place_of(number);
        if self.open[at].units[unit].closed {
            return Ok(());
        }
        self.finish_round(groups)?;
        self.allocate(at, unit, groups)?;
        let Self { layout, open, sums, memory, .. } = self;
        let MicroBatch { role, units, .. } = &mut open[at];
        units[unit].closed = true;
        let buckets = layout.units()[unit].buckets.iter().zip(&mut units[unit].buckets);
        for ((bucket, of), sum) in buckets.zip(&mut sums[unit]) {
            let Some(mut gradient) = of.gradient.take() else { continue };
            bucket.complete(&mut gradient, &of.written, *role);
            match (self.scatter, groups.shards()) {
                (Scatter::EachRound, Some(shards)) => {
                    sum.state = SumState::ScatteringRound(gradient.start_scattered_sum(shards));
                    self.in_flight = Some(unit);
                }
                _ => sum.tree.add(number, gradient, |left, right| merge(left, right, &mut sum.pool, memory)),
            }
        }
        self.start_due(at, groups)
    }

    /// Ends a micro-batch.
    pub(crate) fn end(&mut self, number: usize, groups: &mut ReduceGroups<'_>) -> Result<()> {
        for index in 0..self.layout.order().len() {
            self.close(number, self.layout.order()[index], groups)?;
        }
        self.finish_round(groups)?;
        let at = self.place_of(number);
        let ended = self.open.swap_remove(at);
        self.unused.push(ended);
        self.ended += 1;
        Ok(())
    }

    /// Returns the mean gradient of a parameter that is not sharded. `None` if it has no gradient.
    pub(crate) fn mean(&self, parameter: usize) -> Option<Values<'_>> {
        let (bucket, place) = self.layout.place(self.layout.slot(parameter)?);
        let place = bucket.places[place];
        self.mean_of_chunk(place.parameter, 0, place.len)
    }

    /// Returns the mean gradient of `len` values of a parameter that is not tied to an earlier one, from value `offset`
    /// on. This rank's shard must have them. `None` if no micro-batch had a gradient for the parameter.
    pub(crate) fn mean_of_chunk(&self, parameter: usize, offset: usize, len: usize) -> Option<Values<'_>> {
        let slot = self.layout.slot(parameter)?;
        let (bucket, place) = self.layout.place(slot);
        let at = bucket.places[place].offset + offset - self.rank * bucket.shard_len;
        match &self.sums[slot.unit][slot.bucket].state {
            SumState::Mean(mean) if self.used[parameter] => Some(mean.slice(at, len)),
            _ => None,
        }
    }

    /// Returns the mean gradients of all buckets, or of this rank's shards of them, padding included. Those of
    /// parameters without a gradient are +0.
    #[cfg(test)]
    pub(crate) fn means(&self) -> impl Iterator<Item = &Mean> {
        self.sums.iter().flatten().filter_map(|sum| match &sum.state {
            SumState::Mean(mean) => Some(mean),
            _ => None,
        })
    }

    /// Scales all mean gradients.
    pub(crate) fn scale(&mut self, factor: f64) {
        for sum in self.sums.iter_mut().flatten() {
            if let SumState::Mean(mean) = &mut sum.state {
                mean.scale(factor);
            }
        }
    }

    /// Returns the flags for parameters with a gradient: on this rank, or on any rank after a step.
    pub(crate) fn used(&self) -> &[bool] {
        &self.used
    }

    /// Replaces the flags by those of all ranks. A hook's residual counts as a gradient.
    pub(crate) fn set_used(&mut self, used: impl Iterator<Item = bool>) {
        self.used.iter_mut().zip(used).for_each(|(own, of_any)| *own = of_any);
        for (used, ever_used) in self.used.iter_mut().zip(self.ever_used.iter_mut().flatten()) {
            *ever_used |= *used;
            *used = *ever_used;
        }
    }

    /// Drops all gradients.
    pub(crate) fn forget(&mut self) {
        self.sums.iter_mut().flatten().for_each(|sum| *sum = BucketSum::new());
        self.open.clear();
        (self.in_flight, self.started, self.ended) = (None, 0, 0);
        self.used.fill(false);
        self.rest();
    }

    /// Records that the hook has no residuals any more.
    pub(crate) fn forget_residuals(&mut self) {
        self.ever_used.iter_mut().flatten().for_each(|ever_used| *ever_used = false);
    }

    /// Frees the memory that units share.
    pub(crate) fn rest(&mut self) {
        if let GradientMemory::Shared(pool) = &mut self.memory {
            pool.clear();
        }
    }

    fn place_of(&self, number: usize) -> usize {
        let place = self.open.iter().position(|open| open.number == number);
        place.expect("a micro-batch begins before its gradients are reported")
    }

    /// Allocates a unit's buffers for a micro-batch, after the round before has released its own.
    fn allocate(&mut self, at: usize, unit: usize, groups: &mut ReduceGroups<'_>) -> Result<()> {
        if !self.layout.units()[unit].is_root {
            self.finish_round(groups)?;
        }
        let Self { layout, open, sums, memory, .. } = self;
        let MicroBatch { number, units, .. } = &mut open[at];
        let buckets = layout.units()[unit].buckets.iter().zip(&mut units[unit].buckets);
        for ((bucket, of), sum) in buckets.zip(&mut sums[unit]) {
            if of.gradient.is_none() {
                of.gradient = Some(sum.buffer(bucket, *number == 0, memory, groups)?);
            }
        }
        Ok(())
    }
}

impl MicroBatch {
    fn new(layout: &GradientLayout) -> Self {
        let bucket = |bucket: &GradientBucket| BucketGradient {
            gradient: None,
            written: vec![false; bucket.places.len()],
        };
        let units = layout.units().iter().map(|unit| UnitGradient {
            outstanding: 0,
            closed: false,
            buckets: unit.buckets.iter().map(bucket).collect(),
        });
        Self {
            number: 0,
            role: RoundRole::Inner,
            reported: vec![false; layout.len()],
            units: units.collect(),
        }
    }
}

impl RoundRole {
    /// Returns the role of a round. `present` is `true` if this rank has a micro-batch in it.
    pub(crate) const fn new(present: bool, last: bool) -> Self {
        match (present, last) {
            (true, false) => Self::Inner,
            (true, true) => Self::Last,
            (false, last) => Self::Absent { last },
        }
    }

    const fn is_last(self) -> bool {
        matches!(self, Self::Last | Self::Absent { last: true })
    }
}

impl GradientBucket {
    /// Clears the places without a gradient. Without a micro-batch, all values are neutral.
    fn complete(&self, gradient: &mut Flat, written: &[bool], role: RoundRole) {
        if matches!(role, RoundRole::Absent { .. }) {
            return gradient.slice_mut(0, self.len()).fill_neutral();
        }
        for (at, _) in self.places.iter().zip(written).filter(|(_, written)| !**written) {
            gradient.slice_mut(at.offset, at.len).clear();
        }
    }
}

impl BucketSum {
    const fn new() -> Self {
        Self { tree: TreeSum::new(), state: SumState::Summing, recycled: None, pool: Vec::new() }
    }

    /// Returns a buffer for a micro-batch. Its contents are unspecified, except that padding is zero.
    fn buffer(
        &mut self,
        bucket: &GradientBucket,
        is_first: bool,
        memory: &mut GradientMemory,
        groups: &mut ReduceGroups<'_>,
    ) -> Result<Flat> {
        let (dtype, lens) = (bucket.sum_dtype(), (bucket.len(), bucket.padded_len));
        match memory {
            GradientMemory::Shared(pool) => {
                pool.take(dtype, lens, |dtype, len| groups.allocate_shared(dtype, len))
            }
            GradientMemory::OfEachBucket if is_first => match self.recycled.take() {
                Some(recycled) => Ok(recycled),
                None => groups.allocate(dtype, lens.1),
            },
            GradientMemory::OfEachBucket => {
                Ok(self.pool.pop().unwrap_or_else(|| groups.allocator.zeros(dtype, lens.1)))
            }
        }
    }
}

/// Adds the right sum to the left one. The right one's memory is kept or freed.
fn merge(left: &mut Flat, right: Flat, pool: &mut Vec<Flat>, memory: &GradientMemory) {
    left.add(&right);
    if matches!(memory, GradientMemory::OfEachBucket) {
        pool.push(right);
    }
}

#[cfg(test)]
mod tests;

//! The gradients of one stage, summed over its micro-batches.

use std::collections::BTreeMap;

use crate::flat::Flat;
use crate::gradients::{GradientSlots, merge};
use crate::mean::Mean;
use crate::tree::TreeSum;
use crate::{Bucket, BucketBytes, BucketPlan, ParamInfo, Result, Values};

/// The gradients of a stage's own parameters, in a [`TreeSum`] by the number of the micro-batch: a schedule can
/// finish micro-batches in any order.
pub(super) struct StageSums {
    /// The slots of the gradients, in one bucket per type.
    slots: GradientSlots,
    /// One tree sum per bucket.
    trees: Vec<TreeSum<Flat>>,
    /// Gradients of micro-batches whose backward is not finished.
    open: BTreeMap<usize, MicroBatchGradient>,
    /// For each parameter of the stage, `true` if a micro-batch has had a gradient.
    used: Vec<bool>,
    /// For each bucket, recycled memory for gradients.
    pool: Vec<Vec<Flat>>,
}

struct MicroBatchGradient {
    buckets: Vec<Flat>,
    /// For each bucket and place, `true` if there is a gradient.
    written: Vec<Vec<bool>>,
    reported: Vec<bool>,
}

impl StageSums {
    /// Returns empty sums for a stage's parameters. Frozen parameters have none.
    pub(super) fn new(infos: &[ParamInfo]) -> Self {
        let plan = BucketPlan::new(infos, BucketBytes { first_max: usize::MAX, other_max: usize::MAX });
        Self {
            trees: plan.buckets().iter().map(|_| TreeSum::new()).collect(),
            pool: plan.buckets().iter().map(|_| Vec::new()).collect(),
            slots: GradientSlots::new(infos, plan),
            open: BTreeMap::new(),
            used: vec![false; infos.len()],
        }
    }

    /// Stores a gradient of a micro-batch.
    pub(super) fn report(&mut self, micro_batch: usize, parameter: usize, values: Values<'_>) -> Result<()> {
        self.open(micro_batch);
        let gradient = self.open.get_mut(&micro_batch).expect("it was just opened");
        let Some(slot) = self.slots.reported(parameter, &mut gradient.reported)? else { return Ok(()) };
        let bucket = (&mut gradient.buckets[slot.bucket], &mut *gradient.written[slot.bucket]);
        let owner = self.slots.put(parameter, slot, values, bucket)?;
        self.used[owner] = true;
        Ok(())
    }

    /// Ends a micro-batch, whose gradients are final. Unreported gradients are zero.
    pub(super) fn end(&mut self, micro_batch: usize) {
        self.open(micro_batch);
        let gradient = self.open.remove(&micro_batch).expect("it was just opened");
        for (bucket, mut buffer) in gradient.buckets.into_iter().enumerate() {
            self.slots.clear_unwritten(bucket, &mut buffer, &gradient.written[bucket]);
            let pool = &mut self.pool[bucket];
            self.trees[bucket].add(micro_batch, buffer, |left, right| merge(left, right, pool));
        }
    }

    /// Returns the sums of all micro-batches, by bucket. All micro-batches must have ended.
    pub(super) fn take(&mut self) -> Vec<Flat> {
        let planned = self.slots.buckets().iter();
        let trees = self.trees.iter_mut().zip(&mut self.pool);
        let sums = planned.zip(trees).map(|(planned, (tree, pool))| {
            let sum = tree.finish(|left, right| merge(left, right, pool));
            sum.unwrap_or_else(|| planned.zeros())
        });
        sums.collect()
    }

    /// Returns for each parameter of the stage whether it has a gradient, and resets the flags.
    pub(super) fn take_used(&mut self) -> Vec<bool> {
        let count = self.used.len();
        std::mem::replace(&mut self.used, vec![false; count])
    }

    /// Recycles the memory of means.
    pub(super) fn recycle(&mut self, means: Vec<Mean>) {
        self.pool.iter_mut().zip(means).for_each(|(pool, mean)| pool.push(mean.into_memory()));
    }

    /// Returns `true` if this sums the gradients of a parameter.
    pub(super) fn has(&self, parameter: usize) -> bool {
        self.slots.of(parameter).is_some()
    }

    /// Returns the buckets, one per type.
    pub(super) fn buckets(&self) -> &[Bucket] {
        self.slots.buckets()
    }

    /// Returns the mean gradient of a parameter, given the means by bucket and the flags of parameters that have one.
    pub(super) fn mean<'a>(
        &self,
        parameter: usize,
        means: Option<&'a [Mean]>,
        used: &[bool],
    ) -> Option<Values<'a>> {
        self.slots.mean(parameter, used, |bucket| Some(&means?[bucket]))
    }

    /// Drops all sums.
    pub(super) fn forget(&mut self) {
        self.open.clear();
        self.trees.iter_mut().for_each(|tree| *tree = TreeSum::new());
        self.used.fill(false);
    }

    fn open(&mut self, micro_batch: usize) {
        let Self { pool, slots, open, .. } = self;
        open.entry(micro_batch).or_insert_with(|| {
            let buckets = slots.buckets().iter().zip(pool);
            let buffer =
                |(planned, pool): (&Bucket, &mut Vec<Flat>)| pool.pop().unwrap_or_else(|| planned.zeros());
            MicroBatchGradient {
                buckets: buckets.map(buffer).collect(),
                written: slots.buckets().iter().map(|planned| vec![false; planned.places.len()]).collect(),
                reported: vec![false; slots.len()],
            }
        });
    }
}

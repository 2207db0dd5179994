//! The gradients of one stage, summed over its micro-batches whenever they are final.

use std::collections::BTreeMap;

use crate::flat::Flat;
use crate::tree::TreeSum;
use crate::{Bucket, BucketBytes, BucketPlan, Error, ParamInfo, Place, Result, Values};

/// The gradients of a stage's own parameters. Sums are those of [`TreeSum`], by the index of the micro-batch: a
/// schedule may finish micro-batches in any order.
pub(super) struct Sums {
    /// One bucket per type.
    plan: BucketPlan,
    /// For each parameter of the stage, its bucket and place.
    homes: Vec<Option<(usize, usize)>>,
    names: Vec<String>,
    /// For each bucket.
    trees: Vec<TreeSum<Flat>>,
    /// Gradients of micro-batches whose backward has begun and not ended.
    open: BTreeMap<usize, Leaf>,
    /// For each parameter of the stage, whether a micro-batch has had a gradient.
    used: Vec<bool>,
    /// For each bucket, memory for gradients to come.
    spare: Vec<Vec<Flat>>,
}

struct Leaf {
    buckets: Vec<Flat>,
    /// For each bucket and place, whether there is a gradient.
    written: Vec<Vec<bool>>,
    reported: Vec<bool>,
}

impl Sums {
    /// Sums for a stage's parameters; those that are not trainable have none.
    pub(super) fn new(infos: &[ParamInfo]) -> Self {
        let plan = BucketPlan::new(infos, BucketBytes { first_max: usize::MAX, other_max: usize::MAX });
        let mut homes = vec![None; infos.len()];
        for (bucket, planned) in plan.buckets().iter().enumerate() {
            for (place, at) in planned.places.iter().enumerate() {
                homes[at.parameter] = Some((bucket, place));
            }
        }
        for (parameter, info) in infos.iter().enumerate() {
            if let (true, Some(earlier)) = (info.trainable, info.same_as) {
                homes[parameter] = homes[earlier];
            }
        }
        Self {
            homes,
            names: infos.iter().map(|info| info.name.clone()).collect(),
            trees: plan.buckets().iter().map(|_| TreeSum::new()).collect(),
            spare: plan.buckets().iter().map(|_| Vec::new()).collect(),
            plan,
            open: BTreeMap::new(),
            used: vec![false; infos.len()],
        }
    }

    /// Takes a gradient of a micro-batch.
    pub(super) fn report(&mut self, micro_batch: usize, parameter: usize, values: Values<'_>) -> Result<()> {
        let count = self.homes.len();
        let home = *self.homes.get(parameter).ok_or(Error::NoSuchParameter { index: parameter, count })?;
        self.open(micro_batch);
        let leaf = self.open.get_mut(&micro_batch).expect("it was just opened");
        if std::mem::replace(&mut leaf.reported[parameter], true) {
            return Err(Error::ReportedTwice { parameter: self.names[parameter].clone() });
        }
        let Some((bucket, place)) = home else { return Ok(()) };
        let Place { parameter: owner, offset, len } = self.plan.buckets()[bucket].places[place];
        let mut into = leaf.buckets[bucket].slice_mut(offset, len);
        let written = std::mem::replace(&mut leaf.written[bucket][place], true);
        let taken = if written { into.add(values) } else { into.copy_from(values) };
        taken.map_err(|source| Error::WrongGradient {
            parameter: self.names[parameter].clone(),
            source: Box::new(source),
        })?;
        self.used[owner] = true;
        Ok(())
    }

    /// Ends a micro-batch, whose gradients are final: those that were not reported are zero.
    pub(super) fn end(&mut self, micro_batch: usize) {
        self.open(micro_batch);
        let leaf = self.open.remove(&micro_batch).expect("it was just opened");
        for (bucket, mut buffer) in leaf.buckets.into_iter().enumerate() {
            for (at, _) in self.plan.buckets()[bucket]
                .places
                .iter()
                .zip(&leaf.written[bucket])
                .filter(|(_, written)| !**written)
            {
                buffer.slice_mut(at.offset, at.len).clear();
            }
            let spare = &mut self.spare[bucket];
            self.trees[bucket].add(micro_batch, buffer, |left, right| merge(left, right, spare));
        }
    }

    /// The sum of all micro-batches, which are all ended, by bucket.
    pub(super) fn take(&mut self) -> Vec<Flat> {
        let planned = self.plan.buckets().iter();
        let trees = self.trees.iter_mut().zip(&mut self.spare);
        let sums = planned.zip(trees).map(|(planned, (tree, spare))| {
            let sum = tree.finish(|left, right| merge(left, right, spare));
            sum.unwrap_or_else(|| Flat::zeros(planned.dtype, planned.len()))
        });
        sums.collect()
    }

    /// For each parameter of the stage, whether there is a gradient; none has one afterwards.
    pub(super) fn take_used(&mut self) -> Vec<bool> {
        let count = self.used.len();
        std::mem::replace(&mut self.used, vec![false; count])
    }

    /// Takes back the memory of sums that are not needed any more.
    pub(super) fn recycle(&mut self, sums: Vec<Flat>) {
        self.spare.iter_mut().zip(sums).for_each(|(spare, sum)| spare.push(sum));
    }

    /// Whether a parameter's gradients are summed here.
    pub(super) fn has(&self, parameter: usize) -> bool {
        self.homes[parameter].is_some()
    }

    /// Where gradients lie: one bucket per type.
    pub(super) fn buckets(&self) -> &[Bucket] {
        self.plan.buckets()
    }

    /// The mean gradient of a parameter, given the means by bucket and which parameters have one.
    pub(super) fn mean<'a>(
        &self,
        parameter: usize,
        means: Option<&'a [Flat]>,
        used: &[bool],
    ) -> Option<Values<'a>> {
        let (bucket, place) = (*self.homes.get(parameter)?)?;
        let Place { parameter, offset, len } = self.plan.buckets()[bucket].places[place];
        let means = means.filter(|_| used[parameter])?;
        Some(means[bucket].slice(offset, len))
    }

    /// Forgets everything that was summed.
    pub(super) fn forget(&mut self) {
        self.open.clear();
        self.trees.iter_mut().for_each(|tree| *tree = TreeSum::new());
        self.used.fill(false);
    }

    fn open(&mut self, micro_batch: usize) {
        let Self { plan, spare, homes, open, .. } = self;
        open.entry(micro_batch).or_insert_with(|| {
            let buckets = plan.buckets().iter().zip(spare);
            let buffer = |(planned, spare): (&Bucket, &mut Vec<Flat>)| {
                spare.pop().unwrap_or_else(|| Flat::zeros(planned.dtype, planned.len()))
            };
            Leaf {
                buckets: buckets.map(buffer).collect(),
                written: plan.buckets().iter().map(|planned| vec![false; planned.places.len()]).collect(),
                reported: vec![false; homes.len()],
            }
        });
    }
}

fn merge(left: &mut Flat, right: Flat, spare: &mut Vec<Flat>) {
    left.add(&right);
    spare.push(right);
}

//! The buckets of a model's gradients.

use crate::fsdp::{FlatParameter, Layout, Precision};
use crate::{Bucket, BucketPlace, BucketPlan, BucketTensor, Error, FloatType, ParamInfo, Result};

/// The buckets of a model's gradients, in units. It is pure data and the same on every rank.
#[derive(Debug)]
pub(crate) struct GradientLayout {
    units: Vec<GradientUnit>,
    /// The order in which units are reduced.
    order: Vec<usize>,
    /// For each parameter of the model, the slot of its gradient, or `None` if it has no gradient. Tied parameters
    /// share a slot.
    slots: Vec<Option<GradientSlot>>,
    names: Vec<String>,
}

/// Buckets that are filled and reduced together.
#[derive(Debug)]
pub(crate) struct GradientUnit {
    pub(super) buckets: Vec<GradientBucket>,
    /// The number of parameters that can report a gradient. Tied parameters count once per name.
    pub(super) reporters: usize,
    /// `true` if several blocks report gradients. It is then open while other units are filled and reduced.
    pub(super) is_root: bool,
}

/// Gradients of one type that are contiguous in one buffer.
#[derive(Debug)]
pub(crate) struct GradientBucket {
    /// The type of the reported gradients.
    pub(super) dtype: FloatType,
    /// The type of the mean gradients. Its [`sum_dtype`](FloatType::sum_dtype) is that of the sums.
    pub(super) mean_dtype: FloatType,
    pub(super) places: Vec<BucketPlace>,
    /// The number of values in each rank's shard, padding included.
    pub(super) shard_len: usize,
    /// The number of values in the buffer, padding included.
    pub(super) padded_len: usize,
}

/// The position of a parameter's gradient: its unit, its bucket there and its place in the bucket.
#[derive(Debug, Clone, Copy)]
pub(super) struct GradientSlot {
    pub(super) unit: usize,
    pub(super) bucket: usize,
    place: usize,
}

impl GradientLayout {
    /// Returns a layout in which each bucket of a plan is a unit. Means have the type `reduce`, or that of their
    /// parameters.
    pub(crate) fn of_plan(
        infos: &[ParamInfo],
        plan: &BucketPlan,
        reduce: Option<FloatType>,
        shards: usize,
    ) -> Self {
        let bucket = |bucket: &Bucket| {
            GradientBucket::new(
                bucket.dtype,
                reduce.unwrap_or(bucket.dtype),
                &bucket.places,
                bucket.len().div_ceil(shards),
                shards,
            )
        };
        let units = plan.buckets().iter().map(|of| (vec![bucket(of)], false));
        let units: Vec<(Vec<GradientBucket>, bool)> = units.collect();
        let order = (0..units.len()).collect();
        Self::new(infos, units, order)
    }

    /// Returns a layout in which the trained flat parameters of each unit are buckets. Units become final from the last
    /// to the first, and the root unit after them.
    pub(crate) fn of_units(infos: &[ParamInfo], layout: &Layout, precision: Precision) -> Self {
        let bucket = |flat: &FlatParameter| {
            let mean_dtype = flat.reduce_dtype(precision);
            GradientBucket::new(flat.dtype, mean_dtype, &flat.places, flat.shard_len, layout.shards)
        };
        let units = layout.units.iter().map(|unit| {
            let trained = unit.flat_params.iter().filter(|flat_param| flat_param.trainable);
            (trained.map(bucket).collect(), unit.is_root())
        });
        let root = layout.root();
        let with_blocks = (0..layout.units.len()).rev().filter(|unit| Some(*unit) != root);
        Self::new(infos, units.collect(), with_blocks.chain(root).collect())
    }

    fn new(infos: &[ParamInfo], units: Vec<(Vec<GradientBucket>, bool)>, order: Vec<usize>) -> Self {
        let mut slots = vec![None; infos.len()];
        for (unit, (buckets, _)) in units.iter().enumerate() {
            for (bucket, of) in buckets.iter().enumerate() {
                for (place, at) in of.places.iter().enumerate() {
                    slots[at.parameter] = Some(GradientSlot { unit, bucket, place });
                }
            }
        }
        for (parameter, info) in infos.iter().enumerate() {
            if let (true, Some(earlier)) = (info.trainable, info.same_as) {
                slots[parameter] = slots[earlier];
            }
        }
        let unit = |(buckets, is_root)| GradientUnit { buckets, reporters: 0, is_root };
        let mut units: Vec<GradientUnit> = units.into_iter().map(unit).collect();
        slots.iter().flatten().for_each(|slot| units[slot.unit].reporters += 1);
        Self { units, order, slots, names: infos.iter().map(|info| info.name.clone()).collect() }
    }

    pub(super) fn units(&self) -> &[GradientUnit] {
        &self.units
    }

    pub(super) fn order(&self) -> &[usize] {
        &self.order
    }

    /// Returns all buckets, unit by unit.
    pub(super) fn buckets(&self) -> impl Iterator<Item = &GradientBucket> + Clone {
        self.units.iter().flat_map(|unit| &unit.buckets)
    }

    /// Returns the number of buckets of the units before this one.
    pub(super) fn buckets_before(&self, unit: usize) -> usize {
        self.units[..unit].iter().map(|unit| unit.buckets.len()).sum()
    }

    /// Returns the number of parameters, those without a slot included.
    pub(super) const fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns the slot of a parameter, if it exists and has one.
    pub(super) fn slot(&self, parameter: usize) -> Option<GradientSlot> {
        *self.slots.get(parameter)?
    }

    /// Returns the bucket and the place of a slot.
    pub(super) fn place(&self, slot: GradientSlot) -> (&GradientBucket, usize) {
        (&self.units[slot.unit].buckets[slot.bucket], slot.place)
    }

    /// Returns the slot of a reported parameter. It is an error to report a parameter twice.
    pub(super) fn reported(&self, parameter: usize, reported: &mut [bool]) -> Result<Option<GradientSlot>> {
        let count = self.len();
        let slot = *self.slots.get(parameter).ok_or(Error::NoSuchParameter { index: parameter, count })?;
        if std::mem::replace(&mut reported[parameter], true) {
            return Err(Error::ReportedTwice { parameter: self.names[parameter].clone() });
        }
        Ok(slot)
    }

    /// Returns the error of a parameter whose gradient differs from it in type or length.
    pub(super) fn wrong_gradient(&self, parameter: usize, source: Error) -> Error {
        Error::WrongGradient { parameter: self.names[parameter].clone(), source: source.into() }
    }

    /// Returns the tensors of each bucket, unit by unit. If gradients are sharded, a rank's shard of a bucket is one
    /// tensor.
    pub(crate) fn tensors(&self, infos: &[ParamInfo]) -> Vec<Vec<BucketTensor>> {
        let shape = |place: &BucketPlace| infos[place.parameter].shape.clone();
        let tensors = |bucket: &GradientBucket| match bucket.shard_len < bucket.padded_len {
            true => BucketTensor::row([vec![bucket.shard_len]]),
            false => BucketTensor::row(bucket.places.iter().map(shape)),
        };
        self.buckets().map(tensors).collect()
    }
}

impl GradientBucket {
    fn new(
        dtype: FloatType,
        mean_dtype: FloatType,
        places: &[BucketPlace],
        shard_len: usize,
        shards: usize,
    ) -> Self {
        Self { dtype, mean_dtype, places: places.to_vec(), shard_len, padded_len: shard_len * shards }
    }

    /// Returns the number of values without padding.
    pub(super) fn len(&self) -> usize {
        self.places.last().map_or(0, |place| place.offset + place.len)
    }

    /// Returns the type of the sums.
    pub(super) const fn sum_dtype(&self) -> FloatType {
        self.mean_dtype.sum_dtype()
    }
}

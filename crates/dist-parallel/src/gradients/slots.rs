//! The slots of gradients in buckets.

use crate::flat::Flat;
use crate::mean::Mean;
use crate::{Bucket, BucketPlace, BucketPlan, Error, ParamInfo, Result, Values};

/// A bucket plan with the slot of each parameter's gradient.
#[derive(Debug)]
pub(crate) struct GradientSlots {
    plan: BucketPlan,
    /// For each parameter of the model, its slot, or `None` if it has no gradient.
    slots: Vec<Option<GradientSlot>>,
    names: Vec<String>,
}

/// The position of a parameter's gradient. Tied parameters share a slot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GradientSlot {
    pub(crate) bucket: usize,
    /// The index of the place in the bucket.
    pub(crate) place: usize,
}

impl GradientSlots {
    pub(crate) fn new(infos: &[ParamInfo], plan: BucketPlan) -> Self {
        let mut slots = vec![None; infos.len()];
        for (bucket, planned) in plan.buckets().iter().enumerate() {
            for (place, at) in planned.places.iter().enumerate() {
                slots[at.parameter] = Some(GradientSlot { bucket, place });
            }
        }
        for (parameter, info) in infos.iter().enumerate() {
            if let (true, Some(earlier)) = (info.trainable, info.same_as) {
                slots[parameter] = slots[earlier];
            }
        }
        Self { plan, slots, names: infos.iter().map(|info| info.name.clone()).collect() }
    }

    pub(crate) fn buckets(&self) -> &[Bucket] {
        self.plan.buckets()
    }

    /// Returns the number of parameters, those without a slot included.
    pub(crate) const fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns the slots of all parameters. A shared slot comes once per name.
    pub(crate) fn of_all(&self) -> impl Iterator<Item = GradientSlot> {
        self.slots.iter().copied().flatten()
    }

    /// Returns the slot of a parameter, if it exists and has one.
    pub(crate) fn of(&self, parameter: usize) -> Option<GradientSlot> {
        *self.slots.get(parameter)?
    }

    /// Returns the slot of a reported parameter. It is an error to report a parameter twice.
    pub(crate) fn reported(&self, parameter: usize, reported: &mut [bool]) -> Result<Option<GradientSlot>> {
        let count = self.len();
        let slot = *self.slots.get(parameter).ok_or(Error::NoSuchParameter { index: parameter, count })?;
        if std::mem::replace(&mut reported[parameter], true) {
            return Err(Error::ReportedTwice { parameter: self.names[parameter].clone() });
        }
        Ok(slot)
    }

    /// Stores a parameter's gradient in a bucket's buffer, or adds it to a gradient that is already there. Returns
    /// the parameter of the place.
    pub(crate) fn put(
        &self,
        parameter: usize,
        slot: GradientSlot,
        values: Values<'_>,
        (gradient, written): (&mut Flat, &mut [bool]),
    ) -> Result<usize> {
        let BucketPlace { parameter: owner, offset, len } = self.place(slot);
        let (dtype, is_first) = (self.buckets()[slot.bucket].dtype, !written[slot.place]);
        let taken = gradient.slice_mut(offset, len).take_gradients(values, dtype, is_first);
        taken.map_err(|source| Error::WrongGradient {
            parameter: self.names[parameter].clone(),
            source: source.into(),
        })?;
        written[slot.place] = true;
        Ok(owner)
    }

    /// Clears the places of a bucket's buffer without a gradient.
    pub(crate) fn clear_unwritten(&self, bucket: usize, gradient: &mut Flat, written: &[bool]) {
        for (at, _) in self.buckets()[bucket].places.iter().zip(written).filter(|(_, written)| !**written) {
            gradient.slice_mut(at.offset, at.len).clear();
        }
    }

    /// Returns the mean gradient of a parameter, given those of its bucket and the flags of parameters that have one.
    pub(crate) fn mean<'a>(
        &self,
        parameter: usize,
        used: &[bool],
        of_bucket: impl FnOnce(usize) -> Option<&'a Mean>,
    ) -> Option<Values<'a>> {
        let slot = self.of(parameter)?;
        let BucketPlace { parameter, offset, len } = self.place(slot);
        if used[parameter] { Some(of_bucket(slot.bucket)?.slice(offset, len)) } else { None }
    }

    fn place(&self, slot: GradientSlot) -> BucketPlace {
        self.buckets()[slot.bucket].places[slot.place]
    }
}

/// Adds the right sum to the left one, and recycles the right one's memory.
pub(crate) fn merge(left: &mut Flat, right: Flat, pool: &mut Vec<Flat>) {
    left.add(&right);
    pool.push(right);
}

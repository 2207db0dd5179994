//! Where each parameter's gradient goes.

use crate::flat::Flat;
use crate::mean::Mean;
use crate::{Bucket, BucketPlan, Error, ParamInfo, Place, Result, Values};

/// A plan of buckets, and by it the place of each parameter's gradient.
#[derive(Debug)]
pub(crate) struct Homes {
    plan: BucketPlan,
    /// For each parameter of the model, `None` if its gradient goes nowhere.
    homes: Vec<Option<Home>>,
    names: Vec<String>,
}

/// Where a parameter's gradient goes. Several parameters that are the same share a home.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Home {
    pub(crate) bucket: usize,
    /// Which of the bucket's places.
    pub(crate) place: usize,
}

impl Homes {
    pub(crate) fn new(infos: &[ParamInfo], plan: BucketPlan) -> Self {
        let mut homes = vec![None; infos.len()];
        for (bucket, planned) in plan.buckets().iter().enumerate() {
            for (place, at) in planned.places.iter().enumerate() {
                homes[at.parameter] = Some(Home { bucket, place });
            }
        }
        for (parameter, info) in infos.iter().enumerate() {
            if let (true, Some(earlier)) = (info.trainable, info.same_as) {
                homes[parameter] = homes[earlier];
            }
        }
        Self { plan, homes, names: infos.iter().map(|info| info.name.clone()).collect() }
    }

    pub(crate) fn buckets(&self) -> &[Bucket] {
        self.plan.buckets()
    }

    /// How many parameters there are, those without a home included.
    pub(crate) const fn len(&self) -> usize {
        self.homes.len()
    }

    /// The homes of all parameters that have one: as often as there are names for it.
    pub(crate) fn of_all(&self) -> impl Iterator<Item = Home> {
        self.homes.iter().copied().flatten()
    }

    /// The home of a parameter, if there is such a parameter and it has one.
    pub(crate) fn of(&self, parameter: usize) -> Option<Home> {
        *self.homes.get(parameter)?
    }

    /// The home of a parameter whose gradient is reported, which must not have been reported before.
    pub(crate) fn reported(&self, parameter: usize, reported: &mut [bool]) -> Result<Option<Home>> {
        let count = self.len();
        let home = *self.homes.get(parameter).ok_or(Error::NoSuchParameter { index: parameter, count })?;
        if std::mem::replace(&mut reported[parameter], true) {
            return Err(Error::ReportedTwice { parameter: self.names[parameter].clone() });
        }
        Ok(home)
    }

    /// Puts a parameter's gradient in its place in a bucket's leaf, or adds it to what is written there; tells which
    /// parameter the place is of.
    pub(crate) fn put(
        &self,
        parameter: usize,
        home: Home,
        values: Values<'_>,
        (leaf, written): (&mut Flat, &mut [bool]),
    ) -> Result<usize> {
        let Place { parameter: owner, offset, len } = self.place(home);
        let (dtype, is_first) = (self.buckets()[home.bucket].dtype, !written[home.place]);
        let taken = leaf.slice_mut(offset, len).take_gradients(values, dtype, is_first);
        taken.map_err(|source| Error::WrongGradient {
            parameter: self.names[parameter].clone(),
            source: source.into(),
        })?;
        written[home.place] = true;
        Ok(owner)
    }

    /// Makes zero of a bucket's leaf what was not written.
    pub(crate) fn clear_unwritten(&self, bucket: usize, leaf: &mut Flat, written: &[bool]) {
        for (at, _) in self.buckets()[bucket].places.iter().zip(written).filter(|(_, written)| !**written) {
            leaf.slice_mut(at.offset, at.len).clear();
        }
    }

    /// The mean gradient of a parameter, given those of its bucket and which parameters have one.
    pub(crate) fn mean<'a>(
        &self,
        parameter: usize,
        used: &[bool],
        of_bucket: impl FnOnce(usize) -> Option<&'a Mean>,
    ) -> Option<Values<'a>> {
        let home = self.of(parameter)?;
        let Place { parameter, offset, len } = self.place(home);
        if used[parameter] { Some(of_bucket(home.bucket)?.slice(offset, len)) } else { None }
    }

    fn place(&self, home: Home) -> Place {
        self.buckets()[home.bucket].places[home.place]
    }
}

/// Adds the right sum to the left one, and keeps its memory.
pub(crate) fn merge(left: &mut Flat, right: Flat, spare: &mut Vec<Flat>) {
    left.add(&right);
    spare.push(right);
}

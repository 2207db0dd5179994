//! Stages whose parameters are divided among several ranks, and whole only while they are used.

use std::sync::Arc;

use dist_collectives::Communicator;

use crate::flat::Flat;
use crate::{Bucket, Error, Lent, Params, Place, Result, Values, ValuesMut, params};

/// One rank's part of a stage's parameters: those that the stage sums gradients of, by type, each an equal part of all
/// of a type one after the other, padded with zeros.
pub(super) struct Shard {
    rank: usize,
    ranks: usize,
    /// The own parts, which the optimizer changes.
    masters: Vec<Flat>,
}

impl Shard {
    /// Divides the parameters that are in these buckets, and frees them.
    pub(super) fn new(comm: &Communicator, buckets: &[Bucket], model: &mut impl Params) -> Result<Self> {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let mut masters = Vec::with_capacity(buckets.len());
        for bucket in buckets {
            let part = bucket.len().div_ceil(ranks);
            let mut whole = Flat::zeros(bucket.dtype, part * ranks);
            params::pack(model, &bucket.places, &mut whole)?;
            masters.push(whole.part(bucket.dtype, rank * part, part));
        }
        let shard = Self { rank, ranks, masters };
        shard.free(buckets, model)?;
        Ok(shard)
    }

    /// Gathers the parameters, and lends them to the model.
    pub(super) fn gather(
        &self,
        comm: &mut Communicator,
        buckets: &[Bucket],
        model: &mut impl Params,
    ) -> Result<()> {
        let mut arriving = Vec::with_capacity(buckets.len());
        for master in &self.masters {
            let part = master.len();
            let mut whole = Flat::zeros(master.dtype(), part * self.ranks);
            whole.slice_mut(self.rank * part, part).copy_from(master.slice(0, part))?;
            arriving.push(whole.start_gather(comm));
        }
        for (bucket, whole) in buckets.iter().zip(arriving) {
            let whole = Arc::new(whole.wait()?);
            for place in &bucket.places {
                let lent = Lent::new(Arc::clone(&whole), place.offset, place.len);
                let loaded = model.load(place.parameter, lent);
                loaded.map_err(|source| refused(model, place.parameter, source))?;
            }
        }
        Ok(())
    }

    /// Frees what was gathered.
    pub(super) fn free(&self, buckets: &[Bucket], model: &mut impl Params) -> Result<()> {
        for place in buckets.iter().flat_map(|bucket| &bucket.places) {
            let unloaded = model.unload(place.parameter);
            unloaded.map_err(|source| refused(model, place.parameter, source))?;
        }
        Ok(())
    }

    /// A sum of gradients with as many zeros behind it as make equal parts.
    pub(super) fn padded(&self, sum: Flat) -> Flat {
        let part = sum.len().div_ceil(self.ranks);
        if part * self.ranks == sum.len() {
            return sum;
        }
        let mut padded = Flat::zeros(sum.dtype(), part * self.ranks);
        let copied = padded.slice_mut(0, sum.len()).copy_from(sum.slice(0, sum.len()));
        copied.expect("both are of one type");
        padded
    }

    /// This rank's part of what all ranks have added up.
    pub(super) fn own_part(&self, whole: &Flat) -> Flat {
        let part = whole.len() / self.ranks;
        whole.part(whole.dtype(), self.rank * part, part)
    }

    /// Calls `f` with each of this rank's pieces of parameters: the parameter, its values here, and their mean gradient.
    pub(super) fn change(
        &mut self,
        buckets: &[Bucket],
        means: Option<&[Flat]>,
        mut f: impl FnMut(usize, ValuesMut<'_>, Option<Values<'_>>) -> Result<()>,
    ) -> Result<()> {
        for (index, (bucket, master)) in buckets.iter().zip(&mut self.masters).enumerate() {
            let part = master.len();
            let own = self.rank * part..(self.rank + 1) * part;
            for &Place { parameter, offset, len } in &bucket.places {
                let (start, end) = (offset.max(own.start), (offset + len).min(own.end));
                if start < end {
                    let at = start - own.start;
                    let mean = means.map(|means| means[index].slice(at, end - start));
                    f(parameter, master.slice_mut(at, end - start), mean)?;
                }
            }
        }
        Ok(())
    }

    /// Gives every rank rank 0's part.
    pub(super) fn broadcast(&mut self, comm: &mut Communicator) -> Result<()> {
        self.masters.iter_mut().try_for_each(|master| {
            let len = master.len();
            master.slice_mut(0, len).broadcast(comm, 0)
        })
    }
}

fn refused(model: &impl Params, parameter: usize, source: crate::BoxError) -> Error {
    Error::Model { parameter: model.infos()[parameter].name.clone(), source }
}

//! Stages whose parameters are divided among several ranks, and whole only while they are used.

use std::sync::Arc;

use dist_collectives::Communicator;

use crate::flat::Flat;
use crate::fsdp::Strip;
use crate::mean::Mean;
use crate::watch::Watch;
use crate::{Bucket, Params, Result, Values, ValuesMut, params};

/// One rank's part of a stage's parameters: those that the stage sums gradients of, by type, each an equal part of all
/// of a type one after the other, padded with zeros.
pub(super) struct Shard {
    rank: usize,
    ranks: usize,
    /// One for each bucket.
    strips: Vec<Strip>,
    /// The own parts of the strips, which the optimizer changes.
    masters: Vec<Flat>,
    /// Whether the stage's blocks leave the parameters as they are.
    watch: Watch,
}

impl Shard {
    /// Divides the parameters that are in these buckets, and frees them.
    pub(super) fn new(comm: &Communicator, buckets: &[Bucket], model: &mut impl Params) -> Result<Self> {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let strip = |bucket: &Bucket| Strip {
            dtype: bucket.dtype,
            trainable: true,
            places: bucket.places.clone(),
            part: bucket.len().div_ceil(ranks),
        };
        let strips: Vec<Strip> = buckets.iter().map(strip).collect();
        let mut masters = Vec::with_capacity(strips.len());
        for strip in &strips {
            let mut whole = Flat::zeros(strip.dtype, strip.padded(ranks));
            params::pack(model, &strip.places, &mut whole)?;
            masters.push(whole.part(strip.dtype, rank * strip.part, strip.part));
        }
        let mut shard = Self { rank, ranks, strips, masters, watch: Watch::new(0, 1) };
        shard.free(model)?;
        Ok(shard)
    }

    /// Gathers the parameters, and lends them to the model.
    pub(super) fn gather(&mut self, comm: &mut Communicator, model: &mut impl Params) -> Result<()> {
        let mut arriving = Vec::with_capacity(self.strips.len());
        for (strip, master) in self.strips.iter().zip(&self.masters) {
            let mut whole = Flat::zeros(strip.dtype, strip.padded(self.ranks));
            let own = master.slice(0, strip.part);
            whole.slice_mut(self.rank * strip.part, strip.part).copy_from(own)?;
            arriving.push(whole.start_gather(comm));
        }
        for (strip, whole) in self.strips.iter().zip(arriving) {
            params::lend(model, &strip.places, &Arc::new(whole.wait()?))?;
        }
        self.watch.begin(model, parameters(&self.strips))
    }

    /// Frees what was gathered.
    ///
    /// # Errors
    /// Also if the stage's blocks have changed it, see [`Watch`].
    pub(super) fn free(&mut self, model: &mut impl Params) -> Result<()> {
        self.watch.end(model, parameters(&self.strips))?;
        self.strips.iter().try_for_each(|strip| params::unload(model, &strip.places))
    }

    /// A bucket's sum of gradients with as many zeros behind it as make equal parts.
    pub(super) fn padded(&self, bucket: usize, sum: Flat) -> Flat {
        let padded_len = self.strips[bucket].padded(self.ranks);
        if padded_len == sum.len() {
            return sum;
        }
        let mut padded = Flat::zeros(sum.dtype(), padded_len);
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
        means: Option<&[Mean]>,
        mut f: impl FnMut(usize, ValuesMut<'_>, Option<Values<'_>>) -> Result<()>,
    ) -> Result<()> {
        for (index, (strip, master)) in self.strips.iter().zip(&mut self.masters).enumerate() {
            for piece in strip.pieces(self.rank) {
                let mean = means.map(|means| means[index].slice(piece.at, piece.len));
                f(piece.parameter, master.slice_mut(piece.at, piece.len), mean)?;
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

fn parameters(strips: &[Strip]) -> impl Iterator<Item = usize> {
    strips.iter().flat_map(|strip| &strip.places).map(|place| place.parameter)
}

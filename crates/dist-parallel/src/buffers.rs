//! Buffers: state that blocks change by themselves, and what the ranks make of it at the end of a step.

use dist_collectives::{Communicator, ReduceOp};

use crate::broadcast::{broadcast_bucket, coalesced};
use crate::flat::Flat;
use crate::{Bucket, BucketPlan, BufferSync, FloatType, ParamInfo, Params, Result, agreement, params};

/// The buffers of a model that ranks synchronise.
#[derive(Debug)]
pub(crate) struct Buffers {
    broadcast: BucketPlan,
    mean: BucketPlan,
    /// Whether this rank has gone forward since the buffers were synchronised.
    changed: bool,
}

impl Buffers {
    pub(crate) fn new(infos: &[ParamInfo]) -> Self {
        let with = |sync| coalesced(infos, |info| info.buffer == Some(sync));
        Self { broadcast: with(BufferSync::Broadcast), mean: with(BufferSync::Mean), changed: false }
    }

    /// Notes that this rank goes forward, which may change its buffers.
    pub(crate) const fn record_forward(&mut self) {
        self.changed = true;
    }

    /// Synchronises the buffers of the ranks of these groups, one group after the other, if some of the ranks have gone
    /// forward. Every rank calls this. Nothing is sent if the model has no buffers to synchronise.
    ///
    /// With several groups, either all ranks or none have gone forward.
    pub(crate) fn synchronise<'a>(
        &mut self,
        groups: impl IntoIterator<Item = &'a mut Communicator>,
        model: &mut impl Params,
    ) -> Result<()> {
        let groups = groups.into_iter().filter(|group| group.world_size() > 1 && self.are_synchronised());
        for group in groups {
            self.synchronise_group(group, model)?;
        }
        self.changed = false;
        Ok(())
    }

    /// Whether ranks make something of any buffer.
    fn are_synchronised(&self) -> bool {
        !(self.broadcast.buckets().is_empty() && self.mean.buckets().is_empty())
    }

    fn synchronise_group(&self, group: &mut Communicator, model: &mut impl Params) -> Result<()> {
        let changed = agreement::gather(group, [u8::from(self.changed)])?;
        let Some(first) = changed.iter().position(|&[changed]| changed != 0) else { return Ok(()) };
        for bucket in self.broadcast.buckets() {
            broadcast_bucket(group, model, bucket, first)?;
        }
        let ranks = changed.iter().filter(|&&[changed]| changed != 0).count();
        for bucket in self.mean.buckets() {
            average(group, model, bucket, ranks, self.changed)?;
        }
        Ok(())
    }
}

/// Gives every rank the mean of a bucket's values over so many ranks, of which this is one if it `counts`.
fn average(
    comm: &mut Communicator,
    model: &mut impl Params,
    bucket: &Bucket,
    ranks: usize,
    counts: bool,
) -> Result<()> {
    let dtype = if bucket.dtype == FloatType::F64 { FloatType::F64 } else { FloatType::F32 };
    let mut flat = Flat::zeros(dtype, bucket.len());
    if counts {
        params::pack(model, &bucket.places, &mut flat)?;
    } else {
        flat.slice_mut(0, bucket.len()).fill_neutral();
    }
    flat.all_reduce(comm, ReduceOp::Sum)?;
    flat.slice_mut(0, bucket.len()).divide(ranks);
    params::unpack(model, &bucket.places, &flat)
}

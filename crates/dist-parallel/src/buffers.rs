//! The synchronisation of buffers: state that blocks change by themselves.

use dist_collectives::{Communicator, ReduceOp};

use crate::broadcast::{broadcast_bucket, coalesced};
use crate::flat::Flat;
use crate::{Bucket, BucketPlan, BufferSync, FloatType, ParamInfo, Params, Result, agreement, params};

/// The buffers of a model that ranks synchronise.
#[derive(Debug)]
pub(crate) struct Buffers {
    broadcast: BucketPlan,
    mean: BucketPlan,
    /// `true` if this rank has gone forward since the last synchronisation.
    changed: bool,
}

impl Buffers {
    pub(crate) fn new(infos: &[ParamInfo]) -> Self {
        let with = |sync| coalesced(infos, |info| info.buffer == Some(sync));
        Self { broadcast: with(BufferSync::Broadcast), mean: with(BufferSync::Mean), changed: false }
    }

    /// Records a forward on this rank, which can change its buffers.
    pub(crate) const fn record_forward(&mut self) {
        self.changed = true;
    }

    /// Synchronises the buffers in each of these groups in turn, if any rank has gone forward. Every rank calls this.
    /// It sends nothing if the model has no buffers to synchronise.
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

    /// Returns `true` if any buffer is synchronised.
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

/// Replaces a bucket's values by the mean over `ranks` ranks. `counts` is `true` if this rank is one of them.
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

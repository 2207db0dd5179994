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
    /// With several groups, a rank counts in the later ones as many times as ranks of its earlier groups have gone forward.
    pub(crate) fn synchronise<'a>(
        &mut self,
        groups: impl IntoIterator<Item = &'a mut Communicator>,
        model: &mut impl Params,
    ) -> Result<()> {
        let groups = groups.into_iter().filter(|group| group.world_size() > 1 && self.are_synchronised());
        let mut weight = u32::from(self.changed);
        for group in groups {
            weight = self.synchronise_group(group, model, weight)?;
        }
        self.changed = false;
        Ok(())
    }

    /// Returns `true` if any buffer is synchronised.
    fn are_synchronised(&self) -> bool {
        !(self.broadcast.buckets().is_empty() && self.mean.buckets().is_empty())
    }

    /// Synchronises the buffers in one group, in which this rank counts `weight` times. Returns the sum of these numbers.
    fn synchronise_group(
        &self,
        group: &mut Communicator,
        model: &mut impl Params,
        weight: u32,
    ) -> Result<u32> {
        let weights = agreement::gather(group, [weight])?;
        let Some(first) = weights.iter().position(|&[weight]| weight > 0) else { return Ok(0) };
        for bucket in self.broadcast.buckets() {
            broadcast_bucket(group, model, bucket, first)?;
        }
        let sum = weights.iter().fold(0_u32, |sum, &[weight]| sum.saturating_add(weight));
        let counted = weights.iter().filter(|&&[weight]| weight > 0);
        let are_equal = counted.clone().all(|&[weight]| weight == weights[first][0]);
        for bucket in self.mean.buckets() {
            match are_equal {
                true => average(group, model, bucket, counted.clone().count(), weight.min(1))?,
                false => average(group, model, bucket, sum as usize, weight)?,
            }
        }
        Ok(sum)
    }
}

/// Replaces a bucket's values by their mean over the ranks, of total weight `total`. This rank counts `weight` times.
fn average(
    comm: &mut Communicator,
    model: &mut impl Params,
    bucket: &Bucket,
    total: usize,
    weight: u32,
) -> Result<()> {
    let dtype = if bucket.dtype == FloatType::F64 { FloatType::F64 } else { FloatType::F32 };
    let mut flat = Flat::zeros(dtype, bucket.len());
    match weight {
        0 => flat.slice_mut(0, bucket.len()).fill_neutral(),
        1 => params::pack(model, &bucket.places, &mut flat)?,
        weight => {
            params::pack(model, &bucket.places, &mut flat)?;
            flat.slice_mut(0, bucket.len()).scale(weight.into());
        }
    }
    flat.all_reduce(comm, ReduceOp::Sum)?;
    flat.slice_mut(0, bucket.len()).divide(total);
    params::unpack(model, &bucket.places, &flat)
}

//! The broadcast of parameters.

use dist_collectives::Communicator;

use crate::flat::Flat;
use crate::reduce::BUCKET_BYTES_MAX;
use crate::{Bucket, BucketBytes, BucketPlan, ParamInfo, Params, Result, params};

/// Broadcasts rank 0's parameters and buffers, coalesced into buckets. Returns when every rank has them.
pub(crate) fn broadcast(comm: &mut Communicator, model: &mut impl Params) -> Result<()> {
    let plan = coalesced(model.infos(), |_| true);
    plan.buckets().iter().try_for_each(|bucket| broadcast_bucket(comm, model, bucket, 0))?;
    comm.barrier().map_err(crate::Error::communication)
}

/// Returns buckets of the selected parameters, without tied ones.
pub(crate) fn coalesced(infos: &[ParamInfo], wanted: impl Fn(&ParamInfo) -> bool) -> BucketPlan {
    let bytes = BucketBytes { first_max: BUCKET_BYTES_MAX, other_max: BUCKET_BYTES_MAX };
    BucketPlan::of(infos, bytes, |info| info.same_as.is_none() && wanted(info))
}

/// Broadcasts the root's values of the parameters of a bucket.
pub(crate) fn broadcast_bucket(
    comm: &mut Communicator,
    model: &mut impl Params,
    bucket: &Bucket,
    root: usize,
) -> Result<()> {
    let is_root = comm.rank() == root;
    let mut flat = Flat::zeros(bucket.dtype, bucket.len());
    if is_root {
        params::pack(model, &bucket.places, &mut flat)?;
    }
    flat.slice_mut(0, bucket.len()).broadcast(comm, root)?;
    if is_root { Ok(()) } else { params::unpack(model, &bucket.places, &flat) }
}

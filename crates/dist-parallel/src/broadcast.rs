//! Giving every rank one rank's parameters.

use dist_collectives::Communicator;

use crate::flat::Flat;
use crate::reduce::BUCKET_BYTES_MAX;
use crate::{BucketBytes, BucketPlan, Params, Result, params};

/// Gives every rank rank 0's parameters, many of them by one operation. Returns when every rank has them.
pub(crate) fn broadcast(comm: &mut Communicator, model: &mut impl Params) -> Result<()> {
    let is_root = comm.rank() == 0;
    let bytes = BucketBytes { first_max: BUCKET_BYTES_MAX, other_max: BUCKET_BYTES_MAX };
    // Also what is not trained.
    let plan = BucketPlan::of(model.infos(), bytes, |info| info.same_as.is_none());
    for bucket in plan.buckets() {
        let mut flat = Flat::zeros(bucket.dtype, bucket.len());
        if is_root {
            params::pack(model, &bucket.places, &mut flat)?;
        }
        flat.slice_mut(0, bucket.len()).broadcast(comm, 0)?;
        if !is_root {
            params::unpack(model, &bucket.places, &flat)?;
        }
    }
    comm.barrier().map_err(crate::Error::communication)
}

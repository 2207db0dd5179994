//! Giving every rank one rank's parameters.

use dist_collectives::Communicator;

use crate::flat::Flat;
use crate::reduce::{BUCKET_BYTES_MAX, groups};
use crate::{Bucket, FloatType, ParamInfo, Params, Place, Result, params};

/// Gives every rank rank 0's parameters, many of them by one operation. Returns when every rank has them.
pub(crate) fn broadcast(comm: &mut Communicator, model: &mut impl Params) -> Result<()> {
    let is_root = comm.rank() == 0;
    for bucket in together(model.infos()) {
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

/// The parameters that have memory of their own, those of one type together as far as they are not too long for one
/// operation.
fn together(infos: &[ParamInfo]) -> Vec<Bucket> {
    let mut buckets = Vec::new();
    for dtype in [FloatType::F32, FloatType::F64, FloatType::F16, FloatType::Bf16] {
        let is_own = |info: &ParamInfo| info.dtype == dtype && info.same_as.is_none();
        let own: Vec<usize> = (0..infos.len()).filter(|&parameter| is_own(&infos[parameter])).collect();
        let lens: Vec<usize> = own.iter().map(|&parameter| infos[parameter].len()).collect();
        for group in groups(&lens, BUCKET_BYTES_MAX / dtype.size()) {
            let mut bucket = Bucket { dtype, places: Vec::with_capacity(group.len()) };
            for index in group {
                bucket.places.push(Place { parameter: own[index], offset: bucket.len(), len: lens[index] });
            }
            buckets.push(bucket);
        }
    }
    buckets
}

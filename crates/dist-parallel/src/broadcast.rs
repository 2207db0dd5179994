//! Giving every rank one rank's parameters.

use std::ops::Range;

use dist_collectives::Communicator;

use crate::flat::Flat;
use crate::reduce::{BUCKET_BYTES_MAX, groups};
use crate::{FloatType, Params, Result, params};

/// Gives every rank rank 0's parameters, many of them by one operation. Returns when every rank has them.
pub(crate) fn broadcast(comm: &mut Communicator, model: &mut impl Params) -> Result<()> {
    let is_root = comm.rank() == 0;
    for (dtype, parameters) in together(model) {
        let lens = lens(model, &parameters);
        let mut flat = Flat::zeros(dtype, lens.iter().sum());
        if is_root {
            for (&parameter, place) in parameters.iter().zip(places(&lens)) {
                let mut into = flat.slice_mut(place.start, place.len());
                let mut copied = Ok(());
                params::read(model, parameter, &mut |values| copied = into.copy_from(values))?;
                copied?;
            }
        }
        flat.broadcast(comm)?;
        if !is_root {
            for (&parameter, place) in parameters.iter().zip(places(&lens)) {
                let values = flat.slice(place.start, place.len());
                params::write(model, parameter, |mut memory| memory.copy_from(values))?;
            }
        }
    }
    comm.barrier().map_err(crate::Error::communication)
}

/// The parameters that have memory of their own, in lists of one type that are not too long for one operation.
fn together(model: &impl Params) -> Vec<(FloatType, Vec<usize>)> {
    let mut lists = Vec::new();
    for dtype in [FloatType::F32, FloatType::F64, FloatType::F16, FloatType::Bf16] {
        let infos = model.infos().iter().enumerate();
        let own = infos.filter(|(_, info)| info.dtype == dtype && info.same_as.is_none());
        let own: Vec<usize> = own.map(|(parameter, _)| parameter).collect();
        let groups = groups(&lens(model, &own), BUCKET_BYTES_MAX / dtype.size());
        lists.extend(groups.into_iter().map(|group| (dtype, own[group].to_vec())));
    }
    lists
}

fn lens(model: &impl Params, parameters: &[usize]) -> Vec<usize> {
    parameters.iter().map(|&parameter| model.infos()[parameter].len()).collect()
}

/// Places of these lengths, one after the other.
fn places(lens: &[usize]) -> impl Iterator<Item = Range<usize>> {
    lens.iter().scan(0, |end, len| {
        let start = *end;
        *end += len;
        Some(start..*end)
    })
}

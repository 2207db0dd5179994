//! All direct operations and algorithms, as calls of a communicator.

use dist_algos::direct::{DirectAlgorithm, DirectCollective};
use dist_algos::{ALGORITHMS, Source};
use dist_collectives::{Communicator, Error, ReduceOp};

/// Returns all operations by all algorithms, with this root.
pub(crate) fn all(root: usize) -> impl Iterator<Item = (DirectCollective, &'static DirectAlgorithm)> {
    DirectCollective::all(root).into_iter().flat_map(|collective| {
        let served = ALGORITHMS.direct().filter(move |algorithm| algorithm.collective == collective.kind());
        served.map(move |algorithm| (collective, algorithm))
    })
}

/// Runs an operation once, on parts of this many elements, or on a buffer of this many if the operation has
/// no parts.
pub(crate) fn call(
    comm: &mut Communicator,
    (collective, algorithm): (DirectCollective, &'static DirectAlgorithm),
    len: usize,
) -> Result<(), Error> {
    let world_size = comm.world_size();
    let mut buffer = comm.alloc::<f32>(len)?;
    let (mut part, mut whole) = (vec![0.5_f32; len], vec![1.0_f32; len * world_size]);
    let mut comm = comm.with_algorithm(algorithm);
    let op = ReduceOp::Sum;
    match collective {
        DirectCollective::AllReduce => comm.all_reduce_buffer(&mut buffer, op),
        DirectCollective::Reduce { root } => comm.reduce(&mut part, op, root),
        DirectCollective::ReduceScatter { of: Source::Buffer } => {
            comm.reduce_scatter_in_place(&mut whole, op).map(drop)
        }
        DirectCollective::ReduceScatter { of: Source::Input } => comm.reduce_scatter(&whole, &mut part, op),
        DirectCollective::AllGather { of: Source::Buffer } => comm.all_gather_in_place(&mut whole),
        DirectCollective::AllGather { of: Source::Input } => comm.all_gather(&part, &mut whole),
        DirectCollective::Broadcast { root } => comm.broadcast(&mut part, root),
        DirectCollective::AllToAll => comm.all_to_all(&whole.clone(), &mut whole),
        DirectCollective::Barrier => comm.barrier(),
        other => panic!("say here how {other:?} is called"),
    }
}

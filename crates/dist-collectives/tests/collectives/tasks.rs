//! Everything that ranks which share memory do directly, as calls of a communicator.

use dist_algos::Source;
use dist_algos::direct::{DirectAlgorithm, Task};
use dist_collectives::{Communicator, Direct, DirectAlgorithm, Error, Operation, ReduceOp};

/// Every operation in every form, with this root.
pub(crate) fn all(root: usize) -> impl Iterator<Item = (Task, DirectAlgorithm)> {
    let forms = |task| DirectAlgorithm::ALL.map(|algorithm| (task, algorithm));
    Task::all(root).into_iter().flat_map(forms).filter(|(task, algorithm)| algorithm.serves(*task))
}

/// A form of an operation, by which it can be asked for.
pub(crate) fn direct(operation: Operation, algorithm: DirectAlgorithm) -> Direct {
    Direct::of(operation).find(|direct| direct.algorithm() == algorithm).expect("it serves the operation")
}

/// Does a task once, on parts of so many elements, or a buffer of so many where there are none.
pub(crate) fn call(
    comm: &mut Communicator,
    (task, algorithm): (Task, DirectAlgorithm),
    len: usize,
) -> Result<(), Error> {
    let world_size = comm.world_size();
    let mut operations = Operation::ALL.into_iter();
    let operation = operations.find(|operation| operation.name() == task.name()).expect("there is one");
    let mut buffer = comm.alloc::<f32>(len)?;
    let (mut part, mut whole) = (vec![0.5_f32; len], vec![1.0_f32; len * world_size]);
    let mut comm = comm.with_algorithm(direct(operation, algorithm));
    let op = ReduceOp::Sum;
    match task {
        Task::AllReduce => comm.all_reduce_buffer(&mut buffer, op),
        Task::Reduce { root } => comm.reduce(&mut part, op, root),
        Task::ReduceScatter { of: Source::Buffer } => comm.reduce_scatter_in_place(&mut whole, op).map(drop),
        Task::ReduceScatter { of: Source::Input } => comm.reduce_scatter(&whole, &mut part, op),
        Task::AllGather { of: Source::Buffer } => comm.all_gather_in_place(&mut whole),
        Task::AllGather { of: Source::Input } => comm.all_gather(&part, &mut whole),
        Task::Broadcast { root } => comm.broadcast(&mut part, root),
        Task::AllToAll => comm.all_to_all(&whole.clone(), &mut whole),
        Task::Barrier => comm.barrier(),
        other => panic!("say here how {other:?} is called"),
    }
}

//! Every operation in every form on a few numbers, with a check of the results.

use dist_collectives::tuning::{Algorithm, Operation};
use dist_collectives::{Communicator, Error, ReduceOp};

/// The form of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum CallForm {
    /// Parts have one size. The algorithm is given if there are several.
    Even(Option<Algorithm>),
    /// Parts have different sizes.
    Uneven,
    /// Without blocking.
    Started,
}

/// Returns the algorithms of an operation that send messages and treat all ranks alike.
pub(crate) fn by_messages(operation: Operation) -> impl Iterator<Item = Algorithm> {
    operation.algorithms().filter(|algorithm| matches!(algorithm, Algorithm::Messages(_)))
}

/// Returns all operations in all forms for a world of this size, without two-level and direct algorithms.
pub(crate) fn every(world_size: usize) -> impl Iterator<Item = (Operation, CallForm)> {
    // Windows have tests of their own, and announced calls move nothing.
    let others = [Operation::Window, Operation::Announced];
    let operations = Operation::ALL.into_iter().filter(move |operation| !others.contains(operation));
    operations.flat_map(move |operation| {
        let algorithms = by_messages(operation).filter(move |algorithm| algorithm.supports(world_size));
        let mut ways: Vec<CallForm> = algorithms.map(|algorithm| CallForm::Even(Some(algorithm))).collect();
        if ways.is_empty() {
            ways.push(CallForm::Even(None));
        }
        if !matches!(operation, Operation::MonitoredBarrier | Operation::Message) {
            ways.push(CallForm::Started);
        }
        if UNEVEN.contains(&operation) {
            ways.push(CallForm::Uneven);
        }
        ways.into_iter().map(move |way| (operation, way))
    })
}

const UNEVEN: [Operation; 5] = [
    Operation::ReduceScatter,
    Operation::AllGather,
    Operation::Gather,
    Operation::Scatter,
    Operation::AllToAll,
];

/// Runs the operation once. A wrong result panics.
pub(crate) fn call(comm: &mut Communicator, (operation, way): (Operation, CallForm)) -> Result<(), Error> {
    match way {
        CallForm::Even(Some(algorithm)) => even(&mut comm.with_algorithm(algorithm), operation),
        CallForm::Even(None) => even(comm, operation),
        CallForm::Uneven => uneven(comm, operation),
        CallForm::Started => started(comm, operation),
    }
}

/// Returns the data of a rank, if all ranks have the same amount.
fn part(rank: usize) -> [u64; 2] {
    [2 * rank as u64 + 1, 5]
}

/// Returns the data of these ranks, one after the other.
fn parts(ranks: std::ops::Range<usize>) -> Vec<u64> {
    ranks.flat_map(part).collect()
}

/// Returns the sum of the data of the first `ranks` ranks.
fn sum(ranks: usize) -> [u64; 2] {
    let ranks = ranks as u64;
    [ranks * ranks, 5 * ranks]
}

/// Returns the result of this rank, if rank `s` sends the parts of all ranks plus a hundred `s` times.
fn exchanged(rank: usize, world_size: usize) -> Vec<u64> {
    (0..world_size).flat_map(|from| part(rank).map(|word| word + 100 * from as u64)).collect()
}

fn even(comm: &mut Communicator, operation: Operation) -> Result<(), Error> {
    let (rank, n) = (comm.rank(), comm.world_size());
    let (root, op) = (n - 1, ReduceOp::Sum);
    let (mut own, mut all) = (part(rank), vec![0; 2 * n]);
    match operation {
        Operation::AllReduce => {
            comm.all_reduce(&mut own, op)?;
            assert_eq!(own, sum(n));
        }
        Operation::ReduceScatter => {
            comm.reduce_scatter(&parts(0..n), &mut own, op)?;
            assert_eq!(own, part(rank).map(|word| word * n as u64));
        }
        Operation::AllGather => {
            comm.all_gather(&own, &mut all)?;
            assert_eq!(all, parts(0..n));
        }
        Operation::Broadcast => {
            comm.broadcast(&mut own, root)?;
            assert_eq!(own, part(root));
        }
        Operation::Reduce => {
            comm.reduce(&mut own, op, root)?;
            assert!(rank != root || own == sum(n));
        }
        Operation::Gather => {
            comm.gather(&own, if rank == root { &mut all } else { &mut [] }, root)?;
            assert!(rank != root || all == parts(0..n));
        }
        Operation::Scatter => {
            own = [0; 2];
            comm.scatter(&parts(0..if rank == root { n } else { 0 }), &mut own, root)?;
            assert_eq!(own, part(rank));
        }
        Operation::AllToAll => {
            let sent: Vec<u64> = parts(0..n).iter().map(|word| word + 100 * rank as u64).collect();
            comm.all_to_all(&sent, &mut all)?;
            assert_eq!(all, exchanged(rank, n));
        }
        Operation::Scan => {
            comm.scan(&mut own, op)?;
            assert_eq!(own, sum(rank + 1));
        }
        Operation::ExclusiveScan => {
            comm.exclusive_scan(&mut own, op)?;
            assert_eq!(own, sum(rank));
        }
        Operation::Barrier => comm.barrier()?,
        Operation::MonitoredBarrier => comm.monitored_barrier()?,
        Operation::Message => {
            let (right, left) = ((rank + 1) % n, (rank + n - 1) % n);
            comm.send_recv(&part(rank), right, &mut own, left)?;
            assert_eq!(own, part(left));
        }
        other => panic!("say here how {other} is called"),
    }
    Ok(())
}

/// Returns the data of rank `r`: the first `r + 1` numbers from `10 r` on.
fn uneven_part(rank: usize) -> Vec<u64> {
    (0..=rank as u64).map(|word| 10 * rank as u64 + word).collect()
}

fn uneven(comm: &mut Communicator, operation: Operation) -> Result<(), Error> {
    let (rank, n) = (comm.rank(), comm.world_size());
    let root = n - 1;
    let counts: Vec<usize> = (1..=n).collect();
    let whole: Vec<u64> = (0..n).flat_map(uneven_part).collect();
    let (own, mut part, mut all) = (uneven_part(rank), vec![0; rank + 1], vec![0; whole.len()]);
    match operation {
        Operation::ReduceScatter => {
            comm.reduce_scatter_v(&whole, &counts, &mut part, ReduceOp::Sum)?;
            assert!(part.iter().zip(&own).all(|(sum, word)| *sum == word * n as u64));
        }
        Operation::AllGather => {
            comm.all_gather_v(&own, &counts, &mut all)?;
            assert_eq!(all, whole);
        }
        Operation::Gather => {
            comm.gather_v(&own, &counts, if rank == root { &mut all } else { &mut [] }, root)?;
            assert!(rank != root || all == whole);
        }
        Operation::Scatter => {
            comm.scatter_v(if rank == root { &whole } else { &[] }, &counts, &mut part, root)?;
            assert_eq!(part, own);
        }
        Operation::AllToAll => {
            let mut received = vec![0; n * own.len()];
            comm.all_to_all_v(&whole, &counts, &mut received, &vec![own.len(); n])?;
            assert_eq!(received, own.repeat(n));
        }
        other => panic!("{other} has parts of one size"),
    }
    Ok(())
}

fn started(comm: &mut Communicator, operation: Operation) -> Result<(), Error> {
    let (rank, n) = (comm.rank(), comm.world_size());
    let (root, op) = (n - 1, ReduceOp::Sum);
    let own = part(rank).to_vec();
    match operation {
        Operation::AllReduce => assert_eq!(comm.start_all_reduce(own, op).wait()?[..], sum(n)),
        Operation::ReduceScatter => {
            let scattered = comm.start_reduce_scatter(parts(0..n), op).wait()?;
            assert_eq!(scattered[..], part(rank).map(|word| word * n as u64));
        }
        Operation::AllGather => assert_eq!(comm.start_all_gather(own).wait()?[..], parts(0..n)),
        Operation::Broadcast => assert_eq!(comm.start_broadcast(own, root).wait()?[..], part(root)),
        Operation::Reduce => {
            let reduced = comm.start_reduce(own, op, root).wait()?;
            assert!(rank != root || reduced[..] == sum(n));
        }
        Operation::Gather => {
            let gathered = comm.start_gather(own, root).wait()?;
            assert!(rank != root || gathered[..] == parts(0..n));
        }
        Operation::Scatter => {
            let whole = if rank == root { parts(0..n) } else { Vec::new() };
            assert_eq!(comm.start_scatter(whole, 2, root).wait()?[..], part(rank));
        }
        Operation::AllToAll => {
            let sent: Vec<u64> = parts(0..n).iter().map(|word| word + 100 * rank as u64).collect();
            assert_eq!(comm.start_all_to_all(sent).wait()?[..], exchanged(rank, n));
        }
        Operation::Scan => assert_eq!(comm.start_scan(own, op).wait()?[..], sum(rank + 1)),
        Operation::ExclusiveScan => {
            assert_eq!(comm.start_exclusive_scan(own, op).wait()?[..], sum(rank));
        }
        Operation::Barrier => comm.start_barrier().wait()?,
        other => panic!("say here how {other} is started"),
    }
    Ok(())
}

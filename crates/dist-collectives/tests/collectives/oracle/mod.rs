//! Every operation against the oracle: element types, reductions, worlds, roots, lengths, algorithms, networks.

mod copies;
mod reductions;

use dist_collectives::{
    Algorithm, Communicator, CostModel, Element, Error, Hosts, Operation, ReductionOrder, Scoped, TwoLevel,
};
use dist_testkit::oracle::{self, Number};

/// What all checks need of an element.
pub(crate) trait Probe: Element + Number {}
impl<T: Element + Number> Probe for T {}

/// Elements of all ranks' parts together, or of a rank's buffer: nothing, fewer than ranks, as many, more, a prime, and
/// more than one piece of a pipeline.
fn lengths(world_size: usize) -> [usize; 7] {
    [0, 1, world_size - 1, world_size, world_size + 1, 127, 3000]
}

/// Every rank's input.
pub(crate) fn inputs<T: Number>(world_size: usize, len: usize) -> Vec<Vec<T>> {
    (0..world_size).map(|rank| oracle::sample(len as u64, rank, len)).collect()
}

/// Uneven parts of so many elements, one for each rank, of which some are empty.
fn parts(world_size: usize, len: usize) -> Vec<usize> {
    let mut borders: Vec<usize> = (1..world_size).map(|rank| rank * rank * 7919 % (len + 1)).collect();
    borders.extend([0, len]);
    borders.sort_unstable();
    borders.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// The part of one rank among parts of these sizes.
fn part_of<'a, T>(elements: &'a [T], counts: &[usize], rank: usize) -> &'a [T] {
    let start: usize = counts[..rank].iter().sum();
    &elements[start..start + counts[rank]]
}

#[track_caller]
pub(crate) fn assert_same<T: Number>(found: &[T], expected: &[T], context: &dyn std::fmt::Display) {
    assert_eq!(found.len(), expected.len(), "{context}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(found.same(*expected), "{context}: element {index} is {found:?}, not {expected:?}");
    }
}

/// The library's choice, and every algorithm of the operation: those of two levels serve where hosts are known.
fn ways(operation: Operation) -> impl Iterator<Item = Option<Algorithm>> {
    let two_level = TwoLevel::of(operation).map(Algorithm::from);
    std::iter::once(None).chain(Algorithm::of(operation).chain(two_level).map(Some))
}

/// Ranks that share hosts: alike, by turns, alone, all together, and not alike.
const HOSTS: [&[u64]; 7] = [
    &[0, 0, 1, 1],
    &[0, 1, 0, 1],
    &[0, 0, 0, 0, 1, 1, 1, 1],
    &[0, 0, 1, 1, 2, 2],
    &[0, 0, 0],
    &[0, 1, 2, 3, 4],
    &[0, 0, 0, 1, 1, 2, 0],
];

/// Makes two levels as cheap as they can be, so that they are what the library chooses.
fn tell_of_hosts(comm: &mut Communicator, hosts: &[u64]) {
    let inside = CostModel { round_ps: 1, byte_ps: 1, reduced_byte_ps: 0 };
    comm.set_hosts(Hosts::new(hosts), inside).expect("they are the hosts of this world");
}

/// The communicator with this algorithm, if there is to be one.
fn by(comm: &mut Communicator, algorithm: Option<Algorithm>) -> Scoped<'_> {
    match algorithm {
        Some(algorithm) => comm.with_algorithm(algorithm),
        None => comm.with_order(ReductionOrder::Canonical),
    }
}

/// Whether the call was done. The algorithm that was asked for may be refused for this world or this order; any other
/// error is a failure.
#[track_caller]
fn done(algorithm: Option<Algorithm>, outcome: Result<(), Error>) -> bool {
    match outcome {
        Ok(()) => true,
        Err(
            Error::Unsupported { .. }
            | Error::Order { .. }
            | Error::NeedsEvenParts { .. }
            | Error::NoHosts { .. },
        ) if algorithm.is_some() => false,
        Err(error) => panic!("{algorithm:?}: {error}"),
    }
}

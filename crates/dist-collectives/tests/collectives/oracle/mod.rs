//! Every operation against the oracle: element types, reductions, worlds, roots, lengths, algorithms, networks.

mod copies;
mod elements;
mod reductions;

use std::ops::{Deref, DerefMut};

use dist_algos::Order;
use dist_collectives::tuning::{Algorithm, CostModel, Hosts, Operation};
use dist_collectives::{Communicator, Element, Error, ReductionOrder};
use dist_testkit::oracle::{self, Number};

/// The requirements of all checks for an element type.
pub(crate) trait Probe: Element + Number {}
impl<T: Element + Number> Probe for T {}

/// Elements of all ranks' parts together, or of a rank's buffer: zero, fewer than ranks, as many, more, a prime,
/// and more than one piece of a pipeline.
fn lengths(world_size: usize) -> [usize; 7] {
    [0, 1, world_size - 1, world_size, world_size + 1, 127, 3000]
}

/// Returns the input of every rank.
pub(crate) fn inputs<T: Number>(world_size: usize, len: usize) -> Vec<Vec<T>> {
    (0..world_size).map(|rank| oracle::sample(len as u64, rank, len)).collect()
}

/// Returns uneven parts of this many elements, one for each rank; some are empty.
fn parts(world_size: usize, len: usize) -> Vec<usize> {
    let mut borders: Vec<usize> = (1..world_size).map(|rank| rank * rank * 7919 % (len + 1)).collect();
    borders.extend([0, len]);
    borders.sort_unstable();
    borders.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// Returns the part of one rank among parts of these sizes.
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

/// Returns the library's choice and all algorithms of the operation; two-level ones apply if hosts are known.
fn ways(operation: Operation) -> impl Iterator<Item = Option<Algorithm>> {
    let by_messages = operation.algorithms().filter(|algorithm| !matches!(algorithm, Algorithm::Direct(_)));
    std::iter::once(None).chain(by_messages.map(Some))
}

/// Layouts of ranks on hosts: regular, alternating, one rank per host, all on one host, and irregular.
const HOSTS: [&[u64]; 7] = [
    &[0, 0, 1, 1],
    &[0, 1, 0, 1],
    &[0, 0, 0, 0, 1, 1, 1, 1],
    &[0, 0, 1, 1, 2, 2],
    &[0, 0, 0],
    &[0, 1, 2, 3, 4],
    &[0, 0, 0, 1, 1, 2, 0],
];

/// A communicator and its hosts.
pub(crate) struct World {
    comm: Communicator,
    hosts: Option<Hosts>,
}

/// The reason why a forced algorithm is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    NoHosts,
    Unsupported,
    Order,
}

impl World {
    pub(crate) const fn new(comm: Communicator) -> Self {
        Self { comm, hosts: None }
    }

    /// Makes two-level algorithms as cheap as possible, so that the library chooses them.
    fn among(mut comm: Communicator, hosts: &[u64]) -> Self {
        let (hosts, inside) = (Hosts::new(hosts), CostModel { round_ps: 1, byte_ps: 1, reduced_byte_ps: 0 });
        comm.set_topology(hosts.clone(), inside).expect("they are the hosts of this world");
        Self { comm, hosts: Some(hosts) }
    }

    /// Makes a call by this algorithm, or by the library's choice, and returns `true` if it was executed. The
    /// algorithm must be refused exactly if it does not support these ranks or this order.
    #[track_caller]
    pub(crate) fn does(
        &mut self,
        algorithm: Option<Algorithm>,
        call: impl FnOnce(&mut Communicator) -> Result<(), Error>,
    ) -> bool {
        let expected = algorithm.and_then(|algorithm| self.refusal(algorithm));
        let outcome = match algorithm {
            Some(algorithm) => call(&mut self.comm.with_algorithm(algorithm)),
            None => call(&mut self.comm.with_order(ReductionOrder::Canonical)),
        };
        let refused = match outcome {
            Ok(()) => None,
            Err(Error::NoHosts { .. }) => Some(Refusal::NoHosts),
            Err(Error::Unsupported { .. }) => Some(Refusal::Unsupported),
            Err(Error::Order { .. }) => Some(Refusal::Order),
            Err(error) => panic!("{algorithm:?}: {error}"),
        };
        assert_eq!(refused, expected, "{algorithm:?} on {}", self.comm.world_size());
        refused.is_none()
    }

    /// Returns the reason for which an algorithm must be refused.
    fn refusal(&self, algorithm: Algorithm) -> Option<Refusal> {
        let n = self.comm.world_size();
        let (supported, order) = match (algorithm, &self.hosts) {
            (Algorithm::Direct(_), _) => return None,
            (Algorithm::TwoLevel(_), None) => return Some(Refusal::NoHosts),
            (Algorithm::TwoLevel(two), Some(hosts)) => {
                (two.supports(hosts), two.order(hosts).unwrap_or(Order::Canonical))
            }
            (Algorithm::Messages(flat), _) => (flat.supports(n), flat.order(n).unwrap_or(Order::Canonical)),
        };
        let canonical = self.comm.order() == ReductionOrder::Canonical;
        match supported {
            false => Some(Refusal::Unsupported),
            true => (canonical && order < Order::Canonical).then_some(Refusal::Order),
        }
    }
}

impl Deref for World {
    type Target = Communicator;

    fn deref(&self) -> &Communicator {
        &self.comm
    }
}

impl DerefMut for World {
    fn deref_mut(&mut self) -> &mut Communicator {
        &mut self.comm
    }
}

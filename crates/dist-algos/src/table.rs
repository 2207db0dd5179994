//! The table of all algorithms, and the choice among them.

use std::ops::Deref;

use crate::direct::{DirectAlgorithm, DirectCase, one_shot, read_from_all, staged, write_to_all};
use crate::hierarchical::{self, TwoLevelAlgorithm};
use crate::{
    Algorithm, CollectiveKind, CostModel, Error, Hosts, MessageAlgorithm, Order, Placement, Result,
    all_to_all, barrier, binomial, chain, circulant, halving_doubling, knomial, linear, neighbour, pairwise,
    recursive_doubling, ring, scan,
};

/// A list of algorithms.
///
/// Everything that enumerates algorithms takes a table as an argument: the choice, the verifier, documents, benches and
/// predictions. A program that adds an algorithm of its own passes a table with one more entry:
///
/// ```
/// use dist_algos::{ALGORITHMS, AlgorithmTable, CollectiveKind, MessageAlgorithm};
///
/// static NOTHING: MessageAlgorithm = MessageAlgorithm {
///     name: "nothing",
///     supports: |world_size| world_size == 1,
///     ..MessageAlgorithm::NOTHING
/// };
/// let mut algorithms = ALGORITHMS.to_vec();
/// algorithms.push((&NOTHING).into());
/// let table = AlgorithmTable::new(&algorithms);
/// assert_eq!(table.of(CollectiveKind::Barrier).last(), Some((&NOTHING).into()));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct AlgorithmTable<'a>(&'a [Algorithm]);

/// All algorithms of this crate. Among algorithms of equal cost, the first is chosen.
pub static ALGORITHMS: AlgorithmTable<'static> = AlgorithmTable::new(&[
    Algorithm::Messages(&recursive_doubling::ALL_REDUCE),
    Algorithm::Messages(&halving_doubling::ALL_REDUCE),
    Algorithm::Messages(&circulant::ALL_REDUCE),
    Algorithm::Messages(&binomial::ALL_REDUCE),
    Algorithm::Messages(&ring::ALL_REDUCE),
    Algorithm::Messages(&pairwise::ALL_REDUCE),
    Algorithm::Messages(&halving_doubling::REDUCE_SCATTER),
    Algorithm::Messages(&circulant::REDUCE_SCATTER),
    Algorithm::Messages(&ring::REDUCE_SCATTER),
    Algorithm::Messages(&pairwise::REDUCE_SCATTER),
    Algorithm::Messages(&recursive_doubling::ALL_GATHER),
    Algorithm::Messages(&circulant::BRUCK),
    Algorithm::Messages(&circulant::ALL_GATHER),
    Algorithm::Messages(&neighbour::ALL_GATHER),
    Algorithm::Messages(&ring::ALL_GATHER),
    Algorithm::Messages(&binomial::BROADCAST),
    Algorithm::Messages(&knomial::BROADCAST),
    Algorithm::Messages(&chain::BROADCAST),
    Algorithm::Messages(&circulant::BROADCAST),
    Algorithm::Messages(&binomial::REDUCE),
    Algorithm::Messages(&pairwise::REDUCE),
    Algorithm::Messages(&linear::GATHER),
    Algorithm::Messages(&binomial::GATHER),
    Algorithm::Messages(&linear::SCATTER),
    Algorithm::Messages(&binomial::SCATTER),
    Algorithm::Messages(&all_to_all::WINDOWED),
    Algorithm::Messages(&all_to_all::PAIRWISE),
    Algorithm::Messages(&all_to_all::BRUCK),
    Algorithm::Messages(&scan::SCAN),
    Algorithm::Messages(&scan::EXCLUSIVE_SCAN),
    Algorithm::Messages(&barrier::RING),
    Algorithm::Messages(&barrier::DISSEMINATION),
    Algorithm::TwoLevel(&hierarchical::LEADERS_RECURSIVE_DOUBLING),
    Algorithm::TwoLevel(&hierarchical::LEADERS_HALVING_DOUBLING),
    Algorithm::TwoLevel(&hierarchical::LEADERS_CIRCULANT),
    Algorithm::TwoLevel(&hierarchical::LEADERS_BINOMIAL),
    Algorithm::TwoLevel(&hierarchical::LEADERS_RING),
    Algorithm::TwoLevel(&hierarchical::LEADERS_PAIRWISE),
    Algorithm::TwoLevel(&hierarchical::PARTS_RECURSIVE_DOUBLING),
    Algorithm::TwoLevel(&hierarchical::PARTS_HALVING_DOUBLING),
    Algorithm::TwoLevel(&hierarchical::PARTS_CIRCULANT),
    Algorithm::TwoLevel(&hierarchical::PARTS_BINOMIAL),
    Algorithm::TwoLevel(&hierarchical::PARTS_RING),
    Algorithm::TwoLevel(&hierarchical::PARTS_PAIRWISE),
    Algorithm::TwoLevel(&hierarchical::REDUCE_SCATTER),
    Algorithm::TwoLevel(&hierarchical::ALL_GATHER),
    Algorithm::TwoLevel(&hierarchical::BROADCAST_BINOMIAL),
    Algorithm::TwoLevel(&hierarchical::BROADCAST_KNOMIAL),
    Algorithm::TwoLevel(&hierarchical::BROADCAST_CHAIN),
    Algorithm::TwoLevel(&hierarchical::BROADCAST_CIRCULANT),
    Algorithm::TwoLevel(&hierarchical::REDUCE_BINOMIAL),
    Algorithm::TwoLevel(&hierarchical::REDUCE_PAIRWISE),
    Algorithm::TwoLevel(&hierarchical::BARRIER_RING),
    Algorithm::TwoLevel(&hierarchical::BARRIER_DISSEMINATION),
    Algorithm::Direct(&one_shot::ALL_REDUCE),
    Algorithm::Direct(&staged::ALL_REDUCE),
    Algorithm::Direct(&read_from_all::ALL_REDUCE),
    Algorithm::Direct(&write_to_all::ALL_REDUCE),
    Algorithm::Direct(&one_shot::REDUCE_SCATTER),
    Algorithm::Direct(&read_from_all::REDUCE_SCATTER),
    Algorithm::Direct(&one_shot::ALL_GATHER),
    Algorithm::Direct(&read_from_all::ALL_GATHER),
    Algorithm::Direct(&one_shot::BROADCAST),
    Algorithm::Direct(&read_from_all::BROADCAST),
    Algorithm::Direct(&one_shot::REDUCE),
    Algorithm::Direct(&staged::REDUCE),
    Algorithm::Direct(&read_from_all::REDUCE),
    Algorithm::Direct(&one_shot::ALL_TO_ALL),
    Algorithm::Direct(&read_from_all::ALL_TO_ALL),
    Algorithm::Direct(&one_shot::BARRIER),
]);

impl<'a> AlgorithmTable<'a> {
    /// Returns the table of these algorithms. The names of an operation's algorithms must be unique.
    pub const fn new(algorithms: &'a [Algorithm]) -> Self {
        Self(algorithms)
    }

    /// Returns the algorithms of an operation.
    pub fn of(self, collective: CollectiveKind) -> impl Iterator<Item = Algorithm> + Clone + 'a {
        self.0.iter().copied().filter(move |algorithm| algorithm.collective() == collective)
    }

    /// Returns the algorithms that send messages and treat all ranks alike.
    pub fn messages(self) -> impl Iterator<Item = &'static MessageAlgorithm> + Clone + 'a {
        self.0.iter().filter_map(|algorithm| match algorithm {
            Algorithm::Messages(algorithm) => Some(*algorithm),
            _ => None,
        })
    }

    /// Returns the algorithms that send messages inside hosts and between hosts.
    pub fn two_level(self) -> impl Iterator<Item = &'static TwoLevelAlgorithm> + Clone + 'a {
        self.0.iter().filter_map(|algorithm| match algorithm {
            Algorithm::TwoLevel(algorithm) => Some(*algorithm),
            _ => None,
        })
    }

    /// Returns the algorithms for ranks that share memory.
    pub fn direct(self) -> impl Iterator<Item = &'static DirectAlgorithm> + Clone + 'a {
        self.0.iter().filter_map(|algorithm| match algorithm {
            Algorithm::Direct(algorithm) => Some(*algorithm),
            _ => None,
        })
    }

    /// Returns the algorithm of an operation with this name.
    ///
    /// # Errors
    /// If there is none.
    pub fn find(self, collective: CollectiveKind, name: &str) -> Result<Algorithm> {
        let all = self.of(collective);
        all.clone().find(|algorithm| algorithm.name() == name).ok_or_else(|| Error::UnknownAlgorithm {
            operation: collective.name(),
            name: name.into(),
            known: all.map(Algorithm::name).collect::<Vec<_>>().join(", "),
        })
    }

    /// Returns the cheapest algorithm that reduces in this order or a stricter one, for ranks that may share cores.
    /// `bytes` is the size of the memory that the schedules work on. Among algorithms of equal cost, the first is
    /// chosen. Returns `None` if no algorithm supports the world. [`ALGORITHMS`] has a canonical algorithm of every
    /// operation for every world that has ranks.
    pub fn suggest(
        self,
        collective: CollectiveKind,
        placement: Placement,
        bytes: usize,
        order: Order,
        model: &CostModel,
    ) -> Option<&'static MessageAlgorithm> {
        let world_size = placement.ranks;
        self.messages()
            .filter(|algorithm| algorithm.collective == collective)
            .filter(|algorithm| algorithm.supports(world_size) && algorithm.keeps(order, world_size))
            .min_by_key(|algorithm| algorithm.picoseconds(placement, bytes, model))
    }

    /// Returns the cheapest two-level algorithm of an operation that reduces in this order or a stricter one, and its
    /// time. The cost models are those of messages inside hosts and between hosts. Returns `None` if there is no such
    /// algorithm, for example for canonical order on hosts that do not preserve it.
    pub fn suggest_two_level(
        self,
        collective: CollectiveKind,
        hosts: &Hosts,
        bytes: usize,
        order: Order,
        [inside, across]: [&CostModel; 2],
    ) -> Option<(&'static TwoLevelAlgorithm, u128)> {
        let time =
            |two: &TwoLevelAlgorithm| two.cost(hosts).picoseconds(inside, across, bytes, two.chunks(hosts));
        self.two_level()
            .filter(|two| two.collective == collective && two.supports(hosts) && two.keeps(order, hosts))
            .map(|two| (two, time(two)))
            .min_by_key(|&(_, time)| time)
    }

    /// Returns the fastest algorithm for ranks that share memory: the last one of the operation that
    /// [fits](DirectAlgorithm::fits). Returns `None` if the operation has no such algorithm.
    pub fn suggest_direct(
        self,
        collective: CollectiveKind,
        case: &DirectCase<'_>,
    ) -> Option<&'static DirectAlgorithm> {
        let of_operation = self.direct().filter(|algorithm| algorithm.collective == collective);
        of_operation.filter(|algorithm| (algorithm.fits)(case)).last()
    }
}

impl Deref for AlgorithmTable<'_> {
    type Target = [Algorithm];

    fn deref(&self) -> &[Algorithm] {
        self.0
    }
}

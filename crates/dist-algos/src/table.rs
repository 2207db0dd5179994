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
            known: all.map(Algorithm::name).collect::<Vec<_>>().join(", ").into(),
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

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{ChunkLocation, Source, Step};
    use dist_transport::Rank;

    #[test]
    fn names_are_unique_in_their_operation_and_lead_back_to_their_algorithm() {
        for algorithm in ALGORITHMS.iter() {
            assert_eq!(ALGORITHMS.find(algorithm.collective(), algorithm.name()), Ok(*algorithm));
            let same = ALGORITHMS.iter().filter(|other| *other == algorithm);
            assert_eq!(same.count(), 1, "{algorithm:?}");
        }
        assert_eq!(format!("{:>6}", Algorithm::from(&ring::ALL_REDUCE)), "  ring");
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let error = ALGORITHMS.find(CollectiveKind::Scan, "star").unwrap_err();
        assert_eq!(error.to_string(), "\"star\" is no algorithm of scan: there are recursive_doubling");
    }

    const DEFAULT: CostModel = CostModel { round_ps: 65_536 * 200, byte_ps: 200, reduced_byte_ps: 0 };
    /// As measured over loopback.
    const LOOPBACK: CostModel = CostModel { reduced_byte_ps: 50, ..DEFAULT };
    const SLOW_REDUCTION: CostModel = CostModel { reduced_byte_ps: 20_000, ..DEFAULT };
    const CANONICAL: Order = Order::Canonical;

    /// The name of the cheapest algorithm.
    fn suggest(
        collective: CollectiveKind,
        [ranks, cores]: [usize; 2],
        bytes: usize,
        order: Order,
        model: &CostModel,
    ) -> &'static str {
        ALGORITHMS.suggest(collective, Placement { ranks, cores }, bytes, order, model).unwrap().name
    }

    /// Each line is an operation, the ranks, an order, and names with the sizes from which they are expected.
    #[rstest]
    #[case(CollectiveKind::AllReduce, 2, CANONICAL, &[(8, "recursive_doubling"), (64 << 20, "recursive_doubling")])]
    #[case(CollectiveKind::AllReduce, 3, CANONICAL, &[(8, "recursive_doubling"), (64 << 20, "pairwise_circulant")])]
    #[case(CollectiveKind::AllReduce, 4, CANONICAL, &[(8, "recursive_doubling"), (256 << 10, "recursive_doubling")])]
    #[case(CollectiveKind::AllReduce, 4, CANONICAL, &[(257 << 10, "halving_doubling"), (64 << 20, "halving_doubling")])]
    #[case(CollectiveKind::AllReduce, 5, CANONICAL, &[(8, "binomial"), (64 << 20, "pairwise_circulant")])]
    #[case(CollectiveKind::AllReduce, 5, Order::Uniform, &[(8, "recursive_doubling"), (64 << 20, "pairwise_circulant")])]
    #[case(CollectiveKind::AllReduce, 5, Order::Any, &[(8, "recursive_doubling"), (64 << 20, "circulant")])]
    #[case(CollectiveKind::AllReduce, 12, CANONICAL, &[(8, "recursive_doubling"), (64 << 20, "pairwise_circulant")])]
    #[case(CollectiveKind::AllReduce, 64, Order::Any, &[(8, "recursive_doubling"), (64 << 20, "halving_doubling")])]
    // Halving in blocks is chosen if the blocks have similar sizes.
    #[case(CollectiveKind::AllReduce, 12, CANONICAL, &[(512 << 10, "halving_doubling")])]
    #[case(CollectiveKind::AllReduce, 24, CANONICAL, &[(512 << 10, "halving_doubling")])]
    #[case(CollectiveKind::AllReduce, 9, CANONICAL, &[(512 << 10, "pairwise_circulant")])]
    #[case(CollectiveKind::ReduceScatter, 12, CANONICAL, &[(512 << 10, "halving_doubling")])]
    #[case(CollectiveKind::ReduceScatter, 24, CANONICAL, &[(512 << 10, "halving_doubling")])]
    #[case(CollectiveKind::ReduceScatter, 9, CANONICAL, &[(512 << 10, "pairwise")])]
    // Data that is scattered is not copied if copying takes longer than a few rounds.
    #[case(CollectiveKind::ReduceScatter, 4, CANONICAL, &[(1 << 16, "halving_doubling"), (1 << 20, "pairwise")])]
    #[case(CollectiveKind::ReduceScatter, 8, CANONICAL, &[(1 << 19, "halving_doubling"), (4 << 20, "pairwise")])]
    #[case(CollectiveKind::ReduceScatter, 16, Order::Any, &[(8, "halving_doubling")])]
    #[case(CollectiveKind::Broadcast, 8, Order::Any, &[(1 << 10, "binomial"), (1 << 20, "scatter_circulant"), (64 << 20, "chain")])]
    #[case(CollectiveKind::Broadcast, 64, Order::Any, &[(64 << 20, "scatter_circulant")])]
    #[case(CollectiveKind::Broadcast, 2, Order::Any, &[(64 << 20, "binomial")])]
    #[case(CollectiveKind::AllGather, 16, Order::Any, &[(1 << 20, "recursive_doubling")])]
    #[case(CollectiveKind::Reduce, 8, CANONICAL, &[(8, "binomial"), (64 << 20, "pairwise_gather")])]
    // Any order, and gathering, take a logarithm of rounds in every world.
    #[case(CollectiveKind::AllGather, 6, Order::Any, &[(8, "bruck"), (1 << 18, "bruck")])]
    #[case(CollectiveKind::AllGather, 13, Order::Any, &[(1 << 20, "bruck")])]
    #[case(CollectiveKind::AllGather, 63, Order::Any, &[(8 << 20, "bruck")])]
    #[case(CollectiveKind::ReduceScatter, 6, Order::Any, &[(8, "circulant"), (1 << 18, "circulant")])]
    #[case(CollectiveKind::ReduceScatter, 13, Order::Any, &[(1 << 20, "circulant")])]
    #[case(CollectiveKind::ReduceScatter, 63, Order::Any, &[(8 << 20, "circulant")])]
    fn small_messages_get_few_rounds_and_large_ones_few_bytes(
        #[case] collective: CollectiveKind,
        #[case] ranks: usize,
        #[case] order: Order,
        #[case] expected: &[(usize, &str)],
    ) {
        for &(bytes, name) in expected {
            assert_eq!(suggest(collective, [ranks; 2], bytes, order, &DEFAULT), name, "{bytes} bytes");
        }
    }

    /// With a core for each rank it is a binomial tree, and a scatter from 256 KiB on. As measured over loopback.
    #[rstest]
    #[case(CollectiveKind::Broadcast, &[3, 4, 8], &DEFAULT, &[(8, "knomial"), (64 << 10, "knomial"), (1 << 20, "knomial")])]
    #[case(CollectiveKind::Reduce, &[3, 4, 8], &DEFAULT, &[(8, "binomial"), (64 << 10, "binomial"), (1 << 20, "binomial")])]
    #[case(CollectiveKind::Gather, &[3, 4, 8], &DEFAULT, &[(8, "linear"), (64 << 10, "linear"), (1 << 20, "linear")])]
    #[case(CollectiveKind::AllToAll, &[4], &DEFAULT, &[(16 << 10, "bruck"), (256 << 10, "windowed")])]
    #[case(CollectiveKind::AllToAll, &[8], &DEFAULT, &[(64 << 10, "bruck"), (256 << 10, "windowed")])]
    #[case(CollectiveKind::AllReduce, &[4], &DEFAULT, &[(64 << 10, "recursive_doubling"), (1 << 20, "halving_doubling")])]
    #[case(CollectiveKind::AllReduce, &[8], &DEFAULT, &[(64 << 10, "binomial"), (1 << 20, "halving_doubling")])]
    // A binomial tree has fewer messages, reduces less, and waits twice as often.
    #[case(CollectiveKind::AllReduce, &[4], &LOOPBACK, &[(8, "recursive_doubling"), (64 << 10, "recursive_doubling")])]
    #[case(CollectiveKind::AllReduce, &[6], &LOOPBACK, &[(1 << 20, "halving_doubling")])]
    #[case(CollectiveKind::AllReduce, &[8], &LOOPBACK, &[(64 << 10, "binomial"), (1 << 20, "halving_doubling")])]
    fn on_two_cores_the_work_of_all_ranks_counts(
        #[case] collective: CollectiveKind,
        #[case] ranks: &[usize],
        #[case] model: &CostModel,
        #[case] expected: &[(usize, &str)],
    ) {
        for &ranks in ranks {
            for &(bytes, name) in expected {
                assert_eq!(suggest(collective, [ranks, 2], bytes, CANONICAL, model), name, "{ranks} {bytes}");
            }
        }
    }

    #[test]
    fn a_schedule_in_which_all_ranks_do_the_same_costs_the_same_wherever_they_run() {
        for ranks in 3..=16 {
            let time =
                |cores| ring::ALL_REDUCE.picoseconds(Placement { ranks, cores }, ranks << 16, &LOOPBACK);
            for cores in 1..ranks {
                assert_eq!(time(cores), time(ranks), "{ranks} ranks, {cores} cores");
            }
        }
    }

    #[rstest]
    fn two_ranks_choose_alike_on_two_cores_and_on_one(
        #[values(CollectiveKind::AllReduce, CollectiveKind::Broadcast, CollectiveKind::Reduce)]
        collective: CollectiveKind,
        #[values(8, 1 << 16, 1 << 20, 64 << 20)] bytes: usize,
    ) {
        let suggest = |cores| suggest(collective, [2, cores], bytes, CANONICAL, &DEFAULT);
        assert_eq!(suggest(1), suggest(2));
    }

    #[test]
    fn reducing_less_is_worth_a_round_where_reducing_is_slow() {
        let suggest = |model| suggest(CollectiveKind::AllReduce, [4; 2], 16 << 10, CANONICAL, model);
        assert_eq!(suggest(&DEFAULT), "recursive_doubling");
        assert_eq!(suggest(&SLOW_REDUCTION), "halving_doubling");
    }

    #[test]
    fn every_operation_has_an_algorithm_for_every_world_size_and_order() {
        for collective in CollectiveKind::ALL {
            for ranks in 1..=64 {
                for bytes in [0, 1 << 10, 1 << 16, 1 << 20, 1 << 27] {
                    for order in [Order::Any, Order::Uniform, Order::Canonical] {
                        let placement = Placement::dedicated(ranks);
                        let found = ALGORITHMS.suggest(collective, placement, bytes, order, &LOOPBACK);
                        let found = found.expect("there is one");
                        assert!(found.supports(ranks) && found.keeps(order, ranks), "{found:?}");
                    }
                }
            }
        }
    }

    /// Returns `true` if no rank sends a chunk that it has received into.
    fn sends_no_sums(algorithm: &MessageAlgorithm, world_size: usize) -> bool {
        Rank::all(world_size).all(|rank| {
            let mut sums = Vec::new();
            algorithm.steps(rank, 0).all(|step| {
                let Step::Exchange { send, receive } = step else { return true };
                let sent = send.is_none_or(|send| send.chunks.indices().all(|chunk| !sums.contains(&chunk)));
                let received = receive.filter(|receive| receive.place == ChunkLocation::Buffer);
                sums.extend(received.into_iter().flat_map(|receive| receive.chunks.indices()));
                sent
            })
        })
    }

    #[test]
    fn a_reduce_scatter_that_sends_from_the_input_sends_no_sums() {
        for algorithm in ALGORITHMS.messages().filter(|it| it.collective == CollectiveKind::ReduceScatter) {
            for world_size in 1..=17 {
                let is_of_input = algorithm.sends_from(world_size) == Source::Input;
                assert!(
                    sends_no_sums(algorithm, world_size) || !is_of_input,
                    "{algorithm:?}, {world_size} ranks"
                );
            }
        }
        assert!(!sends_no_sums(&halving_doubling::REDUCE_SCATTER, 4));
    }
}

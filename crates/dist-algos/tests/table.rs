//! The table of all algorithms: names, and the choice.

use dist_algos::{
    ALGORITHMS, Algorithm, ChunkLocation, CollectiveKind, CostModel, MessageAlgorithm, Order, Placement,
    Source, Step, halving_doubling, ring,
};
use dist_transport::Rank;
use rstest::rstest;

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
/// Costs measured over loopback.
const LOOPBACK: CostModel = CostModel { reduced_byte_ps: 50, ..DEFAULT };
const SLOW_REDUCTION: CostModel = CostModel { reduced_byte_ps: 20_000, ..DEFAULT };
const CANONICAL: Order = Order::Canonical;

/// Returns the name of the cheapest algorithm.
fn suggest(
    collective: CollectiveKind,
    [ranks, cores]: [usize; 2],
    bytes: usize,
    order: Order,
    model: &CostModel,
) -> &'static str {
    ALGORITHMS
        .suggest(collective, Placement { ranks, cores }, bytes, order, model)
        .expect("every operation has an algorithm")
        .name
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

/// Measured over loopback. With a core for each rank the choice is a binomial tree, and a scatter from 256
/// KiB on.
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
fn a_symmetric_schedule_has_the_same_cost_on_any_number_of_cores() {
    for ranks in 3..=16 {
        let time = |cores| ring::ALL_REDUCE.picoseconds(Placement { ranks, cores }, ranks << 16, &LOOPBACK);
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

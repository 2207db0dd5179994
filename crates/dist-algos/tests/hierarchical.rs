//! Two-level schedules are proven for many layouts of ranks on hosts.

use dist_algos::hierarchical::{self, TwoLevelAlgorithm};
use dist_algos::verify::{self, Report};
use dist_algos::{ALGORITHMS, CollectiveKind, CostModel, Error, Hosts, Order, binomial};
use dist_transport::Rank;
use rstest::rstest;

/// Maximum number of ranks.
const RANKS_MAX: usize = 20;

/// Returns layouts of this many ranks on hosts: all on one host, consecutive ranks on hosts of every size, ranks
/// assigned to hosts in turn, and a few irregular ones.
fn layouts(world_size: usize) -> Vec<Hosts> {
    let ranks = || 0..world_size as u64;
    let mut layouts = vec![Hosts::new(&vec![7; world_size])];
    for size in 1..world_size as u64 {
        layouts.push(Hosts::new(&ranks().map(|rank| rank / size).collect::<Vec<_>>()));
        layouts.push(Hosts::new(&ranks().map(|rank| rank % size).collect::<Vec<_>>()));
    }
    for seed in 1..5 {
        let irregular = ranks().map(|rank| (rank + seed) * (rank + 3 * seed) * 7919 % 31 % (seed + 2));
        layouts.push(Hosts::new(&irregular.collect::<Vec<_>>()));
    }
    layouts
}

fn all_layouts() -> impl Iterator<Item = Hosts> {
    (1..=RANKS_MAX).flat_map(layouts)
}

#[rstest]
fn every_schedule_is_proven_on_every_layout_with_every_root(
    #[values(
        CollectiveKind::AllReduce,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllGather,
        CollectiveKind::Broadcast,
        CollectiveKind::Reduce,
        CollectiveKind::Barrier
    )]
    collective: CollectiveKind,
) {
    let mut proofs = 0;
    for hosts in all_layouts() {
        for two in of(collective).filter(|two| two.supports(&hosts)) {
            for root in collective.roots(hosts.world_size()) {
                prove(two, &hosts, root);
                proofs += 1;
            }
        }
    }
    assert!(proofs > 0);
}

/// Returns the two-level algorithms of an operation.
fn of(collective: CollectiveKind) -> impl Iterator<Item = &'static TwoLevelAlgorithm> {
    ALGORITHMS.two_level().filter(move |two| two.collective == collective)
}

#[track_caller]
fn prove(two: &TwoLevelAlgorithm, hosts: &Hosts, root: usize) -> Report {
    verify::two_level(two, hosts, root)
        .unwrap_or_else(|error| panic!("{two:?}, root {root}, {hosts:?}: {error}"))
}

#[test]
fn schedules_serve_every_layout_but_where_parts_need_regular_hosts() {
    for hosts in all_layouts() {
        for two in ALGORITHMS.two_level() {
            let serves = match two.collective {
                CollectiveKind::AllReduce if two.name.contains("parts") => hosts.regular().is_some(),
                CollectiveKind::ReduceScatter | CollectiveKind::AllGather => hosts.contiguous().is_some(),
                _ => true,
            };
            assert_eq!(two.supports(&hosts), serves, "{two:?} on {hosts:?}");
        }
    }
}

#[test]
fn all_reduce_on_regular_hosts_has_the_declared_cost() {
    for hosts in all_layouts().filter(|hosts| hosts.regular().is_some()) {
        for two in of(CollectiveKind::AllReduce) {
            let (report, costs) = (prove(two, &hosts, 0), two.cost(&hosts));
            assert_eq!(report.rounds, costs.inside.rounds + costs.across.rounds, "{two:?} {hosts:?}");
            assert_eq!(report.path, costs.inside.path + costs.across.path, "{two:?} {hosts:?}");
        }
    }
}

#[test]
fn all_gather_and_reduce_scatter_move_as_little_as_can_be() {
    for hosts in all_layouts().filter(|hosts| hosts.contiguous().is_some()) {
        for two in [&hierarchical::ALL_GATHER, &hierarchical::REDUCE_SCATTER] {
            let report = prove(two, &hosts, 0);
            assert_eq!(report.chunks_sent_max(), hosts.world_size() - 1, "{hosts:?}");
            assert_eq!(report.path, hosts.world_size() - 1, "{hosts:?}");
        }
    }
}

/// Hosts of consecutive ranks with these numbers of ranks.
fn of_sizes(sizes: &[usize]) -> Hosts {
    let names: Vec<u64> = (0..).zip(sizes).flat_map(|(host, &size)| vec![host; size]).collect();
    Hosts::new(&names)
}

#[rstest]
#[case::neighbours(&[4, 4, 4], &hierarchical::LEADERS_HALVING_DOUBLING, Order::Canonical)]
#[case::the_last_smaller(&[4, 4, 3], &hierarchical::LEADERS_HALVING_DOUBLING, Order::Canonical)]
#[case::the_last_larger(&[3, 4], &hierarchical::LEADERS_HALVING_DOUBLING, Order::Uniform)]
#[case::no_power_of_two(&[3, 3], &hierarchical::LEADERS_HALVING_DOUBLING, Order::Uniform)]
#[case::neighbours_in_parts(&[8, 8, 8], &hierarchical::PARTS_HALVING_DOUBLING, Order::Canonical)]
#[case::parts_of_no_power_of_two(&[3, 3], &hierarchical::PARTS_HALVING_DOUBLING, Order::Any)]
fn orders_are_as_documented(#[case] sizes: &[usize], #[case] two: &TwoLevelAlgorithm, #[case] order: Order) {
    let hosts = of_sizes(sizes);
    assert_eq!(two.order(&hosts), Some(order));
    assert_eq!(prove(two, &hosts, 0).order, Some(order));
}

#[test]
fn parts_send_the_minimum_between_hosts() {
    let hosts = of_sizes(&[4, 4]);
    let two = &hierarchical::PARTS_RECURSIVE_DOUBLING;
    let costs = two.cost(&hosts);
    // Four ranks, each a quarter.
    assert_eq!((two.chunks(&hosts), costs.across.sent_max), (4, 1));
    assert_eq!((costs.inside.rounds, costs.inside.path), (4, 6));
}

#[test]
fn parts_are_suggested_where_hosts_are_regular_and_leaders_elsewhere() {
    let across = CostModel { round_ps: 50_000_000, ..CostModel::default() };
    let inside = CostModel { round_ps: 500_000, byte_ps: 100, ..CostModel::default() };
    let suggest = |sizes: &[usize], bytes| {
        let hosts = of_sizes(sizes);
        let found = ALGORITHMS.suggest_two_level(
            CollectiveKind::AllReduce,
            &hosts,
            bytes,
            Order::Canonical,
            [&inside, &across],
        );
        found.map(|(two, time)| {
            let costs = two.cost(&hosts);
            assert_eq!(time, costs.picoseconds(&inside, &across, bytes, two.chunks(&hosts)));
            two.name
        })
    };
    assert_eq!(suggest(&[4, 4, 4, 4], 8), Some("two_level/parts/recursive_doubling"));
    assert_eq!(suggest(&[4, 4, 4, 4], 64 << 20), Some("two_level/parts/halving_doubling"));
    assert_eq!(suggest(&[4, 4, 4, 2], 64 << 20), Some("two_level/leaders/halving_doubling"));
    assert_eq!(suggest(&[3, 3], 8), None);
}

#[test]
fn hosts_of_another_world_have_no_schedule() {
    let (hosts, rank) = (of_sizes(&[2, 2]), Rank::new(0, 5).unwrap());
    for two in ALGORITHMS.two_level() {
        assert!(two.steps(rank, &hosts, 0).is_none(), "{two:?}");
    }
}

#[test]
fn layouts_and_roots_that_are_not_served_are_refused() {
    let check = |two: &TwoLevelAlgorithm, hosts: &Hosts, root| {
        let (operation, algorithm, world_size) = (two.collective.name(), two.name, hosts.world_size());
        let refused = Err(Error::Unsupported { operation, algorithm, world_size });
        assert_eq!(verify::two_level(two, hosts, root), refused);
    };
    let (uneven, cards) = (of_sizes(&[2, 3]), Hosts::new(&[0, 1, 0, 1]));
    check(&hierarchical::PARTS_RING, &uneven, 0);
    check(&hierarchical::ALL_GATHER, &cards, 0);
    check(&hierarchical::REDUCE_SCATTER, &cards, 0);
    check(&hierarchical::REDUCE_BINOMIAL, &uneven, 5);
    for two in ALGORITHMS.two_level() {
        check(two, &Hosts::new(&[]), 0);
    }
}

#[test]
fn a_two_level_broadcast_crosses_once_to_each_host() {
    let (hosts, two) = (of_sizes(&[5, 5, 5, 5]), &hierarchical::BROADCAST_BINOMIAL);
    assert_eq!(two.cost(&hosts).across, binomial::BROADCAST.cost(4));
    assert_eq!(prove(two, &hosts, 7).rounds, 5);
}

//! Two-level schedules are proven for many ways in which ranks can share hosts.

use dist_algos::hierarchical::{self, Form, Plan};
use dist_algos::verify::hierarchical as verify;
use dist_algos::{AllReduce, Barrier, Broadcast, CostModel, Error, Hosts, Order, Reduce};
use dist_transport::Rank;
use rstest::rstest;

/// Worlds of up to so many ranks.
const RANKS_MAX: usize = 20;

/// Ways to put so many ranks on hosts: all on one, neighbours on hosts of every size, dealt like cards to every
/// number of hosts, and a few without any rule.
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

#[test]
fn every_all_reduce_is_proven_on_every_layout() {
    for hosts in all_layouts() {
        for plan in Plan::all(&hosts) {
            let report = verify::all_reduce(plan, &hosts)
                .unwrap_or_else(|error| panic!("{plan:?} {hosts:?}: {error}"));
            if hosts.regular().is_some() {
                let costs = plan.cost(&hosts);
                assert_eq!(report.rounds, costs.inside.rounds + costs.across.rounds, "{plan:?} {hosts:?}");
                assert_eq!(report.path, costs.inside.path + costs.across.path, "{plan:?} {hosts:?}");
            }
        }
    }
}

#[test]
fn every_reduce_and_broadcast_is_proven_on_every_layout_with_every_root() {
    for hosts in all_layouts() {
        for root in 0..hosts.world_size() {
            for &across in Reduce::ALL {
                let report = verify::reduce(across, &hosts, root);
                report.unwrap_or_else(|error| panic!("{across} to {root} {hosts:?}: {error}"));
            }
            for &across in Broadcast::ALL {
                let report = verify::broadcast(across, &hosts, root);
                report.unwrap_or_else(|error| panic!("{across} from {root} {hosts:?}: {error}"));
            }
        }
    }
}

#[test]
fn every_barrier_is_proven_on_every_layout() {
    for hosts in all_layouts() {
        for &across in Barrier::ALL {
            verify::barrier(across, &hosts).unwrap_or_else(|error| panic!("{across} {hosts:?}: {error}"));
        }
    }
}

#[test]
fn every_all_gather_and_reduce_scatter_is_proven_on_contiguous_hosts() {
    for hosts in all_layouts().filter(|hosts| hosts.contiguous().is_some()) {
        for report in [verify::all_gather(&hosts), verify::reduce_scatter(&hosts)] {
            let report = report.unwrap_or_else(|error| panic!("{hosts:?}: {error}"));
            assert_eq!(report.chunks_sent_max(), hosts.world_size() - 1, "{hosts:?}");
            assert_eq!(report.path, hosts.world_size() - 1, "{hosts:?}");
        }
    }
}

/// Hosts of neighbouring ranks, so many on each.
fn of_sizes(sizes: &[usize]) -> Hosts {
    let names: Vec<u64> = (0..).zip(sizes).flat_map(|(host, &size)| vec![host; size]).collect();
    Hosts::new(&names)
}

#[rstest]
#[case::neighbours(&[4, 4, 4], Form::Leaders, Order::Canonical)]
#[case::the_last_smaller(&[4, 4, 3], Form::Leaders, Order::Canonical)]
#[case::the_last_larger(&[3, 4], Form::Leaders, Order::Uniform)]
#[case::no_power_of_two(&[3, 3], Form::Leaders, Order::Uniform)]
#[case::neighbours_in_parts(&[8, 8, 8], Form::Parts, Order::Canonical)]
#[case::parts_of_no_power_of_two(&[3, 3], Form::Parts, Order::Any)]
fn orders_are_as_documented(#[case] sizes: &[usize], #[case] form: Form, #[case] order: Order) {
    let (hosts, plan) = (of_sizes(sizes), Plan { form, across: AllReduce::HalvingDoubling });
    assert_eq!(plan.order(&hosts), order);
    assert_eq!(verify::all_reduce(plan, &hosts).unwrap().order, Some(order));
}

#[test]
fn parts_send_across_what_a_host_has_to() {
    let hosts = of_sizes(&[4, 4]);
    let plan = Plan { form: Form::Parts, across: AllReduce::RecursiveDoubling };
    let costs = plan.cost(&hosts);
    // Four ranks, each a quarter.
    assert_eq!((plan.chunks(&hosts), costs.across.sent_max), (4, 1));
    assert_eq!((costs.inside.rounds, costs.inside.path), (4, 6));
}

#[test]
fn parts_are_suggested_where_hosts_are_regular_and_leaders_elsewhere() {
    let hosts = of_sizes(&[4, 4, 4, 4]);
    let across = CostModel { round_ps: 50_000_000, ..CostModel::default() };
    let inside = CostModel { round_ps: 500_000, byte_ps: 100, ..CostModel::default() };
    let suggest = |bytes| Plan::suggest(&hosts, bytes, Order::Canonical, &inside, &across);
    let small = suggest(8).unwrap();
    assert_eq!(small.to_string(), "parts/recursive_doubling");
    assert_eq!(suggest(64 << 20), Some(Plan { form: Form::Parts, across: AllReduce::HalvingDoubling }));
    let uneven = Plan::suggest(&of_sizes(&[4, 4, 4, 2]), 64 << 20, Order::Canonical, &inside, &across);
    assert_eq!(uneven, Some(Plan { form: Form::Leaders, across: AllReduce::HalvingDoubling }));
    assert_eq!(Plan::suggest(&of_sizes(&[3, 3]), 8, Order::Canonical, &inside, &across), None);
}

#[test]
fn hosts_of_another_world_have_no_schedule() {
    let (hosts, rank) = (of_sizes(&[2, 2]), Rank::new(0, 5).unwrap());
    let plan = Plan { form: Form::Leaders, across: AllReduce::Ring };
    assert!(plan.phases(rank, &hosts).is_none());
    assert!(hierarchical::reduce(rank, &hosts, Reduce::Binomial, 0).is_none());
    assert!(hierarchical::broadcast(rank, &hosts, Broadcast::Binomial, 0).is_none());
    assert!(hierarchical::barrier(rank, &hosts, Barrier::Ring).is_none());
    assert!(hierarchical::all_gather(rank, &hosts).is_none());
    assert!(hierarchical::reduce_scatter(rank, &hosts).is_none());
}

#[test]
fn layouts_that_are_not_served_are_refused() {
    let unsupported = |error| matches!(error, Error::Unsupported { algorithm: "two levels", .. });
    let (uneven, cards) = (of_sizes(&[2, 3]), Hosts::new(&[0, 1, 0, 1]));
    let parts = Plan { form: Form::Parts, across: AllReduce::Ring };
    assert!(unsupported(verify::all_reduce(parts, &uneven).unwrap_err()));
    assert!(unsupported(verify::all_gather(&cards).unwrap_err()));
    assert!(unsupported(verify::reduce_scatter(&cards).unwrap_err()));
    assert!(unsupported(verify::reduce(Reduce::Binomial, &uneven, 5).unwrap_err()));
    assert!(unsupported(verify::barrier(Barrier::Ring, &Hosts::new(&[])).unwrap_err()));
    assert_eq!(Plan::all(&Hosts::new(&[])).count(), 0);
}

#[test]
fn a_two_level_broadcast_crosses_once_to_each_host() {
    let hosts = of_sizes(&[5, 5, 5, 5]);
    let costs = hierarchical::broadcast_cost(&hosts, Broadcast::Binomial);
    assert_eq!(costs.across, Broadcast::Binomial.cost(4));
    assert_eq!(verify::broadcast(Broadcast::Binomial, &hosts, 7).unwrap().rounds, 5);
}

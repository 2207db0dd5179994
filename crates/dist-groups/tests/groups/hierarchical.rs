//! Two-level algorithms: chosen when faster, correct, inherited, and with little traffic on slow links.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::time::Duration;

use dist_collectives::tuning::{CostCache, Operation};
use dist_collectives::{Communicator, ReduceOp, ReductionOrder};
use dist_groups::{CommunicatorExt, Group, Mesh};
use dist_transport::sim;
use rstest::rstest;

/// Returns a network whose messages take a microsecond within a host and a hundred between hosts.
fn network(hosts: &[u64]) -> sim::Network {
    let memory = sim::Link::new(Duration::from_micros(1), 5_000_000_000);
    let cable = sim::Link::new(Duration::from_micros(50), 100_000_000);
    sim::Network::new(hosts.len()).with_hosts(hosts).with_memory_link(memory).with_host_link(cable)
}

fn by_host(world: &mut Communicator) -> bool {
    world.enable_hierarchical(&CostCache::disabled(), "sim").unwrap()
}

fn all_reduce_name(comm: &Communicator) -> &'static str {
    comm.algorithm(Operation::AllReduce, 1 << 20).unwrap().unwrap().name()
}

#[rstest]
#[case::regular(&[0, 0, 0, 0, 1, 1, 1, 1])]
#[case::dealt_like_cards(&[0, 1, 2, 0, 1, 2, 0, 1, 2])]
fn sums_are_the_same_and_sooner_there(#[case] hosts: &'static [u64]) {
    let sum = move |going_by_host: bool| {
        let outcome = network(hosts).run(move |transport| {
            let mut world = Communicator::new(transport);
            // Whole numbers have the same sum in any order, even if ranks of a host are not consecutive.
            world.set_order(ReductionOrder::Any);
            assert_eq!(going_by_host && by_host(&mut world), going_by_host);
            assert_eq!(all_reduce_name(&world).starts_with("two_level/"), going_by_host);
            world.barrier().unwrap();
            let start = world.runtime().now();
            let mut values = vec![world.rank() as u64 + 1; 100_000];
            world.all_reduce(&mut values, ReduceOp::Sum).unwrap();
            world.barrier().unwrap();
            assert!(values.iter().all(|&value| value == values[0]));
            (values[0], world.runtime().now() - start)
        });
        outcome.results[0]
    };
    let ((flat, flat_time), (two_level, two_level_time)) = (sum(false), sum(true));
    assert_eq!(two_level, flat);
    assert!(two_level_time < flat_time, "{two_level_time:?} {flat_time:?}");
}

#[rstest]
#[case::one_host(&[7; 4])]
#[case::a_host_for_each(&[1, 2, 3, 4])]
fn nothing_changes_without_two_levels(#[case] hosts: &'static [u64]) {
    let outcome = network(hosts).run(|transport| {
        let mut world = Communicator::new(transport);
        let before = (world.cost_model(), all_reduce_name(&world));
        assert!(!by_host(&mut world));
        assert_eq!((world.cost_model(), all_reduce_name(&world)), before);
        world.traffic().messages_sent
    });
    assert_eq!(outcome.results, [0; 4]);
}

#[test]
fn groups_and_meshes_made_later_go_by_host_too() {
    let outcome = network(&[0, 0, 0, 0, 1, 1, 1, 1]).run(|transport| {
        let mut world = Communicator::new(transport);
        by_host(&mut world);
        let some = Group::new(&mut world, &[1, 0, 6, 5]).unwrap();
        let of_some = some.as_ref().map(|group| all_reduce_name(group).starts_with("two_level/"));
        let on_host = world.split_by_host().unwrap();
        let inside = (on_host.cost_model(), all_reduce_name(&on_host).starts_with("two_level/"));
        assert!(inside.0.round_ps < world.cost_model().round_ps && !inside.1, "{inside:?}");
        let mut mesh = Mesh::new(world, [("data", 4), ("shard", 2)]).unwrap();
        let across = all_reduce_name(mesh.axis("data").unwrap()).starts_with("two_level/");
        let beside = all_reduce_name(mesh.axis("shard").unwrap()).starts_with("two_level/");
        (of_some, across, beside)
    });
    assert_eq!(outcome.results[0], (Some(true), true, false), "{:?}", outcome.results);
    assert_eq!(outcome.results[2], (None, true, false));
}

#[test]
fn hosts_may_differ_in_size_and_every_rank_goes_by_the_same_costs() {
    let outcome = network(&[0, 0, 0, 1, 1, 2]).run(|transport| {
        let mut world = Communicator::new(transport);
        assert!(by_host(&mut world));
        let mut sum = [u32::try_from(world.rank()).unwrap(); 1000];
        world.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        (world.cost_model(), sum == [15; 1000])
    });
    assert!(outcome.results.iter().all(|found| *found == (outcome.results[0].0, true)));
}

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

/// Measures the costs, as `Communicator::from_env` does.
fn tune(world: &mut Communicator) {
    world.tune(Some(&CostCache::disabled()), "sim").unwrap();
}

fn all_reduce_name(comm: &Communicator) -> &'static str {
    comm.algorithm(Operation::AllReduce, 1 << 20).unwrap().unwrap().name()
}

#[rstest]
#[case::regular(&[0, 0, 0, 0, 1, 1, 1, 1])]
#[case::dealt_like_cards(&[0, 1, 2, 0, 1, 2, 0, 1, 2])]
fn sums_are_the_same_and_sooner_there(#[case] hosts: &'static [u64]) {
    let sum = move |in_two_levels: bool| {
        let outcome = network(hosts).run(move |transport| {
            let mut world = Communicator::new(transport);
            // Whole numbers have the same sum in any order, even if ranks of a host are not consecutive.
            world.set_order(ReductionOrder::Any);
            if in_two_levels {
                tune(&mut world);
            }
            assert_eq!(all_reduce_name(&world).starts_with("two_level/"), in_two_levels);
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
fn worlds_of_one_level_have_algorithms_of_one_level(#[case] hosts: &'static [u64]) {
    let outcome = network(hosts).run(|transport| {
        let mut world = Communicator::new(transport);
        tune(&mut world);
        all_reduce_name(&world)
    });
    assert!(outcome.results.iter().all(|name| !name.starts_with("two_level/")), "{:?}", outcome.results);
}

#[test]
fn without_measurements_messages_inside_hosts_count_as_cheaper() {
    let outcome = network(&[0, 0, 1, 1]).run(|transport| {
        let mut world = Communicator::new(transport);
        let before = world.cost_model();
        assert_eq!(world.tune(None, "sim").unwrap(), before);
        let inside = world.split_by_host().unwrap().cost_model();
        assert!(inside.round_ps < before.round_ps && inside.byte_ps < before.byte_ps, "{inside:?}");
        all_reduce_name(&world).starts_with("two_level/")
    });
    assert_eq!(outcome.results, [true; 4]);
}

#[test]
fn the_costs_of_both_levels_are_stored_and_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("costs");
    let costs = || {
        let path = path.clone();
        let outcome = network(&[0, 0, 1, 1]).run(move |transport| {
            let mut world = Communicator::new(transport);
            // The file of rank 0 counts.
            let cache = if world.rank() == 0 { CostCache::at(&path) } else { CostCache::disabled() };
            let across = world.tune(Some(&cache), "sim").unwrap();
            (across, world.split_by_host().unwrap().cost_model(), world.runtime().now())
        });
        assert!(
            outcome
                .results
                .iter()
                .all(|found| (found.0, found.1) == (outcome.results[0].0, outcome.results[0].1))
        );
        outcome.results[0]
    };
    let (measured, found) = (costs(), costs());
    assert_eq!((measured.0, measured.1), (found.0, found.1));
    assert!(found.2 < measured.2 / 2, "the second job only checks the costs: {found:?}, {measured:?}");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains("\nsim-inside 4 2 ") && text.contains("\nsim-across 4 2 "), "{text}");
}

#[test]
fn groups_and_meshes_that_cross_hosts_use_two_levels_too() {
    let outcome = network(&[0, 0, 0, 0, 1, 1, 1, 1]).run(|transport| {
        let mut world = Communicator::new(transport);
        tune(&mut world);
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
fn hosts_may_differ_in_size_and_every_rank_has_the_same_costs() {
    let outcome = network(&[0, 0, 0, 1, 1, 2]).run(|transport| {
        let mut world = Communicator::new(transport);
        tune(&mut world);
        let mut sum = [u32::try_from(world.rank()).unwrap(); 1000];
        world.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        (world.cost_model(), sum == [15; 1000])
    });
    assert!(outcome.results.iter().all(|found| *found == (outcome.results[0].0, true)));
}

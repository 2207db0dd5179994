//! Groups by host, on a network with known hosts.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use dist_collectives::tuning::Hosts;
use dist_collectives::{Communicator, Config};
use dist_groups::{CommunicatorExt, Group};
use dist_testkit::process;
use dist_transport::sim;
use rstest::rstest;

use crate::worlds::{PROCESS_LIMIT, gathered};

/// Returns the groups of this rank: on its host, across hosts, and of leaders.
fn groups(world: &mut Communicator) -> [Option<Vec<u64>>; 3] {
    let on_host = world.split_by_host().unwrap();
    let across = world.split_across_hosts().unwrap();
    [Some(on_host), Some(across), world.host_leaders().unwrap()].map(|group| Some(gathered(&mut group?)))
}

#[rstest]
#[case(&[3, 3, 3])]
#[case(&[3, 4, 5])]
#[case(&[5, 5, 5, 3, 3, 3])]
#[case(&[5, 3, 5, 3, 4, 3, 3])]
fn groups_by_host_have_the_ranks_of_the_hosts(#[case] ids: &'static [u64]) {
    let outcome = sim::Network::new(ids.len()).with_hosts(ids).run(move |transport| {
        let mut world = Communicator::new(transport);
        let hosts = Hosts::new(&world.hosts());
        assert_eq!(hosts, Hosts::new(ids));
        let (rank, numbers) =
            (world.rank(), |ranks: &[usize]| ranks.iter().map(|&rank| rank as u64).collect());
        let on_host = numbers(hosts.members(hosts.of(rank)));
        let across = numbers(&hosts.across(hosts.place(rank)).collect::<Vec<_>>());
        let leaders: Vec<usize> = hosts.leaders().collect();
        let leaders = leaders.contains(&rank).then(|| numbers(&leaders));
        assert_eq!(groups(&mut world), [Some(on_host), Some(across), leaders]);
    });
    assert_eq!(outcome.results.len(), ids.len());
}

#[test]
fn a_group_knows_the_hosts_of_its_own_ranks() {
    let outcome = sim::Network::new(5).with_hosts(&[1, 2, 2, 1, 2]).run(|transport| {
        let mut world = Communicator::new(transport);
        let group = Group::new(&mut world, &[4, 3, 1]).unwrap();
        group.map(|group| Hosts::new(&group.hosts()))
    });
    assert_eq!(outcome.results[4], Some(Hosts::new(&[2, 1, 2])));
}

#[test]
fn processes_are_grouped_by_their_host_id() {
    let Some(rank) = process::rank() else {
        let name = "hosts::processes_are_grouped_by_their_host_id";
        return process::ranks(4, name, PROCESS_LIMIT).assert_success();
    };
    let config = Config::from_env().unwrap().with_host_id(["a", "b", "b", "a"][rank]);
    let found = groups(&mut Communicator::join(&config).unwrap());
    let expected = match rank {
        0 => [Some(vec![0, 3]), Some(vec![0, 1]), Some(vec![0, 1])],
        1 => [Some(vec![1, 2]), Some(vec![0, 1]), Some(vec![0, 1])],
        2 => [Some(vec![1, 2]), Some(vec![3, 2]), None],
        _ => [Some(vec![0, 3]), Some(vec![3, 2]), None],
    };
    assert_eq!(found, expected);
}

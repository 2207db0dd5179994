//! Two levels are chosen without being asked for: the bytes of an all_reduce, counted on the interfaces of hosts that are
//! network namespaces.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::print_stdout, reason = "a test that is skipped says why")]

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

use dist_collectives::tuning::{Hosts, Operation};
use dist_collectives::{Communicator, ReduceOp, ReductionOrder};
use dist_groups::{CommunicatorExt, Group};
use dist_testkit::{hosts, process};
use rstest::rstest;

use crate::worlds::PROCESS_LIMIT;

/// The host of each rank, as in `0 0 1`.
const PLACES: &str = "TEST_PLACES";
/// Elements of the buffer, of 8 bytes each.
const LEN: usize = 1 << 19;
const BYTES: u64 = 8 * LEN as u64;
/// More than the headers of small messages, acknowledgements and heartbeats take during a call.
const LITTLE: u64 = 200_000;

/// Returns the bytes that this rank's host sends while these calls are made. All ranks of the world count at once.
fn sent(world: &mut Communicator, calls: impl FnOnce()) -> u64 {
    world.barrier().unwrap();
    let before = hosts::sent_bytes("out");
    world.barrier().unwrap();
    calls();
    world.barrier().unwrap();
    let sent = hosts::sent_bytes("out") - before;
    // The next calls begin when all ranks have counted.
    world.barrier().unwrap();
    sent
}

fn all_reduce(comm: &mut Communicator) {
    let mut values = vec![comm.rank() as u64 + 1; LEN];
    comm.all_reduce(&mut values, ReduceOp::Sum).unwrap();
    let size = comm.world_size() as u64;
    assert!(values.iter().all(|&value| value == size * (size + 1) / 2));
}

/// Checks that a host sent the minimum of an all_reduce among the ranks of a group: 2(H − 1)/H of the buffer.
fn check(what: &str, sent: u64, group: &Communicator) {
    let count = Hosts::new(&group.hosts()).count() as u64;
    let least = 2 * (count - 1) * BYTES / count;
    // Each packet has headers.
    let most = least + least / 10 + LITTLE;
    let algorithm = group.algorithm(Operation::AllReduce, BYTES.try_into().unwrap()).unwrap();
    assert!(
        (least..most).contains(&sent),
        "{what}: a host sent {sent} bytes, and not {least}, by {algorithm:?}"
    );
}

fn rank_that_counts() {
    let mut world = Communicator::from_env().unwrap();
    let ids: Vec<u64> = std::env::var(PLACES).unwrap().split(' ').map(|id| id.parse().unwrap()).collect();
    let places = Hosts::new(&ids);
    assert_eq!(Hosts::new(&world.hosts()), places);
    // Whole numbers have the same sum in any order, so hosts need not be subtrees of the canonical tree.
    world.set_order(ReductionOrder::Any);
    let mut calls = world.fork().unwrap();
    check("all ranks", sent(&mut world, || all_reduce(&mut calls)), &calls);

    let mut on_host = world.split_by_host().unwrap();
    check("the ranks of a host", sent(&mut world, || all_reduce(&mut on_host)), &on_host);

    let without_first: Vec<usize> = (1..world.world_size()).collect();
    let mut some = Group::new(&mut world, &without_first).unwrap();
    let bytes = sent(&mut world, || some.iter_mut().for_each(|group| all_reduce(group)));
    if let Some(group) = some {
        check("a group that crosses hosts", bytes, &group);
    }

    let mut leaders = world.host_leaders().unwrap();
    let bytes = sent(&mut world, || leaders.iter_mut().for_each(|group| all_reduce(group)));
    if let Some(group) = leaders {
        check("a rank of each host", bytes, &group);
    }

    if places.order() == dist_collectives::algorithms::Order::Canonical {
        calls.set_order(ReductionOrder::Canonical);
        check("canonical order", sent(&mut world, || all_reduce(&mut calls)), &calls);
    }
}

#[rstest]
#[case::one_rank_per_host("0 1")]
#[case::two("0 0 1 1")]
#[case::three("0 0 0 1 1 1")]
#[case::two_on_three_hosts("0 0 1 1 2 2")]
#[case::different_numbers("0 0 0 1")]
#[case::ranks_that_alternate("0 1 0 1 1")]
fn a_host_sends_the_minimum_of_an_all_reduce_for_any_number_of_ranks_on_it(#[case] places: &str) {
    if process::rank().is_some() {
        return rank_that_counts();
    }
    let of_ranks: Vec<usize> = places.split(' ').map(|id| id.parse().unwrap()).collect();
    let hosts = match hosts::Hosts::new(of_ranks.iter().max().unwrap() + 1) {
        Ok(hosts) => hosts,
        Err(reason) => return println!("skipped, as this machine cannot have hosts of its own: {reason}"),
    };
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    let mut file =
        std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&secret).unwrap();
    file.write_all(b"known to the ranks of this job").unwrap();
    let (address, secret) = (hosts.address(0), secret.display().to_string());
    let variables = [(PLACES, places), ("MASTER_ADDR", &*address), ("DIST_SECRET_FILE", &*secret)];
    let name = std::thread::current().name().unwrap().to_owned();
    let starter = |rank: usize| hosts.starter(of_ranks[rank]);
    process::ranks_through(of_ranks.len(), &name, PROCESS_LIMIT, &variables, starter).assert_success();
}

//! Processes that may not open more files: they report it at once, and all ranks name the process.
#![cfg(all(feature = "shm", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::time::Duration;

use dist_testkit::process;
use dist_transport::process::{Config, ProcessTransport};
use dist_transport::{Cause, Error, Incoming, Outgoing, Sink, Transport};
use rstest::rstest;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const LIMIT: Duration = Duration::from_secs(60);
/// The rank that may not open more files.
const STARVED: &str = "DIST_TEST_STARVED";
const MEDIUM: &str = "DIST_TRANSPORT";
const SOCKETS: &str = "DIST_SOCKETS_PER_PEER";

/// Returns how many files this process has open.
fn open_files() -> u64 {
    std::fs::read_dir("/proc/self/fd").unwrap().count() as u64 - 1
}

/// Passes a word round the ring.
fn pass_round(transport: &mut dyn Transport) -> Result<(), Error> {
    let (rank, deadline) = (transport.rank(), transport.runtime().deadline(LIMIT));
    let mut received = [0; 8];
    transport.exchange(
        Some(Outgoing { to: rank.right().index(), parts: &[&[7; 8]] }),
        Some(Incoming { from: rank.left().index(), len: 8, sink: Sink::Into(&mut received) }),
        &deadline.into(),
    )
}

/// Passes a word around the world. If this is its rank, the process may then open no more files. Creates
/// groups until one cannot be connected, and returns its error.
fn connect_groups(world: &mut ProcessTransport, starved: usize) -> Error {
    let mut groups = Vec::new();
    let mut passed = pass_round(world);
    if world.rank().index() == starved {
        let limit = Some(open_files());
        setrlimit(Resource::Nofile, Rlimit { current: limit, maximum: limit }).unwrap();
    }
    while passed.is_ok() {
        assert!(groups.len() < 100, "each group takes a connection");
        passed = world.fork(&[0, 1, 2]).and_then(|group| {
            groups.push(group.unwrap());
            pass_round(&mut **groups.last_mut().unwrap())
        });
    }
    passed.unwrap_err()
}

fn rank_of_a_starved_job(starved: usize) {
    let mut world = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
    let error = connect_groups(&mut world, starved);
    // The rank itself may get the system's error.
    let abort = loop {
        if let Some(abort) = world.aborted() {
            break abort;
        }
        world.runtime().yield_now();
    };
    assert_eq!(abort.rank, starved, "{abort}, {error}");
    let Cause::GaveUp { why } = &abort.cause else { panic!("{abort}") };
    assert!(why.contains("open files"), "{why}");
}

#[rstest]
fn a_rank_that_may_open_no_more_files_is_named_by_all(
    #[values("tcp", "shm", "auto")] medium: &str,
    #[values("0", "1", "2")] starved: &str,
) {
    if process::rank().is_some() {
        return rank_of_a_starved_job(std::env::var(STARVED).unwrap().parse().unwrap());
    }
    let name = std::thread::current().name().unwrap().to_owned();
    let variables = [(STARVED, starved), (MEDIUM, medium)];
    process::ranks_with(3, &name, LIMIT, &variables).assert_success();
}

#[rstest]
fn a_rank_that_may_open_some_of_the_sockets_of_a_peer_only_is_named_by_all(
    #[values("0", "1", "2")] starved: &str,
) {
    if process::rank().is_some() {
        return rank_of_a_starved_job(std::env::var(STARVED).unwrap().parse().unwrap());
    }
    let name = std::thread::current().name().unwrap().to_owned();
    let variables = [(STARVED, starved), (MEDIUM, "tcp"), (SOCKETS, "3")];
    process::ranks_with(3, &name, LIMIT, &variables).assert_success();
}

#[test]
fn a_limit_of_open_files_that_can_be_raised_is_raised() {
    if process::rank().is_none() {
        let name = std::thread::current().name().unwrap().to_owned();
        return process::ranks(2, &name, LIMIT).assert_success();
    }
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(open_files() + 2), maximum }).unwrap();
    let mut world = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
    pass_round(&mut world).unwrap();
}

/// Rank 0 hosts the coordinator, which informs the others.
#[rstest]
fn a_limit_of_open_files_that_is_too_low_for_the_world_is_an_error_on_all_ranks(
    #[values("0", "1")] starved: &str,
) {
    let Some(rank) = process::rank() else {
        let name = std::thread::current().name().unwrap().to_owned();
        return process::ranks_with(2, &name, LIMIT, &[(STARVED, starved)]).assert_success();
    };
    let starved: usize = std::env::var(STARVED).unwrap().parse().unwrap();
    let limit = open_files() + 16;
    if rank == starved {
        setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
    }
    match ProcessTransport::join(&Config::from_env().unwrap()).unwrap_err() {
        Error::FilesLimit { limit: said, needed, world_size: 2 } if rank == starved => {
            assert!(said == limit && needed > limit, "{said} {needed}");
        }
        Error::Aborted(abort) if rank != starved => {
            assert!(abort.rank == starved && abort.to_string().contains("open files"), "{abort}");
        }
        error => panic!("{error}"),
    }
}

/// The limit allows one socket for each peer, and not eight.
#[rstest]
fn a_limit_of_open_files_that_is_too_low_for_the_sockets_of_all_peers_is_an_error(
    #[values("1", "8")] sockets: &str,
) {
    let Some(rank) = process::rank() else {
        let name = std::thread::current().name().unwrap().to_owned();
        return process::ranks_with(2, &name, LIMIT, &[(SOCKETS, sockets)]).assert_success();
    };
    let limit = open_files() + 24 + 8;
    if rank == 1 {
        setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
    }
    match (sockets_of_this_job(), ProcessTransport::join(&Config::from_env().unwrap())) {
        (1, joined) => pass_round(&mut joined.unwrap()).unwrap(),
        (_, Err(Error::FilesLimit { limit: said, needed, world_size: 2 })) if rank == 1 => {
            assert!(said == limit && needed > limit, "{said} {needed}");
        }
        (_, Err(Error::Aborted(abort))) if rank == 0 => {
            assert!(abort.rank == 1 && abort.to_string().contains("open files"), "{abort}");
        }
        (_, joined) => panic!("{joined:?}"),
    }
}

fn sockets_of_this_job() -> usize {
    std::env::var(SOCKETS).unwrap().parse().unwrap()
}

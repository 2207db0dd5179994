//! Ranks on several hosts (network namespaces) while the network between them fails.
#![cfg(all(feature = "tcp", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::print_stdout, reason = "a test that is skipped says why")]

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use dist_testkit::hosts::Hosts;
use dist_testkit::process;
use dist_transport::process::{Config, ProcessTransport};
use dist_transport::{Cause, Error, Incoming, Outgoing, Sink, Transport};
use rstest::rstest;

const LIMIT: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);

/// The names of the hosts.
const HOSTS: &str = "TEST_HOSTS";
/// The time for which the network is silent, in milliseconds.
const OUTAGE: &str = "TEST_OUTAGE";
const LIVENESS: &str = "DIST_LIVENESS";

/// Runs this test once more on each of `count` hosts, if this machine can have them.
fn run_on_hosts(count: usize, variables: &[(&str, &str)]) {
    let hosts = match Hosts::new(count) {
        Ok(hosts) => hosts,
        Err(reason) => {
            println!("skipped, as this machine cannot have hosts of its own: {reason}");
            return;
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&secret).unwrap();
    file.write_all(b"known to the ranks of this job").unwrap();
    let (secret, address) = (secret.to_str().unwrap(), hosts.address(0));
    let own = [(HOSTS, hosts.prefix()), ("DIST_SECRET_FILE", secret), ("MASTER_ADDR", &address)];
    let name = std::thread::current().name().unwrap().to_owned();
    let variables = [&own[..], variables].concat();
    process::ranks_through(count, &name, LIMIT, &variables, |rank| hosts.starter(rank)).assert_success();
}

fn hosts(transport: &ProcessTransport) -> Hosts {
    Hosts::of(&std::env::var(HOSTS).unwrap(), transport.rank().world_size())
}

/// Sends a word to the right while receiving one from the left.
fn pass_round(transport: &mut ProcessTransport) -> Result<(), Error> {
    let (rank, deadline) = (transport.rank(), transport.runtime().deadline(LIMIT));
    let mut received = [0; 8];
    let send = Outgoing { to: rank.right().index(), parts: &[&[7; 8]] };
    let receive = Incoming { from: rank.left().index(), len: 8, sink: Sink::Into(&mut received) };
    transport.exchange(Some(send), Some(receive), &deadline.into())
}

/// One rank of three. The network of the last one's host is silent for a while.
fn rank_on_a_silent_network() {
    let mut transport = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
    let outage = Duration::from_millis(std::env::var(OUTAGE).unwrap().parse().unwrap());
    for _ in 0..100 {
        pass_round(&mut transport).unwrap();
    }
    if transport.rank().index() == 0 {
        let hosts = hosts(&transport);
        hosts.disconnect(2).unwrap();
        transport.runtime().sleep(outage);
        hosts.connect(2).unwrap();
    }
    for _ in 0..100 {
        pass_round(&mut transport).unwrap();
    }
}

#[rstest]
#[case::that_is_longer_between_hosts("800", None)]
#[case::of_a_job("800", Some("2"))]
// TCP retransmits a lost packet after six seconds, and then after twelve.
#[case::for_longer_than_tcp_pauses("8000", None)]
fn a_network_that_is_silent_for_less_than_the_limit_ends_no_job(
    #[case] outage: &str,
    #[case] liveness: Option<&str>,
) {
    if process::rank().is_some() {
        return rank_on_a_silent_network();
    }
    let liveness = liveness.map(|liveness| (LIVENESS, liveness));
    run_on_hosts(3, &[(OUTAGE, outage)].into_iter().chain(liveness).collect::<Vec<_>>());
}

/// The file that is written when the network is cut, so that all ranks measure from the same moment.
fn cut() -> std::path::PathBuf {
    std::path::Path::new(&std::env::var_os("DIST_SECRET_FILE").unwrap()).with_file_name("cut")
}

/// One rank of three. The last one loses its network for good.
fn rank_of_which_one_is_cut_off() {
    let mut transport = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
    for _ in 0..100 {
        pass_round(&mut transport).unwrap();
    }
    let rank = transport.rank().index();
    if rank == 0 {
        hosts(&transport).disconnect(2).unwrap();
        std::fs::write(cut(), b"").unwrap();
    }
    let error = std::iter::repeat_with(|| pass_round(&mut transport)).find_map(Result::err).unwrap();
    let lasted = cut().metadata().unwrap().modified().unwrap().elapsed().unwrap();
    let abort = transport.aborted().unwrap();
    assert!(matches!(error, Error::Aborted(_)), "{error:?}");
    let expected = if rank == 2 { (0, Cause::CoordinatorLost) } else { (2, Cause::Silent) };
    assert_eq!((abort.rank, abort.cause), expected);
    assert!((9 * SECOND..20 * SECOND).contains(&lasted), "{lasted:?}");
}

#[test]
fn a_host_that_loses_its_network_is_named_after_ten_seconds() {
    if process::rank().is_some() {
        return rank_of_which_one_is_cut_off();
    }
    run_on_hosts(3, &[]);
}

/// One rank of four, of which ranks 1 and 3 cannot reach each other: from the start, or after they are
/// connected.
fn rank_of_which_two_are_parted(from_the_start: bool) {
    let mut transport = ProcessTransport::join(&Config::from_env().unwrap()).unwrap();
    let (runtime, rank) = (transport.runtime().clone(), transport.rank().index());
    let mut exchange = |peer: usize| {
        let (deadline, mut received) = (runtime.deadline(LIMIT), [0; 8]);
        let receive = Incoming { from: peer, len: 8, sink: Sink::Into(&mut received) };
        transport.exchange(Some(Outgoing { to: peer, parts: &[&[7; 8]] }), Some(receive), &deadline.into())
    };
    // Both pairs: 0 and 2, 1 and 3.
    let across = (rank + 2) % 4;
    if !from_the_start {
        exchange(across).unwrap();
    }
    // The ranks of both pairs learn through other ranks that the others have come as far.
    exchange(rank ^ 1).unwrap();
    if rank == 1 {
        Hosts::of(&std::env::var(HOSTS).unwrap(), 4).part(1, 3).unwrap();
    }
    exchange(rank ^ 1).unwrap();
    let parted = runtime.now();
    let error = std::iter::repeat_with(|| exchange(across)).find_map(Result::err).unwrap();
    let Error::Aborted(abort) = error else { panic!("{error:?}") };
    assert_eq!(abort.to_string(), "rank 1 and rank 3 cannot reach each other");
    let lasted = runtime.now() - parted;
    assert!((9 * SECOND..20 * SECOND).contains(&lasted), "{lasted:?}");
}

#[rstest]
fn two_ranks_that_cannot_reach_each_other_are_both_named(#[values("true", "false")] from_the_start: &str) {
    const FROM_THE_START: &str = "TEST_FROM_THE_START";
    if process::rank().is_some() {
        return rank_of_which_two_are_parted(std::env::var(FROM_THE_START).unwrap() == "true");
    }
    run_on_hosts(4, &[(FROM_THE_START, from_the_start)]);
}

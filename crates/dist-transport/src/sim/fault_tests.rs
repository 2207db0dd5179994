//! Tests of faults: each fault happens, and the ranks are told the right cause.

use std::time::Duration;

use rstest::rstest;

use super::*;
use crate::{Abort, Cause, Error, Fingerprint, Incoming, Outgoing, Result, Sink, Transport};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// The end of a rank: the rounds that it did, why it stopped, and when.
type End = (usize, Option<(Error, Abort)>, Duration);

/// Sends bytes round a ring, until an error or until `rounds` are done.
fn ring(mut transport: SimTransport, rounds: usize) -> End {
    let (rank, runtime) = (transport.rank(), transport.runtime().clone());
    for round in 0..rounds {
        let deadline = runtime.deadline(MINUTE);
        let mut received = [0; 100];
        let send = Outgoing { to: rank.right().index(), parts: &[&[7; 100]] };
        let receive = Incoming { from: rank.left().index(), len: 100, sink: Sink::Into(&mut received) };
        if let Err(error) = transport.exchange(Some(send), Some(receive), &deadline.into()) {
            let abort = transport.aborted().expect("an error ends the job");
            return (round, Some((error, abort)), runtime.now());
        }
        assert_eq!(received, [7; 100]);
    }
    (rounds, None, runtime.now())
}

/// Returns a network of four ranks with a latency of a millisecond.
fn four(seed: u64) -> Network {
    Network::new(4).with_seed(seed).with_memory_link(Link::new(MS, 1_000_000_000))
}

fn ends(network: &Network) -> Vec<Option<End>> {
    let outcome = network.try_run(|transport| ring(transport, 100)).unwrap();
    assert!(!outcome.faults.is_empty(), "the fault has happened");
    outcome.results
}

/// Asserts that every rank except `victim` ended with this cause and rank at this time.
#[track_caller]
fn assert_ends(ends: &[Option<End>], victim: usize, cause: Cause, (from, to): (Duration, Duration)) {
    for (rank, end) in ends.iter().enumerate().filter(|(rank, _)| *rank != victim) {
        let Some((_, Some((_, abort)), time)) = end else { panic!("rank {rank} was told nothing: {end:?}") };
        assert_eq!((&abort.cause, abort.rank), (&cause, victim), "rank {rank}");
        assert!((from..=to).contains(time), "rank {rank} was told at {time:?}");
    }
}

const AT_TEN: When = When::At(Duration::from_millis(10));

#[rstest]
#[case::with_its_coordinator(0, Cause::CoordinatorLost)]
#[case::alone(2, Cause::Died)]
fn a_killed_rank_leaves_no_result_and_is_named_at_once(
    #[case] rank: usize,
    #[case] cause: Cause,
    #[values(0, 1, 2)] seed: u64,
) {
    let ends = ends(&four(seed).with_fault(AT_TEN, Fault::Kill { rank }));
    assert!(ends[rank].is_none());
    assert_ends(&ends, rank, cause, (10 * MS, 10 * MS));
}

#[test]
fn a_rank_that_is_killed_before_it_begins_leaves_no_result() {
    for seed in 0..20 {
        let first = When::Operation { rank: 1, number: 1 };
        let ends = ends(&Network::new(4).with_seed(seed).with_fault(first, Fault::Kill { rank: 2 }));
        assert!(ends[2].is_none(), "seed {seed}");
    }
}

#[test]
fn a_rank_that_is_killed_after_its_goodbye_is_not_missed() {
    let network = four(0).with_external_coordinator().with_fault(AT_TEN, Fault::Kill { rank: 2 });
    let outcome = network.try_run(|mut transport| {
        let runtime = transport.runtime().clone();
        let everybody = transport.fork(&[0, 1, 3]).unwrap();
        let Some(mut group) = everybody else {
            drop(transport);
            runtime.sleep(SECOND);
            return 0;
        };
        for _ in 0..20 {
            ring_once(&mut *group).unwrap();
        }
        20
    });
    let outcome = outcome.unwrap();
    assert_eq!(outcome.results, [Some(20), Some(20), None, Some(20)]);
    assert_eq!(outcome.faults, ["at 10ms rank 2 is killed"]);
}

#[test]
fn the_threads_of_a_killed_rank_unwind_and_are_no_panic() {
    let network = four(3).with_fault(When::Operation { rank: 1, number: 5 }, Fault::Kill { rank: 1 });
    let outcome = network.try_run(|transport| {
        let runtime = transport.runtime().clone();
        let task = runtime.clone().spawn("worker", move || runtime.park(None)).unwrap();
        let end = ring(transport, 10);
        drop(task);
        end.0
    });
    // The other ranks' workers are still there.
    let failure = outcome.unwrap_err().to_string();
    assert!(failure.contains("rank 0/worker") && !failure.contains("rank 1/worker"), "{failure}");
}

#[test]
fn an_operation_that_is_the_last_one_does_not_begin() {
    let network = four(0).with_fault(When::Operation { rank: 1, number: 5 }, Fault::Kill { rank: 1 });
    let outcome = network.try_run(|transport| ring(transport, 100).0).unwrap();
    assert_eq!(outcome.operations[1], 5);
    assert_eq!(outcome.results[1], None);
    let rounds = outcome.results[2].unwrap();
    assert!((3..=4).contains(&rounds), "its right neighbour did {rounds} rounds");
    assert_eq!(outcome.faults, ["at 4.0004ms rank 1 is killed"]);
}

#[rstest]
fn a_stall_that_is_shorter_than_two_seconds_is_only_a_delay(#[values(0, 2)] rank: usize) {
    let lasts = Some(1900 * MS);
    let ends = ends(&four(1).with_fault(AT_TEN, Fault::Stall { rank, lasts }));
    for end in ends {
        let (rounds, error, time) = end.unwrap();
        assert!(error.is_none() && rounds == 100, "{error:?}");
        assert!((1900 * MS..2100 * MS).contains(&time), "{time:?}");
    }
}

#[test]
fn a_stall_ends_if_another_fault_strikes_with_it() {
    let shm_group = When::Operation { rank: 1, number: 5 };
    let partition =
        Fault::Partition { from: vec![0], to: vec![2], directions: Directions::One, lasts: Some(MS) };
    let stall = Fault::Stall { rank: 2, lasts: Some(500 * MS) };
    for ends in [[&partition, &stall], [&stall, &partition]].map(|faults| {
        let network =
            faults.into_iter().fold(four(1), |network, fault| network.with_fault(shm_group, fault.clone()));
        ends(&network)
    }) {
        assert!(
            ends.iter().flatten().all(|(rounds, error, _)| *rounds == 100 && error.is_none()),
            "{ends:?}"
        );
        assert!(ends.iter().all(Option::is_some));
    }
}

#[rstest]
#[case::with_its_coordinator(0, Cause::CoordinatorLost)]
#[case::alone(2, Cause::Silent)]
fn a_stall_that_lasts_is_noticed_within_two_seconds(
    #[case] rank: usize,
    #[case] cause: Cause,
    #[values(None, Some(MINUTE))] lasts: Option<Duration>,
) {
    let ends = ends(&four(2).with_fault(AT_TEN, Fault::Stall { rank, lasts }));
    assert_ends(&ends, rank, cause, (2 * SECOND, 2010 * MS));
    // A rank that continues after the job has ended is told so.
    let stalled = &ends[rank];
    assert_eq!(stalled.is_some(), lasts.is_some());
    if let Some((_, error, time)) = stalled {
        assert!(error.is_some() && *time >= MINUTE, "{stalled:?}");
    }
}

#[test]
fn a_coordinator_elsewhere_does_not_share_the_fate_of_rank_zero() {
    let network = four(0).with_external_coordinator();
    let killed = ends(&network.clone().with_fault(AT_TEN, Fault::Kill { rank: 0 }));
    assert_ends(&killed, 0, Cause::Died, (10 * MS, 10 * MS));
    let dead = ends(&network.with_fault(AT_TEN, Fault::CoordinatorDeath));
    for (rank, end) in dead.into_iter().enumerate() {
        let (_, known_by, time) = end.unwrap();
        let (_, abort) = known_by.unwrap();
        assert_eq!((abort.cause, abort.rank, time), (Cause::LauncherLost, rank, 10 * MS));
    }
}

#[test]
fn a_delay_makes_messages_late_and_ends() {
    let fault = Fault::Delay { from: 1, to: 2, by: 500 * MS, lasts: 100 * MS };
    let ends = ends(&four(0).with_fault(AT_TEN, fault));
    for end in ends {
        let (rounds, error, time) = end.unwrap();
        assert!(rounds == 100 && error.is_none(), "{error:?}");
        assert!((600 * MS..650 * MS).contains(&time), "{time:?}");
    }
}

#[test]
fn loss_is_delay_in_steps_of_retransmissions_and_no_gap() {
    let lossy = four(5).with_fault(AT_TEN, Fault::Loss { from: 0, to: 1, one_in: 10, lasts: MINUTE });
    let times: Vec<_> = ends(&lossy).into_iter().map(|end| end.unwrap()).collect();
    assert!(times.iter().all(|(rounds, error, _)| *rounds == 100 && error.is_none()));
    let (_, _, time) = times[1];
    assert!((400 * MS..10 * SECOND).contains(&time), "{time:?}");
}

#[test]
fn a_short_partition_is_a_delay_for_messages_under_way_too() {
    let fault = Fault::Partition {
        from: vec![1],
        to: vec![0, 2, 3],
        directions: Directions::Both,
        lasts: Some(1500 * MS),
    };
    for end in ends(&four(0).with_fault(When::At(Duration::from_micros(10_500)), fault)) {
        let (rounds, error, time) = end.unwrap();
        assert!(rounds == 100 && error.is_none(), "{error:?}");
        assert!((1500 * MS..1700 * MS).contains(&time), "{time:?}");
    }
}

#[rstest]
// The coordinator, at rank 0, does not hear rank 2. Rank 2 hears it, or does not.
#[case::both_ways(vec![2], vec![0, 1, 3], Directions::Both, (Cause::Silent, 2), (Cause::CoordinatorLost, 0))]
#[case::unheard(vec![2], vec![0, 1, 3], Directions::One, (Cause::Silent, 2), (Cause::Silent, 2))]
// Rank 2 gives up the coordinator and is silent from then on, or leaves.
#[case::deaf(vec![0, 1, 3], vec![2], Directions::One, (Cause::Died, 2), (Cause::CoordinatorLost, 0))]
fn a_lasting_partition_is_reported_from_the_view_of_each_side(
    #[case] from: Vec<usize>,
    #[case] to: Vec<usize>,
    #[case] directions: Directions,
    #[case] known_by: (Cause, usize),
    #[case] told_apart: (Cause, usize),
    #[values(0, 1, 2)] seed: u64,
) {
    let ends = ends(&four(seed).with_fault(AT_TEN, Fault::Partition { from, to, directions, lasts: None }));
    for (rank, end) in ends.into_iter().enumerate() {
        let (_, error, time) = end.unwrap();
        let (_, abort) = error.unwrap();
        assert_eq!(
            &(abort.cause, abort.rank),
            if rank == 2 { &told_apart } else { &known_by },
            "rank {rank}"
        );
        assert!((2 * SECOND..=2010 * MS).contains(&time), "rank {rank} at {time:?}");
    }
}

#[rstest]
#[case::on_one_host(&[0, 0, 0, 0], 2 * SECOND)]
#[case::on_two_hosts(&[0, 0, 1, 1], 10 * SECOND)]
fn two_ranks_that_cannot_reach_each_other_are_both_named(
    #[case] hosts: &[u64],
    #[case] limit: Duration,
    #[values((1, 2, Directions::Both), (2, 1, Directions::Both), (1, 2, Directions::One))]
    (from, to, directions): (usize, usize, Directions),
    #[values(0, 1, 2)] seed: u64,
) {
    let fault = Fault::Partition { from: vec![from], to: vec![to], directions, lasts: None };
    let ends = ends(
        &four(seed).with_hosts(hosts).with_host_link(Link::new(MS, 1_000_000_000)).with_fault(AT_TEN, fault),
    );
    let known_by: Vec<_> = ends.into_iter().map(|end| end.unwrap()).collect();
    for (_, error, time) in &known_by {
        let (_, abort) = error.as_ref().unwrap();
        assert_eq!(abort.cause, Cause::Unreachable { hosts: None });
        assert_eq!(abort.to_string(), "rank 1 and rank 2 cannot reach each other");
        assert!((limit..limit + 100 * MS).contains(time), "{time:?}");
    }
    assert!(
        known_by.iter().all(|(_, error, _)| error.as_ref().unwrap().1 == known_by[0].1.as_ref().unwrap().1)
    );
}

#[rstest]
#[case::on_one_host(&[0, 0, 0, 0], 1900 * MS)]
#[case::on_two_hosts(&[0, 0, 1, 1], 9900 * MS)]
fn two_ranks_that_do_not_reach_each_other_for_a_while_go_on_afterwards(
    #[case] hosts: &[u64],
    #[case] outage: Duration,
) {
    let fault =
        Fault::Partition { from: vec![1], to: vec![2], directions: Directions::Both, lasts: Some(outage) };
    for end in ends(&four(0).with_hosts(hosts).with_fault(AT_TEN, fault)) {
        let (rounds, error, _) = end.unwrap();
        assert!(rounds == 100 && error.is_none(), "{error:?}");
    }
}

/// Rank 0 hosts the coordinator.
#[rstest]
#[case::survived(9400 * MS, None)]
#[case::too_long(MINUTE, Some(2))]
fn a_network_between_hosts_may_be_silent_for_ten_seconds(
    #[case] lasts: Duration,
    #[case] named: Option<usize>,
) {
    let fault = Fault::Partition {
        from: vec![2],
        to: vec![0, 1, 3],
        directions: Directions::Both,
        lasts: Some(lasts),
    };
    let ends = ends(&four(0).with_hosts(&[0, 0, 1, 0]).with_fault(AT_TEN, fault));
    for (rank, end) in ends.into_iter().enumerate().filter(|(rank, _)| *rank != 2) {
        let (_, error, time) = end.unwrap();
        assert_eq!(error.map(|(_, abort)| abort.rank), named, "rank {rank}");
        assert!(named.is_none() || (9500 * MS..=10_010 * MS).contains(&time), "rank {rank} at {time:?}");
    }
}

#[rstest]
#[case::magic(3)]
#[case::length(8)]
#[case::length_beyond_memory(15)]
#[case::call(16)]
#[case::end_of_call(63)]
fn a_changed_header_is_refused_and_its_sender_named(#[case] byte: usize, #[values(0, 1)] seed: u64) {
    let ends = ends(&four(seed).with_fault(AT_TEN, Fault::Corrupt { from: 1, to: 2, byte }));
    let (_, known_by, _) = ends[2].as_ref().unwrap();
    let (error, abort) = known_by.as_ref().unwrap();
    match byte {
        3 => assert!(matches!(error, Error::Garbage { peer: 1 }) && abort.cause == Cause::Protocol),
        8 => assert!(matches!(error, Error::Length { peer: 1, expected: 100, got: 101 }), "{error:?}"),
        15 => assert!(matches!(error, Error::Length { peer: 1, expected: 100, got } if *got > 1 << 56)),
        _ => {
            let Error::Mismatch { peer: 1, ours: Fingerprint::NONE, theirs } = error else {
                panic!("{error}")
            };
            assert_eq!(theirs.0[byte - 16], 1);
        }
    }
    for end in &ends {
        let (_, known_by, _) = end.as_ref().unwrap();
        assert_eq!(known_by.as_ref().unwrap().1.rank, 1);
    }
}

#[test]
fn a_changed_payload_is_delivered_because_nothing_checks_it() {
    let fault = Fault::Corrupt { from: 0, to: 1, byte: 64 + 5 };
    let network = Network::new(2).with_fault(When::Operation { rank: 0, number: 1 }, fault);
    let outcome = network.run(|mut transport| {
        let (peer, deadline) = (1 - transport.rank().index(), transport.runtime().deadline(MINUTE));
        let mut received = [0; 10];
        let receive = Incoming { from: peer, len: 10, sink: Sink::Into(&mut received) };
        let sent = Outgoing { to: peer, parts: &[&[8; 10]] };
        transport.exchange(Some(sent), Some(receive), &deadline.into()).unwrap();
        received
    });
    assert_eq!(outcome.results, [[8; 10], [8, 8, 8, 8, 8, 9, 8, 8, 8, 8]]);
}

#[test]
fn a_slow_rank_pauses_before_each_send_and_is_no_failure() {
    let fault = Fault::Slow { rank: 1, pause: 20 * MS };
    let ends = ends(&four(0).with_fault(When::Operation { rank: 1, number: 1 }, fault));
    let times = ends.into_iter().map(|end| end.unwrap());
    for (rounds, error, time) in times {
        assert!(rounds == 100 && error.is_none());
        assert!(time >= 1500 * MS, "every message of the ring waits for it: {time:?}");
    }
}

#[test]
fn a_wrong_clock_changes_when_its_rank_gives_up_and_nothing_else() {
    let wait = |network: Network| {
        network.run(|mut transport| {
            let (runtime, start) = (transport.runtime().clone(), transport.runtime().now());
            ring_once(&mut transport).unwrap();
            if transport.rank().index() == 1 {
                let (mut byte, deadline) = ([0], runtime.deadline(MINUTE));
                let receive = Incoming { from: 0, len: 1, sink: Sink::Into(&mut byte) };
                assert!(transport.exchange(None, Some(receive), &deadline.into()).unwrap_err().is_timeout());
                assert!(runtime.now() - start >= MINUTE);
            } else {
                runtime.park(Some(runtime.deadline(1000 * MINUTE)));
            }
        })
    };
    // Its minute is half a real one.
    let fast = wait(Network::new(2).with_clock(1, 100 * MINUTE, 1_000_000));
    assert_eq!(fast.elapsed, 1000 * MINUTE);
    let network = Network::new(2).with_memory_link(Link::new(MS, 1000)).with_clock(0, SECOND, -300_000);
    let slow = network.run(|mut transport| {
        ring_once(&mut transport).unwrap();
        transport.runtime().now()
    });
    assert_eq!(slow.results[1], 101 * MS);
    let shown = slow.results[0];
    assert!((SECOND + 70 * MS..SECOND + 71 * MS).contains(&shown), "{shown:?}");
}

fn ring_once(transport: &mut dyn Transport) -> Result<()> {
    let (rank, deadline) = (transport.rank(), transport.runtime().deadline(MINUTE));
    let mut received = [0; 100];
    let send = Outgoing { to: rank.right().index(), parts: &[&[7; 100]] };
    let receive = Incoming { from: rank.left().index(), len: 100, sink: Sink::Into(&mut received) };
    transport.exchange(Some(send), Some(receive), &deadline.into())
}

#[test]
fn random_faults_come_from_the_seed_and_never_hang_a_run() {
    let mut kinds = std::collections::BTreeSet::new();
    for seed in 0..150 {
        let network = four(seed).with_random_faults(3);
        let program = |transport| {
            let (rounds, error, time) = ring(transport, 60);
            (rounds, error.map(|error| format!("{error:?}")), time)
        };
        let run = || network.try_run(program).unwrap();
        let (outcome, again) = (run(), run());
        assert_eq!(outcome, again, "seed {seed}");
        for end in outcome.results.iter().flatten() {
            let (rounds, error, _) = end;
            assert!(*rounds == 60 || error.is_some());
        }
        let words = |fault: &String| fault.split_whitespace().skip(2).take(3).collect::<Vec<_>>().join(" ");
        kinds.extend(
            outcome.faults.iter().map(words).map(|words| words.replace(|c: char| c.is_numeric(), "")),
        );
    }
    assert!(kinds.len() >= 8, "{kinds:?}");
}

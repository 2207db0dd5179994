//! Errors of collectives after faults: every survivor names the same rank, before its deadline.

use std::time::Duration;

use dist_collectives::{Communicator, Error, ReduceOp, ReductionOrder, algorithms::ring};
use dist_transport::Cause;
use dist_transport::sim::{Directions, Fault, Link, Network, When};
use rstest::rstest;

const SECOND: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_secs(10);
const WORLD: usize = 4;

/// The end of a rank: the time, the culprit's number in the world, and the cause.
type End = (Duration, Option<(usize, &'static str)>);

/// Sums until something fails, or a hundred times; each sum is checked.
fn sums(network: &Network) -> Vec<Option<End>> {
    let outcome = network.try_run(|transport| {
        let mut comm = Communicator::new(transport);
        comm.set_timeout(TIMEOUT);
        comm.set_order(ReductionOrder::Any);
        for _ in 0..100 {
            let mut values = [comm.rank() as u64; 8];
            let summed = comm.with_algorithm(&ring::ALL_REDUCE).all_reduce(&mut values, ReduceOp::Sum);
            if let Err(error) = summed {
                return (comm.runtime().now(), Some(culprit(&error)));
            }
            assert_eq!(values, [6; 8], "no wrong sum is given");
        }
        comm.barrier().unwrap();
        (comm.runtime().now(), None)
    });
    let outcome = outcome.unwrap();
    assert!(!outcome.faults.is_empty(), "the fault has happened");
    outcome.results
}

/// Returns the rank in the world that an error names, and the cause.
pub(crate) fn culprit(error: &Error) -> (usize, &'static str) {
    let cause = match error {
        Error::Aborted { cause, .. } => match cause {
            Cause::Died => "died",
            Cause::Silent => "silent",
            Cause::CoordinatorLost => "coordinator lost",
            Cause::LauncherLost => "launcher lost",
            Cause::TimedOut { .. } => "timed out",
            Cause::Protocol => "protocol",
            Cause::Unreachable { .. } => "unreachable",
            Cause::Mismatch { .. } | Cause::Length { .. } => "mismatch",
            other => panic!("{other}"),
        },
        Error::Mismatch { .. } => "mismatch",
        _ if error.is_timeout() => "timed out",
        Error::Transport { source, .. } => match &**source {
            dist_transport::Error::Garbage { .. } => "protocol",
            dist_transport::Error::Length { .. } | dist_transport::Error::Mismatch { .. } => "mismatch",
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    };
    (error.peer().expect("an error names a rank"), cause)
}

fn network(seed: u64, fault: Fault) -> Network {
    let network =
        Network::new(WORLD).with_seed(seed).with_memory_link(Link::new(SECOND / 1000, 1_000_000_000));
    network.with_fault(When::At(SECOND / 100), fault)
}

#[rstest]
#[case::death(Fault::Kill { rank: 2 }, (2, "died"), SECOND)]
#[case::death_with_the_coordinator(Fault::Kill { rank: 0 }, (0, "coordinator lost"), SECOND)]
#[case::death_of_the_coordinator(Fault::CoordinatorDeath, (0, "coordinator lost"), SECOND)]
#[case::stall(Fault::Stall { rank: 2, lasts: None }, (2, "silent"), 3 * SECOND)]
#[case::stall_that_ends_late(Fault::Stall { rank: 2, lasts: Some(5 * SECOND) }, (2, "silent"), 6 * SECOND)]
#[case::unheard(
    Fault::Partition { from: vec![2], to: vec![0, 1, 3], directions: Directions::One, lasts: None },
    (2, "silent"),
    3 * SECOND,
)]
#[case::changed_magic(Fault::Corrupt { from: 1, to: 2, byte: 0 }, (1, "protocol"), SECOND)]
#[case::changed_length(Fault::Corrupt { from: 1, to: 2, byte: 9 }, (1, "mismatch"), SECOND)]
fn every_survivor_names_the_culprit(
    #[case] fault: Fault,
    #[case] expected: (usize, &str),
    #[case] by: Duration,
    #[values(0, 1, 2)] seed: u64,
) {
    for (rank, end) in sums(&network(seed, fault)).into_iter().enumerate() {
        // A rank that died or stopped for ever reports nothing.
        let Some((time, told)) = end else {
            assert_eq!(rank, expected.0);
            continue;
        };
        assert_eq!(told, Some(expected), "rank {rank}");
        assert!(time <= by, "rank {rank} was told at {time:?}");
    }
}

#[rstest]
#[case::both_ways(vec![2], vec![0, 1, 3], Directions::Both, "silent")]
// The rank gives up the coordinator without leaving properly.
#[case::deaf(vec![0, 1, 3], vec![2], Directions::One, "died")]
fn a_rank_that_is_cut_off_believes_the_coordinator_lost(
    #[case] from: Vec<usize>,
    #[case] to: Vec<usize>,
    #[case] directions: Directions,
    #[case] cause: &'static str,
    #[values(0, 1, 2)] seed: u64,
) {
    let fault = Fault::Partition { from, to, directions, lasts: None };
    for (rank, end) in sums(&network(seed, fault)).into_iter().enumerate() {
        let (time, told) = end.expect("nobody died");
        assert_eq!(told, Some(if rank == 2 { (0, "coordinator lost") } else { (2, cause) }), "rank {rank}");
        assert!(time <= 3 * SECOND);
    }
}

#[rstest]
fn two_ranks_that_cannot_reach_each_other_end_the_job_for_all(#[values(0, 1, 2)] seed: u64) {
    let fault = Fault::Partition { from: vec![1], to: vec![2], directions: Directions::One, lasts: None };
    for (rank, end) in sums(&network(seed, fault)).into_iter().enumerate() {
        let (time, told) = end.expect("nobody died");
        assert_eq!(told, Some((1, "unreachable")), "rank {rank}");
        assert!(time <= 3 * SECOND, "rank {rank} was told at {time:?}");
    }
}

#[rstest]
fn a_silent_fault_ends_at_the_deadline_and_all_ranks_name_the_same_culprit(#[values(0, 1, 2)] seed: u64) {
    let fault = Fault::Delay { from: 1, to: 2, by: 60 * SECOND, lasts: SECOND };
    let ends = sums(&network(seed, fault));
    let (_, first) = ends[0].expect("nobody died");
    assert_eq!(first.unwrap().1, "timed out");
    for (time, told) in ends.into_iter().flatten() {
        assert_eq!(told, first);
        assert!((TIMEOUT..TIMEOUT + SECOND).contains(&time), "{time:?}");
    }
}

/// The time of six hundred messages one after the other, without faults.
const CALM: Duration = Duration::from_millis(600);

#[rstest]
#[case::slow(Fault::Slow { rank: 1, pause: SECOND / 100 }, 5 * SECOND)]
#[case::late(Fault::Delay { from: 1, to: 2, by: SECOND, lasts: SECOND }, SECOND)]
#[case::lossy(Fault::Loss { from: 1, to: 2, one_in: 20, lasts: 60 * SECOND }, 2 * SECOND)]
#[case::stall_that_ends(Fault::Stall { rank: 2, lasts: Some(SECOND) }, SECOND)]
#[case::partition_that_ends(
    Fault::Partition { from: vec![2], to: vec![0, 1, 3], directions: Directions::Both, lasts: Some(SECOND) },
    SECOND,
)]
#[case::one_way_that_ends(
    Fault::Partition { from: vec![2], to: vec![0, 1, 3], directions: Directions::One, lasts: Some(SECOND) },
    SECOND,
)]
fn delays_are_no_failures(#[case] fault: Fault, #[case] takes: Duration, #[values(0, 1, 2)] seed: u64) {
    let network = network(seed, fault).with_clock(3, 60 * SECOND, 100_000);
    for (rank, end) in sums(&network).into_iter().enumerate() {
        let (time, told) = end.expect("nobody died");
        assert_eq!(told, None, "rank {rank}");
        assert!(time >= CALM + takes, "rank {rank} was done at {time:?}");
    }
}

#[test]
fn a_changed_payload_is_summed_because_no_layer_checks_it() {
    // In each of its two steps a rank sends half of its buffer; the fault is in the first.
    let changed = Fault::Corrupt { from: 0, to: 1, byte: 64 };
    let network = Network::new(2).with_fault(When::Operation { rank: 0, number: 1 }, changed);
    let outcome = network.run(|transport| {
        let mut comm = Communicator::new(transport);
        let mut values = [4_u64, 6];
        comm.set_order(ReductionOrder::Any);
        comm.with_algorithm(&ring::ALL_REDUCE).all_reduce(&mut values, ReduceOp::Sum).unwrap();
        values
    });
    let [first, second] = outcome.results[..] else { panic!("two ranks") };
    assert_eq!(first, second, "they agree on what is wrong");
    assert!(first == [9, 12] || first == [8, 13], "{first:?}");
}

/// Returns for each rank the end of a sum with one late rank, and the reported culprit.
fn late_sum(network: &Network) -> Vec<End> {
    let outcome = network.run(|transport| {
        let mut comm = Communicator::new(transport);
        comm.set_timeout(TIMEOUT);
        comm.set_order(ReductionOrder::Any);
        if comm.rank() == 1 {
            comm.runtime().sleep(TIMEOUT / 10 * 9);
        }
        let began = comm.runtime().now();
        let summed = comm.with_algorithm(&ring::ALL_REDUCE).all_reduce(&mut [1_u64; WORLD], ReduceOp::Sum);
        (comm.runtime().now() - began, summed.err().map(|error| culprit(&error)))
    });
    outcome.results
}

#[test]
fn a_clock_that_is_fast_ends_its_ranks_wait_early_and_all_name_the_same() {
    let network = Network::new(WORLD);
    let right = |(time, told): &End| told.is_none() && *time <= TIMEOUT / 10 * 9;
    assert!(late_sum(&network).iter().all(right), "it comes in time");
    // The clocks' values at the start do not matter.
    let slow = late_sum(&network.clone().with_clock(2, 60 * TIMEOUT, -500_000));
    assert_eq!(slow[2], (TIMEOUT / 20 * 9, None));
    let fast = late_sum(&network.with_clock(2, Duration::ZERO, 1_000_000));
    for (rank, (time, told)) in fast.into_iter().enumerate() {
        assert_eq!(told, Some((1, "timed out")), "rank {rank}");
        let expected = [TIMEOUT / 2, Duration::ZERO, TIMEOUT, TIMEOUT / 2][rank];
        assert_eq!(time, expected, "rank {rank}");
    }
}

/// Returns a network of two hosts with two ranks each.
fn hosts() -> Network {
    let [inside, across] = [1, 20].map(|micros| Link::new(Duration::from_micros(micros), 1_000_000_000));
    Network::new(WORLD).with_hosts(&[0, 0, 1, 1]).with_memory_link(inside).with_host_link(across)
}

fn slow_hosts() -> Network {
    let [inside, across] = [40, 20].map(|micros| Link::new(Duration::from_micros(micros), 10_000_000));
    hosts().with_memory_link(inside).with_host_link(across)
}

/// Returns the bits of all results after several calls, and the time of the calls.
fn moved(network: &Network) -> (Vec<u32>, Duration) {
    let outcome = network.run(|transport| {
        let mut comm = Communicator::new(transport);
        let mut values: Vec<f32> = (1..=1000_u16).map(|n| 1.0 / f32::from(n)).collect();
        values.rotate_left(comm.rank());
        comm.all_reduce(&mut values, ReduceOp::Sum).unwrap();
        let mut parts = vec![0.0; 1000];
        comm.all_to_all(&values, &mut parts).unwrap();
        comm.all_reduce(&mut parts, ReduceOp::Mean).unwrap();
        values.iter().chain(&parts).map(|value| value.to_bits()).collect::<Vec<_>>()
    });
    assert!(outcome.results.iter().all(|bits| *bits == outcome.results[0]));
    (outcome.results[0].clone(), outcome.elapsed)
}

#[rstest]
#[case::links(Network::new(WORLD), hosts())]
#[case::bandwidth(hosts(), hosts().with_host_link(Link::new(Duration::from_micros(20), 100_000_000)))]
#[case::overhead(
    hosts(),
    hosts().with_memory_link(
        Link::new(Duration::from_micros(1), 1_000_000_000).with_overhead(Duration::from_micros(5)),
    ),
)]
#[case::jitter(
    hosts(),
    hosts().with_host_link(
        Link::new(Duration::from_micros(20), 1_000_000_000).with_jitter(Duration::from_micros(20)),
    ),
)]
// A message inside a host takes the same time as between hosts, except on the shared link.
#[case::shared_uplinks(slow_hosts().with_hosts(&[0, 1, 2, 3]), slow_hosts())]
#[case::racks(
    hosts(),
    hosts().with_racks(&[0, 0, 1, 1]).with_rack_link(Link::new(Duration::from_micros(50), 1_000_000_000)),
)]
#[case::a_link_of_their_own(
    hosts().with_link_between(0, 1, Link::new(Duration::from_micros(1), 10_000_000_000)),
    hosts(),
)]
fn links_affect_the_time_of_results_and_not_the_results(
    #[case] sooner: Network,
    #[case] later: Network,
    #[values(0, 1, 2)] seed: u64,
) {
    let [sooner, later] = [sooner, later].map(|network| moved(&network.with_seed(seed)));
    assert_eq!(sooner.0, later.0, "the same bits");
    assert!(sooner.1 < later.1, "{:?} is not before {:?}", sooner.1, later.1);
}

#[test]
fn a_thousand_ranks_name_the_first_of_eleven_that_die_together() {
    const RANKS: usize = 1024;
    const AT: Duration = Duration::from_millis(7);
    let network = Network::new(RANKS).with_external_coordinator();
    let network = network.with_memory_link(Link::new(SECOND / 1000, 1_000_000_000_000));
    let victims: Vec<usize> = (0..11).map(|number| (700 + 31 * number) % RANKS).collect();
    let die = |network: Network, &rank| network.with_fault(When::At(AT), Fault::Kill { rank });
    let outcome = victims.iter().fold(network, die).try_run(|transport| {
        let mut comm = Communicator::new(transport);
        loop {
            if let Err(error) = comm.all_reduce(&mut [1_u32; 2], ReduceOp::Sum) {
                return (comm.runtime().now(), culprit(&error));
            }
        }
    });
    for (rank, end) in outcome.unwrap().results.into_iter().enumerate() {
        let expected = (!victims.contains(&rank)).then_some((AT, (victims[0], "died")));
        assert_eq!(end, expected, "rank {rank}");
    }
}

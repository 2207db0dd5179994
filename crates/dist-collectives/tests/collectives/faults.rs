//! What collectives report when something goes wrong: every survivor names the same rank, and by its deadline.

use std::time::Duration;

use dist_collectives::{AllReduce, Communicator, Error, ReduceOp, ReductionOrder};
use dist_transport::Cause;
use dist_transport::sim::{Fault, Link, Network, Ways, When};
use rstest::rstest;

const SECOND: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_secs(10);
const WORLD: usize = 4;

/// Until when a rank went on, and what ended it: its culprit, by its number in the world, and the cause.
type End = (Duration, Option<(usize, &'static str)>);

/// Sums until something goes wrong, or a hundred sums are done; each sum is checked.
fn sums(network: &Network) -> Vec<Option<End>> {
    let outcome = network.try_run(|transport| {
        let mut comm = Communicator::new(transport);
        comm.set_timeout(TIMEOUT);
        comm.set_order(ReductionOrder::Any);
        for _ in 0..100 {
            let mut values = [comm.rank() as u64; 8];
            let summed = comm.with_algorithm(AllReduce::Ring).all_reduce(&mut values, ReduceOp::Sum);
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

fn culprit(error: &Error) -> (usize, &'static str) {
    let cause = match error {
        Error::Aborted { cause, .. } => match cause {
            Cause::Died => "died",
            Cause::Silent => "silent",
            Cause::CoordinatorLost => "coordinator lost",
            Cause::TimedOut => "timed out",
            Cause::Protocol => "protocol",
            Cause::Mismatch { .. } => "mismatch",
            other => panic!("{other}"),
        },
        Error::Mismatch { .. } => "mismatch",
        Error::Transport { .. } if error.is_timeout() => "timed out",
        Error::Transport { source, .. } => match &**source {
            dist_transport::Error::Garbage { .. } => "protocol",
            dist_transport::Error::Length { .. } => "mismatch",
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
    Fault::Partition { from: vec![2], to: vec![0, 1, 3], ways: Ways::One, lasts: None },
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
        // Who died or stands still for ever has nothing to say.
        let Some((time, told)) = end else {
            assert_eq!(rank, expected.0);
            continue;
        };
        assert_eq!(told, Some(expected), "rank {rank}");
        assert!(time <= by, "rank {rank} was told at {time:?}");
    }
}

#[rstest]
fn a_rank_that_is_cut_off_believes_the_coordinator_lost(#[values(0, 1, 2)] seed: u64) {
    let fault = Fault::Partition { from: vec![2], to: vec![0, 1, 3], ways: Ways::Both, lasts: None };
    for (rank, end) in sums(&network(seed, fault)).into_iter().enumerate() {
        let (time, told) = end.expect("nobody died");
        assert_eq!(
            told,
            Some(if rank == 2 { (0, "coordinator lost") } else { (2, "silent") }),
            "rank {rank}"
        );
        assert!(time <= 3 * SECOND);
    }
}

#[rstest]
#[case::late_messages(Fault::Delay { from: 1, to: 2, by: 60 * SECOND, lasts: SECOND })]
#[case::no_way_between_two(Fault::Partition { from: vec![1], to: vec![2], ways: Ways::One, lasts: None })]
fn what_nobody_is_told_of_ends_at_the_deadline_and_all_name_the_same(
    #[case] fault: Fault,
    #[values(0, 1, 2)] seed: u64,
) {
    let ends = sums(&network(seed, fault));
    let (_, first) = ends[0].expect("nobody died");
    assert_eq!(first.unwrap().1, "timed out");
    for (time, told) in ends.into_iter().flatten() {
        assert_eq!(told, first);
        assert!((TIMEOUT..TIMEOUT + SECOND).contains(&time), "{time:?}");
    }
}

#[rstest]
#[case::slow(Fault::Slow { rank: 1, pause: SECOND / 100 })]
#[case::late(Fault::Delay { from: 1, to: 2, by: SECOND, lasts: SECOND })]
#[case::lossy(Fault::Loss { from: 1, to: 2, one_in: 20, lasts: 60 * SECOND })]
#[case::stall_that_ends(Fault::Stall { rank: 2, lasts: Some(SECOND) })]
#[case::partition_that_ends(Fault::Partition { from: vec![2], to: vec![0, 1, 3], ways: Ways::Both, lasts: Some(SECOND) })]
fn what_only_takes_time_is_no_failure(#[case] fault: Fault, #[values(0, 1, 2)] seed: u64) {
    let network = network(seed, fault).with_clock(3, 60 * SECOND, 100_000);
    assert!(sums(&network).into_iter().all(|end| end.expect("nobody died").1.is_none()));
}

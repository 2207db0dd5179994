//! Faults of ranks that share memory: one of them dies, stops or fails during a call. The others get an error
//! in time, and revoke the access to their memory.

use std::time::Duration;

use dist_algos::direct::{DirectAlgorithm, RemoteAccess, write_to_all};
use dist_algos::{ALGORITHMS, CollectiveKind};
use dist_collectives::{Buffer, Communicator, Error, ReduceOp};
use dist_transport::shm_group::CALLS_MAX;
use dist_transport::sim::{Fault, Link, Network, When};
use rstest::rstest;

use crate::direct_calls::{all, call};
use crate::faults::culprit;

const WORLD: usize = 3;
const VICTIM: usize = 1;
const TIMEOUT: Duration = Duration::from_secs(10);
/// The time from a signal to its reader.
const POST: Duration = Duration::from_millis(1);

/// Signals have different delays, so that every time is a position in the schedule.
fn network(seed: u64) -> Network {
    let link = Link::new(POST, u64::MAX).with_jitter(POST / 2);
    Network::new(WORLD)
        .with_seed(seed)
        .with_shared_memory()
        .with_memory_link(link)
        .with_external_coordinator()
}

/// Lets the victim die at one time after the other during the run, and checks the results of the survivors.
fn die_at_every_moment<T: Send + 'static>(
    program: impl Fn(&mut Communicator) -> T + Clone + Send + Sync + 'static,
    check: impl Fn(T),
) {
    let mut moments = 0;
    loop {
        let moment = POST / 4 + POST / 2 * moments;
        let program = program.clone();
        let network = network(moments.into()).with_fault(When::At(moment), Fault::Kill { rank: VICTIM });
        let outcome = network.try_run(move |transport| {
            let mut comm = Communicator::new(transport);
            comm.set_timeout(TIMEOUT);
            let ended = program(&mut comm);
            assert!(comm.runtime().now() < TIMEOUT / 2, "the others were told at once");
            ended
        });
        let outcome = outcome.unwrap();
        if outcome.faults.is_empty() {
            break;
        }
        assert!(outcome.elapsed < TIMEOUT / 2);
        outcome.results.into_iter().flatten().for_each(&check);
        moments += 1;
    }
    assert!(moments > 3, "the run was over after {moments} moments");
}

fn assert_names_the_victim(error: &Error) {
    assert_eq!(error.peer(), Some(VICTIM), "{error}");
    assert!(error.to_string().contains("died"), "{error}");
}

#[test]
fn a_rank_that_dies_in_any_call_is_named_by_the_others() {
    for way in all(VICTIM) {
        // More than one block, and so little data that it fits into the flag line, where a rank that runs ahead
        // finally has to wait.
        for (len, calls) in [(90_000, 2), (5, CALLS_MAX + 2)] {
            let calls = move |comm: &mut Communicator| (0..calls).try_for_each(|_| call(comm, way, len));
            let culprit = move |comm: &mut Communicator| calls(comm).err();
            die_at_every_moment(culprit, |error| error.iter().for_each(assert_names_the_victim));
        }
    }
}

/// Opens a window, reads it and closes it, again and again.
fn read_windows(comm: &mut Communicator) -> Result<(), Error> {
    let (mut opener, mut own) = (comm.fork()?, comm.alloc::<u64>(1000)?);
    for _ in 0..3 {
        let mut window = opener.open(own)?;
        for peer in 0..WORLD {
            window.read(peer, 10, &mut [0; 500])?;
        }
        (opener, own) = window.close()?;
    }
    Ok(())
}

#[test]
fn a_rank_that_dies_while_windows_are_open_is_named() {
    let culprit = |comm: &mut Communicator| read_windows(comm).err();
    die_at_every_moment(culprit, |error| error.iter().for_each(assert_names_the_victim));
}

/// Sums in place, again and again. Returns the error, if any, and the length of the buffer afterwards.
fn sums(
    comm: &mut Communicator,
    algorithm: &'static DirectAlgorithm,
    allocated: bool,
    op: ReduceOp,
) -> (Option<Error>, usize) {
    const LEN: usize = 1000;
    let mut buffer = Buffer::from(vec![0_u64; LEN]);
    if allocated {
        buffer = comm.alloc(LEN).unwrap();
    }
    for _ in 0..3 {
        buffer.fill(comm.rank() as u64);
        let mut comm = comm.with_algorithm(algorithm);
        if let Err(error) = comm.all_reduce_buffer(&mut buffer, op) {
            return (Some(error), buffer.len());
        }
        assert_eq!(*buffer, [3; LEN]);
    }
    (None, buffer.len())
}

fn all_reduces() -> impl Iterator<Item = &'static DirectAlgorithm> {
    ALGORITHMS.direct().filter(|algorithm| algorithm.collective == CollectiveKind::AllReduce)
}

#[rstest]
fn memory_that_was_open_to_the_dead_is_given_up(#[values(true, false)] allocated: bool) {
    for algorithm in all_reduces() {
        let writes = algorithm.remote_access == RemoteAccess::Write;
        let program = move |comm: &mut Communicator| sums(comm, algorithm, allocated, ReduceOp::Sum);
        die_at_every_moment(program, |(error, left)| {
            assert_eq!(left == 0, writes && error.is_some(), "{algorithm:?}");
            error.iter().for_each(assert_names_the_victim);
        });
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[rstest]
#[case::stall(Fault::Stall { rank: VICTIM, lasts: None }, Some("silent"))]
#[case::stall_that_ends_late(Fault::Stall { rank: VICTIM, lasts: Some(5 * SECOND) }, Some("silent"))]
#[case::death_of_the_coordinator(Fault::CoordinatorDeath, Some("launcher lost"))]
#[case::stall_that_ends(Fault::Stall { rank: VICTIM, lasts: Some(SECOND) }, None)]
#[case::slow(Fault::Slow { rank: VICTIM, pause: SECOND / 50 }, None)]
fn faults_are_reported_through_shared_memory_too(
    #[case] fault: Fault,
    #[case] expected: Option<&'static str>,
) {
    for (algorithm, seed) in all_reduces().zip(0..) {
        let network = network(seed).with_fault(When::At(3 * POST), fault.clone());
        let outcome = network.try_run(move |transport| {
            let mut comm = Communicator::new(transport);
            comm.set_timeout(TIMEOUT);
            let failed = (0..20).find_map(|_| sums(&mut comm, algorithm, true, ReduceOp::Sum).0);
            (comm.runtime().now(), failed.map(|error| culprit(&error)))
        });
        let outcome = outcome.unwrap();
        assert_eq!(outcome.faults.len(), 1);
        for (rank, end) in outcome.results.into_iter().enumerate() {
            let Some((time, told)) = end else {
                assert_eq!(rank, VICTIM, "{algorithm:?}");
                continue;
            };
            // If the launcher is lost, each rank reports itself.
            let whose = if expected == Some("launcher lost") { rank } else { VICTIM };
            assert_eq!(told, expected.map(|cause| (whose, cause)), "{algorithm:?}: rank {rank}");
            let by = if rank == VICTIM { 6 * SECOND } else { 3 * SECOND };
            assert!(if expected.is_some() { time <= by } else { time >= SECOND }, "{algorithm:?}: {time:?}");
        }
    }
}

/// Runs without network faults.
fn run<T: Send + 'static>(program: impl Fn(&mut Communicator) -> T + Send + Sync + 'static) -> Vec<T> {
    let run = network(5).run(move |transport| {
        let mut comm = Communicator::new(transport);
        comm.set_timeout(TIMEOUT);
        program(&mut comm)
    });
    run.results
}

#[rstest]
fn a_rank_in_another_call_is_an_error_on_every_rank(#[values(true, false)] allocated: bool) {
    let ends = run(move |comm| {
        let op = if comm.rank() == VICTIM { ReduceOp::Max } else { ReduceOp::Sum };
        sums(comm, &write_to_all::ALL_REDUCE, allocated, op)
    });
    for (error, left) in ends {
        let error = error.expect("they disagree");
        assert!(error.to_string().contains("max") && error.to_string().contains("sum"), "{error}");
        assert_eq!(left, 0);
    }
}

#[rstest]
fn a_rank_that_does_not_come_is_named_at_the_deadline(#[values(true, false)] allocated: bool) {
    let ends = run(move |comm| {
        comm.barrier().unwrap();
        if comm.rank() == VICTIM {
            comm.runtime().sleep(2 * TIMEOUT);
        }
        let (error, left) = sums(comm, &write_to_all::ALL_REDUCE, allocated, ReduceOp::Sum);
        (error.expect("one of them is late"), left, comm.runtime().now())
    });
    for (rank, (error, left, time)) in ends.into_iter().enumerate() {
        assert!(error.is_timeout() || error.to_string().contains("timed out"), "{error}");
        if rank != VICTIM {
            assert_eq!((error.peer(), left), (Some(VICTIM), 0), "{error}");
            assert!((TIMEOUT..TIMEOUT + TIMEOUT / 10).contains(&time), "{time:?}");
        }
    }
}

/// The data is published in flag lines, in slots, and, from a certain size on, in allocated memory.
#[rstest]
fn a_rank_that_alone_gets_no_shared_memory_takes_part_with_its_own(#[values(0, 1, 1000, 40_001)] len: usize) {
    let network = Network::new(WORLD).with_shared_memory().without_heap(VICTIM);
    let outcome = network.run(move |transport| {
        let mut comm = Communicator::new(transport);
        let mut sums = Vec::new();
        for _ in 0..3 {
            let mut buffer = comm.alloc(len).unwrap();
            buffer.fill(1.0_f32);
            comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum).unwrap();
            sums.extend(comm.start_all_reduce(buffer, ReduceOp::Sum).wait().unwrap().into_vec());
        }
        sums
    });
    assert_eq!(outcome.results, vec![vec![(WORLD * WORLD) as f32; 3 * len]; WORLD]);
}

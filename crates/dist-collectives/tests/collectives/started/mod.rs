//! Properties of all operations that do not block, checked with one table.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use dist_collectives::transport::Cause;
use dist_collectives::{Communicator, Error, ReduceOp};
use dist_transport::runtime::Runtime;
use dist_transport::sim;
use rstest::rstest;

use self::cases::{CASES, Given, Handle, SEND, boxed, own, promised, waiting_cases};
use crate::worlds::{self, Network};

mod cases;

const SECOND: Duration = Duration::from_secs(1);

/// Waits in virtual time.
fn idle(comm: &Communicator, time: Duration) {
    comm.runtime().sleep(time);
}

#[derive(Clone, Copy)]
enum Waiting {
    InOrder,
    Backwards,
    Dropping,
}

#[rstest]
fn all_operations_in_flight_together_give_the_results_of_blocking_ones(
    #[values(Network::Simulated, Network::Threads)] network: Network,
    #[values(1, 2, 3, 4, 5)] world_size: usize,
    #[values(Waiting::InOrder, Waiting::Backwards, Waiting::Dropping)] waiting: Waiting,
) {
    worlds::run(network, world_size, move |mut comm| {
        let twice = CASES.iter().chain(CASES);
        let mut handles: Vec<_> = twice.map(|case| (case, (case.start)(&mut comm))).collect();
        // Blocking calls run at the same time.
        let expected: Vec<_> = CASES.iter().map(|case| (case.name, (case.block)(&mut comm))).collect();
        match waiting {
            Waiting::InOrder => {}
            Waiting::Backwards => handles.reverse(),
            // The first half is not waited for.
            Waiting::Dropping => drop(handles.drain(..CASES.len())),
        }
        for (case, handle) in handles {
            let output = handle.wait().unwrap_or_else(|(_, error)| panic!("{}: {error}", case.name));
            let (_, expected) = expected.iter().find(|(name, _)| *name == case.name).unwrap();
            let [output, expected] = [&output, expected].map(|elements| promised(case, &comm, elements));
            assert_eq!(output, expected, "{}", case.name);
        }
    });
}

#[test]
fn started_collectives_end_in_the_order_of_their_starts() {
    let outcome = sim::run(5, 3, |transport| {
        let mut comm = Communicator::new(transport);
        let cases: Vec<_> = CASES.iter().filter(|case| !case.is_message()).collect();
        for (waited_for, last) in cases.iter().enumerate() {
            let mut handles: Vec<_> = cases.iter().map(|case| (case.start)(&mut comm)).collect();
            let later = handles.split_off(waited_for + 1);
            handles.pop().unwrap().wait().unwrap();
            assert!(handles.iter_mut().all(|handle| handle.is_done()), "before {}", last.name);
            // Nothing is lost if they are not waited for one by one.
            drop((handles, later));
        }
    });
    assert!(outcome.elapsed < SECOND);
}

#[test]
fn a_failure_comes_at_the_deadline_that_began_with_the_start_and_gives_the_memory_back() {
    for case in waiting_cases() {
        let _outcome = sim::run(1, 2, |transport| {
            let mut comm = Communicator::new(transport);
            if comm.rank() == 0 {
                return idle(&comm, 120 * SECOND);
            }
            let handle = (case.start)(&mut comm.with_timeout(30 * SECOND));
            idle(&comm, 20 * SECOND);
            let (given, error) = handle.wait().unwrap_err();
            assert_eq!(comm.runtime().now(), 30 * SECOND, "{}", case.name);
            assert!(error.is_timeout() && error.peer() == Some(0), "{}: {error:?}", case.name);
            match case.failed {
                Given::Read if case.name != "barrier" => assert_eq!(given, own(&comm), "{}", case.name),
                Given::Written => assert_eq!(given.len(), own(&comm).len(), "{}", case.name),
                _ => {}
            }
        });
    }
}

#[test]
fn the_deadline_of_a_queued_operation_has_begun() {
    for case in waiting_cases() {
        let _outcome = sim::run(1, 2, |transport| {
            let mut comm = Communicator::new(transport);
            comm.set_timeout(30 * SECOND);
            if comm.rank() == 0 {
                idle(&comm, 20 * SECOND);
                comm.start_barrier().wait().unwrap();
                return idle(&comm, 120 * SECOND);
            }
            let first = comm.start_barrier();
            let second = (case.start)(&mut comm);
            let (_, error) = second.wait().unwrap_err();
            assert!(error.is_timeout(), "{}: {error:?}", case.name);
            assert_eq!(comm.runtime().now(), 30 * SECOND, "{}", case.name);
            first.wait().unwrap();
        });
    }
}

/// A way to end the operation by its handle.
#[derive(Clone, Copy)]
enum Ending {
    Waiting,
    WaitingAWhile,
    Asking,
    Dropping,
}

/// The operation before it has a longer deadline, and waits for the same rank.
#[rstest]
fn an_operation_that_cannot_begin_before_its_deadline_ends_then(
    #[values(Ending::Waiting, Ending::WaitingAWhile, Ending::Asking, Ending::Dropping)] ending: Ending,
) {
    let cases = waiting_cases().filter(|case| !case.is_message());
    let cases = cases.take(if matches!(ending, Ending::Waiting) { usize::MAX } else { 1 });
    for case in cases {
        let _outcome = sim::run(1, 2, move |transport| {
            let mut comm = Communicator::new(transport);
            if comm.rank() == 0 {
                idle(&comm, 120 * SECOND);
                let told = comm.barrier().unwrap_err();
                let gave_up = matches!(
                    &told,
                    Error::Aborted { rank: 1, cause: Cause::GaveUp { why }, .. }
                        if why.contains("did not begin within 1s")
                );
                return assert!(gave_up, "{}: {told:?}", case.name);
            }
            let first = comm.with_timeout(60 * SECOND).start_barrier();
            let mut second = (case.start)(&mut comm.with_timeout(SECOND));
            match ending {
                Ending::WaitingAWhile => {
                    second = second.wait_timeout(SECOND / 2).unwrap_err();
                    assert_eq!(comm.runtime().now(), SECOND / 2);
                    second = second.wait_timeout(SECOND / 2).unwrap_err();
                }
                Ending::Asking => {
                    idle(&comm, SECOND);
                    second.is_done();
                }
                Ending::Waiting | Ending::Dropping => {}
            }
            if matches!(ending, Ending::Dropping) {
                drop(second);
            } else {
                let (given, error) = second.wait().unwrap_err();
                assert!(matches!(error, Error::NotStarted { limit: SECOND }), "{}: {error:?}", case.name);
                assert!(error.is_timeout());
                assert!(case.name == "barrier" || given == own(&comm), "{}: {given:?}", case.name);
            }
            assert_eq!(comm.runtime().now(), SECOND, "{}", case.name);
            let told = first.wait().unwrap_err();
            assert!(matches!(*told.error, Error::Aborted { rank: 1, .. }), "{}: {told:?}", case.name);
            assert_eq!(comm.runtime().now(), SECOND, "{}", case.name);
        });
    }
}

#[test]
fn an_operation_that_begins_in_time_names_the_rank_that_it_waits_for() {
    for case in waiting_cases() {
        let _outcome = sim::run(1, 2, |transport| {
            let mut comm = Communicator::new(transport);
            if comm.rank() == 0 {
                idle(&comm, SECOND / 2);
                comm.start_barrier().wait().unwrap();
                return idle(&comm, 120 * SECOND);
            }
            let first = comm.with_timeout(60 * SECOND).start_barrier();
            let second = (case.start)(&mut comm.with_timeout(SECOND));
            let (_, error) = second.wait().unwrap_err();
            assert!(error.is_timeout() && error.peer() == Some(0), "{}: {error:?}", case.name);
            assert_eq!(comm.runtime().now(), SECOND, "{}", case.name);
            first.wait().unwrap();
        });
    }
}

#[test]
fn a_wait_that_runs_out_gives_the_handle_back_and_aborts_nothing() {
    let outcome = sim::run(1, 2, |transport| {
        let mut comm = Communicator::new(transport);
        let mut outputs = Vec::new();
        for (round, case) in (1..).zip(waiting_cases()) {
            if comm.rank() == 0 {
                idle(&comm, 15 * SECOND);
            }
            if case.name == "recv" {
                drop((SEND.start)(&mut comm));
            }
            let mut handle = (case.start)(&mut comm);
            if comm.rank() == 1 {
                assert!(!handle.is_done(), "{}", case.name);
                handle = handle.wait_timeout(10 * SECOND).map(drop).expect_err(case.name);
            }
            let Ok(output) = handle.wait_timeout(10 * SECOND) else { panic!("{} goes on", case.name) };
            outputs.push((case, output));
            comm.barrier().unwrap();
            assert_eq!(comm.runtime().now(), round * 15 * SECOND, "{}", case.name);
        }
        (SEND.block)(&mut comm);
        outputs.reverse(); // the message first
        for (case, output) in outputs {
            let expected = (case.block)(&mut comm);
            let [output, expected] = [&output, &expected].map(|elements| promised(case, &comm, elements));
            assert_eq!(output, expected, "{}", case.name);
        }
    });
    assert_eq!(outcome.elapsed, u32::try_from(waiting_cases().count()).unwrap() * 15 * SECOND);
}

#[derive(Clone, Copy)]
enum Leaving {
    HandlesInOrder,
    HandlesBackwards,
    CommunicatorFirst,
    CommunicatorAlone,
}

#[rstest]
fn dropping_waits_for_everything_in_flight(
    #[values(
        Leaving::HandlesInOrder,
        Leaving::HandlesBackwards,
        Leaving::CommunicatorFirst,
        Leaving::CommunicatorAlone
    )]
    leaving: Leaving,
) {
    let outcome = sim::run(1, 2, move |transport| {
        let mut comm = Communicator::new(transport);
        if comm.rank() == 1 {
            let handles = CASES.iter().map(|case| (case.start)(&mut comm));
            let mut handles: Vec<_> = handles.collect();
            match leaving {
                Leaving::HandlesInOrder => {}
                Leaving::HandlesBackwards => handles.reverse(),
                Leaving::CommunicatorFirst => drop(comm),
                Leaving::CommunicatorAlone => handles.drain(..).for_each(std::mem::forget),
            }
            return;
        }
        idle(&comm, 25 * SECOND);
        let handles: Vec<_> = CASES.iter().map(|case| (case.start)(&mut comm)).collect();
        for handle in handles {
            handle.wait().unwrap();
        }
    });
    assert_eq!(outcome.elapsed, 25 * SECOND);
}

#[test]
fn dropping_a_handle_waits_for_a_collective_until_its_deadline_at_most_and_not_for_messages() {
    for case in waiting_cases() {
        let waits = if case.is_message() { Duration::ZERO } else { 30 * SECOND };
        let outcome = sim::run(1, 2, |transport| {
            let mut comm = Communicator::new(transport);
            if comm.rank() == 1 {
                comm.set_timeout(30 * SECOND);
                drop((case.start)(&mut comm));
                return comm.runtime().now();
            }
            idle(&comm, 45 * SECOND);
            Duration::ZERO
        });
        assert_eq!(outcome.results[1], waits, "{}", case.name);
    }
}

/// Outside of the simulation, which treats a rank's panic as a test failure.
#[test]
fn dropping_a_handle_in_a_panic_aborts_the_job() {
    for case in waiting_cases() {
        let runtime = Runtime::system();
        let mut ranks = sim::network(&runtime, 2).into_iter().map(Communicator::new);
        let (mut other, mut quitter) = (ranks.next().unwrap(), ranks.next().unwrap());
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _handle = (case.start)(&mut quitter);
            panic!("planned");
        }));
        assert!(panicked.is_err());
        let error = other.barrier().unwrap_err();
        assert!(matches!(error, Error::Aborted { rank: 1, .. }), "{}: {error:?}", case.name);
        assert!(runtime.now() < 30 * SECOND);
    }
}

#[test]
fn refused_arguments_come_back_with_the_input_and_cost_nothing() {
    type Refused = fn(&mut Communicator) -> Box<dyn Handle>;
    let refused: &'static [(Refused, &str)] = &[
        (|comm| boxed(comm.start_all_reduce(own(comm), ReduceOp::Mean)), "mean does not support i64"),
        (|comm| boxed(comm.start_reduce_scatter(own(comm), ReduceOp::Mean)), "mean does not support i64"),
        (|comm| boxed(comm.start_reduce(own(comm), ReduceOp::Mean, 0)), "mean does not support i64"),
        (|comm| boxed(comm.start_reduce(own(comm), ReduceOp::Sum, 3)), "reduce: root 3 is outside"),
        (|comm| boxed(comm.start_broadcast(own(comm), 3)), "broadcast: root 3 is outside"),
        (|comm| boxed(comm.start_send(own(comm), 3)), "rank 3 is outside a group of 3"),
        (|comm| boxed(comm.start_recv(own(comm), 3)), "rank 3 is outside a group of 3"),
    ];
    worlds::run(Network::Simulated, 3, move |mut comm| {
        for (start, message) in refused {
            let (given, error) = start(&mut comm).wait().unwrap_err();
            assert_eq!(given, own(&comm), "{message}");
            assert!(error.to_string().starts_with(message), "{error}");
        }
        let uneven = comm.start_reduce_scatter(vec![1_i64; 7], ReduceOp::Sum).wait().unwrap_err();
        assert!(matches!(*uneven.error, Error::Parts { whole: 7, world_size: 3, .. }), "{uneven}");
        assert_eq!(uneven.buffer.into_vec(), [1; 7]);
        // Nothing was sent, and the next operation counts as the first.
        let first = comm.with_timeout(Duration::ZERO).start_all_reduce(vec![1_i64], ReduceOp::Sum).wait();
        assert!(first.unwrap_err().to_string().starts_with("all_reduce (call 1) of 1 i64"));
    });
}

#[test]
fn counts_that_fit_nothing_are_refused_by_the_operation() {
    type Refused = fn(&mut Communicator) -> Box<dyn Handle>;
    let refused: &'static [(Refused, &str)] = &[
        (
            |comm| boxed(comm.start_all_gather_v(own(comm), vec![4])),
            "all_gather: 1 counts were given for 2 ranks: give one for each rank",
        ),
        (
            |comm| boxed(comm.start_scatter_v(own(comm), vec![], 0)),
            "scatter: 0 counts were given for 2 ranks: give one for each rank",
        ),
        (
            |comm| boxed(comm.start_reduce_scatter_v(own(comm), vec![1, 2], ReduceOp::Sum)),
            "reduce_scatter: the input has 4 elements, not 3",
        ),
        (
            |comm| boxed(comm.start_all_to_all_v(own(comm), vec![1, 2], vec![0, 0])),
            "all_to_all: the input has 4 elements, not 3",
        ),
        (
            |comm| boxed(comm.start_scatter_v(own(comm), vec![usize::MAX, 1], 1)),
            "scatter: the sum of the counts is larger than any memory",
        ),
        (
            |comm| boxed(comm.start_reduce_scatter_v(own(comm), vec![1, usize::MAX], ReduceOp::Sum)),
            "reduce_scatter: the sum of the counts is larger than any memory",
        ),
        (
            |comm| boxed(comm.start_all_gather_v(own(comm), vec![4, usize::MAX])),
            "all_gather: the sum of the counts is larger than any memory",
        ),
        // The operation itself allocates no memory.
        (
            |comm| boxed(comm.start_reduce_scatter_v(own(comm), vec![usize::MAX / 16; 2], ReduceOp::Sum)),
            "reduce_scatter: the input has 4 elements, not 2305843009213693950",
        ),
        (
            |comm| boxed(comm.start_all_gather_v(own(comm), vec![usize::MAX / 16; 2])),
            "all_gather: the input has 4 elements, not 1152921504606846975",
        ),
        (
            |comm| boxed(comm.start_gather_v(own(comm), vec![usize::MAX / 16; 2], 0)),
            "gather: the input has 4 elements, not 1152921504606846975",
        ),
        (
            |comm| boxed(comm.start_all_to_all_v(own(comm), vec![1, 2], vec![usize::MAX / 16, 0])),
            "all_to_all: the input has 4 elements, not 3",
        ),
    ];
    worlds::run(Network::Simulated, 2, move |mut comm| {
        for (start, message) in refused {
            let (given, error) = start(&mut comm).wait().unwrap_err();
            assert_eq!(given, own(&comm), "{message}");
            assert_eq!(error.to_string(), *message);
        }
        comm.start_barrier().wait().unwrap();
    });
}

#[test]
fn a_started_monitored_barrier_names_the_absent() {
    let outcome = sim::run(1, 3, |transport| {
        let mut comm = Communicator::new(transport);
        comm.start_monitored_barrier().wait().unwrap();
        if comm.rank() == 1 {
            return idle(&comm, 120 * SECOND);
        }
        let error = *comm.start_monitored_barrier().wait().unwrap_err().error;
        assert!(matches!(&error, Error::Absent { ranks } if *ranks == [1]), "{error:?}");
    });
    assert_eq!(outcome.elapsed, 120 * SECOND);
}

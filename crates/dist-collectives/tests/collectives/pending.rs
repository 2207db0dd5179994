//! Operations that do not block.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use dist_collectives::{Buffer, Communicator, Error, Pending, ReduceOp};
use dist_testkit::oracle::{self, Reduction};
#[cfg(feature = "tcp")]
use dist_testkit::process::Port;
use dist_transport::runtime::{Runtime, Unparker};
use dist_transport::sim;
use rstest::rstest;

use crate::worlds::{self, Network};

const MINUTE: Duration = Duration::from_secs(60);

#[rstest]
fn many_started_operations_give_the_results_of_blocking_ones(
    #[values(Network::Simulated, Network::Threads)] network: Network,
    #[values(1, 2, 3, 4)] world_size: usize,
) {
    worlds::run(network, world_size, move |mut comm| {
        let inputs = |seed: u64, len| -> Vec<Vec<f32>> {
            (0..world_size).map(|rank| oracle::sample(seed, rank, len)).collect()
        };
        let lens = [0, 1, 5, 1000, 3];
        let pending: Vec<_> = lens
            .iter()
            .map(|&len| comm.start_all_reduce(inputs(len as u64, len)[comm.rank()].clone(), ReduceOp::Mean))
            .collect();
        // Blocking calls run on the communicator itself at the same time.
        let mut ones = [1_u8];
        comm.all_reduce(&mut ones, ReduceOp::Sum).unwrap();
        assert_eq!(usize::from(ones[0]), world_size);
        for (pending, len) in pending.into_iter().zip(lens) {
            let sum = pending.wait().unwrap().into_vec();
            assert_eq!(sum, oracle::all_reduce(&inputs(len as u64, len), Reduction::Mean));
        }
    });
}

#[test]
fn they_run_under_virtual_time_the_same_way_for_the_same_seed() {
    let program = |transport| {
        let mut comm = Communicator::new(transport);
        let pending: Vec<_> =
            (0..5).map(|n| comm.start_all_reduce(vec![n as f64; 100], ReduceOp::Sum)).collect();
        comm.barrier().unwrap();
        pending.into_iter().map(|pending| pending.wait().unwrap()[99]).collect::<Vec<_>>()
    };
    let (first, second) = (sim::run(21, 3, program), sim::run(21, 3, program));
    assert_eq!((first.trace_hash, &first.results), (second.trace_hash, &second.results));
    let other = sim::run(22, 3, program);
    assert_ne!(other.trace_hash, first.trace_hash);
    assert_eq!(other.results, first.results);
    assert_eq!(first.results, vec![vec![0.0, 3.0, 6.0, 9.0, 12.0]; 3]);
}

/// A started collective is counted among the calls, and so is a fork.
#[test]
fn ranks_that_fork_before_and_after_a_start_get_an_error() {
    worlds::run(Network::Simulated, 2, |mut comm| {
        let early = (comm.rank() == 0).then(|| comm.start_all_reduce(vec![1_i32], ReduceOp::Sum));
        let mut fork = comm.fork().unwrap();
        let pending = early.unwrap_or_else(|| comm.start_all_reduce(vec![1_i32], ReduceOp::Sum));
        let error = pending.wait().map(drop).map_err(Error::from).and(fork.barrier()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("an earlier call differed") && text.contains("made a fork"), "{text}");
    });
}

#[test]
fn the_deadline_begins_at_the_start_and_the_buffer_comes_back() {
    let outcome = sim::run(1, 2, |transport| {
        let mut comm = Communicator::new(transport);
        if comm.rank() == 1 {
            let idle = comm.runtime().deadline(2 * MINUTE);
            while !comm.runtime().expired(idle) {
                comm.runtime().park(Some(idle));
            }
            return;
        }
        let pending = comm.with_timeout(MINUTE / 2).start_all_reduce(vec![7.0_f32; 9], ReduceOp::Sum);
        // Twenty of the thirty seconds pass here.
        let pending = pending.wait_timeout(MINUTE / 3).unwrap_err();
        assert_eq!(comm.runtime().now(), MINUTE / 3);
        let failed = pending.wait().unwrap_err();
        assert_eq!(comm.runtime().now(), MINUTE / 2);
        assert_eq!(failed.buffer.len(), 9);
        assert!(failed.error.is_timeout());
        assert_eq!(failed.error.peer(), Some(1));
        assert!(Error::from(failed).to_string().starts_with("all_reduce (call 1) of 9 f32"));
    });
    assert_eq!(outcome.elapsed, 2 * MINUTE);
}

#[test]
fn a_wait_that_runs_out_aborts_nothing() {
    let outcome = sim::run(1, 2, |transport| {
        let mut comm = Communicator::new(transport);
        if comm.rank() == 1 {
            comm.recv(&mut [0_u8], 0).unwrap();
        }
        let mut pending = comm.start_all_reduce(vec![comm.rank() as u64], ReduceOp::Max);
        if comm.rank() == 0 {
            assert!(!pending.is_done());
            pending = pending.wait_timeout(MINUTE / 4).unwrap_err();
            comm.send(&[1_u8], 1).unwrap();
        }
        let sum = pending.wait_timeout(MINUTE / 4).expect("the other rank comes at once").unwrap();
        assert_eq!(sum.into_vec(), [1]);
    });
    assert_eq!(outcome.elapsed, MINUTE / 4);
}

#[test]
fn testing_never_waits_and_returns_the_memory_of_an_operation_that_has_ended() {
    for &network in Network::ALL {
        worlds::run(network, 2, move |mut comm| {
            if comm.rank() == 1 {
                comm.recv(&mut [0_u8], 0).unwrap();
            }
            let mut pending = comm.start_all_reduce(vec![comm.rank() as u64], ReduceOp::Max);
            if comm.rank() == 0 {
                // Rank 1 starts its operation after it has received a message.
                pending = pending.test().unwrap_err();
                comm.send(&[1_u8], 1).unwrap();
            }
            let maximum = loop {
                match pending.test() {
                    Ok(done) => break done.unwrap().into_vec(),
                    Err(running) => pending = running,
                }
                let soon = comm.runtime().deadline(Duration::from_micros(1));
                comm.runtime().park(Some(soon));
            };
            assert_eq!(maximum, [1], "{network:?}");
        });
    }
}

/// Messages are separate from collectives, so a send does not wait for the collective that its receiver makes later.
#[test]
fn a_message_does_not_wait_for_a_started_collective() {
    for &network in Network::ALL {
        worlds::run(network, 2, move |mut comm| {
            let mut received = [0_u8];
            if comm.rank() == 0 {
                let pending = comm.start_barrier();
                comm.send(&[7_u8], 1).unwrap();
                pending.wait().unwrap();
            } else {
                comm.recv(&mut received, 0).unwrap();
                assert_eq!(received, [7], "{network:?}");
                comm.barrier().unwrap();
            }
        });
    }
}

#[test]
fn a_call_that_cannot_begin_before_its_deadline_says_so() {
    let _outcome = sim::run(1, 2, |transport| {
        let mut comm = Communicator::new(transport);
        if comm.rank() == 1 {
            comm.runtime().sleep(2 * MINUTE);
            return assert!(comm.barrier().is_err());
        }
        let first = comm.start_barrier();
        let error = comm.with_timeout(MINUTE / 4).barrier().unwrap_err();
        assert!(matches!(error, Error::NotStarted { limit } if limit == MINUTE / 4), "{error:?}");
        assert_eq!(comm.runtime().now(), MINUTE / 4);
        let told = first.wait().unwrap_err();
        assert!(matches!(*told.error, Error::Aborted { rank: 0, .. }), "{told:?}");
    });
}

/// Waits for a future on the calling thread.
fn block_on<F: Future + Unpin>(runtime: &Runtime, mut future: F) -> F::Output {
    struct Unpark(Unparker);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(runtime.unparker())));
    loop {
        if let Poll::Ready(output) = Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        runtime.park(None);
    }
}

#[test]
fn a_handle_is_a_future() {
    for &network in Network::ALL {
        worlds::run(network, 2, move |mut comm| {
            let runtime = comm.runtime().clone();
            if comm.rank() == 1 {
                runtime.sleep(Duration::from_millis(1));
            }
            for _ in 0..10 {
                let pending = comm.start_all_reduce(vec![comm.rank() as u64 + 1], ReduceOp::Sum);
                let sum = block_on(&runtime, pending).unwrap();
                assert_eq!(sum.into_vec(), [3], "{network:?}");
            }
            let failed = block_on(&runtime, comm.start_all_reduce(vec![1_u8], ReduceOp::Mean)).unwrap_err();
            assert!(matches!(*failed.error, Error::Unreducible { .. }));
        });
    }
}

#[test]
fn handles_are_waited_for_on_several_threads() {
    for &network in Network::ALL {
        worlds::run(network, 2, move |mut comm| {
            let runtime = comm.runtime().clone();
            for round in 0..20_u64 {
                let start = |value| comm.start_all_reduce(vec![value + round], ReduceOp::Sum);
                let [first, second, third] = [1, 2, 3].map(start);
                let wait = move || third.wait().unwrap().into_vec();
                let task = runtime.spawn("waiter", wait).unwrap();
                assert_eq!(second.wait().unwrap().into_vec(), [2 * (2 + round)], "{network:?}");
                assert_eq!(task.join().unwrap(), [2 * (3 + round)], "{network:?}");
                assert_eq!(first.wait().unwrap().into_vec(), [2 * (1 + round)], "{network:?}");
                comm.barrier().unwrap();
            }
        });
    }
}

#[test]
fn one_of_several_operations_is_waited_for() {
    for &network in Network::ALL {
        worlds::run(network, 2, move |mut comm| {
            let mut forks = [comm.fork().unwrap(), comm.fork().unwrap()];
            let mut pending: Vec<_> = forks
                .iter_mut()
                .zip([10_u64, 20])
                .map(|(fork, value)| {
                    (fork.rank() == 0 || value == 20)
                        .then(|| fork.start_all_reduce(vec![value], ReduceOp::Sum))
                })
                .collect();
            let (index, sum) = Pending::wait_any(&mut pending).unwrap();
            assert_eq!((index, sum.unwrap().into_vec()), (1, vec![40]), "{network:?}");
            assert!(pending[1].is_none());
            // Rank 1 starts the other one after this.
            comm.barrier().unwrap();
            if comm.rank() == 1 {
                pending[0] = Some(forks[0].start_all_reduce(vec![11], ReduceOp::Sum));
            }
            let mut done = Pending::wait_some(&mut pending);
            let (index, sum) = done.pop().unwrap();
            assert_eq!((index, sum.unwrap().into_vec()), (0, vec![21]), "{network:?}");
            assert!(done.is_empty() && Pending::wait_any(&mut pending).is_none());
            assert!(Pending::test_any(&mut pending).is_none());
        });
    }
}

#[rstest]
#[case::the_handle(true)]
#[case::the_communicator(false)]
fn drop_waits_for_the_started_operation(#[case] the_handle: bool) {
    let outcome = sim::run(1, 2, move |transport| {
        let mut comm = Communicator::new(transport);
        if comm.rank() == 0 {
            // Leaves at once, but not before the operation is done.
            let pending = comm.start_all_reduce(vec![1_u8], ReduceOp::Sum);
            if the_handle {
                drop(pending);
            } else {
                std::mem::forget(pending);
                drop(comm);
            }
            return;
        }
        let late = comm.runtime().deadline(MINUTE / 2);
        while !comm.runtime().expired(late) {
            comm.runtime().park(Some(late));
        }
        assert_eq!(comm.start_all_reduce(vec![1_u8], ReduceOp::Sum).wait().unwrap().into_vec(), [2]);
    });
    assert_eq!(outcome.elapsed, MINUTE / 2);
}

#[test]
fn dropping_waits_until_the_deadline_at_most() {
    let outcome = sim::run(1, 2, |transport| {
        let mut comm = Communicator::new(transport);
        if comm.rank() == 0 {
            drop(comm.start_all_reduce(vec![1_u8], ReduceOp::Sum));
            return;
        }
        let late = comm.runtime().deadline(2 * MINUTE);
        while !comm.runtime().expired(late) {
            comm.runtime().park(Some(late));
        }
        assert!(comm.start_all_reduce(vec![1_u8], ReduceOp::Sum).wait().is_err());
    });
    assert_eq!(outcome.elapsed, 2 * MINUTE);
}

/// Outside of the simulation, which treats a rank's panic as a test failure.
#[rstest]
#[case::a_handle_alone(true)]
#[case::handle_and_communicator(false)]
fn a_panic_aborts_the_job_instead_of_waiting(#[case] keep_the_communicator: bool) {
    let runtime = Runtime::system();
    let mut transports = sim::network(&runtime, 2).into_iter();
    let mut quitter = Communicator::new(transports.next().unwrap());
    let mut other = Communicator::new(transports.next().unwrap());
    let mut kept = None;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _pending = quitter.start_all_reduce(vec![1.0_f32], ReduceOp::Sum);
        if keep_the_communicator {
            kept = Some(quitter);
            panic!("planned");
        }
        let _dropped_in_the_panic = quitter;
        panic!("planned");
    }));
    assert!(panicked.is_err());
    let error = other.start_all_reduce(vec![1.0_f32], ReduceOp::Sum).wait().unwrap_err().error;
    assert!(matches!(*error, Error::Aborted { rank: 0, .. }), "{error:?}");
    assert!(runtime.now() < MINUTE / 2);
    drop(kept);
}

/// Rank 1 holds the handle of an operation that has ended until rank 0 is done. The transports of rank 0 wait
/// until all others have left.
#[cfg(feature = "tcp")]
#[test]
fn a_handle_that_outlives_the_communicator_does_not_keep_its_rank_in_the_job() {
    use dist_collectives::Config;
    let runtime = Runtime::system();
    let port = Port::reserve();
    let address = format!("127.0.0.1:{}", port.number());
    let (gone, mut has_gone) = runtime.mailbox();
    let start = |rank| {
        let config = Config::new(rank, 2, &address).unwrap();
        move || {
            let mut comm = Communicator::join(&config).unwrap();
            let pending = comm.start_all_reduce(vec![1_u8], ReduceOp::Sum);
            drop(comm);
            pending
        }
    };
    let (host, keeper) = (start(0), start(1));
    let host = runtime.spawn("rank 0", move || {
        let sum = host().wait().unwrap();
        gone.send(());
        sum.into_vec()
    });
    let keeper = runtime.spawn("rank 1", move || {
        let (pending, runtime) = (keeper(), Runtime::system());
        let left = has_gone.receive(Some(runtime.deadline(MINUTE / 2)));
        (left.is_ok(), pending.wait().unwrap().into_vec())
    });
    assert_eq!(keeper.unwrap().join().unwrap(), (true, vec![2]), "rank 0 was held back");
    assert_eq!(host.unwrap().join().unwrap(), [2]);
}

#[test]
fn refused_arguments_come_back_with_the_buffer() {
    worlds::run(Network::Simulated, 2, |mut comm| {
        let failed = comm.start_all_reduce(vec![3_u32; 4], ReduceOp::Mean).wait().unwrap_err();
        assert!(matches!(*failed.error, Error::Unreducible { .. }));
        assert_eq!(failed.buffer.into_vec(), [3; 4]);
        // Nothing was sent, and the next operation counts as the first.
        let sum = comm.start_all_reduce(Buffer::from(vec![3_u32; 4]), ReduceOp::Sum).wait().unwrap();
        assert_eq!(sum.into_vec(), [6; 4]);
    });
}

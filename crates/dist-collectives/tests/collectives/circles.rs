//! Ranks that wait for each other in a circle.

use std::time::Duration;

use dist_collectives::error::WaitingRank;
use dist_collectives::tuning::Operation;
use dist_collectives::{Communicator, Error, ReduceOp};
use dist_transport::sim;
use rstest::rstest;

use crate::worlds::{self, Network};

/// A timeout that leaves the time for reports of waits, also on a busy machine.
const LIMIT: Duration = Duration::from_secs(5);

/// Longer than the wait after which a rank reports it.
const LATE: Duration = Duration::from_millis(600);

/// The ranks of a circle, each with the rank that it waits for.
fn ranks(waits: &[WaitingRank]) -> Vec<(usize, usize)> {
    waits.iter().map(|wait| (wait.rank, wait.on)).collect()
}

#[rstest]
fn ranks_that_all_receive_first_are_told_long_before_the_deadline(#[values(2, 3, 4)] world_size: usize) {
    for &network in Network::ALL {
        let errors = worlds::run(network, world_size, |mut comm| {
            let right = (comm.rank() + 1) % comm.world_size();
            let error = comm.with_tag(7).recv(&mut [0_u8], right).unwrap_err();
            assert!(comm.runtime().now() < Duration::from_secs(25));
            error
        });
        let circle: Vec<_> = (0..world_size).map(|rank| (rank, (rank + 1) % world_size)).collect();
        for error in &errors {
            let Error::CircularWait { waits, count, .. } = error else { panic!("{network:?}: {error:?}") };
            assert_eq!((ranks(waits), *count), (circle.clone(), world_size), "{network:?}");
            assert!(!error.is_timeout() && error.peer().is_none());
        }
        if world_size == 2 {
            let expected = "message of 1 u8 (tag 7, from rank 1) failed: 2 ranks wait for each other: rank 0 waits for rank \
                            1 in message of u8 (tag 7); rank 1 waits for rank 0 in message of u8 (tag 7)";
            assert_eq!(errors[0].to_string(), expected, "{network:?}");
        }
    }
}

#[test]
fn messages_that_came_instead_are_listed_in_a_circle() {
    for &network in Network::ALL {
        let errors = worlds::run(network, 3, |mut comm| {
            let (left, right) = ((comm.rank() + 2) % 3, (comm.rank() + 1) % 3);
            comm.with_tag(1).start_send(vec![1_u8; 5], left).wait().unwrap();
            comm.with_tag(2).send_recv(&[1_u8], left, &mut [0_u8], right).unwrap();
            comm.with_tag(7).recv(&mut [0_u8], right).unwrap_err()
        });
        for error in &errors {
            assert!(matches!(error, Error::CircularWait { .. }), "{network:?}: {error:?}");
            let text = error.to_string();
            assert!(
                text.ends_with("; these have come instead: message of 5 u8 (tag 1)"),
                "{network:?}: {text}"
            );
        }
    }
}

#[test]
fn a_rank_that_computes_while_a_started_receive_waits_is_in_no_circle() {
    for &network in Network::ALL {
        worlds::run(network, 2, |mut comm| {
            if comm.rank() == 1 {
                comm.with_tag(2).recv(&mut [0_u8], 0).unwrap();
                return comm.with_tag(1).send(&[1_u8], 0).unwrap();
            }
            let pending = comm.with_tag(1).start_recv(vec![0_u8], 1);
            comm.runtime().sleep(LATE);
            comm.with_tag(2).send(&[2_u8], 1).unwrap();
            assert_eq!(pending.wait().unwrap()[0], 1);
        });
    }
}

#[test]
fn a_rank_that_receives_from_any_rank_is_in_no_circle() {
    for &network in Network::ALL {
        for started in [false, true] {
            worlds::run(network, 3, move |mut comm| match comm.rank() {
                0 => {
                    let from = if started {
                        comm.with_tag(5).start_recv_any(vec![0_u8]).wait().unwrap().from.unwrap()
                    } else {
                        comm.with_tag(5).recv_any(&mut [0_u8]).unwrap()
                    };
                    assert_eq!(from, 1);
                    comm.with_tag(6).send(&[1_u8], 2).unwrap();
                }
                1 => {
                    comm.runtime().sleep(LATE);
                    comm.with_tag(5).send(&[1_u8], 0).unwrap();
                }
                _ => comm.with_tag(6).recv(&mut [0_u8], 0).unwrap(),
            });
        }
    }
}

/// Checks the errors of all ranks. The first rank receives from the second one, and all others reduce.
fn check_circle_of_calls(network: &str, errors: &[Error]) {
    for (rank, error) in errors.iter().enumerate() {
        let Error::CircularWait { waits, count, .. } = error else {
            panic!("{network}, rank {rank}: {error:?}")
        };
        let nexts = waits.iter().skip(1).chain(&waits[..1]).map(|next| next.rank);
        assert!(waits.len() == *count && waits.iter().map(|wait| wait.on).eq(nexts), "{network}: {error}");
        for WaitingRank { rank, call, .. } in waits {
            let expected = if *rank == 0 { Operation::Message } else { Operation::AllReduce };
            assert_eq!(call.as_ref().map(|call| call.operation), Some(expected), "{network}: {error}");
        }
        assert!(!error.is_timeout() && error.peer().is_none());
    }
}

/// Makes calls that wait for each other: the first rank receives from the second, the others reduce. Returns the error.
fn receive_or_reduce(comm: &mut Communicator, is_connected: bool) -> Error {
    // In the simulator, the first ranks may find the circle while the last ones are still in the first call.
    if is_connected && let Err(error) = comm.all_reduce(&mut [1.0_f32; 100], ReduceOp::Sum) {
        return error;
    }
    let before = comm.runtime().now();
    let failed = match comm.rank() {
        0 => comm.recv(&mut [0_u8], 1),
        _ => comm.all_reduce(&mut [1_u64], ReduceOp::Sum),
    };
    assert!(comm.runtime().now() - before < Duration::from_secs(25));
    failed.unwrap_err()
}

#[rstest]
fn a_receive_and_a_collective_that_wait_for_each_other_are_told_long_before_the_deadline(
    #[values(2, 3, 4)] world_size: usize,
    #[values(false, true)] is_connected: bool,
) {
    for &network in Network::ALL {
        let errors =
            worlds::run(network, world_size, move |mut comm| receive_or_reduce(&mut comm, is_connected));
        check_circle_of_calls(&format!("{network:?}"), &errors);
    }
    for seed in 0..20 {
        let network = sim::Network::new(world_size).with_seed(seed);
        let network = if seed % 2 == 0 { network } else { network.with_shared_memory() };
        let run =
            network.run(move |transport| receive_or_reduce(&mut Communicator::new(transport), is_connected));
        check_circle_of_calls(&format!("seed {seed}"), &run.results);
    }
}

#[test]
fn a_collective_that_was_started_and_has_ended_does_not_hide_a_circle() {
    for &network in Network::ALL {
        let errors = worlds::run(network, 2, |mut comm| {
            comm.start_all_reduce(vec![1_u64], ReduceOp::Sum).wait().unwrap();
            let (to, from) = (1 - comm.rank(), 1 - comm.rank());
            let pending = comm.with_tag(1).start_recv(vec![0_u8], from);
            comm.with_tag(1).send(&[1_u8], to).unwrap();
            pending.wait().unwrap();
            receive_or_reduce(&mut comm, false)
        });
        check_circle_of_calls(&format!("{network:?}"), &errors);
    }
}

#[test]
fn a_started_collective_beside_a_receive_is_in_no_circle() {
    for &network in Network::ALL {
        worlds::run(network, 3, |mut comm| match comm.rank() {
            0 => {
                let pending = comm.start_all_reduce(vec![1_u64], ReduceOp::Sum);
                comm.recv(&mut [0_u8], 1).unwrap();
                assert_eq!(pending.wait().unwrap()[0], 3);
            }
            1 => {
                comm.all_reduce(&mut [1_u64], ReduceOp::Sum).unwrap();
                comm.send(&[1_u8], 0).unwrap();
            }
            _ => {
                comm.runtime().sleep(LATE);
                comm.all_reduce(&mut [1_u64], ReduceOp::Sum).unwrap();
            }
        });
    }
}

#[test]
fn a_rank_that_computes_while_its_started_collective_waits_is_in_no_circle() {
    for &network in Network::ALL {
        worlds::run(network, 2, |mut comm| {
            if comm.rank() == 0 {
                comm.recv(&mut [0_u8], 1).unwrap();
                return comm.all_reduce(&mut [1_u64], ReduceOp::Sum).unwrap();
            }
            let pending = comm.start_all_reduce(vec![1_u64], ReduceOp::Sum);
            comm.runtime().sleep(LATE);
            comm.send(&[1_u8], 0).unwrap();
            assert_eq!(pending.wait().unwrap()[0], 2);
        });
    }
}

#[test]
fn a_started_send_beside_a_collective_is_in_no_circle() {
    const LONG: usize = 3 << 20;
    for &network in Network::ALL {
        worlds::run(network, 2, |mut comm| {
            if comm.rank() == 0 {
                comm.runtime().sleep(LATE);
                comm.recv(&mut vec![0_u8; LONG], 1).unwrap();
                return comm.all_reduce(&mut [1_u64], ReduceOp::Sum).unwrap();
            }
            let pending = comm.start_send(vec![1_u8; LONG], 0);
            comm.all_reduce(&mut [1_u64], ReduceOp::Sum).unwrap();
            pending.wait().unwrap();
        });
    }
}

#[test]
fn ranks_that_are_late_by_seconds_are_in_no_circle() {
    for &network in Network::ALL {
        worlds::run(network, 3, |mut comm| {
            let late = 2 * LATE * u32::try_from(comm.rank()).unwrap();
            comm.runtime().sleep(late);
            comm.all_reduce(&mut [1_u64], ReduceOp::Sum).unwrap();
            let (left, right) = ((comm.rank() + 2) % 3, (comm.rank() + 1) % 3);
            comm.runtime().sleep(late);
            if comm.rank() == 2 {
                comm.send(&[1_u8], right).unwrap();
            }
            comm.recv(&mut [0_u8], left).unwrap();
            if comm.rank() != 2 {
                comm.send(&[1_u8], right).unwrap();
            }
            comm.all_reduce(&mut [1_u64], ReduceOp::Sum).unwrap();
        });
    }
}

#[test]
fn a_circle_across_communicators_is_listed_when_the_deadline_passes() {
    for &network in Network::ALL {
        for is_collective in [false, true] {
            let errors = worlds::run(network, 2, move |mut comm| {
                let mut other = comm.fork().unwrap();
                if comm.rank() == 0 {
                    return comm.with_timeout(LIMIT).recv(&mut [0_u8], 1).unwrap_err();
                }
                let failed = match is_collective {
                    true => other.all_reduce(&mut [1_u64], ReduceOp::Sum),
                    false => other.recv(&mut [0_u64], 0),
                };
                failed.unwrap_err()
            });
            for (rank, error) in errors.iter().enumerate() {
                let text = error.to_string();
                assert!(error.is_timeout() && error.peer() == Some(1), "{network:?}, rank {rank}: {error:?}");
                let first = "2 ranks wait for each other across communicators: rank 0 waits for rank 1 in message of u8 \
                             on channel 0; rank 1 waits for rank 0 in ";
                let call = if is_collective { "all_reduce (call 1) of 1 u64" } else { "message of u64" };
                let (_, second) =
                    text.split_once(first).unwrap_or_else(|| panic!("{network:?}, rank {rank}: {text}"));
                assert!(second.starts_with(call) && second.contains(" on channel "), "{network:?}: {text}");
            }
        }
    }
}

#[test]
fn a_circle_beside_a_started_collective_is_listed_when_the_deadline_passes() {
    for &network in Network::ALL {
        let errors = worlds::run(network, 2, |mut comm| {
            if comm.rank() == 0 {
                return comm.with_timeout(LIMIT).recv(&mut [0_u8], 1).unwrap_err();
            }
            comm.start_all_reduce(vec![1_u64], ReduceOp::Sum).wait().unwrap_err().into()
        });
        for error in errors {
            let text = error.to_string();
            assert!(error.is_timeout() && error.peer() == Some(1), "{network:?}: {error:?}");
            let circle = "2 ranks wait for each other: rank 0 waits for rank 1 in message of u8; rank 1 waits for rank 0 in \
                          all_reduce (call 1)";
            assert!(text.contains(circle), "{network:?}: {text}");
        }
    }
}

#[test]
#[cfg(all(feature = "shm", target_os = "linux"))]
fn ranks_that_both_send_a_long_message_first_are_told_soon() {
    for network in [Network::Tcp, Network::Shm] {
        let errors = worlds::run(network, 2, |mut comm| {
            let other = 1 - comm.rank();
            comm.send(&vec![1_u8; 64 << 20], other).unwrap_err()
        });
        for error in errors {
            assert!(matches!(error, Error::CircularWait { count: 2, .. }), "{network:?}: {error:?}");
            let circle = "2 ranks wait for each other: rank 0 waits for rank 1 in message of u8; rank 1 waits for rank 0 in \
                          message of u8";
            assert!(error.to_string().contains(circle), "{network:?}: {error}");
        }
    }
}

#[test]
fn a_deadline_with_a_rank_that_computes_lists_no_circle() {
    for &network in Network::ALL {
        let errors = worlds::run(network, 3, |mut comm| {
            let mut other = comm.fork().unwrap();
            match comm.rank() {
                0 => comm.with_timeout(LIMIT).recv(&mut [0_u8], 1).unwrap_err(),
                1 => other.recv(&mut [0_u8], 2).unwrap_err(),
                _ => {
                    comm.runtime().sleep(LIMIT + LATE);
                    comm.barrier().unwrap_err()
                }
            }
        });
        for error in errors {
            assert!(error.is_timeout(), "{network:?}: {error:?}");
            assert!(!error.to_string().contains("wait for each other"), "{network:?}: {error}");
        }
    }
}

#[test]
fn a_thread_that_acts_on_another_communicator_ends_a_circle() {
    for &network in Network::ALL {
        worlds::run(network, 2, |mut comm| {
            let mut other = comm.fork().unwrap();
            if comm.rank() == 0 {
                comm.recv(&mut [0_u8], 1).unwrap();
                return other.all_reduce(&mut [1_u64], ReduceOp::Sum).unwrap();
            }
            let runtime = comm.runtime().clone();
            let late = move || {
                comm.runtime().sleep(3 * LATE);
                comm.send(&[1_u8], 0).unwrap();
            };
            let thread = runtime.spawn("late", late).unwrap();
            other.all_reduce(&mut [1_u64], ReduceOp::Sum).unwrap();
            thread.join().unwrap();
        });
    }
}

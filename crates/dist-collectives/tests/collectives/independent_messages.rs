//! Started messages that wait for their own peers only, beside blocking calls and collectives.

use std::time::Duration;

use dist_collectives::transport::runtime::Runtime;
use dist_collectives::{Communicator, Error, OwnedMessage, Pending, ReduceOp};
use rstest::rstest;

use crate::worlds::{self, Network};

const SECOND: Duration = Duration::from_secs(1);

/// More than a link takes before its receiver reads.
const LONG: usize = 3 << 20;

/// Lengths of messages in bytes: empty, in a fastbox, in a ring, and as a single copy.
const LENGTHS: [usize; 4] = [0, 8, 100_000, LONG];

fn content(from: usize, len: usize) -> Vec<u8> {
    (0..len).map(|index| u8::try_from((from * 31 + index) % 251).unwrap()).collect()
}

#[rstest]
fn all_ranks_post_receives_then_send_then_wait(#[values(1, 2, 3, 4)] world_size: usize) {
    for &network in Network::ALL {
        worlds::run(network, world_size, |mut comm| {
            let (rank, ranks) = (comm.rank(), comm.world_size());
            for len in LENGTHS {
                let receives: Vec<_> =
                    (0..ranks).map(|from| comm.start_recv(vec![0_u8; len], from)).collect();
                for to in 0..ranks {
                    comm.send(&content(rank, len), (rank + to) % ranks).unwrap();
                }
                for (from, received) in Pending::wait_all(receives).into_iter().enumerate() {
                    assert!(received.unwrap()[..] == content(from, len), "{len} bytes from rank {from}");
                }
            }
            // No started message is left, so that the engine is in the communicator again.
            comm.close().unwrap();
        });
    }
}

#[test]
fn a_started_message_meets_a_blocking_call() {
    for &network in Network::ALL {
        worlds::run(network, 2, |mut comm| {
            for len in LENGTHS {
                if comm.rank() == 0 {
                    comm.start_send(content(0, len), 1).wait().unwrap();
                    comm.send(&content(1, len), 1).unwrap();
                } else {
                    let mut received = vec![0; len];
                    comm.recv(&mut received, 0).unwrap();
                    assert!(received == content(0, len));
                    let received = comm.start_recv(received, 0).wait().unwrap();
                    assert!(received[..] == content(1, len));
                }
            }
        });
    }
}

#[test]
fn collectives_and_messages_of_other_ranks_go_on_while_receives_wait() {
    for &network in Network::ALL {
        worlds::run(network, 3, |mut comm| {
            let rank = comm.rank();
            let [first, second] = [(rank + 1) % 3, (rank + 2) % 3];
            let early = comm.with_tag(1).start_recv(vec![0_u8; 50_000], first);
            let late = comm.with_tag(2).start_recv(vec![0_u8; LONG], second);
            for round in 0..3 {
                let mut sum = [1.0_f64; 1000];
                comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [3.0; 1000]);
                // A message with another tag passes those that are awaited.
                let sent = comm.start_send(vec![round; 10], second);
                let mut received = [0; 10];
                comm.recv(&mut received, first).unwrap();
                assert_eq!(received, [round; 10]);
                sent.wait().unwrap();
            }
            let late_send = comm.with_tag(2).start_send(content(rank, LONG), first);
            comm.barrier().unwrap();
            comm.with_tag(1).send(&content(rank, 50_000), second).unwrap();
            assert!(early.wait().unwrap()[..] == content(first, 50_000));
            assert!(late.wait().unwrap()[..] == content(second, LONG));
            late_send.wait().unwrap();
        });
    }
}

#[test]
fn receives_of_one_tag_end_in_the_order_of_their_starts_and_a_blocking_one_is_the_last() {
    for &network in Network::ALL {
        worlds::run(network, 2, |mut comm| {
            if comm.rank() == 0 {
                for value in 0..4_u64 {
                    comm.send(&[value], 1).unwrap();
                }
                return;
            }
            let started: Vec<_> = (0..3).map(|_| comm.start_recv(vec![u64::MAX], 0)).collect();
            let mut last = [0_u64];
            comm.recv(&mut last, 0).unwrap();
            let values: Vec<_> =
                Pending::wait_all(started).into_iter().map(|value| value.unwrap()[0]).collect();
            assert_eq!((values, last), (vec![0, 1, 2], [3]));
        });
    }
}

#[test]
fn the_receive_whose_message_comes_first_ends_first() {
    for &network in Network::ALL {
        worlds::run(network, 3, |mut comm| {
            if comm.rank() > 0 {
                let order = if comm.rank() == 2 { 0 } else { 1 };
                for turn in 0..2 {
                    if order == turn {
                        comm.send(&[comm.rank()], 0).unwrap();
                    }
                    comm.barrier().unwrap();
                }
                return;
            }
            let mut pending = [1, 2].map(|from| Some(comm.start_recv(vec![0], from)));
            for expected in [2, 1] {
                // The other message is sent after the barrier.
                let (index, received) = Pending::wait_any(&mut pending).unwrap();
                assert_eq!((index + 1, received.unwrap()[0]), (expected, expected));
                comm.barrier().unwrap();
            }
            assert!(Pending::wait_any(&mut pending).is_none());
        });
    }
}

#[test]
fn test_any_finds_a_message_without_a_wait() {
    for &network in Network::ALL {
        worlds::run(network, 2, |mut comm| {
            let other = 1 - comm.rank();
            let mut pending = [Some(comm.start_recv(vec![0; 100], other))];
            comm.send(&[7; 100], other).unwrap();
            let deadline = comm.runtime().deadline(60 * SECOND);
            let (_, received) = loop {
                if let Some(done) = Pending::test_any(&mut pending) {
                    break done;
                }
                assert!(!comm.runtime().expired(deadline));
                comm.runtime().sleep(Duration::from_micros(10));
            };
            assert_eq!(received.unwrap()[..], [7; 100]);
        });
    }
}

#[test]
fn a_receive_without_a_message_is_cancelled_and_its_message_goes_to_a_later_one() {
    for &network in Network::ALL {
        worlds::run(network, 2, |mut comm| {
            let other = 1 - comm.rank();
            let cancelled = comm.start_recv(vec![1_u8; 9], other);
            let dropped = comm.start_recv(vec![2_u8; 9], other);
            assert_eq!(cancelled.cancel().unwrap().into_vec(), [1; 9]);
            drop(dropped);
            comm.barrier().unwrap();
            comm.send(&[7_u8; 9], other).unwrap();
            let mut received = [0_u8; 9];
            comm.recv(&mut received, other).unwrap();
            assert_eq!(received, [7; 9]);
            comm.close().unwrap();
        });
    }
}

#[test]
fn what_cannot_be_cancelled_ends() {
    for &network in Network::ALL {
        worlds::run(network, 2, |mut comm| {
            let other = 1 - comm.rank();
            let sum = comm.start_all_reduce(vec![1], ReduceOp::Sum).cancel().unwrap_err();
            assert_eq!(sum.wait().unwrap()[0], 2);
            let receive = comm.start_recv(vec![0_u8; LONG / 8], other);
            comm.send(&content(comm.rank(), LONG / 8), other).unwrap();
            comm.barrier().unwrap();
            let sent = comm.start_send(vec![1_u8], other).cancel().unwrap_err();
            assert!(receive.wait().unwrap()[..] == content(other, LONG / 8));
            comm.recv(&mut [0_u8], other).unwrap();
            sent.wait().unwrap();
        });
    }
}

#[test]
fn a_dropped_send_is_sent_and_a_forgotten_handle_changes_no_memory_of_others() {
    for &network in Network::ALL {
        worlds::run(network, 2, |mut comm| {
            let other = 1 - comm.rank();
            drop(comm.start_send(content(comm.rank(), LONG), other));
            std::mem::forget(comm.with_tag(5).start_recv(vec![0_u8; LONG], other));
            let mut received = vec![0; LONG];
            comm.recv(&mut received, other).unwrap();
            assert!(received == content(other, LONG));
            comm.with_tag(5).send(&received, other).unwrap();
        });
    }
}

#[test]
fn a_message_that_was_kept_goes_to_the_receive_that_is_started_for_it() {
    for &network in Network::ALL {
        worlds::run(network, 2, |mut comm| {
            let other = 1 - comm.rank();
            if comm.rank() == 0 {
                comm.with_tag(1).send(&[1_u8; 70_000], other).unwrap();
                comm.with_tag(2).send(&[2_u8], other).unwrap();
                return;
            }
            comm.with_tag(2).recv(&mut [0_u8], other).unwrap();
            let received = comm.with_tag(1).start_recv(vec![0_u8; 70_000], other).wait().unwrap();
            assert_eq!(received[..], [1; 70_000]);
        });
    }
}

#[test]
fn a_batch_is_independent_of_what_was_started_before_it() {
    for &network in Network::ALL {
        worlds::run(network, 2, |mut comm| {
            let (rank, other) = (comm.rank(), 1 - comm.rank());
            let first = comm.with_tag(9).start_recv(vec![0_u8; 10], other);
            let batch = comm.start_batch(vec![
                OwnedMessage::receive(other, vec![0_u8; LONG]),
                OwnedMessage::send(other, content(rank, LONG)),
                OwnedMessage::send(rank, vec![3_u8; 5]).with_tag(1),
                OwnedMessage::receive(rank, vec![0_u8; 5]).with_tag(1),
            ]);
            let mut messages = batch.wait().unwrap();
            assert_eq!(messages.pop().unwrap().into_elements()[..], [3; 5]);
            assert!(messages.swap_remove(0).into_elements()[..] == content(other, LONG));
            comm.with_tag(9).send(&[4_u8; 10], other).unwrap();
            assert_eq!(first.wait().unwrap()[..], [4; 10]);
        });
    }
}

#[test]
fn a_receive_from_the_own_rank_waits_for_a_later_send() {
    for &network in Network::ALL {
        worlds::run(network, 2, |mut comm| {
            let rank = comm.rank();
            let own = comm.start_recv(vec![0], rank);
            comm.barrier().unwrap();
            comm.send(&[5], rank).unwrap();
            assert_eq!(own.wait().unwrap()[0], 5);
        });
    }
}

#[test]
fn several_threads_wait_for_messages_of_one_communicator() {
    for &network in Network::ALL {
        worlds::run(network, 3, |mut comm| {
            let (rank, runtime): (_, Runtime) = (comm.rank(), comm.runtime().clone());
            let others = [(rank + 1) % 3, (rank + 2) % 3];
            let waits = others.map(|from| {
                let pending = comm.start_recv(vec![0_u8; LONG], from);
                runtime.spawn("waiter", move || pending.wait().unwrap().into_vec()).unwrap()
            });
            for to in others {
                comm.send(&content(rank, LONG), to).unwrap();
            }
            let received = waits.map(|wait| wait.join().unwrap());
            assert!(received == others.map(|from| content(from, LONG)));
        });
    }
}

#[test]
fn each_receive_ends_at_its_own_deadline_and_names_its_own_peer() {
    let errors = worlds::run(Network::Simulated, 3, |mut comm| {
        if comm.rank() > 0 {
            comm.runtime().sleep(100 * SECOND);
            return None;
        }
        let long = comm.with_timeout(60 * SECOND).start_recv(vec![0_u8], 1);
        let short = comm.with_timeout(9 * SECOND).start_recv(vec![0_u8], 2);
        let blocking = comm.with_timeout(30 * SECOND).with_tag(3).recv(&mut [0_u8], 1).unwrap_err();
        assert_eq!(comm.runtime().now(), 9 * SECOND);
        let short = *short.wait().unwrap_err().error;
        let long = *long.wait().unwrap_err().error;
        Some([short, long, blocking])
    });
    let [short, long, blocking] = errors[0].as_ref().unwrap();
    assert!(short.is_timeout() && short.peer() == Some(2), "{short:?}");
    for other in [long, blocking] {
        assert!(matches!(other, Error::Aborted { rank: 2, .. }), "{other:?}");
    }
}

#[test]
fn a_blocking_call_ends_at_its_deadline_and_names_its_peer_while_others_are_awaited() {
    for &network in Network::ALL {
        let errors = worlds::run(network, 3, |mut comm: Communicator| {
            if comm.rank() > 0 {
                return comm.barrier().unwrap_err();
            }
            let _late = comm.start_recv(vec![0_u8], 2);
            comm.with_timeout(SECOND / 2).recv(&mut [0_u8], 1).unwrap_err()
        });
        assert!(errors[0].is_timeout() && errors[0].peer() == Some(1), "{network:?}: {:?}", errors[0]);
    }
}

#[test]
fn a_message_of_another_length_fails_the_receive_that_it_matches() {
    let errors = worlds::run(Network::Simulated, 2, |mut comm| {
        if comm.rank() == 1 {
            comm.send(&[1_u8; 3], 0).unwrap();
            return comm.barrier().unwrap_err();
        }
        let started = comm.start_recv(vec![0_u8; 4], 1);
        let blocking = comm.with_tag(1).recv(&mut [0_u8], 1).unwrap_err();
        assert!(matches!(blocking, Error::Aborted { .. }), "{blocking:?}");
        let failed = started.wait().unwrap_err();
        assert_eq!(failed.buffer.len(), 4);
        *failed.error
    });
    assert!(errors[0].to_string().contains("message"), "{}", errors[0]);
    assert_eq!(errors[0].peer(), Some(1), "{:?}", errors[0]);
}

#[test]
fn dropping_the_communicator_sends_what_was_started() {
    for &network in Network::ALL {
        worlds::run(network, 2, |mut comm| {
            let other = 1 - comm.rank();
            let receive = comm.start_recv(vec![0_u8; LONG], other);
            drop(comm.start_send(content(comm.rank(), LONG), other));
            drop(comm);
            assert!(receive.wait().unwrap()[..] == content(other, LONG));
        });
    }
}

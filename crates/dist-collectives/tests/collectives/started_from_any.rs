//! Started receives from any rank, and of any length: what blocking ones do not promise.

use std::time::Duration;

use dist_collectives::{Error, Pending, ReceivedMessage, ReduceOp};
use rstest::rstest;

use crate::worlds::{self, Network};

const SECOND: Duration = Duration::from_secs(1);

/// Lengths of messages in bytes: empty, in a fastbox, in a ring, and as a single copy.
const LENGTHS: [usize; 4] = [0, 8, 100_000, 3 << 20];

fn content(from: usize, len: usize) -> Vec<u8> {
    (0..len).map(|index| u8::try_from((from * 31 + index) % 251).unwrap()).collect()
}

#[rstest]
fn started_receives_from_any_rank_get_every_message(#[values(1, 2, 3, 4)] world_size: usize) {
    for &network in Network::ALL {
        worlds::run(network, world_size, move |mut comm| {
            let (rank, ranks) = (comm.rank(), comm.world_size());
            for (tag, len) in (0..).zip(LENGTHS) {
                let mut comm = comm.with_tag(tag);
                let receives: Vec<_> = (0..ranks).map(|_| comm.start_recv_any(vec![0_u8; len])).collect();
                for to in 0..ranks {
                    comm.send(&content(rank, len), (rank + to) % ranks).unwrap();
                }
                let mut senders = Vec::new();
                for received in Pending::wait_all(receives) {
                    let ReceivedMessage { from, elements } = received.unwrap();
                    let from = from.expect("a message has come");
                    assert!(elements[..] == content(from, len), "{len} bytes from rank {from}");
                    senders.push(from);
                }
                senders.sort_unstable();
                assert_eq!(senders, Vec::from_iter(0..ranks), "{network:?}");
            }
            // No started message is left, so that the engine is in the communicator again.
            comm.close().unwrap();
        });
    }
}

#[test]
fn vectors_take_the_length_of_their_message() {
    for &network in Network::ALL {
        worlds::run(network, 3, move |mut comm| {
            let (rank, ranks) = (comm.rank(), comm.world_size());
            for (tag, len) in (1..).zip([0, 5, 70_000]) {
                let mut comm = comm.with_tag(tag);
                let named = comm.with_tag(100).start_recv_vec::<usize>((rank + 1) % ranks);
                let any = [0; 2].map(|_| comm.start_recv_any_vec::<usize>());
                for to in (0..ranks).filter(|&to| to != rank) {
                    comm.send(&vec![rank; len + rank], to).unwrap();
                }
                comm.with_tag(100).send(&vec![rank; rank], (rank + 2) % ranks).unwrap();
                let mut senders = any.map(|any| {
                    let ReceivedMessage { from, elements } = any.wait().unwrap();
                    let from = from.expect("a message has come");
                    assert_eq!(elements, vec![from; len + from], "{network:?}");
                    from
                });
                senders.sort_unstable();
                assert_eq!(senders[..], (0..ranks).filter(|&from| from != rank).collect::<Vec<_>>());
                let next = (rank + 1) % ranks;
                assert_eq!(named.wait().unwrap(), vec![next; next]);
            }
        });
    }
}

#[test]
fn the_oldest_receive_that_takes_a_message_gets_it() {
    for &network in Network::ALL {
        worlds::run(network, 2, move |mut comm| {
            if comm.rank() == 1 {
                comm.barrier().unwrap();
                return (0..4).for_each(|number| comm.send(&[number], 0).unwrap());
            }
            let first = comm.start_recv(vec![9], 1);
            let any = comm.start_recv_any(vec![9]);
            let third = comm.start_recv(vec![9], 1);
            comm.barrier().unwrap();
            let mut last = [9];
            assert_eq!(comm.recv_any(&mut last).unwrap(), 1);
            let any = any.wait().unwrap();
            assert_eq!((any.from, any.elements[0]), (Some(1), 1), "{network:?}");
            assert_eq!((first.wait().unwrap()[0], third.wait().unwrap()[0], last[0]), (0, 2, 3));
        });
    }
}

#[test]
fn a_started_receive_from_any_rank_gets_a_message_that_was_kept() {
    for &network in Network::ALL {
        worlds::run(network, 3, move |mut comm| {
            if comm.rank() > 0 {
                (0..2).for_each(|number| comm.send(&[comm.rank(), number], 0).unwrap());
                return comm.with_tag(8).send(&[0_u8], 0).unwrap();
            }
            // The messages before these are kept.
            (1..3).for_each(|from| comm.with_tag(8).recv(&mut [9_u8], from).unwrap());
            let named = comm.start_recv(vec![9_usize; 2], 1);
            let any = comm.start_recv_any(vec![9_usize; 2]);
            let vector = comm.start_recv_vec::<usize>(2);
            assert_eq!(comm.recv_any_vec::<usize>().unwrap(), (2, vec![2, 1]), "{network:?}");
            let any = any.wait().unwrap();
            assert_eq!((any.from, &any.elements[..]), (Some(1), &[1, 1][..]), "{network:?}");
            assert_eq!((&named.wait().unwrap()[..], &vector.wait().unwrap()[..]), (&[1, 0][..], &[2, 0][..]));
        });
    }
}

#[test]
fn wait_any_wait_some_and_test_any_take_receives_from_any_rank() {
    for &network in Network::ALL {
        worlds::run(network, 3, move |mut comm| {
            if comm.rank() > 0 {
                for number in 0..3 {
                    comm.barrier().unwrap();
                    comm.send(&[10 * comm.rank() + number], 0).unwrap();
                }
                return;
            }
            let mut pending: Vec<_> = (0..6).map(|_| Some(comm.start_recv_any(vec![0_usize]))).collect();
            let mut received = Vec::new();
            comm.barrier().unwrap();
            let (index, first) = Pending::wait_any(&mut pending).unwrap();
            assert_eq!(index, 0, "receives end in the order of their starts");
            received.push(first.unwrap());
            comm.barrier().unwrap();
            received.extend(Pending::wait_some(&mut pending).into_iter().map(|(_, done)| done.unwrap()));
            comm.barrier().unwrap();
            let deadline = comm.runtime().deadline(60 * SECOND);
            while received.len() < 6 {
                received.extend(Pending::test_any(&mut pending).map(|(_, done)| done.unwrap()));
                assert!(!comm.runtime().expired(deadline));
                comm.runtime().sleep(Duration::from_micros(10));
            }
            for rank in 1..3 {
                let numbers = received.iter().filter(|message| message.from == Some(rank));
                let numbers: Vec<_> = numbers.map(|message| message.elements[0]).collect();
                assert_eq!(numbers, [10 * rank, 10 * rank + 1, 10 * rank + 2], "{network:?}");
            }
        });
    }
}

#[test]
fn a_cancelled_receive_from_any_rank_leaves_its_message_to_a_later_one() {
    for &network in Network::ALL {
        worlds::run(network, 2, move |mut comm| {
            let other = 1 - comm.rank();
            let cancelled = comm.start_recv_any(vec![1_u8; 9]);
            let vector = comm.start_recv_any_vec::<u8>();
            drop(comm.start_recv_any(vec![2_u8; 9]));
            let memory = cancelled.cancel().unwrap();
            assert_eq!((memory.from, memory.elements.into_vec()), (None, vec![1; 9]));
            assert_eq!(vector.cancel().unwrap(), ReceivedMessage::default());
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
fn collectives_and_other_messages_go_on_while_a_receive_from_any_rank_waits() {
    for &network in Network::ALL {
        worlds::run(network, 3, move |mut comm| {
            let (rank, right, left) = (comm.rank(), (comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
            let pending = comm.with_tag(7).start_recv_any(vec![0_usize; 5]);
            for round in 0..3 {
                let mut sum = [1.0_f64; 1000];
                comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [3.0; 1000]);
                for len in LENGTHS {
                    let mut received = vec![0; len];
                    comm.send_recv(&content(rank + round, len), right, &mut received, left).unwrap();
                    assert!(received == content(left + round, len));
                }
            }
            comm.with_tag(7).send(&[rank; 5], right).unwrap();
            let received = pending.wait().unwrap();
            assert_eq!((received.from, &received.elements[..]), (Some(left), &[left; 5][..]), "{network:?}");
        });
    }
}

#[test]
fn a_started_receive_from_any_rank_gets_a_later_message_of_its_own_rank() {
    for &network in Network::ALL {
        for world_size in [1, 2] {
            worlds::run(network, world_size, move |mut comm| {
                let rank = comm.rank();
                let pending = comm.start_recv_any(vec![0]);
                comm.barrier().unwrap();
                comm.send(&[5], rank).unwrap();
                assert_eq!(pending.wait().unwrap().from, Some(rank), "{network:?}");
                // A receive from any rank fails if the others have left.
                comm.barrier().unwrap();
            });
        }
    }
}

#[test]
fn a_started_receive_from_any_rank_that_fails_returns_its_memory() {
    for &network in Network::ALL {
        worlds::run(network, 3, move |mut comm| {
            if comm.rank() == 0 {
                let failed = comm.start_recv_any(vec![4_u8]).wait().unwrap_err();
                assert_eq!(
                    (failed.buffer.from, failed.buffer.elements.into_vec()),
                    (None, vec![4]),
                    "{network:?}"
                );
            }
        });
    }
}

#[test]
fn a_started_receive_from_any_rank_that_times_out_beside_a_call_blames_no_rank() {
    for &network in Network::ALL {
        let errors = worlds::run(network, 3, move |mut comm| {
            if comm.rank() > 0 {
                return comm.barrier().unwrap_err();
            }
            let pending =
                comm.with_timeout(Duration::from_millis(300)).with_tag(7).start_recv_any(vec![0_u8]);
            let call = comm.with_tag(3).recv(&mut [0_u8], 1).unwrap_err();
            assert!(matches!(call, Error::Aborted { rank: 0, .. }), "{network:?}: {call:?}");
            *pending.wait().unwrap_err().error
        });
        assert!(errors[0].is_timeout() && errors[0].peer().is_none(), "{network:?}: {:?}", errors[0]);
        let expected = "message of 1 u8 (tag 7) from any rank: none of ranks [1, 2] has sent it within 300ms";
        assert_eq!(errors[0].to_string(), expected, "{network:?}");
        for error in &errors[1..] {
            assert_eq!(error.peer(), Some(0), "{network:?}: {error:?}");
        }
    }
}

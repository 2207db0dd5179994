//! Messages with tags, which are independent of the collectives.

use std::time::Duration;

use dist_collectives::transport::Chain;
use dist_collectives::{Communicator, Error, Message, ReduceOp};
use fastrand::Rng;
use rstest::rstest;

use crate::worlds::{self, Network};

/// Longer than a transport passes on before the receiver takes it.
const LONG: usize = 300_000;

#[rstest]
fn a_message_is_received_after_a_collective_that_followed_it(
    #[values(0, 1, 2)] sender: usize,
    #[values(1, 1000)] len: usize,
) {
    for &network in Network::ALL {
        worlds::run(network, 3, move |mut comm| {
            let (rank, receiver) = (comm.rank(), (sender + 1) % 3);
            if rank == sender {
                comm.send(&vec![7_u8; len], receiver).unwrap();
            }
            let mut sum = [rank as u64];
            comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [3]);
            if rank == receiver {
                let mut received = vec![0_u8; len];
                comm.recv(&mut received, sender).unwrap();
                assert_eq!(received, vec![7; len]);
            }
        });
    }
}

#[rstest]
fn receives_choose_among_the_messages_of_a_rank_by_tag_and_keep_the_order_within_a_tag(
    #[values(0, 5, LONG)] len: usize,
    #[values(0, 1)] sender: usize,
) {
    const SENT: [u32; 6] = [1, 2, 1, u32::MAX, 2, 0];
    const RECEIVED: [u32; 6] = [0, u32::MAX, 2, 1, 2, 1];
    for &network in Network::ALL {
        worlds::run(network, 2, move |mut comm| {
            let peer = 1 - comm.rank();
            if comm.rank() == sender {
                for (number, tag) in (0_u32..).zip(SENT) {
                    comm.with_tag(tag).send(&vec![number; len], peer).unwrap();
                }
                return;
            }
            let numbers = RECEIVED.map(|tag| {
                let mut received = vec![99_u32; len];
                comm.with_tag(tag).recv(&mut received, peer).unwrap();
                assert!(received.iter().all(|number| *number == received[0]));
                received.first().copied()
            });
            let expected = [5, 3, 1, 0, 4, 2].map(|number| (len > 0).then_some(number));
            assert_eq!(numbers, expected, "{network:?}");
        });
    }
}

#[rstest]
fn the_halos_of_a_ring_are_matched_by_their_direction(#[values(1, 2, 3)] world_size: usize) {
    const TO_LEFT: u32 = 1;
    const TO_RIGHT: u32 = 2;
    for &network in Network::ALL {
        worlds::run(network, world_size, move |mut comm| {
            let rank = comm.rank();
            let (left, right) = ((rank + world_size - 1) % world_size, (rank + 1) % world_size);
            let (mut before, mut after) = ([[0; 2]; 1], [[0; 2]; 1]);
            comm.batch(&mut [
                Message::receive(left, before.as_flattened_mut()).with_tag(TO_RIGHT),
                Message::receive(right, after.as_flattened_mut()).with_tag(TO_LEFT),
                Message::send(left, &[rank as u64, 0]).with_tag(TO_LEFT),
                Message::send(right, &[rank as u64, 1]).with_tag(TO_RIGHT),
            ])
            .unwrap();
            assert_eq!((before, after), ([[left as u64, 1]], [[right as u64, 0]]), "{network:?}");
        });
    }
}

/// Returns the messages of each pair of ranks in a random exchange, as their tags in the order of the sends.
fn random_tags(rng: &mut Rng, world_size: usize) -> Vec<Vec<Vec<u32>>> {
    let tags = |rng: &mut Rng| (0..rng.usize(0..5)).map(|_| rng.u32(0..3)).collect();
    (0..world_size).map(|_| (0..world_size).map(|_| tags(rng)).collect()).collect()
}

/// Returns the content of message `number` with this tag among those between two ranks.
fn content(from: usize, to: usize, tag: u32, number: usize) -> Vec<u64> {
    let len = (from * 7 + to * 5 + number * 3) % 11;
    vec![(from * 1000 + to * 100 + number * 10) as u64 + u64::from(tag); len]
}

/// Exchanges all messages in one batch, whose receives are in random order.
fn exchange_at_random(comm: &mut Communicator, rng: &mut Rng, tags: &[Vec<Vec<u32>>]) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    // Numbers the messages of a pair within each tag.
    let numbered = |tags: &[u32]| -> Vec<(u32, usize)> {
        let number = |index: usize| tags[..index].iter().filter(|tag| **tag == tags[index]).count();
        (0..tags.len()).map(|index| (tags[index], number(index))).collect()
    };
    let sent: Vec<_> = (0..world_size)
        .flat_map(|to| numbered(&tags[rank][to]).into_iter().map(move |(tag, number)| (to, tag, number)))
        .map(|(to, tag, number)| (to, tag, content(rank, to, tag, number)))
        .collect();
    let mut order: Vec<_> = (0..world_size)
        .flat_map(|from| numbered(&tags[from][rank]).into_iter().map(move |(tag, _)| (from, tag)))
        .collect();
    rng.shuffle(&mut order);
    let mut expected = Vec::new();
    for (index, &(from, tag)) in order.iter().enumerate() {
        let number = order[..index].iter().filter(|other| **other == (from, tag)).count();
        expected.push(content(from, rank, tag, number));
    }
    let mut received: Vec<_> = expected.iter().map(|content| vec![0; content.len()]).collect();
    let sends = sent.iter().map(|(to, tag, elements)| Message::send(*to, elements).with_tag(*tag));
    let receives = order.iter().zip(&mut received);
    let receives = receives.map(|(&(from, tag), elements)| Message::receive(from, elements).with_tag(tag));
    comm.batch(&mut receives.chain(sends).collect::<Vec<_>>()).unwrap();
    assert_eq!(received, expected);
}

#[rstest]
fn a_batch_matches_any_messages_by_tag(#[values(1, 2, 4)] world_size: usize) {
    for &network in Network::ALL {
        worlds::run(network, world_size, |mut comm| {
            let rank = comm.rank() as u64;
            for round in 0..10 {
                let tags = random_tags(&mut Rng::with_seed(round), comm.world_size());
                exchange_at_random(&mut comm, &mut Rng::with_seed(100 * round + rank), &tags);
            }
        });
    }
}

#[test]
fn started_messages_have_tags_too() {
    worlds::run(Network::Simulated, 2, |mut comm| {
        if comm.rank() == 0 {
            let first = comm.with_tag(1).start_send(vec![1_u8], 1);
            let second = comm.with_tag(2).start_send(vec![2_u8], 1);
            drop((first, second));
            return;
        }
        let second = comm.with_tag(2).start_recv(vec![0_u8], 0);
        let first = comm.with_tag(1).start_recv(vec![0_u8], 0);
        assert_eq!((first.wait().unwrap()[0], second.wait().unwrap()[0]), (1, 2));
    });
}

/// Sends messages with tags 5 and 6 from rank 1, while rank 0 waits for one with tag 7.
fn wait_for_another_tag(leaves: bool) -> (Error, Duration) {
    let mut errors = worlds::run(Network::Simulated, 2, move |mut comm| {
        if comm.rank() == 1 {
            comm.with_tag(5).send(&[1.5_f64; 3], 0).unwrap();
            comm.with_tag(6).send(&[1_u8], 0).unwrap();
            if !leaves {
                comm.runtime().sleep(Duration::from_secs(100));
            }
            return None;
        }
        let mut seven = comm.with_tag(7);
        let error = seven.with_timeout(Duration::from_secs(9)).recv(&mut [0.0_f64; 3], 1).unwrap_err();
        Some((error, seven.runtime().now()))
    });
    errors.swap_remove(0).unwrap()
}

const INSTEAD: &str = "message of 3 f64 (tag 7, from rank 1) failed; rank 1 has sent instead: \
                       message of 3 f64 (tag 5); message of 1 u8 (tag 6)";

#[test]
fn a_receive_that_times_out_lists_the_messages_that_came_instead() {
    let (error, time) = wait_for_another_tag(false);
    let Error::Unmatched { peer: 1, instead, .. } = &error else { panic!("{error:?}") };
    assert_eq!(instead.iter().map(|call| call.tag()).collect::<Vec<_>>(), [Some(5), Some(6)]);
    assert!(error.is_timeout() && error.peer() == Some(1));
    let text = Chain(&error).to_string();
    assert!(text.starts_with(&format!("{INSTEAD}: receiving: rank 1 did not take part within 9s")), "{text}");
    assert_eq!(time, Duration::from_secs(9));
}

#[test]
fn a_receive_lists_the_messages_that_came_instead_as_soon_as_the_sender_has_left() {
    let (error, time) = wait_for_another_tag(true);
    assert_eq!((error.to_string(), error.is_timeout()), (INSTEAD.to_owned(), false));
    assert!(time < Duration::from_secs(9), "{time:?}");
}

#[rstest]
#[case::of_another_type(|comm: &mut Communicator| comm.recv(&mut [0_i32; 3], 1), "types differ: rank 1 has f32, this rank has i32")]
#[case::of_another_length(|comm: &mut Communicator| comm.recv(&mut [0.0_f32; 4], 1), "lengths differ: rank 1 has 3 elements, this rank has 4 elements")]
fn a_kept_message_of_another_type_or_length_is_refused_on_every_rank(
    #[case] receive: fn(&mut Communicator) -> Result<(), Error>,
    #[case] expected: &'static str,
) {
    let errors = worlds::run(Network::Simulated, 2, move |mut comm| {
        if comm.rank() == 1 {
            comm.send(&[1.5_f32; 3], 0).unwrap();
            comm.with_tag(1).send(&[1_u8], 0).unwrap();
            return comm.barrier().unwrap_err();
        }
        // The message with tag 0 arrives first, and stays in the queue.
        comm.with_tag(1).recv(&mut [0_u8], 1).unwrap();
        receive(&mut comm).unwrap_err()
    });
    assert!(matches!(errors[0], Error::Mismatch { peer: 1, .. }), "{:?}", errors[0]);
    assert!(errors[0].to_string().starts_with(expected), "{}", errors[0]);
    let told = Chain(&errors[1]).to_string();
    assert!(told.contains(&format!("rank 0 gave up: {expected}")), "{told}");
}

#[test]
fn a_receive_behind_too_many_other_messages_fails_at_once() {
    /// As many messages of 4 MiB as are kept of one rank.
    const KEPT: u32 = 16;
    let mut errors = worlds::run(Network::Simulated, 2, |mut comm| {
        if comm.rank() == 1 {
            let kept = vec![0_u8; 4 << 20];
            let sent = (1..=KEPT).try_for_each(|tag| comm.with_tag(tag).send(&kept, 0));
            return sent.and_then(|()| comm.barrier()).unwrap_err();
        }
        let error = comm.recv(&mut [0_u8], 1).unwrap_err();
        assert!(comm.runtime().now() < Duration::from_secs(1));
        error
    });
    let error = errors.swap_remove(0);
    let Error::TooManyKept { peer: 1, instead, .. } = &error else { panic!("{error:?}") };
    // The oldest are listed.
    assert_eq!(instead.iter().map(|call| call.tag().unwrap()).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7, 8]);
    let expected = "message of 1 u8 (from rank 1) failed: rank 1 has sent too many messages that must be received \
                    before: message of 4194304 u8 (tag 1); message of 4194304 u8 (tag 2); ";
    assert!(error.to_string().starts_with(expected), "{error}");
}

#[test]
fn a_message_that_was_kept_and_never_received_is_reported_when_the_communicator_is_closed() {
    let closed = worlds::run(Network::Simulated, 2, |mut comm| {
        if comm.rank() == 0 {
            comm.with_tag(1).send(&[1_u8], 1).unwrap();
            comm.with_tag(2).send(&[2_u8], 1).unwrap();
        } else {
            comm.with_tag(2).recv(&mut [0_u8], 0).unwrap();
        }
        comm.close()
    });
    assert!(closed[0].is_ok());
    assert!(matches!(closed[1], Err(Error::Unread { peer: 0 })), "{:?}", closed[1]);
}

#[test]
fn a_tag_holds_as_long_as_its_guard() {
    worlds::run(Network::Simulated, 1, |mut comm| {
        comm.with_tag(3).send(&[3_u8], 0).unwrap();
        comm.send(&[0_u8], 0).unwrap();
        let (mut of_three, mut of_none) = ([9_u8], [9_u8]);
        comm.recv(&mut of_none, 0).unwrap();
        comm.with_tag(3).recv(&mut of_three, 0).unwrap();
        assert_eq!((of_none, of_three), ([0], [3]));
    });
}

#[rstest]
fn a_message_of_any_rank_is_received_with_its_sender(#[values(2, 3, 5)] world_size: usize) {
    const ROUNDS: usize = 4;
    for &network in Network::ALL {
        worlds::run(network, world_size, |mut comm| {
            let rank = comm.rank();
            if rank > 0 {
                for round in 0..ROUNDS {
                    // The receives with tag 4 keep this message for later.
                    comm.with_tag(9).send(&[round], 0).unwrap();
                    comm.with_tag(4).send(&[rank, round], 0).unwrap();
                }
                return;
            }
            let mut next = vec![0; comm.world_size()];
            for _ in 0..ROUNDS * (comm.world_size() - 1) {
                let mut received = [0; 2];
                let from = comm.with_tag(4).recv_any(&mut received).unwrap();
                assert_eq!(received, [from, next[from]], "in order within a rank");
                next[from] += 1;
            }
            for from in 1..comm.world_size() {
                for round in 0..ROUNDS {
                    assert_eq!(comm.with_tag(9).recv_vec::<usize>(from).unwrap(), [round]);
                }
            }
        });
    }
}

#[rstest]
fn a_message_of_any_rank_and_any_length_is_received_in_a_vector(#[values(0, 5, LONG)] len: usize) {
    for &network in Network::ALL {
        worlds::run(network, 3, move |mut comm| {
            if comm.rank() > 0 {
                comm.send(&vec![comm.rank(); len + comm.rank()], 0).unwrap();
                return;
            }
            let mut senders = [0; 2].map(|_| {
                let (from, elements) = comm.recv_any_vec::<usize>().unwrap();
                assert_eq!(elements, vec![from; len + from], "{network:?}");
                from
            });
            senders.sort_unstable();
            assert_eq!(senders, [1, 2]);
        });
    }
}

#[test]
fn a_shorter_message_is_received_with_its_length_and_a_longer_one_is_refused() {
    for &network in Network::ALL {
        worlds::run(network, 2, move |mut comm| {
            if comm.rank() == 0 {
                for len in [0, 3, 5] {
                    comm.with_tag(1).send(&vec![len; len], 1).unwrap();
                }
                return;
            }
            for len in [0, 3, 5] {
                let mut received = [77; 5];
                assert_eq!(comm.with_tag(1).recv_up_to(&mut received, 0).unwrap(), len, "{network:?}");
                assert_eq!((&received[..len], &received[len..]), (&vec![len; len][..], &[77; 5][len..]));
            }
        });
    }
    let errors = worlds::run(Network::Simulated, 2, |mut comm| {
        if comm.rank() == 0 {
            comm.send(&[1_u16; 6], 1).unwrap();
            return comm.barrier().unwrap_err();
        }
        comm.recv_up_to(&mut [0_u16; 5], 0).unwrap_err()
    });
    assert!(errors[1].to_string().contains("5 elements"), "{}", errors[1]);
}

#[test]
fn only_the_probed_message_satisfies_its_receives() {
    for &network in Network::ALL {
        worlds::run(network, 3, move |mut comm| {
            let rank = comm.rank();
            if rank > 0 {
                comm.with_tag(5).send(&vec![rank as u64; 10 * rank], 0).unwrap();
                comm.with_tag(5).send(&[u8::try_from(rank).unwrap()], 0).unwrap();
                return;
            }
            let mut five = comm.with_tag(5);
            let dropped = five.probe(2).unwrap();
            assert_eq!((dropped.from(), dropped.tag(), dropped.len()), (2, 5, 20), "{network:?}");
            drop(dropped);
            for _ in 0..2 {
                let message = five.probe_any().unwrap();
                let from = message.from();
                assert_eq!(message.element_type().to_string(), "u64");
                assert_eq!(message.len(), 10 * from);
                let mut elements = vec![0_u64; message.len()];
                message.recv(&mut elements).unwrap();
                assert_eq!(elements, vec![from as u64; 10 * from], "{network:?}");
                assert_eq!(
                    five.probe(from).unwrap().recv_vec::<u8>().unwrap(),
                    [u8::try_from(from).unwrap()]
                );
            }
            assert!(five.try_probe_any().unwrap().is_none());
        });
    }
}

#[test]
fn a_loop_that_probes_without_waiting_receives_what_was_sent() {
    for &network in Network::ALL {
        worlds::run(network, 2, move |mut comm| {
            if comm.rank() == 1 {
                comm.send(&vec![7_u8; LONG], 0).unwrap();
                return;
            }
            assert!(comm.with_tag(1).try_probe(1).unwrap().is_none());
            let received = loop {
                if let Some(message) = comm.try_probe(1).unwrap() {
                    break message.recv_vec::<u8>().unwrap();
                }
            };
            assert_eq!(received, vec![7; LONG], "{network:?}");
            assert!(comm.try_probe(0).unwrap().is_none());
        });
    }
}

#[test]
fn both_ranks_of_a_pair_send_first_and_their_messages_keep_their_order() {
    for &network in Network::ALL {
        worlds::run(network, 2, move |mut comm| {
            let peer = 1 - comm.rank();
            for _ in 0..10 {
                let mut fork = comm.fork().unwrap();
                for round in 0..3 {
                    for number in 0..5_u32 {
                        fork.send(&[round, number], peer).unwrap();
                    }
                    for number in 0..5 {
                        let mut received = [99; 2];
                        fork.recv(&mut received, peer).unwrap();
                        assert_eq!(received, [round, number], "{network:?}");
                    }
                }
            }
        });
    }
}

//! Long messages, whose bytes stay with their sender until a receive has matched them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dist_collectives::transport::KEPT_MESSAGE_BYTES_MAX;
use dist_collectives::{Communicator, Error, Message};
use dist_transport::sim;
use fastrand::Rng;
use rstest::rstest;

use crate::worlds::{self, Network};

/// The least number of elements of `u32` that is announced.
const LONG: usize = KEPT_MESSAGE_BYTES_MAX / 4 + 1;

/// Returns the content of a message.
fn content(number: u32, len: usize) -> Vec<u32> {
    (0..).take(len).map(|index: u32| number.wrapping_mul(1 << 24).wrapping_add(index)).collect()
}

fn receive(comm: &mut Communicator, tag: u32, from: usize, number: u32, len: usize) {
    let mut received = vec![0; len];
    comm.with_tag(tag).recv(&mut received, from).unwrap();
    assert!(received == content(number, len), "message {number}");
}

#[rstest]
fn long_messages_are_received_by_tag_and_keep_the_order_within_a_tag(#[values(0, 1)] sender: usize) {
    const SENT: [(u32, usize); 6] = [(1, LONG), (2, 10), (1, 2 * LONG), (2, LONG), (3, LONG - 1), (1, 5)];
    const RECEIVED: [usize; 6] = [4, 1, 0, 3, 2, 5];
    for &network in Network::ALL {
        worlds::run(network, 2, move |mut comm| {
            let peer = 1 - comm.rank();
            if comm.rank() == sender {
                let contents: Vec<_> =
                    (0..).zip(SENT).map(|(number, (_, len))| content(number, len)).collect();
                let send = |(content, (tag, _))| Message::send(peer, content).with_tag(tag);
                let mut sends: Vec<_> =
                    contents.iter().map(|content| &content[..]).zip(SENT).map(send).collect();
                return comm.batch(&mut sends).unwrap();
            }
            for number in RECEIVED {
                let (tag, len) = SENT[number];
                receive(&mut comm, tag, peer, u32::try_from(number).unwrap(), len);
            }
        });
    }
}

#[test]
fn long_messages_in_both_directions_pass_each_other() {
    for &network in Network::ALL {
        worlds::run(network, 2, move |mut comm| {
            let (rank, peer) = (u32::try_from(comm.rank()).unwrap(), 1 - comm.rank());
            let theirs = u32::try_from(peer).unwrap();
            let mut received = vec![0; 2 * LONG];
            let own = content(rank, 2 * LONG);
            comm.send_recv(&own, peer, &mut received, peer).unwrap();
            assert!(received == content(theirs, 2 * LONG), "{network:?}");
            let (mut first, mut second) = (vec![0; LONG], vec![0; LONG]);
            let other = content(rank + 2, LONG);
            comm.batch(&mut [
                Message::send(peer, &own[..LONG]).with_tag(1),
                Message::send(peer, &other).with_tag(2),
                Message::receive(peer, &mut second).with_tag(2),
                Message::receive(peer, &mut first).with_tag(1),
            ])
            .unwrap();
            assert!(first == content(theirs, LONG) && second == content(theirs + 2, LONG), "{network:?}");
            // Each rank sends before it receives.
            let sent = comm.with_tag(3).start_send(own, peer);
            receive(&mut comm, 3, peer, theirs, 2 * LONG);
            assert!(sent.wait().unwrap()[..] == content(rank, 2 * LONG));
        });
    }
}

#[test]
fn a_long_message_that_was_announced_goes_to_the_receive_that_is_started_for_it() {
    for &network in Network::ALL {
        worlds::run(network, 2, move |mut comm| {
            if comm.rank() == 1 {
                let long = content(5, LONG);
                comm.batch(&mut [
                    Message::send(0, &long).with_tag(5),
                    Message::send(0, &content(6, 3)).with_tag(6),
                ])
                .unwrap();
                return;
            }
            receive(&mut comm, 6, 1, 6, 3);
            let started = comm.with_tag(5).start_recv(vec![0; LONG], 1);
            // The message has matched.
            assert!(started.wait().unwrap()[..] == content(5, LONG), "{network:?}");
        });
    }
}

#[rstest]
fn a_probe_finds_a_long_message_whose_bytes_come_with_its_receive(#[values(false, true)] polls: bool) {
    for &network in Network::ALL {
        worlds::run(network, 2, move |mut comm| {
            if comm.rank() == 1 {
                comm.with_tag(4).send(&content(9, LONG), 0).unwrap();
                return comm.with_tag(4).send(&content(8, LONG + 1), 0).unwrap();
            }
            let mut four = comm.with_tag(4);
            if polls {
                while four.try_probe_any().unwrap().is_none() {}
            }
            let message = four.probe_any().unwrap();
            assert_eq!((message.from(), message.tag(), message.len()), (1, 4, LONG), "{network:?}");
            let mut received = vec![0; LONG];
            message.recv(&mut received).unwrap();
            assert!(received == content(9, LONG), "{network:?}");
            assert!(four.probe(1).unwrap().recv_vec::<u32>().unwrap() == content(8, LONG + 1));
        });
    }
}

#[rstest]
fn a_long_message_that_no_receive_matches_fails_in_time_and_names_its_receiver(
    #[values(false, true)] is_started: bool,
) {
    for &network in Network::ALL {
        let errors = worlds::run(network, 2, move |mut comm| {
            if comm.rank() == 1 {
                // Another message of the same sender is received.
                comm.recv(&mut [0_u8], 0).unwrap();
                comm.runtime().sleep(Duration::from_secs(1));
                return comm.barrier().unwrap_err();
            }
            comm.send(&[1_u8], 1).unwrap();
            comm.set_timeout(Duration::from_millis(50));
            let long = vec![0_u8; 8 << 20];
            if is_started {
                return comm.with_tag(3).start_send(long, 1).wait().unwrap_err().into();
            }
            comm.with_tag(3).send(&long, 1).unwrap_err()
        });
        let error = &errors[0];
        assert!(
            matches!(error, Error::NotReceived { peer: 1, bytes: 8_388_608, .. }),
            "{network:?}: {error:?}"
        );
        assert!(error.is_timeout() && error.peer() == Some(1));
        let expected = "message of 8388608 u8 (tag 3) failed: rank 1 has not received this message of 8388608 bytes with \
                        tag 3: none of its receives has matched it";
        assert_eq!(error.to_string(), expected, "{network:?}");
    }
}

#[test]
fn a_long_message_to_a_rank_that_leaves_fails_at_once() {
    for &network in Network::ALL {
        let errors = worlds::run(network, 2, |mut comm| {
            if comm.rank() == 1 {
                return None;
            }
            let error = comm.send(&content(0, LONG), 1).unwrap_err();
            assert!(comm.runtime().now() < Duration::from_secs(25));
            Some(error)
        });
        let error = errors[0].as_ref().unwrap();
        assert!(!error.is_timeout() && error.peer() == Some(1), "{network:?}: {error:?}");
    }
}

#[test]
fn ranks_that_all_send_long_messages_first_are_told_long_before_the_deadline() {
    for &network in Network::ALL {
        for world_size in [2, 3] {
            let errors = worlds::run(network, world_size, |mut comm| {
                let right = (comm.rank() + 1) % comm.world_size();
                let error = comm.with_tag(7).send(&content(0, LONG), right).unwrap_err();
                assert!(comm.runtime().now() < Duration::from_secs(25));
                error
            });
            for error in &errors {
                let Error::CircularWait { count, .. } = error else { panic!("{network:?}: {error:?}") };
                assert_eq!(*count, world_size, "{network:?}");
            }
        }
    }
}

#[test]
fn a_full_queue_stops_its_sender_only() {
    const MESSAGES: usize = 40;
    const KEPT: usize = 16;
    // On the simulated networks a send does not wait for its receiver.
    let is_simulated = |network: &Network| {
        matches!(network, Network::Simulated | Network::SharedMemory(_) | Network::Threads)
    };
    for &network in Network::ALL.iter().filter(|network| !is_simulated(network)) {
        let sent = Arc::new(AtomicUsize::new(0));
        worlds::run(network, 3, move |mut comm| match comm.rank() {
            1 => {
                let kept = vec![1_u8; KEPT_MESSAGE_BYTES_MAX];
                for _ in 0..MESSAGES {
                    comm.with_tag(1).send(&kept, 0).unwrap();
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            }
            2 => {
                while sent.load(Ordering::Relaxed) < KEPT {
                    std::thread::yield_now();
                }
                comm.with_tag(2).send(&[2_u8], 0).unwrap();
            }
            _ => {
                let mut received = [0_u8];
                assert_eq!(comm.with_tag(2).recv_any(&mut received).unwrap(), 2);
                // The others are more than the connection takes.
                assert!(sent.load(Ordering::Relaxed) < MESSAGES, "{network:?}");
                let mut kept = vec![0_u8; KEPT_MESSAGE_BYTES_MAX];
                for _ in 0..MESSAGES {
                    comm.with_tag(1).recv(&mut kept, 1).unwrap();
                    assert!(kept.iter().all(|byte| *byte == 1));
                }
            }
        });
    }
}

#[test]
fn long_and_short_messages_are_matched_for_any_seed() {
    const LENGTHS: [usize; 4] = [0, 5, 1000, LONG];
    for seed in 0..8 {
        let network = sim::Network::new(3).with_seed(seed);
        let _ = network.run(move |transport| {
            let mut comm = Communicator::new(transport);
            let (rank, mut rng) = (comm.rank(), Rng::with_seed(seed));
            // The tags and lengths of the messages of each pair of ranks.
            let messages: Vec<Vec<Vec<(u32, usize)>>> = (0..3)
                .map(|_| {
                    let of_pair = |rng: &mut Rng| {
                        (0..rng.usize(0..4)).map(|_| (rng.u32(0..2), LENGTHS[rng.usize(0..4)])).collect()
                    };
                    (0..3).map(|_| of_pair(&mut rng)).collect()
                })
                .collect();
            let number =
                |from: usize, to: usize, index: usize| u32::try_from(from * 30 + to * 10 + index).unwrap();
            let mut sends = Vec::new();
            for (to, of_pair) in messages[rank].iter().enumerate() {
                for (index, &(tag, len)) in of_pair.iter().enumerate() {
                    sends.push(comm.with_tag(tag).start_send(content(number(rank, to, index), len), to));
                }
            }
            for (from, of_rank) in messages.iter().enumerate() {
                for tag in [1, 0] {
                    let with_tag = of_rank[rank].iter().enumerate().filter(|(_, message)| message.0 == tag);
                    for (index, &(_, len)) in with_tag {
                        receive(&mut comm, tag, from, number(from, rank, index), len);
                    }
                }
            }
            sends.into_iter().for_each(|sent| drop(sent.wait().unwrap()));
        });
    }
}

//! Messages between two ranks, one by one and many at once.

use dist_collectives::{Communicator, Error, Message};
use rstest::rstest;

use crate::worlds::{self, Network};

const NETWORKS: [Network; 3] = [Network::Simulated, Network::Threads, LAST];
#[cfg(feature = "tcp")]
const LAST: Network = Network::Tcp;
#[cfg(not(feature = "tcp"))]
const LAST: Network = Network::Threads;

fn numbers(from: usize, to: usize, len: usize) -> Vec<u64> {
    (0..len).map(|index| (from * 1_000_000 + to * 1000 + index) as u64).collect()
}

/// Sends a long and an empty message from every rank to every rank, including itself.
fn exchange_with_all(comm: &mut Communicator, len: usize) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let sent: Vec<_> = (0..world_size).map(|to| numbers(rank, to, len + to)).collect();
    let mut received = vec![vec![0; len + rank]; world_size];
    let mut nothing = vec![[0_u64; 0]; world_size];
    let mut messages = Vec::new();
    for (to, elements) in sent.iter().enumerate() {
        messages.push(Message::send(to, elements));
        messages.push(Message::send(to, &[]));
    }
    for (from, (elements, nothing)) in received.iter_mut().zip(&mut nothing).enumerate() {
        messages.push(Message::receive(from, elements));
        messages.push(Message::receive(from, nothing));
    }
    comm.batch(&mut messages).unwrap();
    for (from, elements) in received.iter().enumerate() {
        assert_eq!(*elements, numbers(from, rank, len + rank));
    }
}

#[rstest]
fn every_rank_sends_to_every_rank_at_once(
    #[values(0, 1, 2)] network: usize,
    #[values(1, 2, 5)] world_size: usize,
) {
    worlds::run(NETWORKS[network], world_size, |mut comm| {
        for len in [0, 1, 100_000] {
            exchange_with_all(&mut comm, len);
        }
        comm.batch::<f32>(&mut []).unwrap();
    });
}

#[rstest]
fn a_batch_meets_single_messages_at_the_other_end(#[values(0, 1, 2)] network: usize) {
    worlds::run(NETWORKS[network], 3, |mut comm| {
        let mut received = [[0_u32; 2]; 3];
        let [first, second, third] = &mut received;
        match comm.rank() {
            0 => {
                comm.batch(&mut [
                    Message::send(1, &[1, 2]),
                    Message::receive(2, first),
                    Message::send(1, &[3, 4]),
                    Message::receive(1, second),
                ])
                .unwrap();
                assert_eq!(received, [[7, 8], [5, 6], [0, 0]]);
            }
            1 => {
                comm.recv(first, 0).unwrap();
                comm.send_recv(&[5, 6], 0, second, 0).unwrap();
                comm.recv(third, 2).unwrap();
                assert_eq!(received, [[1, 2], [3, 4], [9, 9]]);
            }
            _ => {
                comm.send(&[7_u32, 8], 0).unwrap();
                comm.send(&[9_u32, 9], 1).unwrap();
            }
        }
    });
}

#[rstest]
fn ranks_that_all_send_first_in_a_circle_do_not_wait_for_each_other(
    #[values(0, 1, 2)] network: usize,
    #[values(1, 2, 3, 6)] world_size: usize,
) {
    worlds::run(NETWORKS[network], world_size, |mut comm| {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let (right, left) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
        for len in [0, 1, 300_000] {
            let mut received = vec![0; len];
            comm.send_recv(&numbers(rank, right, len), right, &mut received, left).unwrap();
            assert_eq!(received, numbers(left, rank, len));
        }
    });
}

#[test]
fn messages_of_one_type_and_different_lengths_are_matched_in_order() {
    worlds::run(Network::Simulated, 2, |mut comm| {
        let elements = [1.0_f32; 5];
        if comm.rank() == 0 {
            comm.send(&elements, 1).unwrap();
            return;
        }
        let (mut short, mut long) = ([0.0_f32; 2], [0.0_f32; 9]);
        let mut messages = [Message::receive(0, &mut long), Message::receive(0, &mut short)];
        let error = comm.batch(&mut messages).unwrap_err();
        assert!(matches!(error, Error::Mismatch { peer: 0, .. }), "{error:?}");
        let text = error.to_string();
        assert!(
            text.starts_with("lengths differ: rank 0 has 5 elements, this rank has 9 elements; "),
            "{text}"
        );
        assert!(
            text.ends_with(
                ": rank 0 is in message of 5 f32 (from rank 0), this rank in message of 9 f32 (from rank 0)"
            ),
            "{text}"
        );
    });
}

#[test]
fn a_batch_with_a_rank_outside_the_world_is_refused_before_anything_is_sent() {
    worlds::run(Network::Simulated, 2, |mut comm| {
        let mut received = [0_u8];
        let mut messages = [Message::send(0, &[1]), Message::receive(2, &mut received)];
        let error = comm.batch(&mut messages).unwrap_err();
        assert!(matches!(error, Error::RankOutOfRange { rank: 2, world_size: 2 }), "{error:?}");
        assert_eq!(comm.traffic().messages_sent, 0);
        comm.barrier().unwrap();
    });
}

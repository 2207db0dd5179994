//! Messages: bytes arrive whole, in order, at the right place, in the promised pieces, and are counted.

use crate::{Incoming, Outgoing, Rank, Sink, Traffic, Transport};

use super::backend::{Backend, Fabric};
use super::calls::{pass_round, payload, receive, send, soon};

/// Messages go round a ring.
pub(super) fn messages_go_round_a_ring(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize, len: usize) {
        let program = move |mut transport: Box<dyn Transport>| {
            let (rank, due) = (transport.rank(), soon(&*transport));
            let bytes = payload(rank, 0, len);
            let (head, tail) = bytes.split_at(len / 3);
            let outgoing = Outgoing { to: rank.right().index(), parts: &[head, &[], tail] };
            let mut received = vec![0; len];
            let incoming = Incoming { from: rank.left().index(), len, sink: Sink::Into(&mut received) };
            transport.exchange(Some(outgoing), Some(incoming), &due).unwrap();
            assert_eq!(received, payload(rank.left(), 0, len));
        };
        backend.check(world_size, program, drop);
    }
    for world_size in [1, 2, 3, 5, 8] {
        for len in [0, 1, 64, 1000, 100_001, 300_001] {
            check(backend, world_size, len);
        }
    }
}

/// The first messages between ranks go round a ring one after the other. One rank already waits for the
/// returning message when it sends.
pub(super) fn first_messages_wait_only_for_their_receiver(fabric: &'static dyn Fabric) {
    fn check(backend: Backend, first: usize, upwards: bool, messages: usize, len: usize) {
        let program = move |mut transport: Box<dyn Transport>| {
            let (rank, due) = (transport.rank(), soon(&*transport));
            let (to, from) = if upwards { (rank.right(), rank.left()) } else { (rank.left(), rank.right()) };
            let bytes = payload(rank, 0, len);
            let parts: [&[u8]; 1] = [&bytes];
            let sends = vec![Outgoing { to: to.index(), parts: &parts }; messages];
            let mut received = vec![vec![0; len]; messages];
            let receives = received.iter_mut().map(|memory| Incoming {
                from: from.index(),
                len,
                sink: Sink::Into(memory),
            });
            let mut receives: Vec<_> = receives.collect();
            if rank.index() == first {
                transport.exchange_all(&sends, &mut receives, &due).unwrap();
            } else {
                transport.exchange_all(&[], &mut receives, &due).unwrap();
                transport.exchange_all(&sends, &mut [], &due).unwrap();
            }
            assert_eq!(received, vec![payload(from, 0, len); messages]);
        };
        backend.check(3, program, drop);
    }
    for first in [0, 1, 2] {
        for upwards in [true, false] {
            for (messages, len) in [(1, 1), (2, 100_001)] {
                check(Backend(fabric), first, upwards, messages, len);
            }
        }
    }
}

/// A rank exchanges with itself.
pub(super) fn a_rank_exchanges_with_itself(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize, len: usize) {
        let program = move |mut transport: Box<dyn Transport>| {
            let (rank, due) = (transport.rank(), soon(&*transport));
            let sent = payload(rank, 0, len);
            let mut received = Vec::new();
            let mut append = |offset, bytes: &[u8]| {
                assert_eq!(offset, received.len());
                received.extend_from_slice(bytes);
            };
            let outgoing = Outgoing { to: rank.index(), parts: &[&sent] };
            let incoming = Incoming { from: rank.index(), len, sink: Sink::Each(&mut append) };
            transport.exchange(Some(outgoing), Some(incoming), &due).unwrap();
            assert_eq!(received, sent);
        };
        backend.check(world_size, program, drop);
    }
    for world_size in [1, 3] {
        for len in [0, 1, 100_000] {
            check(backend, world_size, len);
        }
    }
}

/// Messages of a pair arrive in order whatever their length.
pub(super) fn messages_of_a_pair_arrive_in_order_at_any_length(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize) {
        const ROUNDS: usize = 40;
        // The long ones are as long as a fastbox or a receive buffer, and one byte longer.
        const LONG: [usize; 4] = [65_537, 65_536, 262_144, 262_145];
        let len = |round: usize| if round % 5 == 4 { LONG[round / 5 % 4] } else { round * 37 % 11 };
        let program = move |mut transport: Box<dyn Transport>| {
            let rank = transport.rank();
            for (from, to) in [(0, 1), (1, 0)] {
                for round in 0..ROUNDS {
                    if rank.index() == from {
                        send(&mut *transport, to, &payload(rank, round, len(round))).unwrap();
                    } else if rank.index() == to {
                        let received = receive(&mut *transport, from, len(round)).unwrap();
                        assert!(
                            received
                                == payload(Rank::new(from, rank.world_size()).unwrap(), round, len(round))
                        );
                    }
                }
            }
        };
        backend.check(world_size, program, drop);
    }
    for world_size in [2, 3, 5] {
        check(backend, world_size);
    }
}

/// The send and the receive of an exchange may differ in peer and length.
pub(super) fn both_halves_may_differ_in_peer_and_length(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize) {
        let program = |mut transport: Box<dyn Transport>| {
            let (rank, due) = (transport.rank(), soon(&*transport));
            let (to, from) = (rank.right(), rank.left());
            let mut received = vec![0; from.index() * 1000];
            let incoming =
                Incoming { from: from.index(), len: received.len(), sink: Sink::Into(&mut received) };
            let sent = payload(rank, 0, rank.index() * 1000);
            let outgoing = Outgoing { to: to.index(), parts: &[&sent] };
            transport.exchange(Some(outgoing), Some(incoming), &due).unwrap();
            assert_eq!(received, payload(from, 0, from.index() * 1000));
            transport.exchange(None, None, &due).unwrap();
        };
        backend.check(world_size, program, drop);
    }
    for world_size in [2, 3, 5, 8] {
        check(backend, world_size);
    }
}

/// Pieces tile the message and are aligned.
pub(super) fn pieces_tile_the_message_and_are_aligned(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize, len: usize) {
        let program = move |mut transport: Box<dyn Transport>| {
            let (rank, due) = (transport.rank(), soon(&*transport));
            let mut received = Vec::new();
            let mut take = |offset: usize, bytes: &[u8]| {
                assert_eq!(offset, received.len(), "pieces come in order");
                assert!(offset.is_multiple_of(64), "a piece begins at {offset}");
                assert!(bytes.as_ptr().addr().is_multiple_of(64), "a piece is not aligned");
                received.extend_from_slice(bytes);
            };
            let sent = payload(rank, 0, len);
            let outgoing = Outgoing { to: rank.right().index(), parts: &[&sent] };
            let incoming = Incoming { from: rank.left().index(), len, sink: Sink::Each(&mut take) };
            transport.exchange(Some(outgoing), Some(incoming), &due).unwrap();
            assert_eq!(received, payload(rank.left(), 0, len));
        };
        backend.check(world_size, program, drop);
    }
    for len in [0, 1, 63, 64, 65, 4096, 100_003, 1_000_003] {
        for world_size in [2, 3] {
            check(backend, world_size, len);
        }
    }
}

/// An exchange in place combines every byte once with the original of the peer.
pub(super) fn an_exchange_in_place_combines_every_byte_once_with_the_original_of_the_peer(
    fabric: &'static dyn Fabric,
) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize, len: usize) {
        let program = move |mut transport: Box<dyn Transport>| {
            let (rank, due) = (transport.rank(), soon(&*transport));
            // Neighbours in pairs; the last rank of an odd world is its own peer.
            let peer = Some(rank.index() ^ 1).filter(|&peer| peer < world_size).unwrap_or(rank.index());
            let peer = Rank::new(peer, world_size).unwrap();
            let (mine, theirs) = (payload(rank, 0, len), payload(peer, 0, len));
            let mut buffer = mine.clone();
            let start = buffer.as_ptr().addr();
            let mut combine = |ours: &mut [u8], theirs: &[u8]| {
                assert_eq!(ours.len(), theirs.len());
                assert!((ours.as_ptr().addr() - start).is_multiple_of(64), "a range begins between lines");
                assert!(theirs.as_ptr().addr().is_multiple_of(64), "the peer's bytes are not aligned");
                // The operation is neither symmetric nor idempotent, so the result shows whose bytes came, and how often.
                ours.iter_mut().zip(theirs).for_each(|(ours, theirs)| {
                    *ours = ours.wrapping_mul(3).wrapping_add(theirs.wrapping_mul(5)).wrapping_add(1);
                });
            };
            transport.exchange_in_place(peer.index(), &mut buffer, &mut combine, &due).unwrap();
            let expected = mine.iter().zip(&theirs);
            let expected = expected.map(|(mine, theirs)| {
                mine.wrapping_mul(3).wrapping_add(theirs.wrapping_mul(5)).wrapping_add(1)
            });
            assert!(buffer.iter().copied().eq(expected));
        };
        backend.check(world_size, program, drop);
    }
    for world_size in [1, 2, 3, 5, 8] {
        for len in [0, 1, 65, 100_001, 500_001] {
            check(backend, world_size, len);
        }
    }
}

/// Messages and bytes are counted.
pub(super) fn messages_and_bytes_are_counted(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize) {
        let program = |mut transport: Box<dyn Transport>| {
            assert_eq!(transport.traffic(), Traffic::default());
            for len in [0, 1, 100] {
                pass_round(&mut *transport, &vec![7; len]).unwrap();
            }
            let (rank, due) = (transport.rank(), soon(&*transport));
            match rank.index() {
                0 => send(&mut *transport, rank.right().index(), &[1; 10]).unwrap(),
                1 => drop(receive(&mut *transport, 0, 10).unwrap()),
                _ => {}
            }
            if rank.world_size() == 1 {
                receive(&mut *transport, 0, 10).unwrap();
            }
            let me = rank.index();
            transport.exchange_in_place(me, &mut [0; 3], &mut |_, _| {}, &due).unwrap();
            transport.traffic()
        };
        backend.check(world_size, program, |traffic| {
            for (rank, traffic) in traffic.into_iter().enumerate() {
                let sends = u64::from(rank == 0);
                let receives = u64::from(rank == 1 % world_size);
                let expected = Traffic {
                    messages_sent: 4 + sends,
                    bytes_sent: 104 + 10 * sends,
                    messages_received: 4 + receives,
                    bytes_received: 104 + 10 * receives,
                };
                assert_eq!(traffic, expected, "rank {rank}");
            }
        });
    }
    for world_size in [1, 2, 5] {
        check(backend, world_size);
    }
}

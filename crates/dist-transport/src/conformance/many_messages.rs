//! Many messages at once, and waiting for messages without receiving them.

use std::time::Duration;

use crate::{Cause, Incoming, Outgoing, Rank, Sink, Transport};

use super::backend::{Backend, Fabric};
use super::calls::{
    assert_one_contradicts, await_abort, call, exchange_a_byte_with_all, pass_round, payload, receive, send,
    soon,
};

/// Messages that every rank sends to every rank.
const MESSAGES: usize = 5;

/// The pause between two looks of a rank that does not wait.
const PAUSE: Duration = Duration::from_millis(1);

/// Returns the length of a message. Two messages are long, so that no rank can send everything before it receives.
fn len(from: Rank, to: Rank, message: usize) -> usize {
    [400_001, 100_000, 0, 70_001, 300_000][message] + from.index() * 10 + to.index()
}

/// Returns the ranks of the group in an order that depends on this rank.
fn peers(rank: Rank) -> impl Iterator<Item = Rank> {
    let upwards = rank.index().is_multiple_of(2);
    (0..rank.world_size())
        .map(move |distance| if upwards { rank.plus(distance) } else { rank.minus(distance) })
}

/// Sends every rank its messages, receives theirs, and checks them.
fn exchange_with_all(transport: &mut dyn Transport, in_pieces: bool) {
    let (rank, due) = (transport.rank(), soon(transport));
    let to_all = (0..MESSAGES).flat_map(|message| peers(rank).map(move |to| (message, to)));
    let sent: Vec<_> =
        to_all.map(|(message, to)| (to, payload(rank, message, len(rank, to, message)))).collect();
    let parts: Vec<[&[u8]; 1]> = sent.iter().map(|(_, bytes)| [&bytes[..]]).collect();
    let sends = sent.iter().zip(&parts).map(|((to, _), parts)| Outgoing { to: to.index(), parts });
    let sends: Vec<_> = sends.collect();
    let from_all = peers(rank).flat_map(|from| (0..MESSAGES).map(move |message| (from, message)));
    let mut received: Vec<_> =
        from_all.map(|(from, message)| (from, message, vec![0; len(from, rank, message)])).collect();
    if in_pieces {
        let place = |memory: &mut [u8], offset: usize, bytes: &[u8]| {
            assert_eq!(offset % 64, 0);
            memory[offset..][..bytes.len()].copy_from_slice(bytes);
        };
        let sinks = received.iter_mut().map(|(from, _, memory)| {
            (from.index(), memory.len(), move |offset: usize, bytes: &[u8]| place(memory, offset, bytes))
        });
        let mut sinks: Vec<_> = sinks.collect();
        let receives = sinks.iter_mut().map(|(from, len, take)| Incoming {
            from: *from,
            len: *len,
            sink: Sink::Each(take),
        });
        transport.exchange_all(&sends, &mut receives.collect::<Vec<_>>(), &due).unwrap();
    } else {
        let receives = received.iter_mut().map(|(from, _, memory)| Incoming {
            from: from.index(),
            len: memory.len(),
            sink: Sink::Into(memory),
        });
        transport.exchange_all(&sends, &mut receives.collect::<Vec<_>>(), &due).unwrap();
    }
    let bytes_received: usize = received.iter().map(|(.., bytes)| bytes.len()).sum();
    let bytes_sent: usize = sent.iter().map(|(_, bytes)| bytes.len()).sum();
    for (from, message, bytes) in received {
        assert!(bytes == payload(from, message, len(from, rank, message)), "message {message} of {from}");
    }
    let traffic = transport.traffic();
    assert_eq!(traffic.messages_sent, (MESSAGES * rank.world_size()) as u64);
    assert_eq!(traffic.messages_received, traffic.messages_sent);
    assert_eq!((traffic.bytes_sent, traffic.bytes_received), (bytes_sent as u64, bytes_received as u64));
}

/// Every rank sends several messages to every rank at once.
pub(super) fn every_rank_sends_several_messages_to_every_rank_at_once(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize, in_pieces: bool) {
        let program = move |mut transport: Box<dyn Transport>| exchange_with_all(&mut *transport, in_pieces);
        backend.check(world_size, program, drop);
    }
    for world_size in [1, 2, 5] {
        for in_pieces in [false, true] {
            check(backend, world_size, in_pieces);
        }
    }
}

/// Several messages at once are refused like single ones.
pub(super) fn messages_at_once_are_refused_as_single_ones_are(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    let program = |mut transport: Box<dyn Transport>| {
        let due = soon(&*transport);
        let mut byte = [0];
        let wrong = [
            transport.exchange_all(&[Outgoing { to: 2, parts: &[] }], &mut [], &due),
            transport.exchange_all(
                &[],
                &mut [Incoming { from: 0, len: 2, sink: Sink::Into(&mut byte) }],
                &due,
            ),
        ];
        assert!(wrong.iter().all(Result::is_err));
        // The job is unharmed.
        pass_round(&mut *transport, &[7]).unwrap();
    };
    backend.check(2, program, drop);
}

/// Peers without a message are returned, and nothing is harmed.
pub(super) fn peers_without_a_message_are_returned_without_harm(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    let program = move |mut transport: Box<dyn Transport>| match transport.rank().index() {
        0 => {
            let some_come = soon(&*transport);
            for peer in [3, 1] {
                assert_eq!(transport.wait_any_peer(&[peer], &some_come).unwrap(), []);
            }
            assert_eq!(transport.wait_any_peer(&[1, 4, 2, 3], &some_come).unwrap(), [4, 2]);
            assert!(!transport.runtime().expired(some_come.deadline()));
            let nobody_comes = transport.runtime().deadline(backend.short() / 4);
            assert_eq!(transport.wait_any_peer(&[4, 2], &nobody_comes.into()).unwrap(), [4, 2]);
            for peer in [1, 3] {
                assert_eq!(receive(&mut *transport, peer, 1).unwrap(), [7]);
            }
            let nothing_is_left = transport.runtime().deadline(backend.short() / 4);
            assert_eq!(transport.wait_any_peer(&[1], &nothing_is_left.into()).unwrap(), [1]);
            for peer in 1..5 {
                send(&mut *transport, peer, &[8]).unwrap();
            }
            for peer in [4, 2] {
                assert_eq!(receive(&mut *transport, peer, 1).unwrap(), [9]);
            }
        }
        1 | 3 => {
            send(&mut *transport, 0, &[7]).unwrap();
            assert_eq!(receive(&mut *transport, 0, 1).unwrap(), [8]);
        }
        _ => {
            assert_eq!(receive(&mut *transport, 0, 1).unwrap(), [8]);
            send(&mut *transport, 0, &[9]).unwrap();
        }
    };
    backend.check(5, program, drop);
}

/// A rank that looks repeatedly and never waits sees the first message of another arrive.
pub(super) fn a_rank_that_polls_for_messages_sees_them_arrive(fabric: &'static dyn Fabric) {
    fn check(backend: Backend, listener: usize) {
        let program = move |mut transport: Box<dyn Transport>| {
            let (peer, due) = (transport.rank().right().index(), soon(&*transport));
            if transport.rank().index() != listener {
                return send(&mut *transport, peer, &[7]).unwrap();
            }
            while look(&mut *transport, &[peer], Duration::ZERO) == [peer] {
                assert!(!transport.runtime().expired(due.deadline()), "it is not seen");
                transport.runtime().sleep(PAUSE);
            }
            assert_eq!(receive(&mut *transport, peer, 1).unwrap(), [7]);
        };
        backend.check(2, program, drop);
    }
    for listener in [0, 1] {
        check(Backend(fabric), listener);
    }
}

/// A peer without a message does not delay the message of another.
pub(super) fn a_peer_without_a_message_does_not_delay_another(fabric: &'static dyn Fabric) {
    fn check(backend: Backend, is_connected: bool, [listener, silent, other]: [usize; 3]) {
        let program = move |mut transport: Box<dyn Transport>| {
            let transport = &mut *transport;
            if is_connected {
                exchange_a_byte_with_all(transport).unwrap();
            }
            let (rank, due) = (transport.rank().index(), soon(transport));
            if rank == silent {
                assert_eq!(receive(transport, listener, 1).unwrap(), [8]);
            } else if rank == other {
                transport.runtime().sleep(PAUSE);
                send(transport, listener, &[7]).unwrap();
            } else {
                assert_eq!(transport.wait_any_peer(&[silent, other], &due).unwrap(), [silent]);
                assert!(!transport.runtime().expired(due.deadline()), "it has waited for all");
                assert_eq!(receive(transport, other, 1).unwrap(), [7]);
                send(transport, silent, &[8]).unwrap();
            }
        };
        backend.check(3, program, drop);
    }
    for is_connected in [true, false] {
        for ranks in [[2, 0, 1], [0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0]] {
            check(Backend(fabric), is_connected, ranks);
        }
    }
}

/// Returns the peers that have sent no message within this time.
fn look(transport: &mut dyn Transport, peers: &[usize], time: Duration) -> Vec<usize> {
    let due = transport.runtime().deadline(time).into();
    transport.wait_any_peer(peers, &due).unwrap()
}

/// A wait for any peer notices messages that a rank sent to itself, and fails for a rank outside the world.
pub(super) fn a_rank_sees_its_own_messages_and_refuses_ranks_outside_the_group(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    let program = move |mut transport: Box<dyn Transport>| {
        let short = transport.runtime().deadline(backend.short());
        assert_eq!(transport.wait_any_peer(&[0], &short.into()).unwrap(), [0]);
        send(&mut *transport, 0, &[1]).unwrap();
        let due = soon(&*transport);
        assert_eq!(transport.wait_any_peer(&[0, 0], &due).unwrap(), []);
        assert!(transport.wait_any_peer(&[1], &due).is_err());
        assert_eq!(receive(&mut *transport, 0, 1).unwrap(), [1]);
    };
    backend.check(1, program, drop);
}

/// A wait for any peer ends with the job.
pub(super) fn a_wait_for_any_peer_ends_with_the_job(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    let program = move |mut transport: Box<dyn Transport>| {
        // The waiting ranks are connected with rank 2 already, or not yet.
        match transport.rank().index() {
            // The message arrives, or the job ends.
            0 => drop(receive(&mut *transport, 2, 1)),
            1 => {}
            _ => {
                send(&mut *transport, 0, &[0]).unwrap();
                return transport.abort(Cause::gave_up("enough"));
            }
        }
        let due = soon(&*transport);
        let error = transport.wait_any_peer(&[2], &due).unwrap_err();
        assert!(!transport.runtime().expired(due.deadline()), "not woken: {error}");
        assert_eq!(transport.aborted().unwrap().rank, 2);
    };
    backend.check(3, program, drop);
}

/// A rank that waits for any peer in a contradicting call is told long before the deadline.
pub(super) fn calls_of_ranks_that_wait_for_any_peer_are_compared_too(fabric: &'static dyn Fabric) {
    fn check(backend: Backend, is_connected: bool) {
        let program = move |mut transport: Box<dyn Transport>| {
            let transport = &mut *transport;
            if is_connected {
                exchange_a_byte_with_all(transport).unwrap();
            }
            let me = transport.rank().index();
            transport.begin(&call(1, u8::from(me == 1)));
            let due = soon(transport);
            let error = match me {
                0 => transport.wait_any_peer(&[1], &due).unwrap_err(),
                _ => receive(transport, 0, 1).unwrap_err(),
            };
            assert!(!transport.runtime().expired(due.deadline()), "not noticed: {error}");
            (error, await_abort(transport))
        };
        backend.check(2, program, assert_one_contradicts);
    }
    for is_connected in [true, false] {
        check(Backend(fabric), is_connected);
    }
}

/// Ranks that share a machine have one host number.
pub(super) fn ranks_that_share_a_machine_have_one_host(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    let program = |mut transport: Box<dyn Transport>| {
        let fork = transport.fork(&[2, 0]).unwrap();
        (transport.hosts(), fork.map(|fork| fork.hosts()))
    };
    backend.check(3, program, |hosts| {
        let (whole, _) = &hosts[0];
        assert_eq!(*whole, vec![whole[0]; 3]);
        assert_eq!(hosts[0], (whole.clone(), Some(vec![whole[0]; 2])));
        assert_eq!(hosts[1], (whole.clone(), None));
    });
}

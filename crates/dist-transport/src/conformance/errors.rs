//! Errors: nothing waits forever, nothing false is delivered, and every rank gets the same reason.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::{Abort, Activity, Cause, Error, Fingerprint, Incoming, Outgoing, Sink, Transport};

use super::backend::{Backend, Fabric, LONG};
use super::calls::{
    assert_one_contradicts, await_abort, exchange_a_byte_with_all, pass_round, receive, receive_within, send,
    soon, stand_by, wait_in_vain,
};

const OURS: Fingerprint = Fingerprint([1; Fingerprint::SIZE]);
const THEIRS: Fingerprint = Fingerprint([2; Fingerprint::SIZE]);

/// Receives a message that must be refused, and returns the error. The memory of a failed receive is
/// unspecified, and a delivery function must not be called.
fn receive_refused(transport: &mut dyn Transport, from: usize, len: usize, in_memory: bool) -> Error {
    if in_memory {
        return receive(transport, from, len).unwrap_err();
    }
    let mut refuse = |_, _: &[u8]| panic!("bytes of a refused message were delivered");
    let incoming = Incoming { from, len, sink: Sink::Each(&mut refuse) };
    let due = soon(transport);
    transport.exchange(None, Some(incoming), &due).unwrap_err()
}

/// Combines a message that must be refused.
fn combine_refused(transport: &mut dyn Transport, peer: usize, len: usize) -> Error {
    let mut refuse = |_: &mut [u8], _: &[u8]| panic!("bytes of a refused message were combined");
    let due = soon(transport);
    transport.exchange_in_place(peer, &mut vec![7; len], &mut refuse, &due).unwrap_err()
}

/// A message of another call is refused on every rank before a byte is delivered.
pub(super) fn a_message_of_another_call_is_refused_on_every_rank_before_a_byte_is_delivered(
    fabric: &'static dyn Fabric,
) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize, in_memory: bool) {
        let program = move |mut transport: Box<dyn Transport>| {
            let transport = &mut *transport;
            let error = match transport.rank().index() {
                // The length differs too: the call is reported.
                0 => {
                    exchange_a_byte_with_all(transport).unwrap();
                    transport.begin(&OURS);
                    receive_refused(transport, 1, 100, in_memory)
                }
                1 => {
                    exchange_a_byte_with_all(transport).unwrap();
                    transport.begin(&THEIRS);
                    send(transport, 0, &[7; 99]).unwrap();
                    wait_in_vain(transport, 0)
                }
                _ => stand_by(transport, 0),
            };
            (error, await_abort(transport))
        };
        let record = Abort { cause: Cause::Mismatch { theirs: THEIRS }, rank: 1, reporter: 0, call: OURS };
        backend.check(world_size, program, move |ends| {
            for (rank, (error, abort)) in ends.iter().enumerate() {
                assert_eq!(*abort, record, "rank {rank}");
                match error {
                    Error::Mismatch { peer: 1, ours: OURS, theirs: THEIRS } if rank == 0 => {}
                    Error::Aborted(abort) if rank > 0 => assert_eq!(*abort, record),
                    other => panic!("rank {rank}: {other}"),
                }
            }
        });
    }
    for world_size in [2, 3, 5, 8] {
        for in_memory in [true, false] {
            check(backend, world_size, in_memory);
        }
    }
}

/// A message of another length is refused on every rank before a byte is delivered.
pub(super) fn a_message_of_another_length_is_refused_on_every_rank_before_a_byte_is_delivered(
    fabric: &'static dyn Fabric,
) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize, (sent, awaited): (usize, usize), in_memory: bool) {
        let program = move |mut transport: Box<dyn Transport>| {
            let transport = &mut *transport;
            let error = match transport.rank().index() {
                0 => {
                    exchange_a_byte_with_all(transport).unwrap();
                    transport.begin(&OURS);
                    receive_refused(transport, 1, awaited, in_memory)
                }
                1 => {
                    exchange_a_byte_with_all(transport).unwrap();
                    transport.begin(&OURS);
                    send(transport, 0, &vec![7; sent]).unwrap();
                    wait_in_vain(transport, 0)
                }
                _ => stand_by(transport, 0),
            };
            (error, await_abort(transport))
        };
        let (expected, got) = (awaited as u64, sent as u64);
        let record = Abort { cause: Cause::Length { expected, got }, rank: 1, reporter: 0, call: OURS };
        backend.check(world_size, program, move |ends| {
            for (rank, (error, abort)) in ends.iter().enumerate() {
                assert_eq!(*abort, record, "rank {rank}");
                let told = format!("rank 1 sends {got} bytes where rank 0 expects {expected}");
                assert_eq!(abort.to_string(), told);
                match error {
                    Error::Length { peer: 1, expected, got } if rank == 0 => {
                        assert_eq!((*got, *expected), (sent as u64, awaited as u64));
                    }
                    Error::Aborted(seen) if rank > 0 => assert_eq!(seen, abort),
                    other => panic!("rank {rank}: {other}"),
                }
            }
        });
    }
    for lengths in [(0, 100), (99, 100), (101, 100), (70_000, 100), (99, 70_000), (70_001, 70_000)] {
        for (world_size, in_memory) in [(2, true), (3, true), (2, false)] {
            check(backend, world_size, lengths, in_memory);
        }
    }
}

/// An exchange in place with a peer that disagrees combines nothing.
pub(super) fn an_exchange_in_place_with_a_peer_that_disagrees_combines_nothing(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, call: Fingerprint, len: usize) {
        let program = move |mut transport: Box<dyn Transport>| {
            let transport = &mut *transport;
            exchange_a_byte_with_all(transport).unwrap();
            let odd = transport.rank().index() == 1;
            transport.begin(&if odd { call } else { OURS });
            let peer = transport.rank().right().index();
            let error = combine_refused(transport, peer, if odd { len } else { 70_000 });
            (error, await_abort(transport))
        };
        backend.check(2, program, move |ends| {
            // Both ranks find out by themselves, at the same time: each may believe that it was first.
            for (rank, (error, abort)) in ends.iter().enumerate() {
                assert_eq!(abort.rank, 1 - abort.reporter);
                match error {
                    Error::Mismatch { peer, .. } if call == THEIRS => assert_eq!(*peer, 1 - rank),
                    Error::Length { peer, .. } if call == OURS => assert_eq!(*peer, 1 - rank),
                    Error::Aborted(first) => assert_eq!(first.reporter, 1 - rank),
                    other => panic!("rank {rank}: {other}"),
                }
            }
        });
    }
    let cases: &[(Fingerprint, usize)] = &[(THEIRS, 70_000), (OURS, 69_999)];
    for &(call, len) in cases {
        check(backend, call, len);
    }
}

/// A rank that leaves is named after its last message has arrived.
pub(super) fn a_rank_that_leaves_is_named_after_its_last_message_has_arrived(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize) {
        let program = |mut transport: Box<dyn Transport>| {
            exchange_a_byte_with_all(&mut *transport).unwrap();
            let rank = transport.rank();
            if rank.index() == 0 {
                for peer in 1..rank.world_size() {
                    send(&mut *transport, peer, &[9; 5]).unwrap();
                }
                return None;
            }
            // One rank waits in vain; the others need nothing more, and leave after the abort.
            assert_eq!(receive(&mut *transport, 0, 5).unwrap(), [9; 5]);
            if rank.index() == 1 {
                for peer in 2..rank.world_size() {
                    assert_eq!(receive(&mut *transport, peer, 1).unwrap(), [3]);
                }
                return Some((wait_in_vain(&mut *transport, 0), await_abort(&*transport)));
            }
            send(&mut *transport, 1, &[3]).unwrap();
            Some((wait_in_vain(&mut *transport, 1), await_abort(&*transport)))
        };
        let record = Abort { cause: Cause::Left, rank: 0, reporter: 1, call: Fingerprint::NONE };
        backend.check(world_size, program, move |ends| {
            for (rank, end) in ends.iter().enumerate().skip(1) {
                let (error, abort) = end.as_ref().unwrap();
                assert_eq!(*abort, record, "rank {rank}");
                match error {
                    Error::Closed { activity: Activity::Receive, peer: 0 } if rank == 1 => {}
                    Error::Aborted(abort) if rank > 1 => assert_eq!(*abort, record),
                    other => panic!("rank {rank}: {other}"),
                }
            }
        });
    }
    for world_size in [2, 3, 5, 8] {
        check(backend, world_size);
    }
}

/// An abort wakes every wait and is never replaced.
pub(super) fn an_abort_wakes_every_wait_and_stands_for_ever(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize) {
        let program = |mut transport: Box<dyn Transport>| {
            let transport = &mut *transport;
            exchange_a_byte_with_all(transport).unwrap();
            let rank = transport.rank();
            transport.begin(&OURS);
            if rank.index() == 0 {
                for peer in 1..rank.world_size() {
                    receive(transport, peer, 1).unwrap();
                }
                transport.abort(Cause::gave_up("no more data"));
            } else {
                send(transport, 0, &[1]).unwrap();
                let error = wait_in_vain(transport, rank.right().index());
                assert!(matches!(error, Error::Aborted(_)), "{error}");
            }
            let abort = await_abort(transport);
            // A later abort changes nothing.
            transport.abort(Cause::gave_up("too late"));
            transport.begin(&THEIRS);
            let due = soon(transport);
            let in_place = transport.exchange_in_place(0, &mut [0; 8], &mut |_, _| {}, &due).unwrap_err();
            for error in [pass_round(transport, &[1]).unwrap_err(), wait_in_vain(transport, 0), in_place] {
                assert!(matches!(&error, Error::Aborted(again) if *again == abort), "{error}");
            }
            assert_eq!(transport.aborted().as_ref(), Some(&abort));
            abort
        };
        let record = Abort { cause: Cause::gave_up("no more data"), rank: 0, reporter: 0, call: OURS };
        backend
            .check(world_size, program, move |aborts| assert!(aborts.iter().all(|abort| *abort == record)));
    }
    for world_size in [1, 2, 3, 5, 8] {
        check(backend, world_size);
    }
}

/// A panic while a rank has the transport is the cause on every rank.
pub(super) fn a_panic_with_the_transport_in_hand_is_the_cause_everywhere(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize) {
        let program = |mut transport: Box<dyn Transport>| {
            let last = transport.rank().world_size() - 1;
            if transport.rank().index() == last {
                exchange_a_byte_with_all(&mut *transport).unwrap();
                let gives_up = AssertUnwindSafe(move || {
                    let _transport = transport;
                    std::panic::resume_unwind(Box::new("planted"));
                });
                catch_unwind(gives_up).unwrap_err();
                return None;
            }
            let error = stand_by(&mut *transport, last);
            Some((error.peer(), await_abort(&*transport)))
        };
        let last = world_size - 1;
        let record = Abort { cause: Cause::Panicked, rank: last, reporter: last, call: Fingerprint::NONE };
        backend.check(world_size, program, move |ends| {
            for end in ends.into_iter().take(last) {
                assert_eq!(end, Some((Some(last), record.clone())));
            }
        });
    }
    for world_size in [2, 3, 5, 8] {
        check(backend, world_size);
    }
}

/// A panic of a function that receives bytes is the cause on every rank, even if it is caught: the message is
/// half received.
pub(super) fn a_panic_of_a_function_that_is_given_bytes_is_the_cause_everywhere(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize, in_place: bool, from: usize) {
        const LEN: usize = 100_000;
        let program = move |mut transport: Box<dyn Transport>| {
            let transport = &mut *transport;
            // Other ranks know nothing of a message that a rank sends to itself.
            if transport.rank().index() > from {
                return (stand_by(transport, 0), await_abort(transport));
            }
            exchange_a_byte_with_all(transport).unwrap();
            transport.begin(&OURS);
            let due = soon(transport);
            let mut memory = vec![7; LEN];
            let planted = || std::panic::resume_unwind(Box::new("planted"));
            let peer = match transport.rank().index() {
                0 => {
                    let panics = AssertUnwindSafe(|| {
                        if in_place {
                            let _ =
                                transport.exchange_in_place(from, &mut memory, &mut |_, _| planted(), &due);
                        } else {
                            let mut sink = |_, _: &[u8]| planted();
                            let incoming = Incoming { from, len: LEN, sink: Sink::Each(&mut sink) };
                            let parts = [&memory[..]];
                            let own = (from == 0).then_some(Outgoing { to: 0, parts: &parts });
                            let _ = transport.exchange(own, Some(incoming), &due);
                        }
                    });
                    catch_unwind(panics).unwrap_err();
                    1
                }
                1 if in_place => {
                    let _ = transport.exchange_in_place(0, &mut memory, &mut |_, _| {}, &due);
                    0
                }
                _ => {
                    // Much of it may still be in flight when the other rank panics.
                    let _ = send(transport, 0, &memory);
                    0
                }
            };
            let error = wait_in_vain(transport, peer);
            (error, await_abort(transport))
        };
        let record = Abort { cause: Cause::Panicked, rank: 0, reporter: 0, call: OURS };
        backend.check(world_size, program, move |ends| {
            for (rank, (error, abort)) in ends.iter().enumerate() {
                assert_eq!(*abort, record, "rank {rank}");
                assert!(matches!(error, Error::Aborted(seen) if *seen == record), "rank {rank}: {error}");
            }
        });
    }
    for world_size in [2, 3] {
        for (in_place, from) in [(true, 1), (false, 1), (true, 0), (false, 0)] {
            check(backend, world_size, in_place, from);
        }
    }
}

/// A peer outside the group is refused without harm.
pub(super) fn a_peer_outside_the_group_is_refused_without_harm(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize) {
        let program = move |mut transport: Box<dyn Transport>| {
            let transport = &mut *transport;
            let due = soon(transport);
            for bad in [world_size, usize::MAX] {
                let in_place = transport.exchange_in_place(bad, &mut [0], &mut |_, _| {}, &due);
                let received = receive(transport, bad, 1).map(drop);
                for refused in [send(transport, bad, &[1]), received, in_place] {
                    let Err(Error::RankOutOfRange { rank, world_size: size }) = refused else {
                        panic!("{refused:?}")
                    };
                    assert_eq!((rank, size), (bad, world_size));
                }
            }
            assert_eq!(pass_round(transport, &[5]).unwrap(), [5]);
            assert_eq!(transport.aborted(), None);
        };
        backend.check(world_size, program, drop);
    }
    for world_size in [1, 2, 3, 5] {
        check(backend, world_size);
    }
}

/// Receiving into memory of another length is refused without harm.
pub(super) fn receiving_into_memory_of_another_length_is_refused_without_harm(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize) {
        let program = |mut transport: Box<dyn Transport>| {
            let (rank, due) = (transport.rank(), soon(&*transport));
            let outgoing = Outgoing { to: rank.right().index(), parts: &[&[5; 10]] };
            let mut memory = [0; 9];
            let incoming = Incoming { from: rank.left().index(), len: 10, sink: Sink::Into(&mut memory) };
            let error = transport.exchange(Some(outgoing), Some(incoming), &due).unwrap_err();
            assert!(matches!(error, Error::Length { expected: 9, got: 10, .. }), "{error}");
            assert_eq!(pass_round(&mut *transport, &[6]).unwrap(), [6], "nothing was sent before");
            assert_eq!(transport.aborted(), None);
        };
        backend.check(world_size, program, drop);
    }
    for world_size in [1, 2, 3] {
        check(backend, world_size);
    }
}

/// Contradicting calls are reported long before the deadline.
pub(super) fn contradicting_calls_are_reported_long_before_the_deadline(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize) {
        /// The first call of all ranks, in one of two forms.
        fn first_call(form: u8) -> Fingerprint {
            let mut call = [0; Fingerprint::SIZE];
            (call[0], call[Fingerprint::SIZE - 1]) = (1, form);
            Fingerprint(call)
        }
        let program = move |mut transport: Box<dyn Transport>| {
            let transport = &mut *transport;
            transport.begin(&first_call(u8::from(transport.rank().index() == 1)));
            // All ranks receive and none sends: no message shows that the calls differ.
            let from = transport.rank().left().index();
            let error = receive_within(transport, from, 0, LONG).unwrap_err();
            (error, await_abort(transport))
        };
        backend.check(world_size, program, assert_one_contradicts);
    }
    for world_size in [2, 3, 5] {
        check(backend, world_size);
    }
}

/// A rank that leaves before any message from it has arrived is named.
pub(super) fn a_rank_that_leaves_before_its_first_message_is_named(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, leaver: usize) {
        let program = move |mut transport: Box<dyn Transport>| {
            if transport.rank().index() == leaver {
                return None;
            }
            Some((wait_in_vain(&mut *transport, leaver), await_abort(&*transport)))
        };
        backend.check(3, program, move |ends| {
            for (error, abort) in ends.into_iter().flatten() {
                assert_eq!((abort.cause, abort.rank), (Cause::Left, leaver));
                match error {
                    Error::Closed { peer, .. } => assert_eq!(peer, leaver),
                    Error::Aborted(seen) => assert_eq!((seen.cause, seen.rank), (Cause::Left, leaver)),
                    other => panic!("{other}"),
                }
            }
        });
    }
    for leaver in [0, 2] {
        check(backend, leaver);
    }
}

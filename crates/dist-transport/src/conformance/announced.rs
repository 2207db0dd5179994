//! Long matched messages: they are announced, and their bytes stay with their sender until a receive matches them.

use crate::{
    Abort, Activity, Cause, Error, Fingerprint, KEPT_MESSAGE_BYTES_MAX, LazyDeadline, Outgoing, Rank, Result,
    Transport,
};

use super::backend::{Backend, Fabric};
use super::calls::{await_abort, pass_round, payload, soon};
use super::matched::{Collected, LONG, call_of, matched};

/// Sends messages of these lengths, with the numbers of their places as their calls. Keeps this many messages of other
/// ranks meanwhile, which are returned.
fn send_all(
    transport: &mut dyn Transport,
    to: usize,
    lengths: &[usize],
    room: usize,
    due: &LazyDeadline<'_>,
) -> Result<Collected> {
    let rank = transport.rank();
    let bytes: Vec<_> =
        lengths.iter().enumerate().map(|(message, &len)| payload(rank, message, len)).collect();
    let parts: Vec<_> = bytes.iter().map(|bytes| [&bytes[..]]).collect();
    let send = |(message, parts)| (call_of(rank, message), Outgoing { to, parts });
    let sends: Vec<_> = parts.iter().map(|parts| &parts[..]).enumerate().map(send).collect();
    let mut inbox = Collected { room, wants: false, ..Collected::new(&vec![0; rank.world_size()]) };
    transport.exchange_matched(&sends, &mut inbox, due)?;
    Ok(inbox)
}

/// The bytes of long matched messages arrive only when the inbox wants them, in the order in which it does. Shorter messages
/// and announcements that were sent later arrive before.
pub(super) fn a_long_matched_message_waits_for_its_receive_and_later_ones_pass_it(
    fabric: &'static dyn Fabric,
) {
    fn check(backend: Backend, sender: usize) {
        let lengths = [LONG, 10, 3 * LONG, KEPT_MESSAGE_BYTES_MAX, 0];
        let program = move |mut transport: Box<dyn Transport>| {
            let mut messages = matched(&mut *transport);
            let (rank, due) = (messages.rank(), soon(&*messages));
            let receiver = (sender + 1) % 3;
            if rank.index() == sender {
                send_all(&mut *messages, receiver, &lengths, 1, &due).unwrap();
            }
            if rank.index() == receiver {
                let mut awaited = [0; 3];
                awaited[sender] = 3;
                let mut inbox = Collected { wants: false, ..Collected::new(&awaited) };
                messages.exchange_matched(&[], &mut inbox, &due).unwrap();
                let calls: Vec<_> = inbox.messages[sender].iter().map(|(call, _)| *call).collect();
                let from = Rank::new(sender, 3).unwrap();
                assert_eq!(calls, [0, 1, 2, 3, 4].map(|message| call_of(from, message)));
                assert_eq!(inbox.announced[sender], [(0, 0), (1, 2)]);
                for (number, message) in [(1, 2), (0, 0)] {
                    inbox.want(sender, number, lengths[message]);
                    messages.exchange_matched(&[], &mut inbox, &due).unwrap();
                    assert!(inbox.messages[sender][message].1 == payload(from, message, lengths[message]));
                }
                for message in [1, 3, 4] {
                    assert!(inbox.messages[sender][message].1 == payload(from, message, lengths[message]));
                }
            }
            pass_round(&mut *transport, &[0; 8]).unwrap();
            messages.traffic()
        };
        backend.check(3, program, move |traffic| {
            let bytes = lengths.iter().sum::<usize>() as u64;
            let (sent, received) = (traffic[sender], traffic[(sender + 1) % 3]);
            assert_eq!((sent.messages_sent, sent.bytes_sent), (5, bytes));
            assert_eq!((received.messages_received, received.bytes_received), (5, bytes));
        });
    }
    for sender in [0, 1, 2] {
        check(Backend(fabric), sender);
    }
}

/// A rank that waits until its long message is wanted keeps the messages that its receiver sends before, as far as its inbox
/// has room for them.
pub(super) fn a_sender_of_a_long_matched_message_keeps_messages_of_its_receiver(fabric: &'static dyn Fabric) {
    fn check(backend: Backend, sender: usize) {
        let program = move |mut transport: Box<dyn Transport>| {
            let mut messages = matched(&mut *transport);
            let (rank, due) = (messages.rank(), soon(&*messages));
            let other = rank.right().index();
            if rank.index() == sender {
                let mut inbox = send_all(&mut *messages, other, &[LONG], 4, &due).unwrap();
                // Over some networks the answer passes the messages.
                inbox.awaited[other] = inbox.room - 1;
                inbox.sources = vec![other];
                messages.exchange_matched(&[], &mut inbox, &due).unwrap();
                assert_eq!(inbox.messages[other].len(), 3);
                for (message, (call, bytes)) in inbox.messages[other].iter().enumerate() {
                    assert_eq!(*call, call_of(rank.right(), message));
                    assert!(*bytes == payload(rank.right(), message, 100_000));
                }
            } else {
                send_all(&mut *messages, other, &[100_000; 3], 0, &due).unwrap();
                let mut awaited = [0; 2];
                awaited[other] = 1;
                let mut inbox = Collected::new(&awaited);
                messages.exchange_matched(&[], &mut inbox, &due).unwrap();
                assert!(inbox.messages[other][0].1 == payload(rank.right(), 0, LONG));
            }
            pass_round(&mut *transport, &[0; 8]).unwrap();
        };
        backend.check(2, program, drop);
    }
    for sender in [0, 1] {
        check(Backend(fabric), sender);
    }
}

/// A long matched message that nothing wants ends at its deadline, or when the receiver leaves, with the name of the
/// receiver. The deadline holds too if the sender has no room for a message that its receiver has sent before.
pub(super) fn a_long_matched_message_that_nothing_wants_ends_in_time_and_names_its_receiver(
    fabric: &'static dyn Fabric,
) {
    #[derive(Clone, Copy, PartialEq)]
    enum Receiver {
        Waits,
        Sends,
        Leaves,
    }
    fn check(backend: Backend, receiver: Receiver) {
        let limit = backend.short();
        let program = move |mut transport: Box<dyn Transport>| {
            let mut messages = matched(&mut *transport);
            if messages.rank().index() == 1 {
                let due = soon(&*messages);
                match receiver {
                    Receiver::Waits => {}
                    Receiver::Sends => drop(send_all(&mut *messages, 0, &[10], 0, &due).unwrap()),
                    Receiver::Leaves => drop(messages),
                }
                return (None, await_abort(&*transport));
            }
            let is_left = receiver == Receiver::Leaves;
            let room = usize::from(receiver != Receiver::Sends);
            if !is_left {
                // The connection may take longer than the deadline.
                let due = soon(&*messages);
                send_all(&mut *messages, 1, &[1], room, &due).unwrap();
            }
            let due = if is_left { soon(&*messages) } else { messages.runtime().deadline(limit).into() };
            let error = send_all(&mut *messages, 1, &[LONG], room, &due).err().unwrap();
            (Some(error), await_abort(&*transport))
        };
        let cause = if receiver == Receiver::Leaves { Cause::Left } else { Cause::timed_out() };
        let record = Abort { cause, rank: 1, reporter: 0, call: Fingerprint::NONE };
        backend.check(2, program, move |ends| {
            assert!(ends.iter().all(|(_, abort)| *abort == record), "{ends:?}");
            match ends[0].0.as_ref().unwrap() {
                Error::Timeout { activity: Activity::Match, peer: 1, .. } if receiver != Receiver::Leaves => {
                }
                Error::Closed { peer: 1, .. } if receiver == Receiver::Leaves => {}
                other => panic!("{other}"),
            }
        });
    }
    for receiver in [Receiver::Waits, Receiver::Sends, Receiver::Leaves] {
        check(Backend(fabric), receiver);
    }
}

/// Two ranks that send a long matched message to each other, and receive nothing meanwhile, are told so long before the
/// deadline.
pub(super) fn ranks_that_wait_for_the_receives_of_each_other_are_told_soon(fabric: &'static dyn Fabric) {
    if !fabric.finds_circles() {
        return;
    }
    let program = |mut transport: Box<dyn Transport>| {
        let mut messages = matched(&mut *transport);
        let (rank, due) = (messages.rank(), soon(&*messages));
        messages.begin(&call_of(Rank::new(0, 2).unwrap(), 1));
        let error = send_all(&mut *messages, rank.right().index(), &[LONG], 1, &due);
        (error.err(), await_abort(&*transport))
    };
    Backend(fabric).check(2, program, |ends| {
        for (error, abort) in ends {
            assert!(matches!(abort.cause, Cause::CircularWait { count: 2, .. }), "{abort:?}");
            assert!(matches!(error, Some(Error::Aborted(record)) if record == abort), "{abort:?}");
        }
    });
}

//! Matched messages: each has a call of its own, which its receiver learns with the length before it takes the bytes.

use std::collections::VecDeque;

use crate::{
    Abort, Activity, Cause, Error, Fingerprint, Inbox, Interrupt, KEPT_MESSAGE_BYTES_MAX, LazyDeadline,
    Outgoing, Pause, Rank, Refusal, Result, Traffic, Transport,
};

use super::backend::{Backend, Fabric};
use super::calls::{await_abort, pass_round, payload, soon};

/// The length of a message that is announced.
pub(super) const LONG: usize = KEPT_MESSAGE_BYTES_MAX + 1;

/// The lengths of the messages that every rank sends to every rank. One is announced, and two more are so long that no
/// rank can send everything before it receives.
const LENGTHS: [usize; 6] = [400_001, 0, LONG, 100_000, 1, 300_000];

/// Returns the lengths of the messages in a world of this size. In a large one no message is announced, since they would be
/// too many bytes.
fn lengths(world_size: usize) -> [usize; 6] {
    let longest = if world_size > 2 { 500_000 } else { LONG };
    LENGTHS.map(|len| len.min(longest))
}

/// An inbox that takes this many messages of each rank.
pub(super) struct Collected {
    pub(super) awaited: Vec<usize>,
    pub(super) sources: Vec<usize>,
    pub(super) messages: Vec<Vec<(Fingerprint, Vec<u8>)>>,
    /// The calls and the memory that the next messages of each rank are expected to have.
    pub(super) expected: Vec<VecDeque<(Fingerprint, Vec<u8>)>>,
    /// The places of the messages that are arriving, in the lists of messages.
    pub(super) arriving: Vec<Option<usize>>,
    /// The announced messages of each rank without their bytes: their numbers, and their places.
    pub(super) announced: Vec<Vec<(u64, usize)>>,
    /// `true` if announced messages are wanted at once.
    pub(super) wants: bool,
    /// Announced messages that are wanted by the next call, as their senders and numbers.
    pub(super) wanted: Vec<(usize, u64)>,
    /// The number of messages that are kept and not awaited.
    pub(super) room: usize,
    pub(super) refusal: Option<Refusal>,
    pub(super) pause: Pause,
    pub(super) pauses_at_deadline: bool,
    pub(super) interrupt: Option<Interrupt>,
    /// The positions of the messages that are sent.
    pub(super) sent: Vec<usize>,
}

impl Collected {
    pub(super) fn new(awaited: &[usize]) -> Self {
        Self {
            awaited: awaited.to_vec(),
            sources: (0..awaited.len()).filter(|&from| awaited[from] > 0).collect(),
            messages: vec![Vec::new(); awaited.len()],
            expected: vec![VecDeque::new(); awaited.len()],
            arriving: vec![None; awaited.len()],
            announced: vec![Vec::new(); awaited.len()],
            wants: true,
            wanted: Vec::new(),
            room: 0,
            refusal: None,
            pause: Pause::Never,
            pauses_at_deadline: false,
            interrupt: None,
            sent: Vec::new(),
        }
    }
}

impl Collected {
    /// Adds a message, and returns its place.
    fn add(&mut self, from: usize, call: &Fingerprint, len: usize) -> Result<usize, Refusal> {
        assert!(self.arriving[from].is_none(), "the last message of rank {from} is not complete");
        assert!(self.awaits(from) || self.keeps(from), "no message of rank {from} is awaited");
        if let Some(refusal) = self.refusal {
            return Err(refusal);
        }
        let expected = self.expected[from].pop_front();
        let is_expected = |(expected, memory): &(_, Vec<_>)| expected == call && memory.len() == len;
        self.messages[from].push(expected.filter(is_expected).unwrap_or_else(|| (*call, vec![0; len])));
        Ok(self.messages[from].len() - 1)
    }

    /// Awaits an announced message with this length in bytes.
    pub(super) fn want(&mut self, from: usize, number: u64, len: usize) {
        let announced = self.announced[from].iter().find(|(announced, _)| *announced == number);
        let &(_, place) = announced.unwrap_or_else(|| panic!("message {number} was not announced"));
        self.messages[from][place].1.resize(len, 0);
        self.wanted.push((from, number));
        self.awaited[from] += 1;
        if !self.sources.contains(&from) {
            self.sources.push(from);
        }
    }
}

impl Inbox for Collected {
    fn sources(&self) -> &[usize] {
        &self.sources
    }

    fn awaits(&self, from: usize) -> bool {
        self.awaited[from] > 0
    }

    fn awaited_bytes(&self) -> usize {
        0
    }

    fn accept(&mut self, from: usize, call: &Fingerprint, len: usize) -> Result<(), Refusal> {
        let place = self.add(from, call, len)?;
        self.arriving[from] = Some(place);
        Ok(())
    }

    fn announce(
        &mut self,
        from: usize,
        call: &Fingerprint,
        len: usize,
        number: u64,
    ) -> Result<bool, Refusal> {
        assert!(len > KEPT_MESSAGE_BYTES_MAX, "a message of {len} bytes is not announced");
        let place = self.add(from, call, if self.wants { len } else { 0 })?;
        self.announced[from].push((number, place));
        Ok(self.wants)
    }

    fn next_wanted(&mut self) -> Option<(usize, u64)> {
        self.wanted.pop()
    }

    fn begin_announced(&mut self, from: usize, number: u64) {
        let announced = &mut self.announced[from];
        let index = announced.iter().position(|(announced, _)| *announced == number);
        let (_, place) = announced.remove(index.expect("the message was announced"));
        self.arriving[from] = Some(place);
    }

    fn keeps(&self, _: usize) -> bool {
        self.room > 0
    }

    fn next_memory(&mut self, from: usize) -> Option<(Fingerprint, &mut [u8])> {
        self.expected[from].front_mut().map(|(call, memory)| (*call, &mut **memory))
    }

    fn memory(&mut self, from: usize) -> &mut [u8] {
        let place = self.arriving[from].unwrap_or_else(|| panic!("no message of rank {from} was accepted"));
        &mut self.messages[from][place].1
    }

    fn complete(&mut self, from: usize) {
        assert!(self.arriving[from].take().is_some(), "no message of rank {from} was accepted");
        match &mut self.awaited[from] {
            0 => self.room -= 1,
            awaited => *awaited -= 1,
        }
    }

    fn sent(&mut self, position: usize) {
        assert!(!self.sent.contains(&position), "message {position} is reported twice");
        self.sent.push(position);
    }

    fn pause(&self) -> Pause {
        match &self.interrupt {
            Some(interrupt) if interrupt.is_requested() => Pause::Now,
            _ => self.pause,
        }
    }

    fn pauses_at_deadline(&self) -> bool {
        self.pauses_at_deadline
    }

    fn interrupt(&self) -> Option<Interrupt> {
        self.interrupt.clone()
    }
}

/// Returns the call of a message.
pub(super) fn call_of(from: Rank, message: usize) -> Fingerprint {
    let mut call = [0; Fingerprint::SIZE];
    call[40..42].copy_from_slice(&[from.index(), message].map(|number| u8::try_from(number).unwrap()));
    Fingerprint(call)
}

/// Returns a transport of the whole group for matched messages.
pub(super) fn matched(transport: &mut dyn Transport) -> Box<dyn Transport> {
    let all: Vec<usize> = (0..transport.rank().world_size()).collect();
    transport.fork(&all).unwrap().unwrap()
}

/// Sends a message with the call of `message`.
fn send(transport: &mut dyn Transport, to: usize, message: usize, bytes: &[u8]) -> Result<()> {
    let (call, due) = (call_of(transport.rank(), message), soon(transport));
    let nothing = &mut Collected::new(&vec![0; transport.rank().world_size()]);
    transport.exchange_matched(&[(call, Outgoing { to, parts: &[bytes] })], nothing, &due)
}

/// Receives this many messages of one rank by the deadline.
fn receive(
    transport: &mut dyn Transport,
    from: usize,
    count: usize,
    due: &LazyDeadline<'_>,
) -> Result<Vec<(Fingerprint, Vec<u8>)>> {
    let mut awaited = vec![0; transport.rank().world_size()];
    awaited[from] = count;
    let mut inbox = Collected::new(&awaited);
    transport.exchange_matched(&[], &mut inbox, due)?;
    Ok(inbox.messages.swap_remove(from))
}

/// Matched messages from all ranks to all ranks arrive whole, in order, and with their calls.
pub(super) fn matched_messages_arrive_whole_and_in_order_with_their_calls(fabric: &'static dyn Fabric) {
    fn check(backend: Backend, world_size: usize, expected: fn(usize) -> Option<(usize, usize)>) {
        let program = move |mut transport: Box<dyn Transport>| {
            let mut transport = matched(&mut *transport);
            let (rank, due) = (transport.rank(), soon(&*transport));
            let lengths = lengths(world_size);
            let bytes: Vec<_> =
                lengths.iter().enumerate().map(|(message, &len)| payload(rank, message, len)).collect();
            let parts: Vec<_> = bytes.iter().map(|bytes| bytes.split_at(bytes.len() / 3)).collect();
            let parts: Vec<_> = parts.iter().map(|&(head, tail)| [head, tail]).collect();
            let sends = (0..world_size).flat_map(|to| {
                let messages = parts.iter().enumerate();
                messages.map(move |(message, parts)| (call_of(rank, message), Outgoing { to, parts }))
            });
            let mut inbox = Collected::new(&vec![LENGTHS.len(); world_size]);
            for (from, queue) in Rank::all(world_size).zip(&mut inbox.expected) {
                let expected = (0..LENGTHS.len()).filter_map(expected);
                queue.extend(expected.map(|(message, len)| (call_of(from, message), vec![7; len])));
            }
            transport.exchange_matched(&sends.collect::<Vec<_>>(), &mut inbox, &due).unwrap();
            for (from, messages) in inbox.messages.iter().enumerate() {
                let from = Rank::new(from, world_size).unwrap();
                assert_eq!(messages.len(), LENGTHS.len());
                for (message, (call, bytes)) in messages.iter().enumerate() {
                    assert_eq!(*call, call_of(from, message));
                    assert!(
                        *bytes == payload(from, message, lengths[message]),
                        "message {message} of {from:?}"
                    );
                }
            }
        };
        backend.check(world_size, program, drop);
    }
    for world_size in [1, 2, 3, 5] {
        check(Backend(fabric), world_size, |_| None);
        check(Backend(fabric), world_size, |message| Some((message, LENGTHS[message])));
    }
    // Other messages arrive than those that are expected.
    check(Backend(fabric), 2, |message| Some((message + 1, LENGTHS[message])));
    check(Backend(fabric), 3, |message| Some((message, 500_000)));
}

/// The first matched message to a rank does not wait until that rank enters a call: it is received after messages
/// of another channel that were sent later.
pub(super) fn a_short_matched_message_does_not_wait_until_its_receiver_enters_a_call(
    fabric: &'static dyn Fabric,
) {
    fn check(backend: Backend, sender: usize) {
        let program = move |mut transport: Box<dyn Transport>| {
            let mut messages = matched(&mut *transport);
            let rank = transport.rank();
            if rank.index() == sender {
                send(&mut *messages, rank.right().index(), 3, &[7; 100]).unwrap();
            }
            // No rank passes this point before the sender has sent.
            for _ in 1..rank.world_size() {
                pass_round(&mut *transport, &[0; 8]).unwrap();
            }
            if rank.left().index() == sender {
                let due = soon(&*messages);
                let received = receive(&mut *messages, sender, 1, &due).unwrap();
                assert_eq!(received, [(call_of(rank.left(), 3), vec![7; 100])]);
            }
        };
        backend.check(3, program, drop);
    }
    for sender in [0, 1, 2] {
        check(Backend(fabric), sender);
    }
}

/// A matched message that its inbox refuses ends the job, and every rank gets the reason.
pub(super) fn a_matched_message_that_is_refused_ends_the_job(fabric: &'static dyn Fabric) {
    fn check(backend: Backend, refusal: Refusal) {
        let program = move |mut transport: Box<dyn Transport>| {
            let mut messages = matched(&mut *transport);
            let rank = messages.rank();
            if rank.index() == 1 {
                send(&mut *messages, 0, 5, &[7; 99]).unwrap();
                return (None, await_abort(&*messages));
            }
            messages.begin(&call_of(rank, 4));
            let mut inbox = Collected { refusal: Some(refusal), ..Collected::new(&[0, 1]) };
            let due = soon(&*messages);
            let error = messages.exchange_matched(&[], &mut inbox, &due).unwrap_err();
            (Some(error), await_abort(&*messages))
        };
        let [ours, theirs] =
            [(0, 4), (1, 5)].map(|(from, message)| call_of(Rank::new(from, 2).unwrap(), message));
        backend.check(2, program, move |ends| {
            let (error, abort) = &ends[0];
            assert_eq!(*abort, ends[1].1);
            match (refusal, error.as_ref().unwrap(), &abort.cause) {
                (Refusal::Mismatch, error, cause) => {
                    let expected = Error::Mismatch { peer: 1, ours, theirs };
                    assert_eq!(error.to_string(), expected.to_string());
                    assert_eq!((cause, abort.rank), (&Cause::Mismatch { theirs }, 1));
                }
                (Refusal::Length(_), Error::Length { peer: 1, expected: 100, got: 99 }, cause) => {
                    assert_eq!((cause, abort.rank), (&Cause::Length { expected: 100, got: 99 }, 1));
                }
                (
                    Refusal::NoMemory,
                    Error::System { activity: Activity::Receive, .. },
                    Cause::GaveUp { .. },
                ) => {
                    assert_eq!(abort.rank, 0);
                }
                (_, error, cause) => panic!("{refusal:?}: {error}, {cause}"),
            }
        });
    }
    for refusal in [Refusal::Mismatch, Refusal::Length(100), Refusal::NoMemory] {
        check(Backend(fabric), refusal);
    }
}

/// A wait for a matched message ends at its deadline, and when the peer leaves, with the name of the peer.
pub(super) fn a_wait_for_a_matched_message_ends_in_time_and_names_the_peer(fabric: &'static dyn Fabric) {
    fn check(backend: Backend, has_sent: bool, leaves: bool) {
        let limit = backend.short();
        let program = move |mut transport: Box<dyn Transport>| {
            let mut messages = matched(&mut *transport);
            if messages.rank().index() == 1 {
                if has_sent {
                    send(&mut *messages, 0, 0, &[1]).unwrap();
                }
                if leaves {
                    drop(messages);
                }
                return (None, await_abort(&*transport));
            }
            let due = if leaves { soon(&*messages) } else { messages.runtime().deadline(limit).into() };
            let error = receive(&mut *messages, 1, 2, &due).unwrap_err();
            (Some(error), await_abort(&*transport))
        };
        let cause = if leaves { Cause::Left } else { Cause::timed_out() };
        let record = Abort { cause, rank: 1, reporter: 0, call: Fingerprint::NONE };
        backend.check(2, program, move |ends| {
            assert!(ends.iter().all(|(_, abort)| *abort == record), "{ends:?}");
            match ends[0].0.as_ref().unwrap() {
                Error::Timeout { peer: 1, .. } if !leaves => {}
                Error::Closed { peer: 1, .. } if leaves => {}
                other => panic!("{other}"),
            }
        });
    }
    for (has_sent, leaves) in [(false, false), (true, false), (false, true), (true, true)] {
        check(Backend(fabric), has_sent, leaves);
    }
}

/// A matched message that is not received is unread, and matched messages are counted.
pub(super) fn matched_messages_are_counted_and_unread_until_they_are_received(fabric: &'static dyn Fabric) {
    let program = |mut transport: Box<dyn Transport>| {
        let mut messages = matched(&mut *transport);
        let (rank, due) = (messages.rank(), soon(&*transport));
        if rank.index() == 0 {
            for len in [0, 10] {
                send(&mut *messages, 1, len, &vec![1; len]).unwrap();
            }
        }
        pass_round(&mut *transport, &[0; 8]).unwrap();
        if rank.index() == 1 {
            receive(&mut *messages, 0, 1, &due).unwrap();
            // The second message may still be in flight.
            let deadline = due.deadline();
            while messages.unread() != Some(0) {
                assert!(!messages.runtime().expired(deadline));
                messages
                    .runtime()
                    .park(Some(messages.runtime().deadline(std::time::Duration::from_millis(1))));
            }
            receive(&mut *messages, 0, 1, &due).unwrap();
        }
        assert_eq!(messages.unread(), None);
        // No rank leaves before the other has looked.
        pass_round(&mut *transport, &[0; 8]).unwrap();
        messages.traffic()
    };
    Backend(fabric).check(2, program, |traffic| {
        let sent = Traffic { messages_sent: 2, bytes_sent: 10, ..Traffic::default() };
        let received = Traffic { messages_received: 2, bytes_received: 10, ..Traffic::default() };
        assert_eq!(traffic, [sent, received]);
    });
}

/// An exchange that pauses after each step goes on in the next call: all messages arrive whole and in order, and each
/// is reported as sent once.
pub(super) fn an_exchange_that_pauses_goes_on_in_the_next_call(fabric: &'static dyn Fabric) {
    fn check(backend: Backend, world_size: usize, pause: Pause) {
        let program = move |mut transport: Box<dyn Transport>| {
            let mut transport = matched(&mut *transport);
            let (rank, due) = (transport.rank(), soon(&*transport));
            let bytes: Vec<_> =
                LENGTHS.iter().enumerate().map(|(message, &len)| payload(rank, message, len)).collect();
            let parts: Vec<_> = bytes.iter().map(|bytes| [&bytes[..]]).collect();
            let sends = (0..world_size).flat_map(|to| {
                let messages = parts.iter().enumerate();
                messages.map(move |(message, parts)| (call_of(rank, message), Outgoing { to, parts }))
            });
            let mut unsent: Vec<_> = sends.collect();
            let mut inbox = Collected { pause, ..Collected::new(&vec![LENGTHS.len(); world_size]) };
            while !unsent.is_empty() || inbox.awaited.iter().any(|&count| count > 0) {
                inbox.sources.retain(|&from| inbox.awaited[from] > 0);
                transport.exchange_matched(&unsent, &mut inbox, &due).unwrap();
                let sent = std::mem::take(&mut inbox.sent);
                let mut position = 0;
                unsent.retain(|_| (!sent.contains(&position), position += 1).0);
                transport.runtime().yield_now();
                assert!(!transport.runtime().expired(due.deadline()), "the messages arrive");
            }
            for (from, messages) in inbox.messages.iter().enumerate() {
                let from = Rank::new(from, world_size).unwrap();
                assert_eq!(messages.len(), LENGTHS.len());
                for (message, (call, bytes)) in messages.iter().enumerate() {
                    assert_eq!(*call, call_of(from, message));
                    assert!(
                        *bytes == payload(from, message, LENGTHS[message]),
                        "message {message} of {from:?}"
                    );
                }
            }
            transport.traffic()
        };
        let messages = (LENGTHS.len() * world_size) as u64;
        backend.check(world_size, program, move |traffic| {
            assert!(traffic.iter().all(|traffic| traffic.messages_sent == messages), "{traffic:?}");
            assert!(traffic.iter().all(|traffic| traffic.messages_received == messages), "{traffic:?}");
        });
    }
    for (world_size, pause) in [(1, Pause::WhenIdle), (2, Pause::WhenIdle), (3, Pause::WhenIdle)] {
        check(Backend(fabric), world_size, pause);
    }
}

/// Another thread ends the wait for a matched message, and the deadline ends it without an error. The message can be
/// received later.
pub(super) fn a_wait_for_a_matched_message_ends_when_another_thread_interrupts_it(
    fabric: &'static dyn Fabric,
) {
    let program = |mut transport: Box<dyn Transport>| {
        let mut messages = matched(&mut *transport);
        let runtime = messages.runtime().clone();
        if messages.rank().index() == 1 {
            // The message is sent after both waits.
            pass_round(&mut *transport, &[0; 8]).unwrap();
            return send(&mut *messages, 0, 3, &[7; 100]).unwrap();
        }
        let interrupt = Interrupt::default();
        let (own, sleeper) = (interrupt.clone(), runtime.clone());
        let task = runtime.spawn("interrupter", move || {
            sleeper.sleep(std::time::Duration::from_millis(200));
            own.request();
        });
        let task = task.unwrap();
        let due = soon(&*messages);
        let mut inbox = Collected { interrupt: Some(interrupt), ..Collected::new(&[0, 1]) };
        messages.exchange_matched(&[], &mut inbox, &due).unwrap();
        task.join().unwrap();
        assert_eq!(inbox.awaited, [0, 1]);
        let limit = runtime.deadline(std::time::Duration::from_millis(50));
        let mut inbox = Collected { pauses_at_deadline: true, ..Collected::new(&[0, 1]) };
        messages.exchange_matched(&[], &mut inbox, &limit.into()).unwrap();
        assert_eq!(inbox.awaited, [0, 1]);
        pass_round(&mut *transport, &[0; 8]).unwrap();
        let received = receive(&mut *messages, 1, 1, &due).unwrap();
        assert_eq!(received, [(call_of(Rank::new(1, 2).unwrap(), 3), vec![7; 100])]);
    };
    Backend(fabric).check(2, program, drop);
}

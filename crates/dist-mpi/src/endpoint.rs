//! An endpoint of one channel.

use std::fmt;
use std::sync::Arc;
use std::thread;

use dist_transport::announced::{AnnouncedMessages, MatchedFrame};
use dist_transport::native::NativeCollectives;
use dist_transport::shm_group::CALLS_MAX;
use dist_transport::{
    Abort, AbortDecision, Activity, Cause, ChannelId, Combine, Error, Fingerprint, Inbox, Incoming,
    LazyDeadline, Outgoing, Pause, Rank, Refusal, Result, Runtime, Sink, Traffic, Transport,
};

use crate::records::{LONG_WAIT, WaitReport};
use crate::wait::Wait;
use crate::wire::{HEADER, Kind, Packet, SEGMENT, SHORT};
use crate::world::{SendState, State, World, cores_here};

/// An endpoint of a channel, without shared memory. Dropping it leaves the channel, and not the job.
///
/// Messages are copied into and out of memory of the world, since a request of MPI cannot be withdrawn when a
/// deadline passes.
pub(crate) struct Endpoint {
    pub(crate) world: Arc<World>,
    /// The place of the channel in the world's state.
    place: usize,
    channel: ChannelId,
    pub(crate) rank: Rank,
    pub(crate) members: Arc<[usize]>,
    children: u64,
    calls: CallHistory,
    announced: CallHistory,
    traffic: Traffic,
    /// The matched messages of each peer. Empty before the first call for such messages.
    matched: Vec<PeerMessages>,
    /// The matched messages that were sent in part or announced when a call paused, with their receivers.
    unsent: Vec<(usize, Sending)>,
}

/// The last calls of a rank, the current one first.
#[derive(Debug)]
struct CallHistory([Fingerprint; CALLS_MAX]);

impl CallHistory {
    const NONE: Self = Self([Fingerprint::NONE; CALLS_MAX]);

    fn begin(&mut self, call: &Fingerprint) {
        self.0.rotate_right(1);
        self.0[0] = *call;
    }
}

/// A message that is being sent.
#[derive(Clone, Copy)]
struct Sending {
    sent: usize,
    len: usize,
    /// `true` if the first packet of the stage is sent.
    is_begun: bool,
    stage: SendStage,
}

/// The part of a message that is sent next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SendStage {
    /// The whole message.
    Message,
    /// Its announcement.
    Announcement,
    /// Nothing before the receiver clears the message with this number.
    Announced(u64),
    /// The bytes of the announced message with this number.
    Body(u64),
}

/// The matched messages of one peer.
#[derive(Default)]
struct PeerMessages {
    /// The message that has begun to arrive.
    receiving: Option<MatchedReceive>,
    /// The number of messages to the peer that were announced.
    announcements_sent: u64,
    /// The announced messages of the peer.
    announced: AnnouncedMessages,
    /// The announced messages of the peer that an inbox wants, without a clear yet.
    wanted: Vec<u64>,
}

/// A message that is being received.
struct Receiving {
    got: usize,
    is_begun: bool,
}

/// A message that an inbox has accepted.
struct MatchedReceive {
    got: usize,
    len: usize,
}

/// The reason why a message cannot be sent or received: it ends the job.
pub(crate) enum Failure {
    Left(Activity, usize),
    TimedOut(Activity, usize),
    Mismatch(usize, Fingerprint),
    Length(usize, u64, u64),
    Garbage(usize),
    /// There is no memory for a message.
    NoMemory,
    Aborted,
}

/// The offset of the length in a header, which consists of fingerprint, length and channel.
const LENGTH: usize = Fingerprint::SIZE;
/// Packets that are taken before the first is delivered.
const TAKEN_MAX: usize = 8;

impl Endpoint {
    /// Creates the transport among all ranks.
    pub(crate) fn of_world(world: Arc<World>) -> Self {
        let members: Arc<[usize]> = (0..world.size()).collect();
        let rank = Rank::new(world.rank, world.size()).expect("MPI numbers its ranks from 0");
        Self::enter(world, ChannelId::WORLD, rank, members)
    }

    fn enter(world: Arc<World>, channel: ChannelId, rank: Rank, members: Arc<[usize]>) -> Self {
        let place = world.enter(channel, &members);
        Self {
            world,
            place,
            channel,
            rank,
            members,
            children: 0,
            calls: CallHistory::NONE,
            announced: CallHistory::NONE,
            traffic: Traffic::default(),
            matched: Vec::new(),
            unsent: Vec::new(),
        }
    }

    fn call(&self) -> &Fingerprint {
        &self.calls.0[0]
    }

    fn begin_operation(&self) -> Result<()> {
        self.world.aborted().map_or(Ok(()), |_| Err(Error::Aborted(self.world.await_decision())))
    }

    /// Sends the next part of a message, if there is room for it.
    fn send_part(
        &self,
        state: &mut State,
        (call, to): (&Fingerprint, usize),
        sending: &mut Sending,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> SendState {
        let len = sending.len as u64;
        let (frame, rest) = match sending.stage {
            SendStage::Message => (MatchedFrame::Message(len), sending.len - sending.sent),
            SendStage::Announcement => (MatchedFrame::Announcement(len), 0),
            SendStage::Announced(_) => return SendState::Full,
            SendStage::Body(number) => (MatchedFrame::Body(number), sending.len - sending.sent),
        };
        let part = rest.min(SEGMENT);
        let mut header = [0; HEADER];
        let kind = if sending.is_begun { Kind::Next } else { Kind::First };
        header[..LENGTH].copy_from_slice(&call.0);
        header[LENGTH..LENGTH + 8].copy_from_slice(&frame.encode().to_le_bytes());
        header[LENGTH + 8..].copy_from_slice(&self.channel.get().to_le_bytes());
        let end = (self.place, self.members[to]);
        let from = sending.sent;
        let sent = state.send_part(&self.world, end, (kind, &header), part, &mut |memory| fill(from, memory));
        if sent == SendState::Sent {
            sending.sent += part;
            sending.is_begun = true;
        }
        sent
    }

    /// Takes the next part of a message. The first part must be of this call and have the expected length.
    fn take_part(
        &self,
        state: &mut State,
        from: usize,
        len: usize,
        receiving: &mut Receiving,
    ) -> Result<Option<Packet>, Failure> {
        let peer = self.members[from];
        let Some(packet) = state.take(self.place, peer) else {
            let has_left = state.has_left(self.place, peer);
            return if has_left { Err(Failure::Left(Activity::Receive, from)) } else { Ok(None) };
        };
        let is_first = packet.kind == Kind::First;
        if is_first == receiving.is_begun {
            return Err(Failure::Garbage(from));
        }
        if is_first {
            let mut theirs = Fingerprint::NONE;
            theirs.0.copy_from_slice(&bytemuck::cast_slice(&packet.buffer[..1])[..LENGTH]);
            if theirs != *self.call() {
                return Err(Failure::Mismatch(from, theirs));
            }
            let got = packet.header_number(LENGTH);
            if got != len as u64 {
                return Err(Failure::Length(from, len as u64, got));
            }
        }
        receiving.is_begun = true;
        receiving.got += packet.payload().len();
        if receiving.got > len || (receiving.got < len && packet.payload().len() != SEGMENT) {
            return Err(Failure::Garbage(from));
        }
        Ok(Some(packet))
    }

    /// Moves all of these messages.
    fn move_messages(
        &self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let sends: Vec<_> = sends.iter().map(|&send| (*self.call(), send)).collect();
        let mut sending: Vec<_> = sends.iter().map(|(_, send)| Sending::new(send.len())).collect();
        let mut receiving: Vec<_> = receives.iter().map(|_| Receiving::NEW).collect();
        let mut to_send: Vec<usize> = (0..sends.len()).collect();
        let mut to_receive: Vec<usize> = (0..receives.len()).collect();
        let mut taken: Vec<(usize, usize, Packet)> = Vec::new();
        let mut busy = BusyPeers::new(self.rank.world_size(), sends.len().max(receives.len()));
        let mut wait = Wait::NEW;
        let result = loop {
            let mut state = self.world.lock();
            let mut has_moved = !taken.is_empty();
            for (index, _, packet) in taken.drain(..) {
                state.give_back(&self.world, (self.place, self.members[receives[index].from]), packet);
            }
            let parts = (&mut sending[..], &mut to_send);
            if let Err(failure) =
                self.send_parts(&mut state, (&sends, &mut []), parts, &mut busy, &mut has_moved)
            {
                break Err(failure);
            }
            if to_send.is_empty() && to_receive.is_empty() {
                self.leave_sends(&mut state, sends.iter().map(|(_, send)| send.len()).sum());
                break Ok(());
            }
            self.world.progress(&mut state);
            if self.world.aborted().is_some() {
                break Err(Failure::Aborted);
            }
            let parts =
                self.take_parts(&mut state, receives, &mut receiving, &mut to_receive, &mut busy, &mut taken);
            drop(state);
            if let Err(failure) = parts {
                break Err(failure);
            }
            for (index, offset, packet) in &taken {
                self.deliver(&mut receives[*index], *offset, packet.payload());
            }
            if has_moved || !taken.is_empty() {
                wait.renew();
                continue;
            }
            let (activity, peer) = match (to_receive.first(), to_send.first()) {
                (Some(&index), _) => (Activity::Receive, receives[index].from),
                (_, Some(&index)) => (Activity::Send, sends[index].1.to),
                _ => continue,
            };
            if let Err(failure) = self.pause(&mut wait, due, activity, peer) {
                break Err(failure);
            }
        };
        self.end_wait(&wait);
        result.map_err(|failure| self.fail(failure, due))
    }

    /// Moves messages that their receivers match.
    fn move_matched(
        &mut self,
        sends: &[(Fingerprint, Outgoing<'_>)],
        inbox: &mut dyn Inbox,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let mut sending = self.begin_sends(sends);
        let mut to_send = sending_order(&sending);
        let mut reported = vec![false; sends.len()];
        let mut peers = std::mem::take(&mut self.matched);
        peers.resize_with(self.rank.world_size(), PeerMessages::default);
        let mut sources = inbox.sources().to_vec();
        let announced = sends.iter().zip(&sending).filter(|(_, sending)| sending.stage != SendStage::Message);
        for ((_, send), _) in announced {
            if !sources.contains(&send.to) {
                sources.push(send.to);
            }
        }
        while let Some((from, number)) = inbox.next_wanted() {
            peers[from].wanted.push(number);
        }
        let mut busy = BusyPeers::new(self.rank.world_size(), sends.len());
        let (mut wait, mut traffic) = (Wait::NEW, Traffic::default());
        let result = loop {
            let mut state = self.world.lock();
            let mut has_moved = self.begin_bodies(&mut state, sends, &mut sending, &mut to_send);
            let parts = (&mut sending[..], &mut to_send);
            let sent = self.send_parts(&mut state, (sends, &mut peers), parts, &mut busy, &mut has_moved);
            if has_moved {
                for position in (0..sends.len()).filter(|&position| sending[position].is_done()) {
                    if !std::mem::replace(&mut reported[position], true) {
                        traffic.messages_sent += 1;
                        traffic.bytes_sent += sends[position].1.len() as u64;
                        inbox.sent(position);
                    }
                }
            }
            self.world.progress(&mut state);
            let taken = sent.and_then(|()| {
                sources.iter().try_for_each(|&from| {
                    let awaits_clear = to_send
                        .iter()
                        .any(|&index| sends[index].1.to == from && sending[index].is_announced());
                    let source = (from, awaits_clear);
                    self.take_matched((&mut *state, &mut traffic), source, &mut peers[from], inbox)
                        .map(|moved| has_moved |= moved)
                })
            });
            if let Err(failure) = taken {
                break Err(failure);
            }
            let first = sources.iter().find(|&&from| inbox.awaits(from));
            let first = first.map(|&from| (Activity::Receive, from));
            let first = first.or_else(|| {
                let index = *to_send.first()?;
                let is_announced = sending[index].is_announced();
                Some((if is_announced { Activity::Match } else { Activity::Send }, sends[index].1.to))
            });
            let pauses = match inbox.pause() {
                Pause::Never => false,
                Pause::WhenIdle => !has_moved,
                Pause::Now => true,
            };
            let Some((activity, peer)) = first.filter(|_| !pauses) else {
                self.leave_sends(&mut state, sends.iter().map(|(_, send)| send.len()).sum());
                break Ok(());
            };
            if self.world.aborted().is_some() {
                break Err(Failure::Aborted);
            }
            drop(state);
            if has_moved {
                wait.renew();
            } else if let Err(failure) = self.pause(&mut wait, due, activity, peer) {
                let pauses = matches!(failure, Failure::TimedOut(..)) && inbox.pauses_at_deadline();
                break if pauses { Ok(()) } else { Err(failure) };
            }
        };
        self.matched = peers;
        to_send.sort_unstable();
        let begun = to_send.into_iter().filter(|&index| sending[index].is_kept()).collect::<Vec<_>>();
        self.unsent.extend(begun.into_iter().map(|index| (sends[index].1.to, sending[index])));
        self.end_wait(&wait);
        self.traffic = self.traffic + traffic;
        result.map_err(|failure| self.fail(failure, due))
    }

    /// Returns the states of messages that are sent. The first ones to a peer may have been sent in part.
    fn begin_sends(&mut self, sends: &[(Fingerprint, Outgoing<'_>)]) -> Vec<Sending> {
        let me = self.rank.index();
        let begin = |(_, send): &(Fingerprint, Outgoing<'_>)| {
            let unsent = self.unsent.iter().position(|(to, _)| *to == send.to);
            let new = || Sending::matched(send.len(), send.to != me);
            unsent.map_or_else(new, |index| self.unsent.remove(index).1)
        };
        sends.iter().map(begin).collect()
    }

    /// Begins to send the announced messages that their receivers have cleared, before all messages to the same ranks that
    /// were not begun. Returns `true` if there are any.
    fn begin_bodies(
        &self,
        state: &mut State,
        sends: &[(Fingerprint, Outgoing<'_>)],
        sending: &mut [Sending],
        to_send: &mut Vec<usize>,
    ) -> bool {
        let mut has_begun = false;
        for index in to_send.clone() {
            let (to, SendStage::Announced(number)) = (sends[index].1.to, sending[index].stage) else {
                continue;
            };
            if !state.take_clear((self.place, self.members[to]), number) {
                continue;
            }
            sending[index] = Sending { stage: SendStage::Body(number), is_begun: false, ..sending[index] };
            to_send.retain(|&other| other != index);
            let is_later = |&other: &usize| sends[other].1.to == to && sending[other].is_new();
            let place = to_send.iter().position(is_later).unwrap_or(to_send.len());
            to_send.insert(place, index);
            has_begun = true;
        }
        has_begun
    }

    /// Takes the parts of the next messages of a peer that an inbox awaits, or that may come before a clear. Returns `true`
    /// if there were any.
    fn take_matched(
        &self,
        (state, traffic): (&mut State, &mut Traffic),
        (from, awaits_clear): (usize, bool),
        matched: &mut PeerMessages,
        inbox: &mut dyn Inbox,
    ) -> Result<bool, Failure> {
        let (peer, mut moved) = (self.members[from], self.send_clears(state, from, matched));
        while inbox.awaits(from) || awaits_clear && (matched.receiving.is_some() || inbox.keeps(from)) {
            let Some(packet) = state.take(self.place, peer) else {
                let has_left = state.has_left(self.place, peer);
                return if !has_left {
                    Ok(moved)
                } else if matched.receiving.is_some() || inbox.awaits(from) && !inbox.peer_left(from) {
                    Err(Failure::Left(Activity::Receive, from))
                } else if awaits_clear {
                    Err(Failure::Left(Activity::Send, from))
                } else {
                    Ok(true)
                };
            };
            moved = true;
            if (packet.kind == Kind::First) == matched.receiving.is_some() {
                return Err(Failure::Garbage(from));
            }
            let message = match matched.receiving.take() {
                Some(message) => Some(message),
                None => Self::accept(from, &packet, matched, inbox)?,
            };
            let Some(mut message) = message else {
                state.give_back(&self.world, (self.place, peer), packet);
                self.send_clears(state, from, matched);
                continue;
            };
            let part = packet.payload();
            let is_whole = message.got + part.len() == message.len;
            if message.got + part.len() > message.len || (!is_whole && part.len() != SEGMENT) {
                return Err(Failure::Garbage(from));
            }
            inbox.memory(from)[message.got..][..part.len()].copy_from_slice(part);
            message.got += part.len();
            state.give_back(&self.world, (self.place, peer), packet);
            if is_whole {
                inbox.complete(from);
                traffic.messages_received += 1;
                traffic.bytes_received += message.len as u64;
            } else {
                matched.receiving = Some(message);
            }
        }
        Ok(moved)
    }

    /// Clears the announced messages of a peer that the inbox wants. Returns `true` if there are any.
    fn send_clears(&self, state: &mut State, from: usize, matched: &mut PeerMessages) -> bool {
        let wanted = std::mem::take(&mut matched.wanted);
        for &number in wanted.iter().filter(|&&number| matched.announced.clear(number)) {
            state.send_clear(&self.world, (self.place, self.members[from]), number);
        }
        !wanted.is_empty()
    }

    /// Lets an inbox accept the message that begins with this packet. Returns `None` if the message is only announced.
    fn accept(
        from: usize,
        packet: &Packet,
        matched: &mut PeerMessages,
        inbox: &mut dyn Inbox,
    ) -> Result<Option<MatchedReceive>, Failure> {
        let mut theirs = Fingerprint::NONE;
        theirs.0.copy_from_slice(&bytemuck::cast_slice(&packet.buffer[..1])[..LENGTH]);
        let length_of = |len: u64| usize::try_from(len).map_err(|_| Failure::NoMemory);
        let refused = |got: u64, refusal| match refusal {
            Refusal::Mismatch => Failure::Mismatch(from, theirs),
            Refusal::Length(expected) => Failure::Length(from, expected as u64, got),
            Refusal::NoMemory => Failure::NoMemory,
        };
        match MatchedFrame::decode(packet.header_number(LENGTH)) {
            MatchedFrame::Message(got) => {
                let len = length_of(got)?;
                inbox.accept(from, &theirs, len).map_err(|refusal| refused(got, refusal))?;
                Ok(Some(MatchedReceive { got: 0, len }))
            }
            MatchedFrame::Announcement(got) => {
                let len = length_of(got)?;
                let number = matched.announced.add(len);
                let wants = inbox.announce(from, &theirs, len, number);
                if wants.map_err(|refusal| refused(got, refusal))? {
                    matched.wanted.push(number);
                }
                Ok(None)
            }
            MatchedFrame::Body(number) => {
                let len = matched.announced.take(number).ok_or(Failure::Garbage(from))?;
                inbox.begin_announced(from, number);
                Ok(Some(MatchedReceive { got: 0, len }))
            }
            MatchedFrame::Clear(_) => Err(Failure::Garbage(from)),
        }
    }

    /// Sends parts of the first unfinished message to each peer, as long as there is room.
    fn send_parts(
        &self,
        state: &mut State,
        (sends, peers): (&[(Fingerprint, Outgoing<'_>)], &mut [PeerMessages]),
        (sending, unfinished): (&mut [Sending], &mut Vec<usize>),
        busy: &mut BusyPeers,
        has_moved: &mut bool,
    ) -> Result<(), Failure> {
        busy.clear();
        let mut left = None;
        unfinished.retain(|&index| {
            let ((call, send), message) = (&sends[index], &mut sending[index]);
            if busy.contains(send.to) || message.is_announced() {
                return true;
            }
            while left.is_none() && !message.is_done() && !message.is_announced() {
                let fill = &mut |from, memory: &mut [u8]| copy_parts(send.parts, from, memory);
                match self.send_part(state, (call, send.to), message, fill) {
                    SendState::Sent => {
                        *has_moved = true;
                        if message.stage == SendStage::Announcement {
                            let count = &mut peers[send.to].announcements_sent;
                            message.stage = SendStage::Announced(*count);
                            *count += 1;
                        }
                    }
                    SendState::Full => break,
                    SendState::Left => left = Some(send.to),
                }
            }
            if !message.is_done() && !message.is_announced() {
                busy.add(send.to);
            }
            !message.is_done()
        });
        left.map_or(Ok(()), |to| Err(Failure::Left(Activity::Send, to)))
    }

    /// Takes parts of the first unfinished message of each peer.
    fn take_parts(
        &self,
        state: &mut State,
        receives: &[Incoming<'_>],
        receiving: &mut [Receiving],
        unfinished: &mut Vec<usize>,
        busy: &mut BusyPeers,
        taken: &mut Vec<(usize, usize, Packet)>,
    ) -> Result<(), Failure> {
        busy.clear();
        let mut failure = None;
        unfinished.retain(|&index| {
            let (receive, message) = (&receives[index], &mut receiving[index]);
            if busy.contains(receive.from) {
                return true;
            }
            while taken.len() < TAKEN_MAX && failure.is_none() {
                let offset = message.got;
                match self.take_part(state, receive.from, receive.len, message) {
                    Ok(Some(packet)) => taken.push((index, offset, packet)),
                    Ok(None) => break,
                    Err(error) => failure = Some(error),
                }
                if message.is_begun && message.got == receive.len {
                    return false;
                }
            }
            busy.add(receive.from);
            true
        });
        failure.map_or(Ok(()), Err)
    }

    /// Gives bytes to their destination. A panic of a function that receives them ends the job.
    fn deliver(&self, incoming: &mut Incoming<'_>, offset: usize, bytes: &[u8]) {
        match &mut incoming.sink {
            Sink::Into(memory) => memory[offset..][..bytes.len()].copy_from_slice(bytes),
            Sink::Each(_) if bytes.is_empty() => {}
            Sink::Each(take) => {
                let abort_on_unwind = AbortOnUnwind(self);
                take(offset, bytes);
                std::mem::forget(abort_on_unwind);
            }
        }
    }

    /// Lets the service thread work for packets of a long message that are still on their way. A short one needs
    /// no work of its sender.
    fn leave_sends(&self, state: &mut State, bytes: usize) {
        if bytes <= SHORT {
            return;
        }
        self.world.progress(state);
        if state.is_in_flight() {
            self.world.wake_service();
        }
    }

    /// Waits a little, unless the deadline has passed.
    pub(crate) fn pause(
        &self,
        wait: &mut Wait,
        due: &LazyDeadline<'_>,
        activity: Activity,
        peer: usize,
    ) -> Result<(), Failure> {
        if self.pause_until(wait, due, peer) { Ok(()) } else { Err(Failure::TimedOut(activity, peer)) }
    }

    /// Waits a little. Returns `false` if the deadline has passed.
    fn pause_until(&self, wait: &mut Wait, due: &LazyDeadline<'_>, peer: usize) -> bool {
        let world = &self.world;
        let Some(waited) = wait.pause(&world.runtime, world.is_oversubscribed, due) else { return false };
        if waited > LONG_WAIT && !wait.is_reported {
            wait.is_reported = true;
            let calls = self.calls.0.iter().chain(&self.announced.0).copied().collect();
            let report = WaitReport { waits_for: self.members[peer], calls };
            world.report_wait(self.channel, Some(&report));
        }
        true
    }

    pub(crate) fn end_wait(&self, wait: &Wait) {
        if wait.is_reported {
            self.world.report_wait(self.channel, None);
        }
    }

    /// Ends the job because of a failure. Returns the error of this rank if its report stands, and otherwise the
    /// abort that does.
    pub(crate) fn fail(&self, failure: Failure, due: &LazyDeadline<'_>) -> Error {
        let (peer, cause) = match failure {
            Failure::Left(_, peer) => (peer, Cause::Left),
            Failure::TimedOut(_, peer) => (peer, Cause::timed_out()),
            Failure::Mismatch(peer, theirs) => (peer, Cause::Mismatch { theirs }),
            Failure::Length(peer, expected, got) => (peer, Cause::Length { expected, got }),
            Failure::Garbage(peer) => (peer, Cause::Protocol),
            Failure::NoMemory => {
                let source = std::io::ErrorKind::OutOfMemory.into();
                let error = Error::System { activity: Activity::Receive, source };
                self.propose(self.world.rank, Cause::gave_up(&error));
                return error;
            }
            Failure::Aborted => return Error::Aborted(self.world.await_decision()),
        };
        let proposed = self.propose(self.members[peer], cause);
        let decided = self.world.await_decision();
        let Abort { cause, reporter, call, .. } = &decided;
        if (cause, reporter, call) != (&proposed.cause, &proposed.reporter, &proposed.call) {
            return Error::Aborted(decided);
        }
        let peer = decided.rank;
        match failure {
            Failure::Left(activity, _) => Error::Closed { activity, peer },
            Failure::TimedOut(activity, _) => {
                let (runtime, deadline) = (&self.world.runtime, due.deadline());
                let (elapsed, limit) = (runtime.elapsed(deadline), deadline.limit());
                Error::Timeout { activity, peer, elapsed, limit, waits: Vec::new(), count: 0 }
            }
            Failure::Mismatch(_, theirs) => Error::Mismatch { peer, ours: *self.call(), theirs },
            Failure::Length(_, expected, got) => Error::Length { peer, expected, got },
            Failure::Garbage(_) | Failure::NoMemory | Failure::Aborted => Error::Garbage { peer },
        }
    }

    fn propose(&self, rank: usize, cause: Cause) -> Abort {
        let record = Abort { cause, rank, reporter: self.world.rank, call: *self.call() };
        self.world.propose(&mut self.world.lock(), record.clone());
        record
    }

    /// Exchanges equally many bytes with a peer. A range is combined after it has been sent.
    fn move_in_place(
        &self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let (mut sending, mut receiving) = (Sending::new(buffer.len()), Receiving::NEW);
        let mut taken: Option<(usize, Packet)> = None;
        let mut wait = Wait::NEW;
        let result = loop {
            let mut state = self.world.lock();
            let mut sent = SendState::Full;
            if !sending.is_done() {
                let fill = &mut |from: usize, memory: &mut [u8]| {
                    memory.copy_from_slice(&buffer[from..][..memory.len()])
                };
                sent = self.send_part(&mut state, (self.call(), peer), &mut sending, fill);
            }
            if sent == SendState::Left {
                break Err(Failure::Left(Activity::Send, peer));
            }
            self.world.progress(&mut state);
            if self.world.aborted().is_some() {
                break Err(Failure::Aborted);
            }
            let has_all = receiving.is_begun && receiving.got == buffer.len();
            if taken.is_none() && !has_all {
                let offset = receiving.got;
                match self.take_part(&mut state, peer, buffer.len(), &mut receiving) {
                    Ok(packet) => taken = packet.map(|packet| (offset, packet)),
                    Err(failure) => break Err(failure),
                }
            }
            if sending.is_done() && has_all && taken.is_none() {
                self.leave_sends(&mut state, buffer.len());
                break Ok(());
            }
            drop(state);
            let is_sent =
                |(offset, packet): &mut (usize, Packet)| *offset + packet.payload().len() <= sending.sent;
            if let Some((offset, packet)) = taken.take_if(is_sent) {
                let (theirs, abort_on_unwind) = (packet.payload(), AbortOnUnwind(self));
                if !theirs.is_empty() {
                    combine(&mut buffer[offset..][..theirs.len()], theirs);
                }
                std::mem::forget(abort_on_unwind);
                self.world.lock().give_back(&self.world, (self.place, self.members[peer]), packet);
            } else if sent != SendState::Sent {
                let activity = if taken.is_some() || has_all { Activity::Send } else { Activity::Receive };
                if let Err(failure) = self.pause(&mut wait, due, activity, peer) {
                    break Err(failure);
                }
                continue;
            }
            wait.renew();
        };
        self.end_wait(&wait);
        result.map_err(|failure| self.fail(failure, due))
    }

    fn count(&mut self, sent: Option<usize>, received: Option<usize>) {
        let traffic = &mut self.traffic;
        traffic.messages_sent += u64::from(sent.is_some());
        traffic.bytes_sent += sent.unwrap_or(0) as u64;
        traffic.messages_received += u64::from(received.is_some());
        traffic.bytes_received += received.unwrap_or(0) as u64;
    }

    fn check_peer(&self, peer: usize) -> Result<()> {
        let world_size = self.rank.world_size();
        if peer < world_size { Ok(()) } else { Err(Error::RankOutOfRange { rank: peer, world_size }) }
    }

    fn check_receive(&self, receive: &Incoming<'_>) -> Result<()> {
        self.check_peer(receive.from)?;
        match &receive.sink {
            Sink::Into(memory) if memory.len() != receive.len => {
                let (expected, got) = (memory.len() as u64, receive.len as u64);
                Err(Error::Length { peer: self.members[receive.from], expected, got })
            }
            _ => Ok(()),
        }
    }

    fn check_members(&self, members: &[usize]) -> Result<()> {
        members.iter().try_for_each(|&member| self.check_peer(member))?;
        let mut sorted = members.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.is_empty() || sorted.len() < members.len() {
            return Err(Error::Members { members: members.to_vec() });
        }
        Ok(())
    }
}

impl Transport for Endpoint {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn channel(&self) -> ChannelId {
        self.channel
    }

    fn runtime(&self) -> &Runtime {
        &self.world.runtime
    }

    fn begin(&mut self, call: &Fingerprint) {
        self.calls.begin(call);
    }

    fn announce(&mut self, call: &Fingerprint) {
        self.announced.begin(call);
    }

    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let (mut receive, send) = (receive, send);
        self.exchange_all(send.as_slice(), receive.as_mut_slice(), due)
    }

    fn exchange_in_place(
        &mut self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.check_peer(peer)?;
        self.begin_operation()?;
        self.move_in_place(peer, buffer, combine, due)?;
        self.count(Some(buffer.len()), Some(buffer.len()));
        Ok(())
    }

    fn exchange_all(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        sends.iter().try_for_each(|send| self.check_peer(send.to))?;
        receives.iter().try_for_each(|receive| self.check_receive(receive))?;
        self.begin_operation()?;
        self.move_messages(sends, receives, due)?;
        sends.iter().for_each(|send| self.count(Some(send.len()), None));
        receives.iter().for_each(|receive| self.count(None, Some(receive.len)));
        Ok(())
    }

    fn exchange_matched(
        &mut self,
        sends: &[(Fingerprint, Outgoing<'_>)],
        inbox: &mut dyn Inbox,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        sends.iter().try_for_each(|(_, send)| self.check_peer(send.to))?;
        inbox.sources().iter().try_for_each(|&from| self.check_peer(from))?;
        self.begin_operation()?;
        self.move_matched(sends, inbox, due)
    }

    fn wait_any_peer(&mut self, peers: &[usize], due: &LazyDeadline<'_>) -> Result<Vec<usize>> {
        peers.iter().try_for_each(|&peer| self.check_peer(peer))?;
        self.begin_operation()?;
        let mut wait = Wait::NEW;
        let result = loop {
            let mut state = self.world.lock();
            self.world.progress(&mut state);
            if self.world.aborted().is_some() {
                break Err(Failure::Aborted);
            }
            let is_silent = |peer: &usize| !state.has_message(self.place, self.members[*peer]);
            let silent: Vec<usize> = peers.iter().copied().filter(is_silent).collect();
            let left = silent.iter().copied().find(|&peer| state.has_left(self.place, self.members[peer]));
            drop(state);
            if let Some(peer) = left {
                break Err(Failure::Left(Activity::Receive, peer));
            }
            if silent.len() < peers.len() || silent.is_empty() || !self.pause_until(&mut wait, due, peers[0])
            {
                break Ok(silent);
            }
        };
        self.end_wait(&wait);
        result.map_err(|failure| self.fail(failure, due))
    }

    fn unread(&mut self) -> Option<usize> {
        let mut state = self.world.lock();
        self.world.progress(&mut state);
        state.first_with_message(self.place, &self.members)
    }

    fn hosts(&self) -> Vec<u64> {
        self.members.iter().map(|&member| self.world.placement[member].host).collect()
    }

    fn cores(&self) -> usize {
        cores_here(&self.world.placement, self.world.rank, |rank| self.members.contains(&rank)).0
    }

    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>> {
        self.check_members(members)?;
        let channel = self.channel.child(self.children, members);
        self.children += 1;
        let index = members.iter().position(|&member| member == self.rank.index());
        let Some(rank) = index.and_then(|index| Rank::new(index, members.len())) else { return Ok(None) };
        let members = members.iter().map(|&member| self.members[member]).collect();
        Ok(Some(Box::new(Self::enter(self.world.clone(), channel, rank, members))))
    }

    fn fork_local(&mut self, members: &[usize], number: u64) -> Result<Box<dyn Transport>> {
        self.check_members(members)?;
        let channel = self.channel.local_child(number, members);
        let index = members.iter().position(|&member| member == self.rank.index());
        let Some(rank) = index.and_then(|index| Rank::new(index, members.len())) else {
            return Err(Error::NotAMember { rank: self.rank.index(), members: members.to_vec() });
        };
        let members = members.iter().map(|&member| self.members[member]).collect();
        Ok(Box::new(Self::enter(self.world.clone(), channel, rank, members)))
    }

    fn abort(&mut self, cause: Cause) {
        self.propose(self.world.rank, cause);
    }

    fn aborted(&self) -> Option<Abort> {
        self.world.aborted().cloned()
    }

    fn abort_decision(&self) -> Option<Arc<dyn AbortDecision>> {
        Some(self.world.clone())
    }

    fn traffic(&self) -> Traffic {
        self.traffic
    }

    fn native(&mut self) -> Option<&mut dyn NativeCollectives> {
        self.world.native_from.is_some().then_some(self)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if thread::panicking() {
            self.propose(self.world.rank, Cause::Panicked);
        }
        if self.world.aborted().is_some() {
            // Otherwise a rank that learns first that this one has left could report that as the cause.
            self.world.await_decision();
        }
        self.world.leave(self.place);
    }
}

/// Aborts the job if it is dropped, which only a panic does, of a function that was receiving bytes of a message.
struct AbortOnUnwind<'a>(&'a Endpoint);

impl Drop for AbortOnUnwind<'_> {
    fn drop(&mut self) {
        self.0.propose(self.0.world.rank, Cause::Panicked);
    }
}

impl Sending {
    const fn new(len: usize) -> Self {
        Self { sent: 0, len, is_begun: false, stage: SendStage::Message }
    }

    /// Begins to send a matched message, which may have to be announced.
    const fn matched(len: usize, may_announce: bool) -> Self {
        let announces = may_announce && MatchedFrame::announces(len);
        let stage = if announces { SendStage::Announcement } else { SendStage::Message };
        Self { stage, ..Self::new(len) }
    }

    const fn is_done(&self) -> bool {
        matches!(self.stage, SendStage::Message | SendStage::Body(_))
            && self.is_begun
            && self.sent == self.len
    }

    /// Returns `true` if the message waits for its clear.
    const fn is_announced(&self) -> bool {
        matches!(self.stage, SendStage::Announced(_))
    }

    /// Returns `true` if nothing of the message was sent.
    const fn is_new(&self) -> bool {
        matches!(self.stage, SendStage::Message | SendStage::Announcement) && !self.is_begun
    }

    /// Returns `true` if a later call has to go on with the message.
    const fn is_kept(&self) -> bool {
        !self.is_new() && !self.is_done()
    }
}

impl Receiving {
    const NEW: Self = Self { got: 0, is_begun: false };
}

/// The peers whose later messages must wait for an earlier one in the same list.
struct BusyPeers {
    /// Empty if there is only one message.
    turns: Vec<u32>,
    turn: u32,
}

impl BusyPeers {
    fn new(world_size: usize, messages: usize) -> Self {
        Self { turns: if messages > 1 { vec![0; world_size] } else { Vec::new() }, turn: 0 }
    }

    fn clear(&mut self) {
        self.turn = self.turn.wrapping_add(1);
    }

    fn add(&mut self, peer: usize) {
        if let Some(turn) = self.turns.get_mut(peer) {
            *turn = self.turn;
        }
    }

    fn contains(&self, peer: usize) -> bool {
        self.turns.get(peer) == Some(&self.turn)
    }
}

/// Returns the sending order of the messages: first messages that were sent in part, then cleared ones.
fn sending_order(sending: &[Sending]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sending.len()).collect();
    order.sort_by_key(|&index| match sending[index] {
        Sending { is_begun: true, stage: SendStage::Message | SendStage::Body(_), .. } => 0,
        Sending { stage: SendStage::Body(_), .. } => 1,
        _ => 2,
    });
    order
}

/// Copies a range of a message that consists of parts.
fn copy_parts(parts: &[&[u8]], from: usize, mut memory: &mut [u8]) {
    let mut skip = from;
    for part in parts {
        let rest = &part[skip.min(part.len())..];
        skip = skip.saturating_sub(part.len());
        let (here, behind) = memory.split_at_mut(rest.len().min(memory.len()));
        here.copy_from_slice(&rest[..here.len()]);
        memory = behind;
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("rank", &self.rank).field("channel", &self.channel).finish()
    }
}

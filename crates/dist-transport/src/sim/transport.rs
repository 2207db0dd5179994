//! One rank's endpoint of the in-process network.

use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::clock::{self, Skew};
use super::fabric::{CallMismatch, ChannelEnd, Found, Room, Sent, SimFabric, SimForkedGroup};
use super::message::{SimMessage, Spoilt};
use super::report::Position;
use super::sim_shm_group::SimShmGroup;
use super::store::SimStore;
use super::waiting::WaitTarget;
use super::world::World;
use crate::announced::{AnnouncedMessages, MatchedFrame};
use crate::bookkeeping::{self, CallHistory};
use crate::check::{check_all, check_exchange, check_matched, check_peer};
use crate::runtime::Unparker;
use crate::shm_group::ShmGroup;
use crate::{
    Abort, AbortDecision, Activity, Allocation, Cause, ChannelId, CircularWait, Combine, Deadline, Error,
    Fingerprint, Inbox, Incoming, Interrupt, LazyDeadline, Outgoing, Pause, Progress, Rank, Refusal, Result,
    Runtime, Sink, StartedCount, Store, StoreError, Traffic, Transport,
};

/// A transport between threads of one process. The [`Network`](super::Network) decides how long sends and
/// receives wait. They wait on the runtime that it was given.
///
/// Dropping the transport says goodbye in order. The messages that it has sent are still delivered. A peer
/// that waits for more gets [`Error::Closed`], and the job is aborted with [`Cause::Left`]. Dropping it
/// during a panic aborts the job with [`Cause::Panicked`].
pub struct SimTransport {
    world: Arc<World>,
    runtime: Runtime,
    skew: Skew,
    rank: Rank,
    channel: ChannelId,
    /// The channel whose calls are made here. For signals it is another channel.
    call_channel: ChannelId,
    /// The group's ranks by their numbers in the world.
    members: Arc<[usize]>,
    children: u64,
    calls: CallHistory,
    traffic: Traffic,
    /// The matched messages that were not sent when a call paused.
    queued: Vec<SimUnsentMessage>,
    /// The announced messages of each pair of ranks. Empty before the first call for matched messages.
    matched: Vec<SimMatchedPeer>,
    shm_group: Option<Box<SimShmGroup>>,
}

/// A matched message that is not sent.
#[derive(Debug, Clone, Copy)]
struct SimUnsentMessage {
    /// The position in the list of sends.
    position: usize,
    to: usize,
    /// The number of its announcement if it waits for its clear. Otherwise it is in the network, and waits for room.
    announced: Option<u64>,
}

/// The announced messages from and to one peer.
#[derive(Debug, Default)]
struct SimMatchedPeer {
    announcements_sent: u64,
    /// The announced messages of the peer.
    announced: AnnouncedMessages,
    /// The announced messages of the peer that an inbox wants, without a clear yet.
    wanted: Vec<u64>,
    /// The messages to the peer that it has cleared.
    cleared: Vec<u64>,
}

/// The result of a wait for matched messages.
enum MatchedStep {
    /// A message of this rank has arrived.
    Arrived(usize),
    /// Other messages are awaited now, or a message was sent.
    Again,
    Paused,
}

/// The result of a look for room.
enum RoomStep {
    Enough,
    Full {
        /// The time of the next look.
        look_again: Option<Duration>,
    },
}

/// The time that a call takes which looks for messages and does not wait.
const POLL: Duration = Duration::from_micros(1);

/// The time between two looks of a rank that nothing wakes.
const WITHOUT_WAKER: Duration = Duration::from_millis(10);

impl SimTransport {
    pub(super) fn enter(
        world: Arc<World>,
        (runtime, skew): (Runtime, Skew),
        rank: Rank,
        [channel, call_channel]: [ChannelId; 2],
        members: Arc<[usize]>,
    ) -> Self {
        let transport = Self {
            world,
            runtime,
            skew,
            rank,
            channel,
            call_channel,
            members,
            children: 0,
            calls: CallHistory::NONE,
            traffic: Traffic::default(),
            queued: Vec::new(),
            matched: Vec::new(),
            shm_group: None,
        };
        transport.fabric().enter(transport.own_end(), &transport.members);
        transport
    }

    /// Creates a channel with the same ranks, for the signals of this channel's calls. It does not count as a
    /// fork.
    pub(super) fn signal_channel(&self, number: u64) -> Self {
        let channel = self.channel.child(number, &self.members);
        let clock = (self.runtime.clone(), self.skew);
        Self::enter(self.world.clone(), clock, self.rank, [channel, self.channel], self.members.clone())
    }

    /// Begins an operation in shared memory, in the current call.
    pub(super) fn begin_direct(&self) -> Result<Fingerprint> {
        self.begin_operation().map(|()| self.call())
    }

    /// Receives an empty message that was sent in this call.
    pub(super) fn receive_of(&mut self, call: Fingerprint, peer: usize, deadline: Deadline) -> Result<()> {
        let present = std::mem::replace(self.calls.current_mut(), call);
        let received = self.receive(peer, 0, deadline);
        *self.calls.current_mut() = present;
        received.map(drop)
    }

    fn fabric(&self) -> &SimFabric {
        &self.world.fabric
    }

    /// Returns the number of channels that the network has.
    #[cfg(test)]
    pub(super) fn channels(&self) -> usize {
        self.fabric().channels()
    }

    fn end(&self, rank: usize) -> ChannelEnd {
        ChannelEnd {
            channel: self.channel,
            call_channel: self.call_channel,
            rank,
            world_rank: self.members[rank],
        }
    }

    fn own_end(&self) -> ChannelEnd {
        self.end(self.rank.index())
    }

    fn call(&self) -> Fingerprint {
        *self.calls.current()
    }

    fn world_rank(&self) -> usize {
        self.members[self.rank.index()]
    }

    /// Begins an operation, unless the job has ended.
    fn begin_operation(&self) -> Result<()> {
        let effects = self.fabric().count_operation(self.world_rank(), self.world.clock.now());
        if self.world.perform(effects) {
            // The faults that were just applied may have killed this rank.
            self.runtime.interleave();
        }
        self.aborted().map_or(Ok(()), |abort| Err(Error::Aborted(abort)))
    }

    fn send(&self, outgoing: Outgoing<'_>) -> Result<()> {
        self.send_in(self.call(), outgoing)
    }

    /// Sends a message that belongs to this call.
    fn send_in(&self, call: Fingerprint, outgoing: Outgoing<'_>) -> Result<()> {
        self.send_message(SimMessage::new(call, outgoing), outgoing.to)
    }

    fn send_message(&self, message: SimMessage, peer: usize) -> Result<()> {
        match self.send_of(message, peer) {
            Sent::Queued => Ok(()),
            Sent::Left => Err(self.closed(Activity::Send, peer)),
            Sent::Aborted(abort) => Err(Error::Aborted(abort)),
        }
    }

    fn send_of(&self, message: SimMessage, peer: usize) -> Sent {
        self.runtime.interleave();
        self.pause();
        self.fabric().send(self.own_end(), self.end(peer), message, self.world.clock.now())
    }

    /// Waits as long as a slow rank does.
    fn pause(&self) {
        let pause = self.fabric().pause(self.world_rank());
        let deadline = self.runtime.deadline(pause);
        while !self.runtime.expired(deadline) {
            self.runtime.park(Some(deadline));
        }
    }

    fn receive(&self, peer: usize, len: usize, deadline: Deadline) -> Result<SimMessage> {
        self.runtime.interleave();
        let message = self.wait_for_message(peer, deadline)?;
        let (ours, theirs) = (self.call(), message.call);
        if message.spoilt == Some(Spoilt::Garbage) {
            return Err(self.fail(peer, Cause::Protocol, |peer| Error::Garbage { peer }));
        }
        if ours != theirs {
            let error = |peer| Error::Mismatch { peer, ours, theirs };
            return Err(self.fail(peer, Cause::Mismatch { theirs }, error));
        }
        let got = match message.spoilt {
            Some(Spoilt::Length(got)) => got,
            _ => message.len() as u64,
        };
        let expected = len as u64;
        if got != expected {
            let error = |peer| Error::Length { peer, expected, got };
            return Err(self.fail(peer, Cause::Length { expected, got }, error));
        }
        Ok(message)
    }

    /// Receives a message and delivers it.
    fn receive_into(&self, incoming: Incoming<'_>, deadline: Deadline) -> Result<()> {
        let message = self.receive(incoming.from, incoming.len, deadline)?;
        match incoming.sink {
            Sink::Into(memory) => memory.copy_from_slice(message.bytes()),
            Sink::Each(take) => {
                let abort_on_unwind = SimAbortOnUnwind(self);
                message.pieces().for_each(|piece| take(piece.start, &message.bytes()[piece]));
                std::mem::forget(abort_on_unwind);
            }
        }
        Ok(())
    }

    /// Sends these messages, and receives those that an inbox awaits in the order in which they arrive. If several have
    /// arrived, the seed decides which comes first.
    fn move_matched(
        &mut self,
        sends: &[(Fingerprint, Outgoing<'_>)],
        inbox: &mut dyn Inbox,
        deadline: Deadline,
    ) -> Result<()> {
        self.matched.resize_with(self.rank.world_size(), SimMatchedPeer::default);
        let mut unsent = Vec::new();
        for (position, &(call, outgoing)) in sends.iter().enumerate() {
            let to = outgoing.to;
            let queued = self.queued.iter().position(|queued| queued.to == to);
            let begun = match queued.map(|queued| self.queued.remove(queued)) {
                Some(queued) => Some(SimUnsentMessage { position, ..queued }),
                None => self.begin_send(position, call, outgoing, inbox)?,
            };
            unsent.extend(begun);
        }
        let mut awaited = inbox.sources().to_vec();
        while let Some((from, number)) = inbox.next_wanted() {
            self.matched[from].wanted.push(number);
        }
        let moved = self.move_until_paused(sends, &mut unsent, &mut awaited, inbox, deadline);
        self.queued.extend(unsent);
        moved
    }

    /// Sends a message, or announces it. Returns it if it is not sent.
    fn begin_send(
        &mut self,
        position: usize,
        call: Fingerprint,
        outgoing: Outgoing<'_>,
        inbox: &mut dyn Inbox,
    ) -> Result<Option<SimUnsentMessage>> {
        let (to, len) = (outgoing.to, outgoing.len());
        if to != self.rank.index() && MatchedFrame::announces(len) {
            let nothing = Outgoing { to, parts: &[] };
            self.send_frame(MatchedFrame::Announcement(len as u64), call, nothing)?;
            let number = self.matched[to].announcements_sent;
            self.matched[to].announcements_sent += 1;
            return Ok(Some(SimUnsentMessage { position, to, announced: Some(number) }));
        }
        self.send_in(call, outgoing)?;
        self.traffic.count(Some(len), None);
        Ok(self.await_room(position, to, inbox))
    }

    /// Returns a message in the network if it counts as sent only when there is room for it.
    fn await_room(&self, position: usize, to: usize, inbox: &mut dyn Inbox) -> Option<SimUnsentMessage> {
        if self.world.window.is_none() {
            inbox.sent(position);
            return None;
        }
        Some(SimUnsentMessage { position, to, announced: None })
    }

    fn send_frame(&self, frame: MatchedFrame, call: Fingerprint, outgoing: Outgoing<'_>) -> Result<()> {
        self.send_message(SimMessage::of_frame(frame, call, outgoing), outgoing.to)
    }

    /// Receives messages, and waits until there is room for the unsent ones, which are in the network or announced.
    fn move_until_paused(
        &mut self,
        sends: &[(Fingerprint, Outgoing<'_>)],
        unsent: &mut Vec<SimUnsentMessage>,
        awaited: &mut Vec<usize>,
        inbox: &mut dyn Inbox,
        deadline: Deadline,
    ) -> Result<()> {
        loop {
            self.send_cleared(sends, unsent, inbox)?;
            self.send_clears()?;
            awaited.retain(|&from| inbox.awaits(from));
            if inbox.pause() == Pause::Now || (awaited.is_empty() && unsent.is_empty()) {
                self.fabric().stop_waiting(self.own_end());
                return Ok(());
            }
            let mut read = awaited.clone();
            for to in unsent.iter().filter(|unsent| unsent.announced.is_some()).map(|unsent| unsent.to) {
                if !read.contains(&to) && inbox.keeps(to) {
                    read.push(to);
                }
            }
            if !read.is_empty() {
                self.runtime.interleave();
            }
            match self.wait_for_any_message(unsent, &read, inbox, deadline)? {
                MatchedStep::Arrived(peer) => {
                    let message = self.fabric().take(self.own_end(), peer);
                    let message = message.expect("only this transport takes what is sent to it");
                    self.take_frame(peer, &message, inbox)?;
                }
                MatchedStep::Again => {}
                MatchedStep::Paused => return Ok(()),
            }
        }
    }

    /// Sends the announced messages that their receivers have cleared.
    fn send_cleared(
        &mut self,
        sends: &[(Fingerprint, Outgoing<'_>)],
        unsent: &mut Vec<SimUnsentMessage>,
        inbox: &mut dyn Inbox,
    ) -> Result<()> {
        for peer in 0..self.matched.len() {
            for number in std::mem::take(&mut self.matched[peer].cleared) {
                let is_cleared =
                    |unsent: &SimUnsentMessage| unsent.to == peer && unsent.announced == Some(number);
                let Some(index) = unsent.iter().position(is_cleared) else {
                    self.matched[peer].cleared.push(number);
                    continue;
                };
                let (position, (_, outgoing)) = (unsent[index].position, sends[unsent[index].position]);
                self.send_frame(MatchedFrame::Body(number), Fingerprint::NONE, outgoing)?;
                self.traffic.count(Some(outgoing.len()), None);
                match self.await_room(position, peer, inbox) {
                    Some(begun) => unsent[index] = begun,
                    None => drop(unsent.remove(index)),
                }
            }
        }
        Ok(())
    }

    /// Clears the announced messages that the inbox wants.
    fn send_clears(&mut self) -> Result<()> {
        for peer in 0..self.matched.len() {
            for number in std::mem::take(&mut self.matched[peer].wanted) {
                if self.matched[peer].announced.clear(number) {
                    let nothing = Outgoing { to: peer, parts: &[] };
                    self.send_frame(MatchedFrame::Clear(number), Fingerprint::NONE, nothing)?;
                }
            }
        }
        Ok(())
    }

    /// Takes a frame that has arrived.
    fn take_frame(&mut self, peer: usize, message: &SimMessage, inbox: &mut dyn Inbox) -> Result<()> {
        let garbage = || Err(self.fail(peer, Cause::Protocol, |peer| Error::Garbage { peer }));
        let got = match message.spoilt {
            Some(Spoilt::Garbage) => return garbage(),
            Some(Spoilt::Length(got)) => got,
            None => message.len() as u64,
        };
        match message.frame {
            MatchedFrame::Message(_) => {
                let accepted = inbox.accept(peer, &message.call, usize::try_from(got).unwrap_or(usize::MAX));
                accepted.map_err(|refusal| self.refused(peer, message.call, got, refusal))?;
                // The bytes after the message would be taken for a header.
                if got != message.len() as u64 {
                    return garbage();
                }
                self.deliver_matched(peer, message, inbox);
            }
            MatchedFrame::Announcement(len) => {
                let number = self.matched[peer].announced.add(usize::try_from(len).unwrap_or(usize::MAX));
                let wanted =
                    inbox.announce(peer, &message.call, usize::try_from(len).unwrap_or(usize::MAX), number);
                if wanted.map_err(|refusal| self.refused(peer, message.call, len, refusal))? {
                    self.matched[peer].wanted.push(number);
                }
            }
            MatchedFrame::Clear(number) if number >= self.matched[peer].announcements_sent => {
                return garbage();
            }
            MatchedFrame::Clear(number) => self.matched[peer].cleared.push(number),
            MatchedFrame::Body(number) => {
                let len = self.matched[peer].announced.take(number);
                if len != Some(message.len()) {
                    return Err(self.fail(peer, Cause::Protocol, |peer| Error::Garbage { peer }));
                }
                inbox.begin_announced(peer, number);
                self.deliver_matched(peer, message, inbox);
            }
        }
        Ok(())
    }

    fn deliver_matched(&mut self, peer: usize, message: &SimMessage, inbox: &mut dyn Inbox) {
        inbox.memory(peer).copy_from_slice(message.bytes());
        inbox.complete(peer);
        self.traffic.count(None, Some(message.len()));
    }

    /// Aborts the job because an inbox has refused a message.
    fn refused(&self, peer: usize, theirs: Fingerprint, got: u64, refusal: Refusal) -> Error {
        let ours = self.call();
        match refusal {
            Refusal::Mismatch => {
                let error = |peer| Error::Mismatch { peer, ours, theirs };
                self.fail(peer, Cause::Mismatch { theirs }, error)
            }
            Refusal::Length(expected) => {
                let expected = expected as u64;
                let error = |peer| Error::Length { peer, expected, got };
                self.fail(peer, Cause::Length { expected, got }, error)
            }
            Refusal::NoMemory => {
                let source = std::io::ErrorKind::OutOfMemory.into();
                let error = Error::System { activity: Activity::Receive, source };
                self.give_up(Cause::gave_up(&error));
                error
            }
        }
    }

    /// Waits for a message of one of these peers, or until there is room for an unsent message.
    fn wait_for_any_message(
        &self,
        unsent: &mut Vec<SimUnsentMessage>,
        peers: &[usize],
        inbox: &mut dyn Inbox,
        deadline: Deadline,
    ) -> Result<MatchedStep> {
        let may_end_otherwise = inbox.pauses_at_deadline();
        let in_network: Vec<usize> =
            unsent.iter().filter(|unsent| unsent.announced.is_none()).map(|unsent| unsent.to).collect();
        let on = match (peers, &in_network[..]) {
            (&[peer], []) if !may_end_otherwise => WaitTarget::Message(peer),
            (&[], &[peer]) if unsent.len() == 1 => WaitTarget::Room(peer),
            (&[], &[peer, ..]) | (&[peer, ..], _) => WaitTarget::AnyMessage(peer),
            (&[], &[]) => match unsent.first() {
                Some(announced) => WaitTarget::AnyMessage(announced.to),
                None => return Ok(MatchedStep::Again),
            },
        };
        let interrupt = inbox.interrupt();
        loop {
            let mut arrived = Vec::new();
            let (mut has_changed, mut next) = self.take_room(unsent, on, inbox)?;
            for &peer in peers {
                match self.look(peer, on)? {
                    Found::Nothing { look_again } => next = next.into_iter().chain(look_again).min(),
                    Found::Left => {
                        self.take_left(peer, unsent, inbox)?;
                        has_changed = true;
                    }
                    _ => arrived.push(peer),
                }
            }
            if !arrived.is_empty() {
                self.fabric().stop_waiting(self.own_end());
                let now = self.world.clock.now();
                return Ok(MatchedStep::Arrived(arrived[self.fabric().choose(arrived.len(), now)]));
            }
            if has_changed {
                self.fabric().stop_waiting(self.own_end());
                return Ok(MatchedStep::Again);
            }
            let pause = inbox.pause();
            if pause != Pause::Never {
                self.fabric().stop_waiting(self.own_end());
                if pause == Pause::WhenIdle {
                    self.pause_poll();
                }
                return Ok(MatchedStep::Paused);
            }
            if self.runtime.expired(deadline) {
                if inbox.pauses_at_deadline() {
                    self.fabric().stop_waiting(self.own_end());
                    return Ok(MatchedStep::Paused);
                }
                return Err(match peers.iter().find(|&&peer| inbox.awaits(peer)) {
                    Some(&peer) => self.timeout(Activity::Receive, peer, deadline),
                    None if in_network.is_empty() => self.timeout(Activity::Match, on.peer(), deadline),
                    None => self.timeout(Activity::Send, in_network[0], deadline),
                });
            }
            if peers.is_empty() && in_network.is_empty() {
                // Nothing wakes a rank that has no room for the messages of its receiver.
                self.aborted().map_or(Ok(()), |abort| Err(Error::Aborted(abort)))?;
                next = Some(self.world.clock.now() + WITHOUT_WAKER);
            }
            self.park_unless(interrupt.as_ref(), deadline, next);
        }
    }

    /// Handles that a peer has left.
    fn take_left(&self, peer: usize, unsent: &[SimUnsentMessage], inbox: &mut dyn Inbox) -> Result<()> {
        if inbox.awaits(peer) && !inbox.peer_left(peer) {
            return Err(self.closed(Activity::Receive, peer));
        }
        if unsent.iter().any(|unsent| unsent.to == peer && unsent.announced.is_some()) {
            return Err(self.closed(Activity::Send, peer));
        }
        Ok(())
    }

    /// Reports the unsent messages for which there is room now. Returns `true` if there are any, and the time of the next
    /// look.
    fn take_room(
        &self,
        unsent: &mut Vec<SimUnsentMessage>,
        on: WaitTarget,
        inbox: &mut dyn Inbox,
    ) -> Result<(bool, Option<Duration>)> {
        let (mut full, mut next) = (Vec::new(), None::<Duration>);
        for &message in &*unsent {
            if message.announced.is_some() {
                full.push(message);
                continue;
            }
            match self.look_for_room(message.to, on)? {
                RoomStep::Enough => inbox.sent(message.position),
                RoomStep::Full { look_again } => {
                    full.push(message);
                    next = next.into_iter().chain(look_again).min();
                }
            }
        }
        let has_room = full.len() < unsent.len();
        *unsent = full;
        Ok((has_room, next))
    }

    /// Waits like [`park`](Self::park), also for an interruption.
    fn park_unless(&self, interrupt: Option<&Interrupt>, deadline: Deadline, wake_by: Option<Duration>) {
        let Some(interrupt) = interrupt else { return self.park(deadline, wake_by) };
        if interrupt.begin_sleep(self.runtime.unparker()) {
            self.park(deadline, wake_by);
            interrupt.end_sleep();
        }
    }

    /// Waits for the time of one poll, so that virtual time passes in a loop that polls.
    fn pause_poll(&self) {
        let deadline = self.runtime.deadline(POLL);
        while !self.runtime.expired(deadline) {
            self.runtime.park(Some(deadline));
        }
    }

    fn wait_for_message(&self, peer: usize, deadline: Deadline) -> Result<SimMessage> {
        if self.message_comes(peer, deadline)? {
            let message = self.fabric().take(self.own_end(), peer);
            return Ok(message.expect("only this transport takes what is sent to it"));
        }
        Err(self.timeout(Activity::Receive, peer, deadline))
    }

    /// Waits for a message of a peer. Returns `false` if there is none by the deadline.
    fn message_comes(&self, peer: usize, deadline: Deadline) -> Result<bool> {
        loop {
            let Found::Nothing { look_again } = self.look_for_message(peer, WaitTarget::Message(peer))?
            else {
                return Ok(true);
            };
            if self.runtime.expired(deadline) {
                return Ok(false);
            }
            self.park(deadline, look_again);
        }
    }

    /// Looks for a message of a peer. If there is none, this thread is woken when `on` may have happened. The
    /// result contains the arrival time of a message in flight.
    fn look_for_message(&self, peer: usize, on: WaitTarget) -> Result<Found> {
        match self.look(peer, on)? {
            Found::Left => Err(self.closed(Activity::Receive, peer)),
            found => Ok(found),
        }
    }

    /// Looks for a message of a peer, which may have left.
    fn look(&self, peer: usize, on: WaitTarget) -> Result<Found> {
        let (now, unparker) = (self.world.clock.now(), self.runtime.unparker());
        let from = (self.end(peer), on);
        match self.fabric().look(self.own_end(), from, self.calls.all(), now, unparker) {
            Found::Aborted(abort) => Err(Error::Aborted(abort)),
            Found::CallMismatch(mismatch) => Err(self.never_meets(mismatch)),
            Found::Circle(waits) => Err(self.abort_circle(waits)),
            Found::OtherMembers(theirs) => Err(self.other_members(peer, theirs)),
            found @ (Found::Message | Found::Left | Found::Nothing { .. }) => Ok(found),
        }
    }

    /// Waits to be woken, for the deadline, or for this time.
    fn park(&self, deadline: Deadline, wake_by: Option<Duration>) {
        clock::park(&self.runtime, self.skew, deadline, wake_by);
    }

    /// Waits until at most the window of the bytes sent to this peer is unreceived.
    fn wait_for_room(&self, peer: usize, deadline: Deadline) -> Result<()> {
        loop {
            match self.look_for_room(peer, WaitTarget::Room(peer))? {
                RoomStep::Enough => return Ok(()),
                RoomStep::Full { look_again } => {
                    if self.runtime.expired(deadline) {
                        return Err(self.timeout(Activity::Send, peer, deadline));
                    }
                    self.park(deadline, look_again);
                }
            }
        }
    }

    /// Looks for room in the window of a peer. If there is none, this thread is woken when `on` may have happened.
    fn look_for_room(&self, peer: usize, on: WaitTarget) -> Result<RoomStep> {
        let Some(window) = self.world.window else { return Ok(RoomStep::Enough) };
        let (now, calls) = (self.world.clock.now(), self.calls.all());
        let (to, unparker) = ((self.end(peer), on), self.runtime.unparker());
        match self.fabric().look_for_room(self.own_end(), to, window, calls, now, unparker) {
            Room::Enough => Ok(RoomStep::Enough),
            Room::Waiter { look_again } => Ok(RoomStep::Full { look_again }),
            Room::Aborted(abort) => Err(Error::Aborted(abort)),
            Room::Left => Err(self.closed(Activity::Send, peer)),
            Room::CallMismatch(mismatch) => Err(self.never_meets(mismatch)),
            Room::OtherMembers(theirs) => Err(self.other_members(peer, theirs)),
        }
    }

    /// Aborts the job because two ranks wait in calls that contradict each other.
    fn never_meets(&self, CallMismatch { world_rank: peer, ours, theirs }: CallMismatch) -> Error {
        let cause = Cause::Mismatch { theirs };
        let abort = Abort { cause, rank: peer, reporter: self.world_rank(), call: ours };
        let first = self.fabric().abort(abort, self.world.clock.now());
        first.map_or_else(Error::Aborted, |_| Error::Mismatch { peer, ours, theirs })
    }

    /// Aborts the job because ranks wait for each other in a circle.
    fn abort_circle(&self, waits: Vec<CircularWait>) -> Error {
        let abort = Abort::circle(waits, self.world_rank());
        let aborted = self.fabric().abort(abort, self.world.clock.now());
        Error::Aborted(aborted.unwrap_or_else(|first| first))
    }

    /// Aborts the job because a peer has named other members of the group.
    fn other_members(&self, peer: usize, theirs: Vec<usize>) -> Error {
        let (ours, peer) = (self.members.to_vec(), self.members[peer]);
        let error = Error::OtherMembers { rank: self.world_rank(), ours, peer, theirs };
        let record = self.record(self.rank.index(), Cause::gave_up(&error));
        let aborted = self.fabric().abort(record, self.world.clock.now());
        aborted.map_or_else(Error::Aborted, |_| error)
    }

    fn closed(&self, activity: Activity, peer: usize) -> Error {
        self.fail(peer, Cause::Left, |peer| Error::Closed { activity, peer })
    }

    fn timeout(&self, activity: Activity, peer: usize, deadline: Deadline) -> Error {
        let (elapsed, limit) = (self.runtime.elapsed(deadline), deadline.limit());
        let record = self.record(peer, Cause::timed_out());
        match self.fabric().abort(record, self.world.clock.now()) {
            Ok(Abort { cause: Cause::TimedOut { waits, count }, rank, .. }) => {
                Error::Timeout { activity, peer: rank, elapsed, limit, waits, count }
            }
            Ok(abort) | Err(abort) => Error::Aborted(abort),
        }
    }

    /// Aborts the job because of `peer`. The first rank to report gets `error` with the peer's number in the
    /// world; later ones get the abort.
    fn fail(&self, peer: usize, cause: Cause, error: impl FnOnce(usize) -> Error) -> Error {
        let record = self.record(peer, cause);
        let aborted = self.fabric().abort(record, self.world.clock.now());
        aborted.map_or_else(Error::Aborted, |known_by| error(known_by.rank))
    }

    /// Aborts the job because of this rank.
    fn give_up(&self, cause: Cause) {
        let record = self.record(self.rank.index(), cause);
        let _ = self.fabric().abort(record, self.world.clock.now());
    }

    fn record(&self, rank: usize, cause: Cause) -> Abort {
        Abort { cause, rank: self.members[rank], reporter: self.world_rank(), call: self.call() }
    }

    /// Signals to a peer, if the peer has not left.
    pub(super) fn signal_to(&self, call: Fingerprint, peer: usize) -> Result<()> {
        match self.send_of(SimMessage::new(call, Outgoing { to: peer, parts: &[] }), peer) {
            Sent::Queued | Sent::Left => Ok(()),
            Sent::Aborted(abort) => Err(Error::Aborted(abort)),
        }
    }
}

impl Transport for SimTransport {
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
        &self.runtime
    }

    fn begin(&mut self, call: &Fingerprint) {
        self.calls.begin(call);
        self.fabric().set_position(self.own_end(), Position { call: *call, progress: None });
    }

    fn announce(&mut self, call: &Fingerprint) {
        self.fabric().announce(self.own_end(), call);
    }

    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let deadline = due.deadline();
        check_exchange((self.rank, &self.members), send.as_ref(), receive.as_ref())?;
        self.begin_operation()?;
        let sent = send.as_ref().map(Outgoing::len);
        let received = receive.as_ref().map(|receive| receive.len);
        let receiver = send.map(|send| send.to);
        if let Some(outgoing) = send {
            self.send(outgoing)?;
        }
        if let Some(incoming) = receive {
            self.receive_into(incoming, deadline)?;
        }
        if let Some(peer) = receiver {
            self.wait_for_room(peer, deadline)?;
        }
        self.traffic.count(sent, received);
        Ok(())
    }

    /// One operation: all its messages are sent before the first is waited for.
    fn exchange_all(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let deadline = due.deadline();
        check_all((self.rank, &self.members), sends, receives)?;
        self.begin_operation()?;
        sends.iter().try_for_each(|&outgoing| self.send(outgoing))?;
        for incoming in receives.iter_mut() {
            self.receive_into(incoming.reborrow(), deadline)?;
        }
        sends.iter().try_for_each(|outgoing| self.wait_for_room(outgoing.to, deadline))?;
        sends.iter().for_each(|send| self.traffic.count(Some(send.len()), None));
        receives.iter().for_each(|receive| self.traffic.count(None, Some(receive.len)));
        Ok(())
    }

    fn exchange_matched(
        &mut self,
        sends: &[(Fingerprint, Outgoing<'_>)],
        inbox: &mut dyn Inbox,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let deadline = due.deadline();
        check_matched(self.rank, sends, inbox)?;
        self.begin_operation()?;
        self.move_matched(sends, inbox, deadline)
    }

    fn exchange_in_place(
        &mut self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let deadline = due.deadline();
        check_peer(self.rank, peer)?;
        self.begin_operation()?;
        // A send copies, so all of this rank's bytes are sent before the first byte of the peer is delivered.
        self.send(Outgoing { to: peer, parts: &[buffer] })?;
        let message = self.receive(peer, buffer.len(), deadline)?;
        let abort_on_unwind = SimAbortOnUnwind(self);
        for piece in message.pieces() {
            combine(&mut buffer[piece.clone()], &message.bytes()[piece]);
        }
        std::mem::forget(abort_on_unwind);
        self.wait_for_room(peer, deadline)?;
        self.traffic.count(Some(buffer.len()), Some(buffer.len()));
        Ok(())
    }

    fn wait_any_peer(&mut self, peers: &[usize], due: &LazyDeadline<'_>) -> Result<Vec<usize>> {
        let deadline = due.deadline();
        peers.iter().try_for_each(|&peer| check_peer(self.rank, peer))?;
        self.begin_operation()?;
        let silent = loop {
            let (mut silent, mut next) = (Vec::new(), None::<Duration>);
            for &peer in peers {
                if let Found::Nothing { look_again } =
                    self.look_for_message(peer, WaitTarget::AnyMessage(peers[0]))?
                {
                    silent.push(peer);
                    next = next.into_iter().chain(look_again).min();
                }
            }
            let is_over = silent.is_empty() || silent.len() < peers.len();
            if is_over || self.runtime.expired(deadline) {
                break silent;
            }
            self.park(deadline, next);
        };
        self.fabric().stop_waiting(self.own_end());
        Ok(silent)
    }

    fn unread(&mut self) -> Option<usize> {
        self.fabric().unread(self.own_end())
    }

    fn hosts(&self) -> Vec<u64> {
        self.members.iter().map(|&member| self.world.hosts[member]).collect()
    }

    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>> {
        let number = self.children;
        let end = bookkeeping::fork(self.rank, self.channel, &mut self.children, members)?;
        let in_world: Vec<usize> = members.iter().map(|&member| self.members[member]).collect();
        let made = SimForkedGroup {
            world_rank: self.world_rank(),
            channel: self.channel.child(number, members),
            members: in_world.clone(),
        };
        self.fabric().record_fork(self.channel, number, made);
        let Some((channel, rank)) = end else { return Ok(None) };
        let members = in_world.into();
        let child =
            Self::enter(self.world.clone(), (self.runtime.clone(), self.skew), rank, [channel; 2], members);
        Ok(Some(Box::new(child)))
    }

    fn fork_local(&mut self, members: &[usize], number: u64) -> Result<Box<dyn Transport>> {
        let (channel, rank) = bookkeeping::fork_local(self.rank, self.channel, members, number)?;
        let members = members.iter().map(|&member| self.members[member]).collect();
        let clock = (self.runtime.clone(), self.skew);
        Ok(Box::new(Self::enter(self.world.clone(), clock, rank, [channel; 2], members)))
    }

    fn abort(&mut self, cause: Cause) {
        self.give_up(cause);
    }

    fn aborted(&self) -> Option<Abort> {
        self.fabric().aborted(self.world_rank())
    }

    fn abort_decision(&self) -> Option<Arc<dyn AbortDecision>> {
        Some(Arc::new(SimDecision { world: self.world.clone(), world_rank: self.world_rank() }))
    }

    fn traffic(&self) -> Traffic {
        self.shm_group.as_ref().map_or(self.traffic, |shm_group| self.traffic + shm_group.traffic())
    }

    fn shm_group(&mut self, _due: &LazyDeadline<'_>) -> Result<Option<&mut dyn ShmGroup>> {
        let hosts = self.hosts();
        let alone = hosts.len() == 1 || hosts.iter().any(|&host| host != hosts[0]);
        let world = self.world.clone();
        let Some(segments) = world.segments.as_ref().filter(|_| !alone) else { return Ok(None) };
        if let Some(abort) = self.aborted() {
            return Err(Error::Aborted(abort));
        }
        if self.shm_group.is_none() {
            self.shm_group = Some(Box::new(SimShmGroup::new(self, segments)));
        }
        let call = self.call();
        Ok(self.shm_group.as_deref_mut().map(|shm_group| -> &mut dyn ShmGroup {
            shm_group.begin(&call);
            shm_group
        }))
    }

    fn allocate(&mut self, bytes: usize) -> Option<Allocation> {
        let given =
            self.world.segments.is_some() && !self.world.without_heap.contains(&self.own_end().world_rank);
        given.then(|| Allocation::private(bytes)).flatten()
    }

    fn store(&self) -> Result<Store, StoreError> {
        let (world, runtime) = (self.world.clone(), self.runtime.clone());
        let service = SimStore { world, world_rank: self.world_rank(), runtime, skew: self.skew };
        Ok(Store::new(Arc::new(service), &self.runtime))
    }

    fn set_progress(&mut self, progress: Progress) {
        let position = Position { call: self.call(), progress: Some(progress) };
        self.fabric().set_position(self.own_end(), position);
    }

    fn set_started_count(&mut self, count: &StartedCount) {
        self.fabric().set_started(self.own_end(), count);
    }

    fn set_call_formatter(&mut self, describe: fn(&Fingerprint) -> Option<String>) {
        self.fabric().set_call_formatter(describe);
    }
}

/// The simulated coordinator as the place that decides about aborts.
struct SimDecision {
    world: Arc<World>,
    world_rank: usize,
}

impl AbortDecision for SimDecision {
    fn propose(&self, abort: Abort) {
        let _ = self.world.fabric.abort(abort, self.world.clock.now());
    }

    fn decided(&self) -> Option<Abort> {
        self.world.fabric.aborted(self.world_rank)
    }

    fn notify(&self, thread: Unparker) {
        self.world.fabric.notify_of_abort(thread);
    }
}

impl fmt::Debug for SimDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimDecision").field("world_rank", &self.world_rank).finish()
    }
}

impl Drop for SimTransport {
    fn drop(&mut self) {
        if thread::panicking() {
            self.give_up(Cause::Panicked);
        }
        self.fabric().leave(self.own_end(), self.world.clock.now());
    }
}

/// Aborts the job if it is dropped, which only a panic does, of a function that was receiving bytes of a
/// message.
struct SimAbortOnUnwind<'a>(&'a SimTransport);

impl Drop for SimAbortOnUnwind<'_> {
    fn drop(&mut self) {
        self.0.give_up(Cause::Panicked);
    }
}

impl fmt::Debug for SimTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimTransport").field("rank", &self.rank).field("channel", &self.channel).finish()
    }
}

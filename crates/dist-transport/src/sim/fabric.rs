//! What the transports of one in-process job share: queues, who is there, and the abort record.
//!
//! One lock guards it all, and it is never held over a call that may run another thread.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::control::{Control, silence_limit};
use super::fault::{Fault, When};
use super::fault_injector::{Effects, FaultInjector};
use super::link::Links;
use super::message::Message;
use super::network_conditions::NetworkConditions;
use super::random::SplitMix64;
use super::report::{self, ChannelReport, Describe, Position};
use super::waiting::{WaitTarget, Waiter, wake};
use crate::bookkeeping::{CallHistory, HEARTBEAT};
use crate::runtime::Unparker;
use crate::{Abort, ChannelId, Fingerprint};

#[derive(Debug)]
pub(super) struct SimFabric(Mutex<FabricState>);

/// One rank's end of one channel.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChannelEnd {
    pub(super) channel: ChannelId,
    /// The channel whose calls are made on it.
    pub(super) call_channel: ChannelId,
    /// Its number in the group that the channel serves.
    pub(super) rank: usize,
    /// Its number in the world.
    pub(super) world_rank: usize,
}

/// What a look for a message found.
pub(super) enum Found {
    /// There is one.
    Message,
    /// Nothing yet: the unparker is used when there is reason to look again, and there is one at this time.
    Nothing {
        look_again: Option<Duration>,
    },
    /// The sender has left, and left nothing behind.
    Left,
    CallMismatch(CallMismatch),
    /// The sender has named these members of the group.
    OtherMembers(Vec<usize>),
    Aborted(Abort),
}

/// This rank of the world waits, or has waited, in a call that can never meet one of the caller's, or has announced one.
pub(super) struct CallMismatch {
    pub(super) world_rank: usize,
    pub(super) ours: Fingerprint,
    pub(super) theirs: Fingerprint,
}

/// What became of a message to be sent.
pub(super) enum Sent {
    Queued,
    /// The receiver has left.
    Left,
    Aborted(Abort),
}

/// Whether messages to a peer have left.
pub(super) enum Room {
    /// Enough of them.
    Enough,
    /// Not yet: the unparker is used when there is reason to look again, and there is one at this time.
    Waiter {
        look_again: Option<Duration>,
    },
    /// The receiver has left.
    Left,
    CallMismatch(CallMismatch),
    /// The receiver has named these members of the group.
    OtherMembers(Vec<usize>),
    Aborted(Abort),
}

/// A group that a rank has made by a fork, whether it is a member or not.
#[derive(Debug)]
pub(super) struct ForkedGroup {
    pub(super) world_rank: usize,
    pub(super) channel: ChannelId,
    /// By their numbers in the world.
    pub(super) members: Vec<usize>,
}

/// What the ranks of a channel have made by one fork of it.
#[derive(Debug, Default)]
struct ForkRecord {
    made: Vec<ForkedGroup>,
    /// Whether two of them have named different members of one group.
    differ: bool,
}

#[derive(Debug)]
pub(super) struct FabricState {
    channels: HashMap<ChannelId, Vec<ChannelMember>>,
    /// Of channels that carry the signals of another one's calls: that one.
    call_channels: HashMap<ChannelId, ChannelId>,
    /// By channel and rank of the world: the last calls that it has announced there.
    announced: BTreeMap<ChannelId, BTreeMap<usize, CallHistory>>,
    /// The channels on which ranks have waited in calls of each communicator.
    siblings: HashMap<u64, Vec<ChannelId>>,
    /// What the ranks of a channel have made by its fork of this number, until all have made it and agree.
    made: HashMap<(ChannelId, u64), ForkRecord>,
    /// The fork that each channel came of.
    origins: HashMap<ChannelId, (ChannelId, u64)>,
    /// How many transports each rank of the world still has.
    transports: Vec<usize>,
    pub(super) control: Control,
    links: Links,
    pub(super) conditions: NetworkConditions,
    pub(super) injector: FaultInjector,
    /// How many ranks knew of the job's end when the waiting were last woken because of it.
    known_by: usize,
    describe: Option<Describe>,
    /// What every rank waited for when the first knew of the job's end.
    waits: Option<Vec<String>>,
    /// Decides what links and conditions leave open.
    random: SplitMix64,
}

#[derive(Debug, Default)]
pub(super) struct ChannelMember {
    pub(super) presence: Presence,
    pub(super) world_rank: usize,
    pub(super) position: Position,
    inbox: BTreeMap<usize, Queue>,
    waiting: Option<Waiter>,
    /// The call in which it waited last, and the one before.
    waited_in: Vec<Fingerprint>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) enum Presence {
    #[default]
    Expected,
    Here,
    Gone,
}

/// The messages of one peer.
#[derive(Debug, Default)]
struct Queue {
    messages: VecDeque<(Duration, Message)>,
    bytes: usize,
}

impl SimFabric {
    pub(super) fn new(
        links: Links,
        coordinator: Option<usize>,
        faults: Vec<(When, Fault)>,
        random: SplitMix64,
    ) -> Self {
        let world_size = links.hosts.len();
        let (channels, call_channels) = (HashMap::new(), HashMap::new());
        let (transports, conditions) = (vec![0; world_size], NetworkConditions::default());
        let control = Control::new(&links.hosts, coordinator);
        let injector = FaultInjector { faults, operations: vec![0; world_size], ..FaultInjector::default() };
        let (known_by, describe, waits) = (0, None, None);
        let state = FabricState {
            channels,
            call_channels,
            announced: BTreeMap::new(),
            siblings: HashMap::new(),
            made: HashMap::new(),
            origins: HashMap::new(),
            transports,
            control,
            links,
            conditions,
            injector,
            known_by,
            describe,
            waits,
            random,
        };
        Self(Mutex::new(state))
    }

    fn lock(&self) -> MutexGuard<'_, FabricState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a new transport, of a group of these ranks of the world.
    pub(super) fn enter(&self, end: ChannelEnd, world_ranks: &[usize]) {
        let mut state = self.lock();
        state.transports[end.world_rank] += 1;
        let expected = |&world_rank| ChannelMember { world_rank, ..ChannelMember::default() };
        let members = state.channels.entry(end.channel);
        let members = members.or_insert_with(|| world_ranks.iter().map(expected).collect());
        members[end.rank].presence = Presence::Here;
        if end.call_channel != end.channel {
            state.call_channels.insert(end.channel, end.call_channel);
        }
    }

    /// Notes that a transport was dropped, and wakes those who wait for it.
    pub(super) fn leave(&self, end: ChannelEnd, now: Duration) {
        let woken = self.lock().leave(end, now);
        wake(woken);
    }

    /// Notes what a rank has made by the fork of a channel with this number. Whoever waits for it in another group that others
    /// have made by the same fork is woken.
    pub(super) fn note_fork(&self, parent: ChannelId, number: u64, made: ForkedGroup) {
        let woken = self.lock().note_fork(parent, number, made);
        wake(woken);
    }

    /// Counts an operation of this rank; there may be a fault planned for it.
    pub(super) fn count_operation(&self, world_rank: usize, now: Duration) -> Effects {
        self.lock().count_operation(world_rank, now)
    }

    /// Does what is due by now. Gives when something is due next as well; the unparker is used when that changes.
    pub(super) fn apply_due(&self, now: Duration, timer: Unparker) -> (Effects, Option<Duration>) {
        self.lock().apply_due(now, timer)
    }

    /// What is to be known_by of a run: how many operations each rank has done, which faults have happened, and what
    /// every rank waited for at the end of the job.
    pub(super) fn history(&self) -> (Vec<u64>, Vec<String>, Vec<String>) {
        let state = self.lock();
        (
            state.injector.operations.clone(),
            state.injector.happened.clone(),
            state.waits.clone().unwrap_or_default(),
        )
    }

    /// Notes where a rank is.
    pub(super) fn note(&self, end: ChannelEnd, position: Position) {
        self.lock().member(end).position = position;
    }

    /// Keeps a call that a rank announces.
    pub(super) fn announce(&self, end: ChannelEnd, call: &Fingerprint) {
        let mut state = self.lock();
        let of_channel = state.announced.entry(end.channel).or_default();
        of_channel.entry(end.world_rank).or_insert(CallHistory::NONE).begin(call);
    }

    pub(super) fn set_call_formatter(&self, describe: Describe) {
        self.lock().describe.get_or_insert(describe);
    }

    /// Keeps what every rank waits for now, unless that of an earlier end is kept.
    pub(super) fn keep_waits(&self) {
        self.lock().keep_waits();
    }

    /// How long this rank pauses before it sends.
    pub(super) fn pause(&self, world_rank: usize) -> Duration {
        self.lock().conditions.pause(world_rank)
    }

    /// Puts a message into the receiver's queue, where it arrives when the links have carried it.
    pub(super) fn send(&self, end: ChannelEnd, to: ChannelEnd, mut message: Message, now: Duration) -> Sent {
        let woken = {
            let mut state = self.lock();
            if let Some(abort) = state.control.known(end.world_rank) {
                return Sent::Aborted(abort);
            }
            if state.has_left(to) {
                return Sent::Left;
            }
            let arrives = state.carry(end, to, message.len(), now);
            if let Some(byte) = state.conditions.corruption(end.world_rank, to.world_rank) {
                message.change_byte(byte);
            }
            let member = state.member(to);
            let queue = member.inbox.entry(end.rank).or_default();
            queue.bytes += message.len();
            queue.messages.push_back((arrives, message));
            member.waiting.take_if(|waiting| waiting.on.may_be_message_of(end.rank))
        };
        wake(woken);
        Sent::Queued
    }

    /// Looks for a message of `from`, or remembers whom to wake when what it waits `on` comes; these are the last calls of
    /// the one who looks.
    pub(super) fn look(
        &self,
        end: ChannelEnd,
        (from, on): (ChannelEnd, WaitTarget),
        calls: &[Fingerprint],
        now: Duration,
        unparker: Unparker,
    ) -> Found {
        let mut state = self.lock();
        if let Some(abort) = state.control.known(end.world_rank) {
            return Found::Aborted(abort);
        }
        let sender_left = state.has_left(from);
        let member = state.member(end);
        let since = waiting_since(member.waiting.take(), on, now);
        let arrives = member.inbox.get(&from.rank).and_then(|queue| queue.messages.front());
        let arrives = arrives.map(|(arrives, _)| *arrives);
        if arrives.is_some_and(|arrives| arrives <= now) {
            return Found::Message;
        }
        if sender_left && arrives.is_none() {
            return Found::Left;
        }
        member.waiting = Some(Waiter { on, since, unparker });
        if let Some(members) = state.named_instead(end, from) {
            return Found::OtherMembers(members);
        }
        let crossing = state.crossing(end, on).filter(|_| arrives.is_none());
        if let Some(mismatch) = state.contradiction(end, calls).or(crossing) {
            return Found::CallMismatch(mismatch);
        }
        let (silent_too_long_at, woken) = state.check_partition([from, end], since, now);
        drop(state);
        wake(woken);
        Found::Nothing { look_again: arrives.into_iter().chain(silent_too_long_at).min() }
    }

    /// Returns a rank of the group of whose messages one was not received.
    pub(super) fn unread(&self, end: ChannelEnd) -> Option<usize> {
        let mut state = self.lock();
        let inbox = &state.member(end).inbox;
        inbox.iter().find(|(_, queue)| !queue.messages.is_empty()).map(|(from, _)| *from)
    }

    /// Notes that a rank waits no longer for what it has looked for.
    pub(super) fn stop_waiting(&self, end: ChannelEnd) {
        self.lock().member(end).waiting = None;
    }

    /// Takes the oldest message of this rank of the group, which has arrived.
    pub(super) fn take(&self, end: ChannelEnd, from: usize) -> Option<Message> {
        let (message, woken) = {
            let mut state = self.lock();
            let queue = state.member(end).inbox.get_mut(&from)?;
            let (_, message) = queue.messages.pop_front()?;
            queue.bytes -= message.len();
            let sender = &mut state.members(end.channel)[from];
            (message, sender.waiting.take_if(|waiting| waiting.on == WaitTarget::Room(end.rank)))
        };
        wake(woken);
        Some(message)
    }

    /// Looks whether at most `window` bytes of what was sent to `to` were not received yet, or remembers whom to
    /// wake when some are.
    pub(super) fn look_for_room(
        &self,
        end: ChannelEnd,
        to: ChannelEnd,
        window: usize,
        calls: &[Fingerprint],
        now: Duration,
        unparker: Unparker,
    ) -> Room {
        let mut state = self.lock();
        let on = WaitTarget::Room(to.rank);
        let since = waiting_since(state.member(end).waiting.take(), on, now);
        let unreceived = state.member(to).inbox.get(&end.rank).map_or(0, |queue| queue.bytes);
        if unreceived <= window {
            return Room::Enough;
        }
        if let Some(abort) = state.control.known(end.world_rank) {
            return Room::Aborted(abort);
        }
        if state.has_left(to) {
            return Room::Left;
        }
        state.member(end).waiting = Some(Waiter { on, since, unparker });
        if let Some(members) = state.named_instead(end, to) {
            return Room::OtherMembers(members);
        }
        if let Some(mismatch) = state.contradiction(end, calls) {
            return Room::CallMismatch(mismatch);
        }
        let (look_again, woken) = state.check_partition([to, end], since, now);
        drop(state);
        wake(woken);
        Room::Waiter { look_again }
    }

    /// Ends the job, as far as the reporter's word reaches, and gives what is known_by of it; if the reporter knows of an end
    /// already, that is the error.
    pub(super) fn abort(&self, abort: Abort, now: Duration) -> Result<Abort, Abort> {
        let (known_by, woken) = {
            let state = &mut *self.lock();
            let known_by = abort.followed(|rank, call| state.waits_for(rank, call));
            state.control.propose(known_by.clone(), now, &state.conditions)?;
            (known_by, state.wake_if_known())
        };
        wake(woken);
        Ok(known_by)
    }

    /// How many channels somebody is in, or may still come to.
    #[cfg(test)]
    pub(super) fn channels(&self) -> usize {
        self.lock().channels.len()
    }

    /// What this rank knows of the job's end.
    pub(super) fn aborted(&self, world_rank: usize) -> Option<Abort> {
        self.lock().control.known(world_rank)
    }
}

/// Since when a rank waits for this, which it may have waited for before it looked again.
fn waiting_since(before: Option<Waiter>, on: WaitTarget, now: Duration) -> Duration {
    before.filter(|before| before.on == on).map_or(now, |before| before.since)
}

impl ChannelMember {
    pub(super) fn waits_on(&self) -> Option<WaitTarget> {
        self.waiting.as_ref().map(|waiting| waiting.on)
    }
}

impl FabricState {
    fn members(&mut self, channel: ChannelId) -> &mut Vec<ChannelMember> {
        self.channels.get_mut(&channel).expect("a channel lives as long as one of its transports")
    }

    fn member(&mut self, end: ChannelEnd) -> &mut ChannelMember {
        &mut self.members(end.channel)[end.rank]
    }

    /// When a message that is sent now arrives.
    fn carry(&mut self, from: ChannelEnd, to: ChannelEnd, bytes: usize, now: Duration) -> Duration {
        let pair = (from.world_rank, to.world_rank);
        let arrives = self.links.carry(pair, bytes, now, &mut self.random);
        self.conditions.arrival(pair, bytes, (now, arrives), &mut self.random)
    }

    /// Ends the job if the last of these waits for the first, and they have not reached each other for too long. Gives when that
    /// may be so, and those who wait and are to hear that it is.
    fn check_partition(
        &mut self,
        [peer, end]: [ChannelEnd; 2],
        since: Duration,
        now: Duration,
    ) -> (Option<Duration>, Vec<Waiter>) {
        let pair = [peer.world_rank, end.world_rank];
        let Some(partitioned) = self.conditions.partitioned_since(pair, now) else {
            return (None, Vec::new());
        };
        let [theirs, ours] = pair.map(|rank| self.links.hosts[rank]);
        let due = partitioned.max(since).saturating_add(silence_limit(theirs == ours));
        if now < due {
            return (Some(due), Vec::new());
        }
        self.control.report_partition(pair, now, &self.conditions);
        (Some(now.saturating_add(HEARTBEAT)), self.wake_if_known())
    }

    /// Keeps messages that are under way from crossing a partition.
    pub(super) fn delay_messages_in_flight(&mut self, now: Duration) {
        for members in self.channels.values_mut() {
            let world_ranks: Vec<_> = members.iter().map(|member| member.world_rank).collect();
            for member in members {
                for (from, queue) in &mut member.inbox {
                    let pair = (world_ranks[*from], member.world_rank);
                    let under_way = queue.messages.iter_mut().filter(|(arrives, _)| *arrives > now);
                    under_way.for_each(|(arrives, _)| {
                        *arrives = self.conditions.after_partitions(pair, (now, *arrives));
                    });
                }
            }
        }
    }

    /// Those who wait, if somebody knows of the job's end who did not when this was last asked.
    pub(super) fn wake_if_known(&mut self) -> Vec<Waiter> {
        let known_by = (0..self.transports.len()).filter(|&rank| self.control.known(rank).is_some()).count();
        if std::mem::replace(&mut self.known_by, known_by) == known_by {
            return Vec::new();
        }
        self.keep_waits();
        self.all_waiting()
    }

    fn keep_waits(&mut self) {
        if self.waits.is_none() {
            let call_members = |id| self.channels.get(self.call_channels.get(id)?).map(Vec::as_slice);
            let mut channels: Vec<ChannelReport<'_>> = self
                .channels
                .iter()
                .map(|(id, members)| ChannelReport { id: *id, members, call_members: call_members(id) })
                .collect();
            channels.sort_unstable_by_key(|channel| channel.id);
            self.waits = Some(report::lines(&channels, self.describe));
        }
    }

    fn note_fork(&mut self, parent: ChannelId, number: u64, made: ForkedGroup) -> Vec<Waiter> {
        self.origins.insert(made.channel, (parent, number));
        let ForkRecord { made: all, differ } = self.made.entry((parent, number)).or_default();
        let overlap = |one: &ForkedGroup, other: &ForkedGroup| {
            let named = |member| other.members.contains(member) || *member == other.world_rank;
            one.channel != other.channel && one.members.iter().any(named)
        };
        let differs = |other: &&ForkedGroup| overlap(other, &made) || overlap(&made, other);
        let others: Vec<_> = all.iter().filter(differs).map(|other| other.channel).collect();
        all.push(made);
        *differ |= !others.is_empty();
        if !*differ && all.len() == self.channels.get(&parent).map_or(0, Vec::len) {
            self.made.remove(&(parent, number));
        }
        let mut woken = Vec::new();
        for channel in others {
            // Signals are waited for on a channel of their own.
            let signals = self
                .call_channels
                .iter()
                .find(|(_, call_channel)| **call_channel == channel)
                .map(|(signals, _)| *signals);
            for channel in std::iter::once(channel).chain(signals) {
                let members = self.channels.get_mut(&channel).into_iter().flatten();
                woken.extend(members.filter_map(|member| member.waiting.take()));
            }
        }
        woken
    }

    /// The members that a peer has named where this rank has named those of this channel, which the peer has not come to then.
    fn named_instead(&self, end: ChannelEnd, peer: ChannelEnd) -> Option<Vec<usize>> {
        if self.channels[&end.call_channel][peer.rank].presence != Presence::Expected {
            return None;
        }
        let made = self.made.get(self.origins.get(&end.call_channel)?)?;
        let is_meant =
            |made: &&ForkedGroup| made.world_rank == peer.world_rank && made.channel != end.call_channel;
        made.made.iter().find(is_meant).map(|made| made.members.clone())
    }

    /// Notes the calls of one who waits, and finds another who waits, or has waited, in one that can never meet them:
    /// for messages or for signals, which are the same calls.
    fn contradiction(&mut self, end: ChannelEnd, calls: &[Fingerprint]) -> Option<CallMismatch> {
        if let Some(announced) = self.announced_mismatch(end.world_rank) {
            return Some(announced);
        }
        let member = self.member(ChannelEnd { channel: end.call_channel, ..end });
        if member.waited_in == calls {
            // The others have compared theirs with these.
            return None;
        }
        member.waited_in = calls.to_vec();
        let communicator = Fingerprint::communicator(calls)?;
        let siblings = self.siblings.entry(communicator).or_default();
        if !siblings.contains(&end.call_channel) {
            siblings.push(end.call_channel);
        }
        let mut members = siblings.iter().flat_map(|channel| &self.channels[channel]);
        members.find_map(|member| {
            let contradiction = Fingerprint::contradiction(calls, &member.waited_in);
            contradiction.map(|(ours, theirs)| CallMismatch { world_rank: member.world_rank, ours, theirs })
        })
    }

    /// Finds a rank that has announced a call which can never meet one that this rank has announced.
    fn announced_mismatch(&self, world_rank: usize) -> Option<CallMismatch> {
        self.announced.values().find_map(|of_channel| {
            let own = of_channel.get(&world_rank)?;
            of_channel.iter().find_map(|(&world_rank, calls)| {
                let contradiction = Fingerprint::contradiction(own.all(), calls.all());
                contradiction.map(|(ours, theirs)| CallMismatch { world_rank, ours, theirs })
            })
        })
    }

    /// The rank that this one waits for, if that one waits for this one in another call, and nothing is on its way between
    /// them: for a message, as of `send_recv`, and for a signal in shared memory, say.
    fn crossing(&self, end: ChannelEnd, on: WaitTarget) -> Option<CallMismatch> {
        let WaitTarget::Message(peer) = on else { return None };
        let call = |rank: usize| self.channels[&end.call_channel][rank].position.call;
        let [ours, theirs] = [end.rank, peer].map(call);
        let signals = self
            .call_channels
            .iter()
            .find(|(_, call_channel)| **call_channel == end.call_channel)
            .map(|(signals, _)| signals);
        let awaits_us = |channel: &ChannelId| {
            let Some(member) = self.channels.get(channel).map(|members| &members[peer]) else { return false };
            let has_more = member.inbox.get(&end.rank).is_some_and(|queue| !queue.messages.is_empty());
            member.waits_on() == Some(WaitTarget::Message(end.rank)) && !has_more
        };
        let is_mutual = peer != end.rank && [&end.call_channel].into_iter().chain(signals).any(awaits_us);
        // Of messages outside any call nobody knows what they belong to.
        let differ = ours != theirs && ![ours, theirs].contains(&Fingerprint::NONE);
        let world_rank = self.channels[&end.call_channel][peer].world_rank;
        (is_mutual && differ).then_some(CallMismatch { world_rank, ours, theirs })
    }

    /// For which rank another waits, if it does so in this call.
    fn waits_for(&self, world_rank: usize, call: &Fingerprint) -> Option<usize> {
        self.channels.iter().find_map(|(channel, members)| {
            let end = members.iter().position(|member| member.world_rank == world_rank)?;
            let on = members[end].waits_on()?;
            let call_channel = self.call_channels.get(channel).unwrap_or(channel);
            self.channels[call_channel][end].waited_in.contains(call).then(|| members[on.peer()].world_rank)
        })
    }

    /// Whether this rank can never send or receive here again.
    fn has_left(&self, end: ChannelEnd) -> bool {
        let gone = self.transports[end.world_rank] == 0 || self.is_gone(end.channel, end.rank);
        // Who died has said no goodbye.
        gone && !self.control.is_dead(end.world_rank)
    }

    /// Whether a rank has left a channel; one that has left another channel does not come to that of its signals any more.
    fn is_gone(&self, channel: ChannelId, rank: usize) -> bool {
        let Some(members) = self.channels.get(&channel) else { return true };
        match members[rank].presence {
            Presence::Gone => true,
            Presence::Here => false,
            Presence::Expected => {
                self.call_channels.get(&channel).is_some_and(|&call_channel| self.is_gone(call_channel, rank))
            }
        }
    }

    fn leave(&mut self, end: ChannelEnd, now: Duration) -> Vec<Waiter> {
        let world_rank = end.world_rank;
        *self.member(end) =
            ChannelMember { presence: Presence::Gone, world_rank, ..ChannelMember::default() };
        self.transports[world_rank] -= 1;
        if let Some(of_channel) = self.announced.get_mut(&end.channel) {
            of_channel.remove(&world_rank);
        }
        self.announced.retain(|_, of_channel| !of_channel.is_empty());
        let mut woken = Vec::new();
        if self.transports[world_rank] == 0 {
            self.control.leave(world_rank, now, &self.conditions);
            woken = self.all_waiting();
        }
        let signals = self
            .call_channels
            .iter()
            .find(|(_, call_channel)| **call_channel == end.channel)
            .map(|(signals, _)| *signals);
        for channel in std::iter::once(end.channel).chain(signals) {
            let its = |waiting: &mut Waiter| waiting.on.may_be_of(end.rank);
            woken.extend(self.members(channel).iter_mut().filter_map(|member| member.waiting.take_if(its)));
            self.forget(channel);
        }
        woken
    }

    /// Drops a channel that nobody can use any more.
    fn forget(&mut self, channel: ChannelId) {
        let ranks = self.channels[&channel].len();
        if (0..ranks).all(|rank| self.is_gone(channel, rank)) {
            self.channels.remove(&channel);
            self.call_channels.remove(&channel);
            self.origins.remove(&channel);
            self.made.retain(|(parent, _), _| *parent != channel);
            self.siblings.retain(|_, channels| {
                channels.retain(|other| *other != channel);
                !channels.is_empty()
            });
        }
    }

    fn all_waiting(&mut self) -> Vec<Waiter> {
        // In the order of the channels' ids: the order of wake-ups must not depend on the hash map's seed.
        let mut channels: Vec<_> = self.channels.iter_mut().collect();
        channels.sort_unstable_by_key(|(id, _)| **id);
        let members = channels.into_iter().flat_map(|(_, members)| members);
        members.filter_map(|member| member.waiting.take()).collect()
    }
}

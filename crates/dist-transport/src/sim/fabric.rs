//! The shared state of the transports of one in-process job: queues, presence of ranks, and the abort record.
//!
//! One lock guards it all. It is never held over a call that may run another thread.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::control::{Control, silence_limit};
use super::fault::{Fault, When};
use super::fault_injector::{Effects, FaultInjector};
use super::link::Links;
use super::message::SimMessage;
use super::network_conditions::NetworkConditions;
use super::random::SplitMix64;
use super::report::{self, ChannelReport, Describe, Position};
use super::store::{MESSAGE_BYTES, StorePoll, StoreState};
use super::waiting::{WaitTarget, Waiter, wake};
use crate::bookkeeping::{CallHistory, HEARTBEAT};
use crate::runtime::Unparker;
use crate::store::StoreRequest;
use crate::{Abort, ChannelId, CircularWait, Fingerprint, StartedCount};

#[derive(Debug)]
pub(super) struct SimFabric(Mutex<FabricState>);

/// One rank's end of one channel.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChannelEnd {
    pub(super) channel: ChannelId,
    /// The channel whose calls are made on it.
    pub(super) call_channel: ChannelId,
    /// The rank in the group that the channel serves.
    pub(super) rank: usize,
    /// The rank in the world.
    pub(super) world_rank: usize,
}

/// The result of polling for a message.
pub(super) enum Found {
    /// A message has arrived.
    Message,
    /// No message has arrived. The unparker wakes the rank when it should look again; it should also look at this
    /// time.
    Nothing {
        look_again: Option<Duration>,
    },
    /// The sender has left, and no message of it is left.
    Left,
    CallMismatch(CallMismatch),
    /// The sender has named these members of the group.
    OtherMembers(Vec<usize>),
    /// These ranks wait for each other in a circle.
    Circle(Vec<CircularWait>),
    Aborted(Abort),
}

/// A rank of the world waits, or has waited, in a call that contradicts one of the caller's, or has announced
/// one.
pub(super) struct CallMismatch {
    pub(super) world_rank: usize,
    pub(super) ours: Fingerprint,
    pub(super) theirs: Fingerprint,
}

/// The result of a send.
pub(super) enum Sent {
    Queued,
    /// The receiver has left.
    Left,
    Aborted(Abort),
}

/// The result of polling for room in the receiver's window.
pub(super) enum Room {
    /// The receiver's window has room.
    Enough,
    /// The receiver's window is full. The unparker wakes the rank when it should look again; it should also look at
    /// this time.
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
pub(super) struct SimForkedGroup {
    pub(super) world_rank: usize,
    pub(super) channel: ChannelId,
    /// The members, by their numbers in the world.
    pub(super) members: Vec<usize>,
}

/// The groups that the ranks of one channel have created with the same fork call.
#[derive(Debug, Default)]
struct ForkRecord {
    made: Vec<SimForkedGroup>,
    /// `true` if two of them have named different members of one group.
    differ: bool,
}

#[derive(Debug)]
pub(super) struct FabricState {
    channels: BTreeMap<ChannelId, Vec<ChannelMember>>,
    /// The channel whose calls a channel of signals belongs to.
    call_channels: BTreeMap<ChannelId, ChannelId>,
    /// The last announced calls, by channel and rank of the world.
    announced: BTreeMap<ChannelId, BTreeMap<usize, CallHistory>>,
    /// The channels on which ranks have waited, by communicator.
    siblings: BTreeMap<u64, Vec<ChannelId>>,
    /// The groups that the ranks of a channel have made by the fork with this number, until all have made it
    /// and agree.
    made: BTreeMap<(ChannelId, u64), ForkRecord>,
    /// The fork that made each channel.
    origins: BTreeMap<ChannelId, (ChannelId, u64)>,
    /// The number of transports that each rank of the world still has.
    transports: Vec<usize>,
    pub(super) control: Control,
    store: StoreState,
    links: Links,
    pub(super) conditions: NetworkConditions,
    pub(super) injector: FaultInjector,
    /// The number of ranks that knew the abort record when it last woke waiting ranks.
    known_by: usize,
    /// Threads that are woken whenever another rank knows the abort record.
    notified: Vec<Unparker>,
    describe: Option<Describe>,
    /// The waits of all ranks when the first knew the abort record.
    waits: Option<Vec<String>>,
    /// Random numbers for links and faults.
    random: SplitMix64,
}

#[derive(Debug, Default)]
pub(super) struct ChannelMember {
    pub(super) presence: Presence,
    pub(super) world_rank: usize,
    pub(super) position: Position,
    inbox: BTreeMap<usize, Queue>,
    waiting: Option<Waiter>,
    /// The call in which it waited last, and the ones before.
    waited_in: Vec<Fingerprint>,
    /// The started operations of its communicator, if they are counted.
    started: Option<StartedCount>,
}

/// Ranks that wait for each other in calls of one communicator.
struct CircleOfCalls {
    waits: Vec<CircularWait>,
    /// `true` if none of the ranks has started operations, which might end a wait.
    is_certain: bool,
}

/// The time after which a possible circle is looked at again.
const SUSPICION_INTERVAL: Duration = Duration::from_millis(100);

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
    messages: VecDeque<(Duration, SimMessage)>,
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
        let (channels, call_channels) = (BTreeMap::new(), BTreeMap::new());
        let (transports, conditions) = (vec![0; world_size], NetworkConditions::default());
        let control = Control::new(&links.hosts, coordinator);
        let injector = FaultInjector { faults, operations: vec![0; world_size], ..FaultInjector::default() };
        let (known_by, describe, waits) = (0, None, None);
        let state = FabricState {
            channels,
            call_channels,
            announced: BTreeMap::new(),
            siblings: BTreeMap::new(),
            made: BTreeMap::new(),
            origins: BTreeMap::new(),
            transports,
            control,
            store: StoreState::default(),
            links,
            conditions,
            injector,
            known_by,
            notified: Vec::new(),
            describe,
            waits,
            random,
        };
        Self(Mutex::new(state))
    }

    fn lock(&self) -> MutexGuard<'_, FabricState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a new transport of a group of these ranks of the world.
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

    /// Removes a dropped transport, and wakes ranks that wait for it.
    pub(super) fn leave(&self, end: ChannelEnd, now: Duration) {
        let woken = self.lock().leave(end, now);
        wake(woken);
    }

    /// Records the group that a rank has made by a fork. Wakes ranks that wait for it in a conflicting group
    /// of the same fork.
    pub(super) fn record_fork(&self, parent: ChannelId, number: u64, made: SimForkedGroup) {
        let woken = self.lock().record_fork(parent, number, made);
        wake(woken);
    }

    /// Counts an operation of this rank; a fault may be planned for it.
    pub(super) fn count_operation(&self, world_rank: usize, now: Duration) -> Effects {
        self.lock().count_operation(world_rank, now)
    }

    /// Applies all events that are due. Returns the time of the next event. If that time changes, the unparker
    /// is used.
    pub(super) fn apply_due(&self, now: Duration, timer: Unparker) -> (Effects, Option<Duration>) {
        self.lock().apply_due(now, timer)
    }

    /// Returns the history of a run: the operations of each rank, the faults, and the waits of all ranks at
    /// the end of the job.
    pub(super) fn history(&self) -> (Vec<u64>, Vec<String>, Vec<String>) {
        let state = self.lock();
        (
            state.injector.operations.clone(),
            state.injector.happened.clone(),
            state.waits.clone().unwrap_or_default(),
        )
    }

    /// Records the position of a rank.
    pub(super) fn set_position(&self, end: ChannelEnd, position: Position) {
        self.lock().member(end).position = position;
    }

    /// Sets the count of the started operations of the communicator that a channel belongs to.
    pub(super) fn set_started(&self, end: ChannelEnd, count: &StartedCount) {
        self.lock().member(end).started = Some(count.clone());
    }

    /// Stores an announced call of a rank.
    pub(super) fn announce(&self, end: ChannelEnd, call: &Fingerprint) {
        let mut state = self.lock();
        let of_channel = state.announced.entry(end.channel).or_default();
        of_channel.entry(end.world_rank).or_insert(CallHistory::NONE).begin(call);
    }

    pub(super) fn set_call_formatter(&self, describe: Describe) {
        self.lock().describe.get_or_insert(describe);
    }

    /// Stores the waits of all ranks, unless those of an earlier end are stored.
    pub(super) fn keep_waits(&self) {
        self.lock().keep_waits();
    }

    /// Returns how long this rank pauses before it sends.
    pub(super) fn pause(&self, world_rank: usize) -> Duration {
        self.lock().conditions.pause(world_rank)
    }

    /// Puts a message into the receiver's queue, where it arrives after the links have carried it.
    pub(super) fn send(
        &self,
        end: ChannelEnd,
        to: ChannelEnd,
        mut message: SimMessage,
        now: Duration,
    ) -> Sent {
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

    /// Looks for a message of `from`. If there is none, registers the unparker, which is used when `on` may
    /// have happened. `calls` are the last calls of the looking rank.
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
        let circle = state.circle(end).filter(|_| arrives.is_none());
        let crossing = state.crossing(end, on).filter(|_| arrives.is_none());
        if let Some(mismatch) = state.contradiction(end, calls).or(crossing) {
            return Found::CallMismatch(mismatch);
        }
        if let Some(waits) = circle {
            return Found::Circle(waits);
        }
        let circle = if arrives.is_none() { state.circle_of_calls(end) } else { None };
        let suspicious_at = circle.as_ref().map(|_| now.saturating_add(SUSPICION_INTERVAL));
        if let Some(CircleOfCalls { waits, is_certain: true }) = circle {
            return Found::Circle(waits);
        }
        let (silent_too_long_at, woken) = state.check_partition([from, end], since, now);
        drop(state);
        wake(woken);
        Found::Nothing {
            look_again: arrives.into_iter().chain(silent_too_long_at).chain(suspicious_at).min(),
        }
    }

    /// Returns a rank of the group from which a message was not received yet.
    pub(super) fn unread(&self, end: ChannelEnd) -> Option<usize> {
        let mut state = self.lock();
        let inbox = &state.member(end).inbox;
        inbox.iter().find(|(_, queue)| !queue.messages.is_empty()).map(|(from, _)| *from)
    }

    /// Chooses one of `count` messages that have arrived by this time. The seed determines the result.
    pub(super) fn choose(&self, count: usize, now: Duration) -> usize {
        if count == 1 { 0 } else { self.lock().random.choice(count, now) }
    }

    /// Ends a registered wait.
    pub(super) fn stop_waiting(&self, end: ChannelEnd) {
        self.lock().member(end).waiting = None;
    }

    /// Takes the oldest arrived message of this rank of the group.
    pub(super) fn take(&self, end: ChannelEnd, from: usize) -> Option<SimMessage> {
        let (message, woken) = {
            let mut state = self.lock();
            let queue = state.member(end).inbox.get_mut(&from)?;
            let (_, message) = queue.messages.pop_front()?;
            queue.bytes -= message.len();
            let sender = &mut state.members(end.channel)[from];
            (message, sender.waiting.take_if(|waiting| waiting.on.may_be_room_of(end.rank)))
        };
        wake(woken);
        Some(message)
    }

    /// Checks whether at most `window` bytes sent to `to` are unreceived. If not, registers the unparker, which is used
    /// when `on` may have happened.
    pub(super) fn look_for_room(
        &self,
        end: ChannelEnd,
        (to, on): (ChannelEnd, WaitTarget),
        window: usize,
        calls: &[Fingerprint],
        now: Duration,
        unparker: Unparker,
    ) -> Room {
        let mut state = self.lock();
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

    /// Aborts the job for the ranks that the reporter can reach, and returns the record. Returns the known
    /// record as the error if the reporter has one already.
    pub(super) fn abort(&self, abort: Abort, now: Duration) -> Result<Abort, Abort> {
        let (record, woken) = {
            let state = &mut *self.lock();
            let record = abort.with_circle(&state.waits_for_one());
            let record = record.followed(|rank, call| state.waits_for(rank, call));
            state.control.propose(record.clone(), now, &state.conditions)?;
            (record, state.wake_if_known())
        };
        wake(woken);
        Ok(record)
    }

    /// Sends a request of a rank to the store. Returns its number.
    pub(super) fn begin_store(
        &self,
        world_rank: usize,
        request: StoreRequest,
        now: Duration,
        unparker: Unparker,
    ) -> u64 {
        let mut state = self.lock();
        let arrives = state.carry_store(world_rank, true, now);
        state.store.begin(world_rank, request, arrives, unparker)
    }

    /// Looks for the reply to a request of this rank. Serves the request if it has arrived at the coordinator.
    pub(super) fn poll_store(&self, number: u64, world_rank: usize, now: Duration) -> StorePoll {
        let (poll, woken) = {
            let mut state = self.lock();
            if let Some(abort) = state.control.known(world_rank) {
                return StorePoll::Aborted(abort);
            }
            let woken = state.serve_store(number, world_rank, now);
            (state.store.poll(number, now), woken)
        };
        woken.iter().for_each(Unparker::unpark);
        poll
    }

    /// Removes a request that nobody waits for any more.
    pub(super) fn end_store(&self, number: u64) {
        self.lock().store.end(number);
    }

    /// Returns the number of channels that ranks are in, or may still enter.
    #[cfg(test)]
    pub(super) fn channels(&self) -> usize {
        self.lock().channels.len()
    }

    /// Wakes this thread whenever another rank knows the abort record.
    pub(super) fn notify_of_abort(&self, thread: Unparker) {
        self.lock().notified.push(thread);
    }

    /// Returns the abort record that this rank knows.
    pub(super) fn aborted(&self, world_rank: usize) -> Option<Abort> {
        self.lock().control.known(world_rank)
    }
}

/// Returns the time at which a rank began to wait for this; repeated polls belong to one wait.
fn waiting_since(before: Option<Waiter>, on: WaitTarget, now: Duration) -> Duration {
    before.filter(|before| before.on == on).map_or(now, |before| before.since)
}

impl ChannelMember {
    pub(super) fn waits_on(&self) -> Option<WaitTarget> {
        self.waiting.as_ref().map(|waiting| waiting.on)
    }

    /// Returns `true` if a message of this rank has arrived or is in flight.
    fn has_message_of(&self, rank: usize) -> bool {
        self.inbox.get(&rank).is_some_and(|queue| !queue.messages.is_empty())
    }
}

impl FabricState {
    fn members(&mut self, channel: ChannelId) -> &mut Vec<ChannelMember> {
        self.channels.get_mut(&channel).expect("a channel lives as long as one of its transports")
    }

    fn member(&mut self, end: ChannelEnd) -> &mut ChannelMember {
        &mut self.members(end.channel)[end.rank]
    }

    /// Returns the arrival time of a message that is sent now.
    fn carry(&mut self, from: ChannelEnd, to: ChannelEnd, bytes: usize, now: Duration) -> Duration {
        let pair = (from.world_rank, to.world_rank);
        let arrives = self.links.carry(pair, bytes, now, &mut self.random);
        self.conditions.arrival(pair, bytes, (now, arrives), &mut self.random)
    }

    /// Returns the arrival time of a message between a rank and the store that is sent now.
    fn carry_store(&mut self, world_rank: usize, is_request: bool, now: Duration) -> Duration {
        let Some(coordinator) = self.control.coordinator_rank() else { return now };
        let pair = if is_request { (world_rank, coordinator) } else { (coordinator, world_rank) };
        let arrives = self.links.carry(pair, MESSAGE_BYTES, now, &mut self.random);
        self.conditions.arrival(pair, MESSAGE_BYTES, (now, arrives), &mut self.random)
    }

    /// Serves a request of this rank if it has arrived at a coordinator that runs. Returns the wakers of the other
    /// ranks that get a reply.
    fn serve_store(&mut self, number: u64, world_rank: usize, now: Duration) -> Vec<Unparker> {
        if !self.store.has_arrived(number, now) || !self.control.serves(world_rank, now, &self.conditions) {
            return Vec::new();
        }
        let replies = self.store.serve(number).into_iter();
        let woken = replies.map(|(to, rank, reply)| {
            let arrives = self.carry_store(rank, false, now);
            (to, self.store.reply(to, arrives, reply))
        });
        woken.filter(|(to, _)| *to != number).map(|(_, unparker)| unparker).collect()
    }

    /// Aborts the job if the second rank waits for the first, and a partition has separated them for too
    /// long. Returns when that may be the case, and the ranks to wake.
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

    /// Delays messages in flight that would cross a partition.
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

    /// Returns the waiting ranks, if more ranks know the abort record than at the last call. They have to be
    /// woken.
    pub(super) fn wake_if_known(&mut self) -> Vec<Waiter> {
        let known_by = (0..self.transports.len()).filter(|&rank| self.control.known(rank).is_some()).count();
        if std::mem::replace(&mut self.known_by, known_by) == known_by {
            return Vec::new();
        }
        self.notified.iter().for_each(Unparker::unpark);
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

    fn record_fork(&mut self, parent: ChannelId, number: u64, made: SimForkedGroup) -> Vec<Waiter> {
        self.origins.insert(made.channel, (parent, number));
        let ForkRecord { made: all, differ } = self.made.entry((parent, number)).or_default();
        let overlap = |one: &SimForkedGroup, other: &SimForkedGroup| {
            let named = |member| other.members.contains(member) || *member == other.world_rank;
            one.channel != other.channel && one.members.iter().any(named)
        };
        let differs = |other: &&SimForkedGroup| overlap(other, &made) || overlap(&made, other);
        let others: Vec<_> = all.iter().filter(differs).map(|other| other.channel).collect();
        all.push(made);
        *differ |= !others.is_empty();
        if !*differ && all.len() == self.channels.get(&parent).map_or(0, Vec::len) {
            self.made.remove(&(parent, number));
        }
        let mut woken = Vec::new();
        for channel in others {
            // Signals are waited for on their own channel.
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

    /// Returns the members that a peer has named in place of those of this channel, if the peer has not
    /// entered this channel.
    fn named_instead(&self, end: ChannelEnd, peer: ChannelEnd) -> Option<Vec<usize>> {
        if self.channels[&end.call_channel][peer.rank].presence != Presence::Expected {
            return None;
        }
        let made = self.made.get(self.origins.get(&end.call_channel)?)?;
        let is_meant =
            |made: &&SimForkedGroup| made.world_rank == peer.world_rank && made.channel != end.call_channel;
        made.made.iter().find(is_meant).map(|made| made.members.clone())
    }

    /// Records the calls of a waiting rank, and finds another that waits, or has waited, in a contradicting
    /// call. Waits for messages and for signals are compared alike.
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
        let communicator = calls.iter().find(|call| **call != Fingerprint::NONE)?.communicator();
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

    /// Finds a rank that has announced a call which contradicts one that this rank has announced.
    fn announced_mismatch(&self, world_rank: usize) -> Option<CallMismatch> {
        self.announced.values().find_map(|of_channel| {
            let own = of_channel.get(&world_rank)?;
            of_channel.iter().find_map(|(&world_rank, calls)| {
                let contradiction = Fingerprint::contradiction(own.all(), calls.all());
                contradiction.map(|(ours, theirs)| CallMismatch { world_rank, ours, theirs })
            })
        })
    }

    /// Returns the awaited rank, if it waits for this rank in another call and no message is in flight between
    /// them. For example, one waits for a message of `send_recv`, and the other for a signal in shared memory.
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
            member.waits_on() == Some(WaitTarget::Message(end.rank)) && !member.has_message_of(end.rank)
        };
        let is_mutual = peer != end.rank && [&end.call_channel].into_iter().chain(signals).any(awaits_us);
        // Messages outside any call cannot be compared.
        let differ = ours != theirs && ![ours, theirs].contains(&Fingerprint::NONE);
        let world_rank = self.channels[&end.call_channel][peer].world_rank;
        (is_mutual && differ).then_some(CallMismatch { world_rank, ours, theirs })
    }

    /// Returns the ranks that wait for each other's messages on a channel, beginning with this one, if they are a circle.
    fn circle(&self, end: ChannelEnd) -> Option<Vec<CircularWait>> {
        let members = &self.channels[&end.channel];
        let (mut circle, mut rank) = (Vec::new(), end.rank);
        loop {
            let member = &members[rank];
            let Some(WaitTarget::Message(on)) = member.waits_on() else { return None };
            let call = member.position.call;
            // Messages outside any call are not compared, nor are signals, which have another channel than their calls.
            if member.has_message_of(on)
                || on == rank
                || call == Fingerprint::NONE
                || circle.len() == members.len()
            {
                return None;
            }
            circle.push(CircularWait { rank: member.world_rank, on: members[on].world_rank, call });
            rank = on;
            if rank == end.rank {
                return Some(circle);
            }
        }
    }

    /// Returns the ranks that wait for each other's messages or signals in calls of one communicator, beginning with this one,
    /// if they are a circle on several channels.
    fn circle_of_calls(&self, end: ChannelEnd) -> Option<CircleOfCalls> {
        let members = &self.channels[&end.call_channel];
        let communicator = members[end.rank].position.call.communicator();
        let channels = self.siblings.get(&communicator).filter(|channels| channels.len() > 1)?;
        let (mut circle, mut rank) = (CircleOfCalls { waits: Vec::new(), is_certain: true }, end.rank);
        loop {
            let (call_channel, on) = channels.iter().find_map(|&channel| {
                let call = self.channels.get(&channel)?.get(rank)?.position.call;
                let is_in_call = call != Fingerprint::NONE && call.communicator() == communicator;
                self.missing_from(channel, rank).filter(|_| is_in_call).map(|on| (channel, on))
            })?;
            if on == rank || circle.waits.len() == members.len() {
                return None;
            }
            let ChannelMember { world_rank, position, started, .. } = &self.channels[&call_channel][rank];
            circle.is_certain &= started.as_ref().is_some_and(StartedCount::is_zero);
            circle.waits.push(CircularWait {
                rank: *world_rank,
                on: members[on].world_rank,
                call: position.call,
            });
            rank = on;
            if rank == end.rank {
                return Some(circle);
            }
        }
    }

    /// Returns the rank for whose message or signal another one waits in the calls of this channel, if none is in flight.
    fn missing_from(&self, call_channel: ChannelId, rank: usize) -> Option<usize> {
        let signals = self.call_channels.iter().find(|(_, channel)| **channel == call_channel);
        [Some(&call_channel), signals.map(|(signals, _)| signals)].into_iter().flatten().find_map(|channel| {
            let member = self.channels.get(channel)?.get(rank)?;
            let Some(WaitTarget::Message(on)) = member.waits_on() else { return None };
            (!member.has_message_of(on)).then_some(on)
        })
    }

    /// Returns the waits of all ranks for one rank each.
    fn waits_for_one(&self) -> Vec<CircularWait> {
        let mut waits = Vec::new();
        for (channel, members) in &self.channels {
            let call_channel = self.call_channels.get(channel).unwrap_or(channel);
            for (rank, member) in members.iter().enumerate() {
                let on = match member.waits_on() {
                    Some(WaitTarget::Message(on)) if !member.has_message_of(on) => on,
                    Some(WaitTarget::Room(on)) => on,
                    _ => continue,
                };
                let call = self.channels.get(call_channel).map(|members| members[rank].position.call);
                let call = call.unwrap_or(Fingerprint::NONE);
                waits.push(CircularWait { rank: member.world_rank, on: members[on].world_rank, call });
            }
        }
        waits
    }

    /// Returns the rank that another one waits for, if it does so in this call.
    fn waits_for(&self, world_rank: usize, call: &Fingerprint) -> Option<usize> {
        self.channels.iter().find_map(|(channel, members)| {
            let end = members.iter().position(|member| member.world_rank == world_rank)?;
            let on = members[end].waits_on()?;
            let call_channel = self.call_channels.get(channel).unwrap_or(channel);
            self.channels[call_channel][end].waited_in.contains(call).then(|| members[on.peer()].world_rank)
        })
    }

    /// Returns `true` if this rank can never send or receive on this channel again.
    fn has_left(&self, end: ChannelEnd) -> bool {
        let gone = self.transports[end.world_rank] == 0 || self.is_gone(end.channel, end.rank);
        // A rank that died has said no goodbye.
        gone && !self.control.is_dead(end.world_rank)
    }

    /// Returns `true` if a rank has left a channel. A rank that has left a channel does not enter the channel
    /// of its signals any more.
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

    /// Removes a channel that no rank can use any more.
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
        // In the order of the channel ids: the order of wake-ups must not depend on the hash map's seed.
        let mut channels: Vec<_> = self.channels.iter_mut().collect();
        channels.sort_unstable_by_key(|(id, _)| **id);
        let members = channels.into_iter().flat_map(|(_, members)| members);
        members.filter_map(|member| member.waiting.take()).collect()
    }
}

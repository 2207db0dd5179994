//! What the transports of one in-process job share: queues, who is there, and the abort record.
//!
//! One lock guards it all, and it is never held over a call that may run another thread.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::control::{Control, silence_limit};
use super::fault::{Fault, When};
use super::link::Links;
use super::message::Message;
use super::random::SplitMix64;
use super::report::{self, Channel, Describe, Position};
use super::storm::{Effects, Plan};
use super::waiting::{On, Waiting, wake};
use super::weather::Weather;
use crate::bookkeeping::{BEAT, Calls};
use crate::runtime::Unparker;
use crate::{Abort, ChannelId, Fingerprint};

#[derive(Debug)]
pub(super) struct Fabric(Mutex<State>);

/// One rank's end of one channel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) channel: ChannelId,
    /// The channel whose calls are made on it.
    pub(super) home: ChannelId,
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
    Elsewhere(Elsewhere),
    /// The sender has named these members of the group.
    OtherMembers(Vec<usize>),
    Aborted(Abort),
}

/// This rank of the world waits, or has waited, in a call that can never meet one of the caller's, or has announced one.
pub(super) struct Elsewhere {
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
    Waiting {
        look_again: Option<Duration>,
    },
    /// The receiver has left.
    Left,
    Elsewhere(Elsewhere),
    /// The receiver has named these members of the group.
    OtherMembers(Vec<usize>),
    Aborted(Abort),
}

/// A group that a rank has made by a fork, whether it is a member or not.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) world_rank: usize,
    pub(super) channel: ChannelId,
    /// By their numbers in the world.
    pub(super) members: Vec<usize>,
}

/// What the ranks of a channel have made by one fork of it.
#[derive(Debug, Default)]
struct Fork {
    made: Vec<Made>,
    /// Whether two of them have named different members of one group.
    differ: bool,
}

#[derive(Debug)]
pub(super) struct State {
    channels: HashMap<ChannelId, Vec<Member>>,
    /// Of channels that carry the posts of another one's calls: that one.
    homes: HashMap<ChannelId, ChannelId>,
    /// By channel and rank of the world: the last calls that it has announced there.
    announced: BTreeMap<ChannelId, BTreeMap<usize, Calls>>,
    /// The channels on which ranks have waited in calls of each communicator.
    siblings: HashMap<u64, Vec<ChannelId>>,
    /// What the ranks of a channel have made by its fork of this number, until all have made it and agree.
    made: HashMap<(ChannelId, u64), Fork>,
    /// The fork that each channel came of.
    origins: HashMap<ChannelId, (ChannelId, u64)>,
    /// How many transports each rank of the world still has.
    transports: Vec<usize>,
    pub(super) control: Control,
    links: Links,
    pub(super) weather: Weather,
    pub(super) plan: Plan,
    /// How many ranks knew of the job's end when the waiting were last woken because of it.
    told: usize,
    describe: Option<Describe>,
    /// What every rank waited for when the first knew of the job's end.
    waits: Option<Vec<String>>,
    /// Decides what links and weather leave open.
    random: SplitMix64,
}

#[derive(Debug, Default)]
pub(super) struct Member {
    pub(super) presence: Presence,
    pub(super) world_rank: usize,
    pub(super) position: Position,
    inbox: BTreeMap<usize, Queue>,
    waiting: Option<Waiting>,
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

impl Fabric {
    pub(super) fn new(
        links: Links,
        coordinator: Option<usize>,
        faults: Vec<(When, Fault)>,
        random: SplitMix64,
    ) -> Self {
        let world_size = links.hosts.len();
        let (channels, homes) = (HashMap::new(), HashMap::new());
        let (transports, weather) = (vec![0; world_size], Weather::default());
        let control = Control::new(&links.hosts, coordinator);
        let plan = Plan { faults, operations: vec![0; world_size], ..Plan::default() };
        let (told, describe, waits) = (0, None, None);
        let state = State {
            channels,
            homes,
            announced: BTreeMap::new(),
            siblings: HashMap::new(),
            made: HashMap::new(),
            origins: HashMap::new(),
            transports,
            control,
            links,
            weather,
            plan,
            told,
            describe,
            waits,
            random,
        };
        Self(Mutex::new(state))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a new transport, of a group of these ranks of the world.
    pub(super) fn enter(&self, place: Place, world_ranks: &[usize]) {
        let mut state = self.lock();
        state.transports[place.world_rank] += 1;
        let expected = |&world_rank| Member { world_rank, ..Member::default() };
        let members = state.channels.entry(place.channel);
        let members = members.or_insert_with(|| world_ranks.iter().map(expected).collect());
        members[place.rank].presence = Presence::Here;
        if place.home != place.channel {
            state.homes.insert(place.channel, place.home);
        }
    }

    /// Notes that a transport was dropped, and wakes those who wait for it.
    pub(super) fn leave(&self, place: Place, now: Duration) {
        let woken = self.lock().leave(place, now);
        wake(woken);
    }

    /// Notes what a rank has made by the fork of a channel with this number. Whoever waits for it in another group that others
    /// have made by the same fork is woken.
    pub(super) fn note_fork(&self, parent: ChannelId, number: u64, made: Made) {
        let woken = self.lock().note_fork(parent, number, made);
        wake(woken);
    }

    /// Counts an operation of this rank; there may be a fault planned for it.
    pub(super) fn count_operation(&self, world_rank: usize, now: Duration) -> Effects {
        self.lock().count_operation(world_rank, now)
    }

    /// Does what is due by now. Gives when something is due next as well; the unparker is used when that changes.
    pub(super) fn turn(&self, now: Duration, station: Unparker) -> (Effects, Option<Duration>) {
        self.lock().turn(now, station)
    }

    /// What is to be told of a run: how many operations each rank has done, which faults have happened, and what
    /// every rank waited for at the end of the job.
    pub(super) fn history(&self) -> (Vec<u64>, Vec<String>, Vec<String>) {
        let state = self.lock();
        (state.plan.operations.clone(), state.plan.happened.clone(), state.waits.clone().unwrap_or_default())
    }

    /// Notes where a rank is.
    pub(super) fn note(&self, place: Place, position: Position) {
        self.lock().member(place).position = position;
    }

    /// Keeps a call that a rank announces.
    pub(super) fn announce(&self, place: Place, call: &Fingerprint) {
        let mut state = self.lock();
        let of_channel = state.announced.entry(place.channel).or_default();
        of_channel.entry(place.world_rank).or_insert(Calls::NONE).begin(call);
    }

    pub(super) fn describe_calls(&self, describe: Describe) {
        self.lock().describe.get_or_insert(describe);
    }

    /// Keeps what every rank waits for now, unless that of an earlier end is kept.
    pub(super) fn keep_waits(&self) {
        self.lock().keep_waits();
    }

    /// How long this rank pauses before it sends.
    pub(super) fn pause(&self, world_rank: usize) -> Duration {
        self.lock().weather.pause(world_rank)
    }

    /// Puts a message into the receiver's queue, where it arrives when the links have carried it.
    pub(super) fn send(&self, place: Place, to: Place, mut message: Message, now: Duration) -> Sent {
        let woken = {
            let mut state = self.lock();
            if let Some(abort) = state.control.known(place.world_rank) {
                return Sent::Aborted(abort);
            }
            if state.has_left(to) {
                return Sent::Left;
            }
            let arrives = state.carry(place, to, message.len(), now);
            if let Some(byte) = state.weather.corruption(place.world_rank, to.world_rank) {
                message.change_byte(byte);
            }
            let member = state.member(to);
            let queue = member.inbox.entry(place.rank).or_default();
            queue.bytes += message.len();
            queue.messages.push_back((arrives, message));
            member.waiting.take_if(|waiting| waiting.on.may_be_message_of(place.rank))
        };
        wake(woken);
        Sent::Queued
    }

    /// Looks for a message of `from`, or remembers whom to wake when what it waits `on` comes; these are the last calls of
    /// the one who looks.
    pub(super) fn look(
        &self,
        place: Place,
        (from, on): (Place, On),
        calls: &[Fingerprint],
        now: Duration,
        unparker: Unparker,
    ) -> Found {
        let mut state = self.lock();
        if let Some(abort) = state.control.known(place.world_rank) {
            return Found::Aborted(abort);
        }
        let sender_left = state.has_left(from);
        let member = state.member(place);
        let since = waiting_since(member.waiting.take(), on, now);
        let arrives = member.inbox.get(&from.rank).and_then(|queue| queue.messages.front());
        let arrives = arrives.map(|(arrives, _)| *arrives);
        if arrives.is_some_and(|arrives| arrives <= now) {
            return Found::Message;
        }
        if sender_left && arrives.is_none() {
            return Found::Left;
        }
        member.waiting = Some(Waiting { on, since, unparker });
        if let Some(members) = state.named_instead(place, from) {
            return Found::OtherMembers(members);
        }
        let crossing = state.crossing(place, on).filter(|_| arrives.is_none());
        if let Some(elsewhere) = state.contradiction(place, calls).or(crossing) {
            return Found::Elsewhere(elsewhere);
        }
        let (parts, woken) = state.part([from, place], since, now);
        drop(state);
        wake(woken);
        Found::Nothing { look_again: arrives.into_iter().chain(parts).min() }
    }

    /// Returns a rank of the group of whose messages one was not received.
    pub(super) fn unread(&self, place: Place) -> Option<usize> {
        let mut state = self.lock();
        let inbox = &state.member(place).inbox;
        inbox.iter().find(|(_, queue)| !queue.messages.is_empty()).map(|(from, _)| *from)
    }

    /// Notes that a rank waits no longer for what it has looked for.
    pub(super) fn stop_waiting(&self, place: Place) {
        self.lock().member(place).waiting = None;
    }

    /// Takes the oldest message of this rank of the group, which has arrived.
    pub(super) fn take(&self, place: Place, from: usize) -> Option<Message> {
        let (message, woken) = {
            let mut state = self.lock();
            let queue = state.member(place).inbox.get_mut(&from)?;
            let (_, message) = queue.messages.pop_front()?;
            queue.bytes -= message.len();
            let sender = &mut state.members(place.channel)[from];
            (message, sender.waiting.take_if(|waiting| waiting.on == On::Room(place.rank)))
        };
        wake(woken);
        Some(message)
    }

    /// Looks whether at most `window` bytes of what was sent to `to` were not received yet, or remembers whom to
    /// wake when some are.
    pub(super) fn look_for_room(
        &self,
        place: Place,
        to: Place,
        window: usize,
        calls: &[Fingerprint],
        now: Duration,
        unparker: Unparker,
    ) -> Room {
        let mut state = self.lock();
        let on = On::Room(to.rank);
        let since = waiting_since(state.member(place).waiting.take(), on, now);
        let unreceived = state.member(to).inbox.get(&place.rank).map_or(0, |queue| queue.bytes);
        if unreceived <= window {
            return Room::Enough;
        }
        if let Some(abort) = state.control.known(place.world_rank) {
            return Room::Aborted(abort);
        }
        if state.has_left(to) {
            return Room::Left;
        }
        state.member(place).waiting = Some(Waiting { on, since, unparker });
        if let Some(members) = state.named_instead(place, to) {
            return Room::OtherMembers(members);
        }
        if let Some(elsewhere) = state.contradiction(place, calls) {
            return Room::Elsewhere(elsewhere);
        }
        let (look_again, woken) = state.part([to, place], since, now);
        drop(state);
        wake(woken);
        Room::Waiting { look_again }
    }

    /// Ends the job, as far as the reporter's word reaches, and gives what is told of it; if the reporter knows of an end
    /// already, that is the error.
    pub(super) fn abort(&self, abort: Abort, now: Duration) -> Result<Abort, Abort> {
        let (told, woken) = {
            let state = &mut *self.lock();
            let told = abort.followed(|rank, call| state.waits_for(rank, call));
            state.control.propose(told.clone(), now, &state.weather)?;
            (told, state.wake_if_told())
        };
        wake(woken);
        Ok(told)
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
fn waiting_since(before: Option<Waiting>, on: On, now: Duration) -> Duration {
    before.filter(|before| before.on == on).map_or(now, |before| before.since)
}

impl Member {
    pub(super) fn waits_on(&self) -> Option<On> {
        self.waiting.as_ref().map(|waiting| waiting.on)
    }
}

impl State {
    fn members(&mut self, channel: ChannelId) -> &mut Vec<Member> {
        self.channels.get_mut(&channel).expect("a channel lives as long as one of its transports")
    }

    fn member(&mut self, place: Place) -> &mut Member {
        &mut self.members(place.channel)[place.rank]
    }

    /// When a message that is sent now arrives.
    fn carry(&mut self, from: Place, to: Place, bytes: usize, now: Duration) -> Duration {
        let pair = (from.world_rank, to.world_rank);
        let arrives = self.links.carry(pair, bytes, now, &mut self.random);
        self.weather.arrival(pair, bytes, (now, arrives), &mut self.random)
    }

    /// Ends the job if the last of these waits for the first, and they have not reached each other for too long. Gives when that
    /// may be so, and those who wait and are to hear that it is.
    fn part(
        &mut self,
        [peer, place]: [Place; 2],
        since: Duration,
        now: Duration,
    ) -> (Option<Duration>, Vec<Waiting>) {
        let pair = [peer.world_rank, place.world_rank];
        let Some(parted) = self.weather.parted_since(pair, now) else { return (None, Vec::new()) };
        let [theirs, ours] = pair.map(|rank| self.links.hosts[rank]);
        let due = parted.max(since).saturating_add(silence_limit(theirs == ours));
        if now < due {
            return (Some(due), Vec::new());
        }
        self.control.part(pair, now, &self.weather);
        (Some(now.saturating_add(BEAT)), self.wake_if_told())
    }

    /// Keeps messages that are under way from crossing a cut.
    pub(super) fn hold_back(&mut self, now: Duration) {
        for members in self.channels.values_mut() {
            let world_ranks: Vec<_> = members.iter().map(|member| member.world_rank).collect();
            for member in members {
                for (from, queue) in &mut member.inbox {
                    let pair = (world_ranks[*from], member.world_rank);
                    let under_way = queue.messages.iter_mut().filter(|(arrives, _)| *arrives > now);
                    under_way.for_each(|(arrives, _)| {
                        *arrives = self.weather.after_cuts(pair, (now, *arrives));
                    });
                }
            }
        }
    }

    /// Those who wait, if somebody knows of the job's end who did not when this was last asked.
    pub(super) fn wake_if_told(&mut self) -> Vec<Waiting> {
        let told = (0..self.transports.len()).filter(|&rank| self.control.known(rank).is_some()).count();
        if std::mem::replace(&mut self.told, told) == told {
            return Vec::new();
        }
        self.keep_waits();
        self.all_waiting()
    }

    fn keep_waits(&mut self) {
        if self.waits.is_none() {
            let home = |id| self.channels.get(self.homes.get(id)?).map(Vec::as_slice);
            let mut channels: Vec<Channel<'_>> = self
                .channels
                .iter()
                .map(|(id, members)| Channel { id: *id, members, home: home(id) })
                .collect();
            channels.sort_unstable_by_key(|channel| channel.id);
            self.waits = Some(report::lines(&channels, self.describe));
        }
    }

    fn note_fork(&mut self, parent: ChannelId, number: u64, made: Made) -> Vec<Waiting> {
        self.origins.insert(made.channel, (parent, number));
        let Fork { made: all, differ } = self.made.entry((parent, number)).or_default();
        let overlap = |one: &Made, other: &Made| {
            let named = |member| other.members.contains(member) || *member == other.world_rank;
            one.channel != other.channel && one.members.iter().any(named)
        };
        let differs = |other: &&Made| overlap(other, &made) || overlap(&made, other);
        let others: Vec<_> = all.iter().filter(differs).map(|other| other.channel).collect();
        all.push(made);
        *differ |= !others.is_empty();
        if !*differ && all.len() == self.channels.get(&parent).map_or(0, Vec::len) {
            self.made.remove(&(parent, number));
        }
        let mut woken = Vec::new();
        for channel in others {
            // Posts are waited for on a channel of their own.
            let posts = self.homes.iter().find(|(_, home)| **home == channel).map(|(posts, _)| *posts);
            for channel in std::iter::once(channel).chain(posts) {
                let members = self.channels.get_mut(&channel).into_iter().flatten();
                woken.extend(members.filter_map(|member| member.waiting.take()));
            }
        }
        woken
    }

    /// The members that a peer has named where this rank has named those of this channel, which the peer has not come to then.
    fn named_instead(&self, place: Place, peer: Place) -> Option<Vec<usize>> {
        if self.channels[&place.home][peer.rank].presence != Presence::Expected {
            return None;
        }
        let made = self.made.get(self.origins.get(&place.home)?)?;
        let is_meant = |made: &&Made| made.world_rank == peer.world_rank && made.channel != place.home;
        made.made.iter().find(is_meant).map(|made| made.members.clone())
    }

    /// Notes the calls of one who waits, and finds another who waits, or has waited, in one that can never meet them:
    /// for messages or for posts, which are the same calls.
    fn contradiction(&mut self, place: Place, calls: &[Fingerprint]) -> Option<Elsewhere> {
        if let Some(announced) = self.announced_elsewhere(place.world_rank) {
            return Some(announced);
        }
        let member = self.member(Place { channel: place.home, ..place });
        if member.waited_in == calls {
            // The others have compared theirs with these.
            return None;
        }
        member.waited_in = calls.to_vec();
        let communicator = Fingerprint::communicator(calls)?;
        let siblings = self.siblings.entry(communicator).or_default();
        if !siblings.contains(&place.home) {
            siblings.push(place.home);
        }
        let mut members = siblings.iter().flat_map(|channel| &self.channels[channel]);
        members.find_map(|member| {
            let contradiction = Fingerprint::contradiction(calls, &member.waited_in);
            contradiction.map(|(ours, theirs)| Elsewhere { world_rank: member.world_rank, ours, theirs })
        })
    }

    /// Finds a rank that has announced a call which can never meet one that this rank has announced.
    fn announced_elsewhere(&self, world_rank: usize) -> Option<Elsewhere> {
        self.announced.values().find_map(|of_channel| {
            let own = of_channel.get(&world_rank)?;
            of_channel.iter().find_map(|(&world_rank, calls)| {
                let contradiction = Fingerprint::contradiction(own.all(), calls.all());
                contradiction.map(|(ours, theirs)| Elsewhere { world_rank, ours, theirs })
            })
        })
    }

    /// The rank that this one waits for, if that one waits for this one in another call, and nothing is on its way between
    /// them: for a message, as of `send_recv`, and for a post in shared memory, say.
    fn crossing(&self, place: Place, on: On) -> Option<Elsewhere> {
        let On::Message(peer) = on else { return None };
        let call = |rank: usize| self.channels[&place.home][rank].position.call;
        let [ours, theirs] = [place.rank, peer].map(call);
        let posts = self.homes.iter().find(|(_, home)| **home == place.home).map(|(posts, _)| posts);
        let awaits_us = |channel: &ChannelId| {
            let Some(member) = self.channels.get(channel).map(|members| &members[peer]) else { return false };
            let has_more = member.inbox.get(&place.rank).is_some_and(|queue| !queue.messages.is_empty());
            member.waits_on() == Some(On::Message(place.rank)) && !has_more
        };
        let is_mutual = peer != place.rank && [&place.home].into_iter().chain(posts).any(awaits_us);
        // Of messages outside any call nobody knows what they belong to.
        let differ = ours != theirs && ![ours, theirs].contains(&Fingerprint::NONE);
        let world_rank = self.channels[&place.home][peer].world_rank;
        (is_mutual && differ).then_some(Elsewhere { world_rank, ours, theirs })
    }

    /// For which rank another waits, if it does so in this call.
    fn waits_for(&self, world_rank: usize, call: &Fingerprint) -> Option<usize> {
        self.channels.iter().find_map(|(channel, members)| {
            let place = members.iter().position(|member| member.world_rank == world_rank)?;
            let on = members[place].waits_on()?;
            let home = self.homes.get(channel).unwrap_or(channel);
            self.channels[home][place].waited_in.contains(call).then(|| members[on.peer()].world_rank)
        })
    }

    /// Whether this rank can never send or receive here again.
    fn has_left(&self, place: Place) -> bool {
        let gone = self.transports[place.world_rank] == 0 || self.is_gone(place.channel, place.rank);
        // Who died has said no goodbye.
        gone && !self.control.is_dead(place.world_rank)
    }

    /// Whether a rank has left a channel; one that has left another channel does not come to that of its posts any more.
    fn is_gone(&self, channel: ChannelId, rank: usize) -> bool {
        let Some(members) = self.channels.get(&channel) else { return true };
        match members[rank].presence {
            Presence::Gone => true,
            Presence::Here => false,
            Presence::Expected => self.homes.get(&channel).is_some_and(|&home| self.is_gone(home, rank)),
        }
    }

    fn leave(&mut self, place: Place, now: Duration) -> Vec<Waiting> {
        let world_rank = place.world_rank;
        *self.member(place) = Member { presence: Presence::Gone, world_rank, ..Member::default() };
        self.transports[world_rank] -= 1;
        if let Some(of_channel) = self.announced.get_mut(&place.channel) {
            of_channel.remove(&world_rank);
        }
        self.announced.retain(|_, of_channel| !of_channel.is_empty());
        let mut woken = Vec::new();
        if self.transports[world_rank] == 0 {
            self.control.leave(world_rank, now, &self.weather);
            woken = self.all_waiting();
        }
        let posts = self.homes.iter().find(|(_, home)| **home == place.channel).map(|(posts, _)| *posts);
        for channel in std::iter::once(place.channel).chain(posts) {
            let its = |waiting: &mut Waiting| waiting.on.may_be_of(place.rank);
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
            self.homes.remove(&channel);
            self.origins.remove(&channel);
            self.made.retain(|(parent, _), _| *parent != channel);
            self.siblings.retain(|_, channels| {
                channels.retain(|other| *other != channel);
                !channels.is_empty()
            });
        }
    }

    fn all_waiting(&mut self) -> Vec<Waiting> {
        // In the order of the channels' ids: the order of wake-ups must not depend on the hash map's seed.
        let mut channels: Vec<_> = self.channels.iter_mut().collect();
        channels.sort_unstable_by_key(|(id, _)| **id);
        let members = channels.into_iter().flat_map(|(_, members)| members);
        members.filter_map(|member| member.waiting.take()).collect()
    }
}

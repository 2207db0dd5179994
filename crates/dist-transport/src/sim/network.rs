//! What the transports of one in-process job share: queues, who is there, and the abort record.
//!
//! One lock guards it all, and it is never held over a call that may run another thread.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::message::Message;
use crate::runtime::Unparker;
use crate::{Abort, ChannelId, Fingerprint};

#[derive(Debug)]
pub(super) struct Network(Mutex<State>);

/// One rank's end of one channel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) channel: ChannelId,
    /// Its number in the group that the channel serves.
    pub(super) rank: usize,
    /// Its number in the world.
    pub(super) world_rank: usize,
}

/// What a look for a message found.
pub(super) enum Found {
    /// There is one.
    Message,
    /// Nothing yet: the unparker is used when there is reason to look again.
    Nothing,
    /// The sender has left, and left nothing behind.
    Left,
    /// This rank of the group waits, or has waited, after a call that can never have met the caller's.
    Elsewhere {
        rank: usize,
        ours: Fingerprint,
        theirs: Fingerprint,
    },
    Aborted(Abort),
}

/// What became of a message to be sent.
pub(super) enum Sent {
    Queued,
    /// The receiver has left.
    Left,
    Aborted(Abort),
}

#[derive(Debug)]
struct State {
    channels: HashMap<ChannelId, Vec<Member>>,
    /// How many transports each rank of the world still has.
    transports: Vec<usize>,
    abort: Option<Abort>,
}

#[derive(Debug, Default)]
struct Member {
    presence: Presence,
    inbox: BTreeMap<usize, VecDeque<Message>>,
    waiting: Option<Waiting>,
    /// The call in which it waited last, and the one before.
    waited_in: Vec<Fingerprint>,
}

#[derive(Debug, Default, PartialEq)]
enum Presence {
    #[default]
    Expected,
    Here,
    Gone,
}

#[derive(Debug)]
struct Waiting {
    from: usize,
    unparker: Unparker,
}

impl Network {
    pub(super) fn new(world_size: usize) -> Self {
        Self(Mutex::new(State { channels: HashMap::new(), transports: vec![0; world_size], abort: None }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a new transport, of a group of `world_size`.
    pub(super) fn enter(&self, place: Place, world_size: usize) {
        let mut state = self.lock();
        state.transports[place.world_rank] += 1;
        let members = state.channels.entry(place.channel).or_default();
        members.resize_with(world_size, Member::default);
        members[place.rank].presence = Presence::Here;
    }

    /// Notes that a transport was dropped, and wakes those who wait for it.
    pub(super) fn leave(&self, place: Place) {
        let woken = self.lock().leave(place);
        wake(woken);
    }

    /// Puts a message into the receiver's queue.
    pub(super) fn send(&self, place: Place, to: Place, message: Message) -> Sent {
        let woken = {
            let mut state = self.lock();
            if let Some(abort) = state.abort {
                return Sent::Aborted(abort);
            }
            if state.has_left(to) {
                return Sent::Left;
            }
            let member = state.member(to);
            member.inbox.entry(place.rank).or_default().push_back(message);
            member.waiting.take_if(|waiting| waiting.from == place.rank)
        };
        wake(woken);
        Sent::Queued
    }

    /// Looks for a message of `from`, or remembers whom to wake when one comes; these are the last
    /// calls of the one who looks.
    pub(super) fn look(&self, place: Place, from: Place, calls: &[Fingerprint], unparker: Unparker) -> Found {
        let mut state = self.lock();
        if let Some(abort) = state.abort {
            return Found::Aborted(abort);
        }
        let sender_left = state.has_left(from);
        let member = state.member(place);
        member.waiting = None;
        if member.inbox.get(&from.rank).is_some_and(|messages| !messages.is_empty()) {
            return Found::Message;
        }
        if sender_left {
            return Found::Left;
        }
        member.waiting = Some(Waiting { from: from.rank, unparker });
        member.waited_in = calls.to_vec();
        let mut members = state.channels[&place.channel].iter().enumerate();
        let found = members.find_map(|(rank, member)| {
            let contradiction = Fingerprint::contradiction(calls, &member.waited_in);
            contradiction.map(|(ours, theirs)| Found::Elsewhere { rank, ours, theirs })
        });
        found.unwrap_or(Found::Nothing)
    }

    /// Takes the oldest message of this rank of the group.
    pub(super) fn take(&self, place: Place, from: usize) -> Option<Message> {
        self.lock().member(place).inbox.get_mut(&from)?.pop_front()
    }

    /// Ends the job; if it has ended already, gives the reason that holds.
    pub(super) fn abort(&self, abort: Abort) -> Result<(), Abort> {
        let woken = {
            let mut state = self.lock();
            if let Some(first) = state.abort {
                return Err(first);
            }
            state.abort = Some(abort);
            state.all_waiting()
        };
        wake(woken);
        Ok(())
    }

    /// How many channels somebody is in, or may still come to.
    #[cfg(test)]
    pub(super) fn channels(&self) -> usize {
        self.lock().channels.len()
    }

    pub(super) fn aborted(&self) -> Option<Abort> {
        self.lock().abort
    }
}

impl State {
    fn member(&mut self, place: Place) -> &mut Member {
        let members = self.channels.get_mut(&place.channel);
        &mut members.expect("a channel lives as long as one of its transports")[place.rank]
    }

    /// Whether this rank can never send or receive here again.
    fn has_left(&mut self, place: Place) -> bool {
        self.transports[place.world_rank] == 0 || self.member(place).presence == Presence::Gone
    }

    fn leave(&mut self, place: Place) -> Vec<Waiting> {
        let member = self.member(place);
        *member = Member { presence: Presence::Gone, ..Member::default() };
        self.transports[place.world_rank] -= 1;
        if self.transports[place.world_rank] == 0 {
            let woken = self.all_waiting();
            self.forget(place.channel);
            return woken;
        }
        let members = self.channels.get_mut(&place.channel).into_iter().flatten();
        let woken = members.filter_map(|member| member.waiting.take_if(|waiting| waiting.from == place.rank));
        let woken = woken.collect();
        self.forget(place.channel);
        woken
    }

    /// Drops a channel that nobody can use any more.
    fn forget(&mut self, channel: ChannelId) {
        if self.channels[&channel].iter().all(|member| member.presence == Presence::Gone) {
            self.channels.remove(&channel);
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

fn wake(woken: impl IntoIterator<Item = Waiting>) {
    for waiting in woken {
        waiting.unparker.unpark();
    }
}

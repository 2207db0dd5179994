//! Circles of waits: each rank waits for a message or a signal of the next one, and the last one for the first.
//!
//! The reports of the ranks show a possible circle. A message may still be on its way, so each rank is asked twice how many
//! messages it has sent to the rank that waits for it, and how many signals it has given. The second answer was given after the
//! coordinator had all reports. If it is the number that the waiting rank has received, no rank of the circle can go on.
//!
//! The messages of one channel can be a circle alone. The calls of several channels of one communicator, such as a receive and
//! an all_reduce, are a circle if no rank of it has started operations that other threads execute.

use super::{RankSlot, RendezvousServer};
use crate::bootstrap::control::{Frame, Missing, WaitReport};
use crate::shm_group::CALLS_MAX;
use crate::{Abort, ChannelId, CircularWait, Fingerprint};

/// The number of messages that a rank has begun to send to another one, and of the signals that it has given.
#[derive(Debug, Clone, Copy)]
pub(super) struct SentCount {
    messages: u64,
    signals: u64,
    /// `true` if it has said so twice.
    is_confirmed: bool,
}

/// The waits that can be a circle.
#[derive(Debug, Clone, Copy)]
enum CircleScope {
    /// Waits for messages of this channel.
    Channel(ChannelId),
    /// Waits for messages and signals in calls of this communicator, each the only open operation of its rank there.
    Communicator(u64),
}

/// A rank of a possible circle.
struct CircleMember {
    rank: usize,
    channel: ChannelId,
    wait: WaitReport,
    call: Fingerprint,
}

impl CircleScope {
    /// Returns `true` if a wait on this channel in this call may be a part of a circle.
    fn contains(self, channel: ChannelId, wait: &WaitReport, call: &Fingerprint) -> bool {
        // Messages outside any call are not compared.
        let is_in_call = *call != Fingerprint::NONE;
        is_in_call
            && match (self, wait.missing) {
                (_, Missing::Anything | Missing::Room) => false,
                (Self::Channel(of), Missing::Message(_)) => channel == of,
                (Self::Channel(_), Missing::Signal(_)) => false,
                (Self::Communicator(of), _) => wait.is_only_call && call.communicator() == of,
            }
    }
}

impl RendezvousServer {
    /// Asks the ranks of a possible circle of waits, which a report has completed.
    pub(super) fn suspect_circle(&mut self, reporter: usize, channel: ChannelId) {
        if let Some(RankSlot::Joined(member)) = self.slots.get_mut(reporter) {
            member.sent.retain(|(of, _), _| *of != channel);
        }
        let is_reported = |first: &CircleMember| first.channel == channel;
        let circle =
            self.possible_circles(reporter, channel).find(|circle| circle.first().is_some_and(is_reported));
        for CircleMember { channel, wait, .. } in circle.unwrap_or_default() {
            if let Some(RankSlot::Joined(next)) = self.slots.get_mut(wait.on as usize) {
                next.sent.remove(&(channel, wait.index));
            }
            self.pass_on(wait.on, Frame::AskSent { channel, to: wait.index });
        }
    }

    /// Takes the answer of a rank, and aborts the job if it completes the proof of a circle.
    pub(super) fn take_sent(
        &mut self,
        rank: usize,
        (channel, to): (ChannelId, u32),
        (messages, signals): (u64, u64),
    ) {
        let is_asked = |member: &CircleMember| {
            member.channel == channel && member.wait.index == to && member.wait.on as usize == rank
        };
        let circle = self.possible_circles(rank, channel).find(|circle| circle.iter().any(is_asked));
        let Some(circle) = circle else { return };
        let Some(RankSlot::Joined(member)) = self.slots.get_mut(rank) else { return };
        let before = member.sent.get(&(channel, to));
        let is_confirmed = before.is_some_and(|count| (count.messages, count.signals) == (messages, signals));
        member.sent.insert((channel, to), SentCount { messages, signals, is_confirmed });
        if !is_confirmed {
            return self.pass_on(u32::try_from(rank).unwrap_or(u32::MAX), Frame::AskSent { channel, to });
        }
        let is_proven = |CircleMember { channel, wait, .. }: &CircleMember| {
            let Some(RankSlot::Joined(next)) = self.slots.get(wait.on as usize) else { return false };
            let is_missing = |sent: &SentCount| match wait.missing {
                Missing::Anything | Missing::Room => false,
                Missing::Message(received) => sent.messages == received,
                Missing::Signal(seen) => sent.signals == seen,
            };
            let sent = next.sent.get(&(*channel, wait.index));
            sent.is_some_and(|sent| sent.is_confirmed && is_missing(sent))
        };
        if circle.iter().all(is_proven) {
            let wait =
                |CircleMember { rank, wait, call, .. }| CircularWait { rank, on: wait.on as usize, call };
            self.abort(Abort::circle(circle.into_iter().map(wait).collect(), rank));
        }
    }

    /// Returns the waits of all ranks for one rank each, according to their last reports.
    pub(super) fn waits(&self) -> Vec<CircularWait> {
        let of_rank = |(rank, slot): (usize, &RankSlot)| {
            let RankSlot::Joined(member) = slot else { return Vec::new() };
            let waits = member.waiting.values().filter(|(wait, _)| wait.missing != Missing::Anything);
            let wait = |(wait, [call, ..]): &(WaitReport, [Fingerprint; CALLS_MAX])| CircularWait {
                rank,
                on: wait.on as usize,
                call: *call,
            };
            waits.map(wait).collect()
        };
        self.slots.iter().enumerate().flat_map(of_rank).collect()
    }

    /// Returns the circles of ranks that wait for each other according to their last reports, each beginning with this rank: of
    /// messages of this channel, and of calls of each communicator in which the rank waits.
    fn possible_circles(&self, first: usize, channel: ChannelId) -> impl Iterator<Item = Vec<CircleMember>> {
        let mut scopes = vec![CircleScope::Channel(channel)];
        if let Some(RankSlot::Joined(member)) = self.slots.get(first) {
            let communicators = member.waiting.values().map(|(_, [call, ..])| call.communicator());
            scopes.extend(communicators.map(CircleScope::Communicator));
        }
        scopes.into_iter().filter_map(move |scope| self.possible_circle(first, scope))
    }

    /// Returns the ranks that wait for each other, beginning with this one, if they are a circle according to their last reports.
    fn possible_circle(&self, first: usize, scope: CircleScope) -> Option<Vec<CircleMember>> {
        let (mut circle, mut rank) = (Vec::new(), first);
        loop {
            let Some(RankSlot::Joined(member)) = self.slots.get(rank) else { return None };
            let mut waits = member.waiting.iter();
            let (&channel, &(wait, [call, ..])) =
                waits.find(|(channel, (wait, [call, ..]))| scope.contains(**channel, wait, call))?;
            let on = wait.on as usize;
            if on == rank || circle.len() == self.slots.len() {
                return None;
            }
            circle.push(CircleMember { rank, channel, wait, call });
            rank = on;
            if rank == first {
                return Some(circle);
            }
        }
    }
}

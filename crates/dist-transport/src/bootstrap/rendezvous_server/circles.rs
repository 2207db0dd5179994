//! Circles of waits: each rank waits for a message of the next one, and the last one for the first.
//!
//! The reports of the ranks show a possible circle. A message may still be on its way, so each rank is asked twice how many
//! messages it has sent to the rank that waits for it. The second answer was given after the coordinator had all reports. If
//! it is the number of messages that the waiting rank has received, no rank of the circle can go on.

use super::{RankSlot, RendezvousServer};
use crate::bootstrap::control::{Frame, Missing, WaitReport};
use crate::{Abort, ChannelId, CircularWait, Fingerprint};

/// The number of messages that a rank has begun to send to another one.
#[derive(Debug, Clone, Copy)]
pub(super) struct SentCount {
    messages: u64,
    /// `true` if it has said so twice.
    is_confirmed: bool,
}

/// A rank of a possible circle.
struct CircleMember {
    rank: usize,
    wait: WaitReport,
    call: Fingerprint,
}

impl RendezvousServer {
    /// Asks the ranks of a possible circle of waits, which a report has completed.
    pub(super) fn suspect_circle(&mut self, reporter: usize, channel: ChannelId) {
        if let Some(RankSlot::Joined(member)) = self.slots.get_mut(reporter) {
            member.sent.retain(|(of, _), _| *of != channel);
        }
        for CircleMember { wait, .. } in self.possible_circle(reporter, channel).unwrap_or_default() {
            if let Some(RankSlot::Joined(next)) = self.slots.get_mut(wait.on as usize) {
                next.sent.remove(&(channel, wait.index));
            }
            self.pass_on(wait.on, Frame::AskSent { channel, to: wait.index });
        }
    }

    /// Takes the answer of a rank, and aborts the job if it completes the proof of a circle.
    pub(super) fn take_sent(&mut self, rank: usize, (channel, to): (ChannelId, u32), messages: u64) {
        let Some(circle) = self.possible_circle(rank, channel) else { return };
        let Some(RankSlot::Joined(member)) = self.slots.get_mut(rank) else { return };
        let before = member.sent.get(&(channel, to)).map(|count| count.messages);
        let is_confirmed = before == Some(messages);
        member.sent.insert((channel, to), SentCount { messages, is_confirmed });
        if !is_confirmed {
            return self.pass_on(u32::try_from(rank).unwrap_or(u32::MAX), Frame::AskSent { channel, to });
        }
        let is_proven = |CircleMember { wait, .. }: &CircleMember| {
            let Some(RankSlot::Joined(next)) = self.slots.get(wait.on as usize) else { return false };
            let sent = next.sent.get(&(channel, wait.index));
            sent.is_some_and(|sent| sent.is_confirmed && wait.missing == Missing::Message(sent.messages))
        };
        if circle.iter().all(is_proven) {
            let wait = |CircleMember { rank, wait, call }| CircularWait { rank, on: wait.on as usize, call };
            self.abort(Abort::circle(circle.into_iter().map(wait).collect(), rank));
        }
    }

    /// Returns the ranks that wait for each other's messages on a channel, beginning with this one, if they are a circle
    /// according to their last reports.
    fn possible_circle(&self, first: usize, channel: ChannelId) -> Option<Vec<CircleMember>> {
        let (mut circle, mut rank) = (Vec::new(), first);
        loop {
            let (wait, [call, ..]) = self.wait_of(rank, channel)?;
            let on = wait.on as usize;
            // Messages outside any call are not compared.
            let is_for_message = matches!(wait.missing, Missing::Message(_)) && call != Fingerprint::NONE;
            if !is_for_message || on == rank || circle.len() == self.slots.len() {
                return None;
            }
            circle.push(CircleMember { rank, wait, call });
            rank = on;
            if rank == first {
                return Some(circle);
            }
        }
    }
}

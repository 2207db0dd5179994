//! Reports of the ranks' waits, as text.

use std::collections::BTreeSet;

use super::fabric::{ChannelMember, Presence};
use super::waiting::WaitTarget;
use crate::{ChannelId, Fingerprint, Progress};

/// The function that formats calls, if one was set.
pub(super) type Describe = fn(&Fingerprint) -> Option<String>;

/// The position of a rank on one channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) call: Fingerprint,
    pub(super) progress: Option<Progress>,
}

impl Default for Position {
    fn default() -> Self {
        Self { call: Fingerprint::NONE, progress: None }
    }
}

/// A channel and its members.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChannelReport<'a> {
    pub(super) id: ChannelId,
    pub(super) members: &'a [ChannelMember],
    /// The members of the channel whose calls the signals belong to, if this channel carries signals.
    pub(super) call_members: Option<&'a [ChannelMember]>,
}

/// Returns one line for every wait, and for every rank that does not wait, in rank order.
pub(super) fn lines(channels: &[ChannelReport<'_>], describe: Option<Describe>) -> Vec<String> {
    let mut lines = Vec::new();
    let mut waiting = BTreeSet::new();
    for channel in channels {
        for (rank, member) in channel.members.iter().enumerate() {
            if let Some(on) = member.waits_on() {
                waiting.insert(member.world_rank);
                lines.push((member.world_rank, wait(channel, rank, on, describe)));
            }
        }
    }
    for member in channels.iter().flat_map(|channel| channel.members) {
        let idle = member.presence == Presence::Here && waiting.insert(member.world_rank);
        if idle {
            let place = place(member.position, describe).map(|place| format!("; it is in {place}"));
            let line =
                format!("rank {} waits for no message{}", member.world_rank, place.unwrap_or_default());
            lines.push((member.world_rank, line));
        }
    }
    lines.sort_by_key(|(rank, _)| *rank);
    lines.into_iter().map(|(_, line)| line).collect()
}

fn wait(channel: &ChannelReport<'_>, rank: usize, on: WaitTarget, describe: Option<Describe>) -> String {
    let members = channel.call_members.unwrap_or(channel.members);
    let (ChannelMember { world_rank, position, .. }, peer) = (&members[rank], &members[on.peer()]);
    let mut line = format!("rank {world_rank} waits");
    if let Some(place) = place(*position, describe) {
        line += &format!(" in {place}");
    }
    let receives = position.progress.and_then(|progress| progress.receives);
    let from = peer.world_rank;
    line += &match (on, receives) {
        _ if channel.call_members.is_some() => format!(" for a signal of rank {from}"),
        (WaitTarget::Room(_), _) => format!(" to be rid of what it sent to rank {from}"),
        (WaitTarget::Message(_), Some((chunk, 1))) => format!(" for chunk {chunk} from rank {from}"),
        (WaitTarget::Message(_), Some((first, count))) if count > 1 => {
            format!(" for {count} chunks, the first {first}, from rank {from}")
        }
        (WaitTarget::Message(_), _) => format!(" for a message from rank {from}"),
        (WaitTarget::AnyMessage(_), _) => format!(" for a message from rank {from} or another"),
    };
    if channel.call_members.is_none() && channel.id != ChannelId::WORLD {
        line += &format!(" on channel {:016x}", channel.id.get());
    }
    line + &describe_position(peer, position.call, describe)
}

/// Describes the position of the peer, as seen from a rank in this call.
fn describe_position(peer: &ChannelMember, call: Fingerprint, describe: Option<Describe>) -> String {
    match peer.presence {
        Presence::Gone => return ", which has left".to_owned(),
        Presence::Expected => return ", which has not come there".to_owned(),
        Presence::Here => {}
    }
    let same_call = peer.position.call == call;
    match (same_call, peer.position.progress) {
        (true, Some(progress)) => format!(", which is in step {}", progress.step),
        (true, None) => String::new(),
        (false, _) => match place(peer.position, describe) {
            Some(place) => format!(", which is in {place}"),
            None => ", which is in no call".to_owned(),
        },
    }
}

/// Describes the call, and the step if it is known. Returns `None` outside any call.
fn place(position: Position, describe: Option<Describe>) -> Option<String> {
    if position.call == Fingerprint::NONE {
        return None;
    }
    let call = describe.and_then(|describe| describe(&position.call));
    let call = call.unwrap_or_else(|| {
        let bytes = position.call.0.iter().map(|byte| format!("{byte:02x}"));
        format!("call {}", bytes.collect::<String>().trim_end_matches("00"))
    });
    Some(match position.progress {
        Some(progress) => format!("step {} of {call}", progress.step),
        None => call,
    })
}

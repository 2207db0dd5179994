//! Matched messages between this rank and one peer.
//!
//! A send must not wait until the peer enters a call, so each rank can open a link of its own. The pair's *primary* link is
//! opened by the higher rank, and carries messages in both directions. The lower rank sends there as soon as the link has
//! arrived. Before that it opens the *secondary* link, on which only the lower rank sends. When the lower rank changes from
//! the secondary to the primary link, it sends a marker on both. So the higher rank reads the secondary link up to the
//! marker, and the primary link from then on. One link for both directions matters: the two fastboxes of shared memory go
//! back and forth on it, and TCP acknowledges a message with the reply.

use crate::bootstrap::failure::PeerError;
use crate::link::counts::MessageCounts;
use crate::link::message::{Inbound, LinkError, NextHeader, Outbound, READ_AHEAD_BYTES};
use crate::link::peer_link::PeerLink;
use crate::link::staging_buffer::StagingBuffer;
use crate::{Activity, Fingerprint, Inbox, Refusal, Traffic};

use super::process_transport::{Waits, receiving};

/// The use of the secondary link of a pair of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Secondary {
    /// No message of the lower rank was sent, or received.
    Unknown,
    /// The lower rank sends on it.
    InUse,
    /// The lower rank sends on the primary link.
    Retired,
}

/// The matched messages between this rank and one peer. They keep their state between calls.
#[derive(Debug)]
pub(super) struct MatchedPeer {
    /// For the lower rank: the link that it sends on. For the higher rank: the link that it receives on.
    pub(super) secondary: Secondary,
    /// The number of arrived connections of all ranks when this rank last looked for the primary link.
    pub(super) arrivals_seen: u64,
    message: Inbound,
    state: MessageState,
    /// The messages to the peer that were begun before a call paused, and markers, each with its link.
    pub(super) unsent: Vec<UnsentMessage>,
    /// `true` if the peer has left, and all its messages were received.
    pub(super) has_left: bool,
    /// Bytes of the primary and the secondary link that were received with a header.
    read_ahead: [StagingBuffer; 2],
}

/// A message, or a marker, that was not sent completely when a call paused.
#[derive(Debug)]
pub(super) struct UnsentMessage {
    pub(super) link: usize,
    pub(super) message: Outbound,
    pub(super) is_marker: bool,
}

/// The state of the next message of a peer.
#[derive(Debug)]
enum MessageState {
    /// Its header was not read.
    Unread,
    /// It has this call and this length. No inbox has accepted it.
    Announced(Fingerprint, usize),
    /// An inbox has accepted it.
    Accepted,
}

/// The ranks of a pair, and the number of ranks of the group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pair {
    pub(super) me: usize,
    pub(super) peer: usize,
    pub(super) ranks: usize,
}

impl Pair {
    /// Returns the index of the primary link.
    pub(super) const fn primary(self) -> usize {
        self.peer
    }

    /// Returns the index of the secondary link.
    pub(super) const fn secondary(self) -> usize {
        self.ranks + self.peer
    }

    pub(super) const fn is_higher(self) -> bool {
        self.me > self.peer
    }
}

impl MatchedPeer {
    pub(super) fn new() -> Self {
        Self {
            secondary: Secondary::Unknown,
            arrivals_seen: 0,
            message: Inbound::any(),
            state: MessageState::Unread,
            unsent: Vec::new(),
            has_left: false,
            read_ahead: [READ_AHEAD_BYTES; 2].map(StagingBuffer::with_limit),
        }
    }

    /// Returns the index of the link on which the next bytes of the peer arrive, as far as is known.
    fn incoming(&mut self, pair: Pair, links: &[Option<PeerLink>]) -> usize {
        if pair.is_higher() && self.secondary != Secondary::Retired {
            if links[pair.secondary()].is_some() {
                self.secondary = Secondary::InUse;
            }
            if self.secondary == Secondary::InUse {
                return pair.secondary();
            }
        }
        pair.primary()
    }

    /// Reads the header of the next message, which `inbox` awaits if there is one. Returns `true` if it is known.
    fn read_header(
        &mut self,
        pair: Pair,
        links: &mut [Option<PeerLink>],
        mut inbox: Option<&mut dyn Inbox>,
    ) -> Result<bool, LinkError> {
        while matches!(self.state, MessageState::Unread) {
            if self.has_left {
                return Err(LinkError::Goodbye);
            }
            let index = self.incoming(pair, links);
            let Some(link) = &mut links[index] else { return Ok(false) };
            let is_primary = index == pair.primary();
            let read_ahead = &mut self.read_ahead[usize::from(!is_primary)];
            let may_be_secondary = pair.is_higher() && is_primary && self.secondary == Secondary::Unknown;
            let inbox: Option<(&mut dyn Inbox, usize)> = match &mut inbox {
                Some(inbox) => Some((&mut **inbox, pair.peer)),
                None => None,
            };
            match self.message.read_header(link, read_ahead, inbox) {
                Ok(None) => return Ok(false),
                Ok(Some(NextHeader::Message(call, len))) => {
                    self.state = MessageState::Announced(call, len);
                    if may_be_secondary {
                        self.secondary = Secondary::Retired;
                    }
                }
                // On the primary link the marker tells that there is a secondary link, which may not have arrived.
                Ok(Some(NextHeader::Moved)) if may_be_secondary => self.secondary = Secondary::InUse,
                Ok(Some(NextHeader::Moved)) if pair.is_higher() => self.secondary = Secondary::Retired,
                // The peer has left. Its messages, if any, are on the secondary link.
                Err(LinkError::Goodbye | LinkError::Closed) if may_be_secondary => {
                    self.secondary = Secondary::InUse;
                }
                Ok(Some(NextHeader::Moved)) => return Err(LinkError::Garbage),
                Err(LinkError::Goodbye) => self.has_left = true,
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Returns `true` if a message has arrived that was not received completely.
    pub(super) fn has_unread(&mut self, pair: Pair, links: &mut [Option<PeerLink>]) -> bool {
        self.read_header(pair, links, None).unwrap_or(false)
    }

    /// Receives the bytes of the next message that have arrived, if the inbox awaits it.
    pub(super) fn pull(
        &mut self,
        (pair, links): (Pair, &mut [Option<PeerLink>]),
        inbox: &mut dyn Inbox,
        staging: &mut StagingBuffer,
        (counts, traffic): (&MessageCounts, &mut Traffic),
        waits: &mut Waits,
    ) -> Result<bool, PeerError> {
        let from = pair.peer;
        if !inbox.awaits(from) {
            return Ok(false);
        }
        let (moved, is_complete) = match self.pull_message((pair, links), inbox, staging) {
            Err(LinkError::Goodbye) if self.has_left && inbox.peer_left(from) => return Ok(true),
            pulled => pulled.map_err(receiving(from))?,
        };
        if is_complete {
            counts.record_received(from);
            traffic.count(None, Some(self.message.length()));
            if !inbox.awaits(from) {
                return Ok(true);
            }
        }
        self.await_more(pair, links, waits);
        Ok(moved)
    }

    /// Returns two flags: something was received, and the message is complete.
    fn pull_message(
        &mut self,
        (pair, links): (Pair, &mut [Option<PeerLink>]),
        inbox: &mut dyn Inbox,
        staging: &mut StagingBuffer,
    ) -> Result<(bool, bool), LinkError> {
        let from = pair.peer;
        let mut moved = false;
        if !matches!(self.state, MessageState::Accepted) {
            if !self.read_header(pair, links, Some(&mut *inbox))? {
                return Ok((false, false));
            }
            if let MessageState::Announced(call, len) = self.state {
                inbox.accept(from, &call, len).map_err(|refusal| refused(refusal, call, len))?;
            }
            self.state = MessageState::Accepted;
            moved = true;
        }
        if !self.message.done() {
            let index = self.incoming(pair, links);
            let read_ahead = &mut self.read_ahead[usize::from(index != pair.primary())];
            let Some(link) = &mut links[index] else { return Ok((false, false)) };
            moved |= self.message.pull_matched(link, (staging, read_ahead), inbox.memory(from))?;
        }
        if !self.message.done() {
            return Ok((moved, false));
        }
        self.state = MessageState::Unread;
        inbox.complete(from);
        Ok((true, true))
    }

    /// Adds the links on which the next bytes of the peer can arrive to `waits`.
    fn await_more(&mut self, pair: Pair, links: &[Option<PeerLink>], waits: &mut Waits) {
        let index = self.incoming(pair, links);
        if pair.is_higher() && index == pair.primary() && self.secondary == Secondary::Unknown {
            waits.push((Activity::Connect, pair.secondary()));
            if links[index].is_some() {
                waits.push((Activity::Receive, index));
            }
            return;
        }
        let activity = if links[index].is_some() { Activity::Receive } else { Activity::Connect };
        waits.push((activity, index));
    }

    /// Handles that the peer has left without opening the link that was awaited. Its messages, if any, are on the
    /// primary link.
    pub(super) fn record_left(&mut self, pair: Pair, links: &[Option<PeerLink>]) {
        if self.secondary == Secondary::Unknown && links[pair.primary()].is_some() {
            self.secondary = Secondary::Retired;
        } else {
            self.has_left = true;
        }
    }
}

/// Converts the refusal of a message with this call and length.
pub(super) fn refused(refusal: Refusal, theirs: Fingerprint, len: usize) -> LinkError {
    match refusal {
        Refusal::Mismatch => LinkError::Mismatch { theirs },
        Refusal::Length(expected) => LinkError::Length { got: len as u64, expected: expected as u64 },
        Refusal::NoMemory => LinkError::Own(std::io::ErrorKind::OutOfMemory.into()),
    }
}

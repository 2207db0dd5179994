//! Matched messages between this rank and one peer.
//!
//! A send must not wait until the peer enters a call, so each rank can open a link of its own. The pair's *primary* link is
//! opened by the higher rank, and carries messages in both directions. The lower rank sends there as soon as the link has
//! arrived. Before that it opens the *secondary* link, on which only the lower rank sends. When the lower rank changes from
//! the secondary to the primary link, it sends a marker on both. So the higher rank reads the secondary link up to the
//! marker, and the primary link from then on. One link for both directions matters: the two fastboxes of shared memory go
//! back and forth on it, and TCP acknowledges a message with the reply.
//!
//! A long message is announced, and waits for its clear:
//!
//! | sender | receiver |
//! |---|---|
//! | sends the announcement in its place among its messages | notes it in its place, or matches a receive at once |
//! | sends later messages, and reads the link from the receiver | receives them |
//! | | sends the clear when a receive has matched the message |
//! | sends the body before all messages that it has not begun | receives the body into the memory of the receive |
//!
//! A clear and a body go before messages that were not begun, so that they do not wait behind messages that their receiver
//! has no room for. Only a body is offered as a single copy, so the offer is taken by a rank that waits for it. A call that
//! fails while a message waits for its clear aborts the job; nothing refers to the memory of the message then.

use crate::announced::{AnnouncedMessages, MatchedFrame};
use crate::bootstrap::failure::PeerError;
use crate::link::counts::MessageCounts;
use crate::link::message::{Inbound, LinkError, NextHeader, Outbound, READ_AHEAD_BYTES, length_of};
use crate::link::peer_link::PeerLink;
use crate::link::staging_buffer::StagingBuffer;
use crate::{Activity, Fingerprint, Inbox, Refusal, Traffic};

use super::process_transport::{Waits, receiving, sending};

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
    /// The frames to the peer that were not sent completely when a call paused, and the messages that wait for their
    /// clears, in the order of their links.
    pub(super) unsent: Vec<UnsentMessage>,
    /// The number of messages to the peer that were announced.
    pub(super) announcements_sent: u64,
    /// The announced messages of the peer.
    pub(super) announced: AnnouncedMessages,
    /// The announced messages of the peer that an inbox wants, without a clear yet.
    pub(super) wanted: Vec<u64>,
    /// The messages to the peer that it has cleared.
    pub(super) cleared: Vec<u64>,
    /// `true` if the peer has left, and all its messages were received.
    pub(super) has_left: bool,
    /// Bytes of the primary and the secondary link that were received with a header.
    read_ahead: [StagingBuffer; 2],
}

/// A frame that was not sent completely when a call paused, or an announced message that waits for its clear.
#[derive(Debug)]
pub(super) struct UnsentMessage {
    pub(super) link: usize,
    pub(super) message: Outbound,
    pub(super) kind: FrameKind,
    /// The place of the message among the unsent messages to the peer; `None` for a frame that is no part of a message.
    pub(super) ordinal: Option<usize>,
}

/// The kind of an outgoing frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// A marker of the change to the primary link.
    Marker,
    Clear,
    /// A whole message.
    Message,
    /// The announcement of a message.
    Announcement,
    /// The message with this number, which was announced and waits for its clear. It is no frame.
    Announced(u64),
    Body,
}

/// The state of the next message of a peer.
#[derive(Debug)]
enum MessageState {
    /// Its header was not read.
    Unread,
    /// It has this header. No inbox has accepted it.
    Read(MatchedFrame, Fingerprint),
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
            announcements_sent: 0,
            announced: AnnouncedMessages::default(),
            wanted: Vec::new(),
            cleared: Vec::new(),
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

    /// Reads the header of the next message, which `inbox` awaits if there is one. Keeps clears that come before it. Returns
    /// `true` if it is known.
    fn read_header(
        &mut self,
        (pair, counts): (Pair, &MessageCounts),
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
                Ok(Some(NextHeader::Frame(frame, call))) => {
                    self.take_header((pair, counts), frame, call)?;
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

    /// Takes the header of a frame.
    fn take_header(
        &mut self,
        (pair, counts): (Pair, &MessageCounts),
        frame: MatchedFrame,
        call: Fingerprint,
    ) -> Result<(), LinkError> {
        match frame {
            MatchedFrame::Clear(number) if number < self.announcements_sent => {
                counts.record_received(pair.peer);
                self.cleared.push(number);
            }
            MatchedFrame::Clear(_) => return Err(LinkError::Garbage),
            _ => self.state = MessageState::Read(frame, call),
        }
        Ok(())
    }

    /// Returns `true` if a message has arrived that was not received completely.
    pub(super) fn has_unread(
        &mut self,
        (pair, counts): (Pair, &MessageCounts),
        links: &mut [Option<PeerLink>],
    ) -> bool {
        self.read_header((pair, counts), links, None).unwrap_or(false)
    }

    /// Receives the bytes of the next message that have arrived, if the inbox awaits it, or if a message to this peer waits
    /// for its clear.
    pub(super) fn pull(
        &mut self,
        (pair, links): (Pair, &mut [Option<PeerLink>]),
        (inbox, awaits_clear): (&mut dyn Inbox, bool),
        staging: &mut StagingBuffer,
        (counts, traffic): (&MessageCounts, &mut Traffic),
        waits: &mut Waits,
    ) -> Result<bool, PeerError> {
        let from = pair.peer;
        if !inbox.awaits(from) && !awaits_clear {
            return Ok(false);
        }
        if !self.is_read(pair, inbox) {
            waits.push((Activity::Match, pair.primary()));
            return Ok(false);
        }
        let (moved, is_complete) = match self.pull_message((pair, counts), links, inbox, staging) {
            Err(LinkError::Goodbye) if self.has_left && inbox.awaits(from) && inbox.peer_left(from) => {
                return if awaits_clear { Err(sending(from)(LinkError::Goodbye)) } else { Ok(true) };
            }
            Err(error) if !inbox.awaits(from) => return Err(sending(from)(error)),
            pulled => pulled.map_err(receiving(from))?,
        };
        if is_complete {
            counts.record_received(from);
            traffic.count(None, Some(self.message.length()));
        }
        if moved && !inbox.awaits(from) && !awaits_clear {
            return Ok(true);
        }
        self.await_more(pair, links, waits);
        Ok(moved)
    }

    /// Returns `true` if the next message of the peer may be received: the inbox awaits it, or has room to keep it.
    fn is_read(&self, pair: Pair, inbox: &dyn Inbox) -> bool {
        inbox.awaits(pair.peer) || inbox.keeps(pair.peer) || matches!(self.state, MessageState::Accepted)
    }

    /// Returns two flags: something was received, and the message is complete.
    fn pull_message(
        &mut self,
        (pair, counts): (Pair, &MessageCounts),
        links: &mut [Option<PeerLink>],
        inbox: &mut dyn Inbox,
        staging: &mut StagingBuffer,
    ) -> Result<(bool, bool), LinkError> {
        let from = pair.peer;
        let mut moved = false;
        if !matches!(self.state, MessageState::Accepted) {
            if !self.read_header((pair, counts), links, Some(&mut *inbox))? {
                return Ok((false, false));
            }
            if !self.accept(from, inbox)? {
                counts.record_received(from);
                return Ok((true, false));
            }
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

    /// Lets an inbox accept the message whose header was read. Returns `false` if it was announced, and no bytes follow.
    fn accept(&mut self, from: usize, inbox: &mut dyn Inbox) -> Result<bool, LinkError> {
        match std::mem::replace(&mut self.state, MessageState::Accepted) {
            MessageState::Read(MatchedFrame::Message(_), call) => {
                let len = self.message.length();
                inbox.accept(from, &call, len).map_err(|refusal| refused(refusal, call, len))?;
            }
            MessageState::Read(MatchedFrame::Announcement(len), call) => {
                self.state = MessageState::Unread;
                let len = length_of(len)?;
                let number = self.announced.add(len);
                let accepted = inbox.announce(from, &call, len, number);
                if accepted.map_err(|refusal| refused(refusal, call, len))? {
                    self.wanted.push(number);
                }
                return Ok(false);
            }
            MessageState::Read(MatchedFrame::Body(number), _) => {
                self.message.expect(self.announced.take(number).ok_or(LinkError::Garbage)?);
                inbox.begin_announced(from, number);
            }
            MessageState::Read(MatchedFrame::Clear(_), _) | MessageState::Unread | MessageState::Accepted => {
            }
        }
        Ok(true)
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

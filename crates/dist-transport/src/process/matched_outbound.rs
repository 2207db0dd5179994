//! The outgoing frames of matched messages.

use crate::bootstrap::failure::PeerError;
use crate::link::counts::MessageCounts;
use crate::link::message::{LinkError, Outbound};
use crate::link::peer_link::PeerLink;
use crate::link::staging_buffer::StagingBuffer;
use crate::{Activity, Inbox, Traffic};

use super::matched::{FrameKind, MatchedPeer};
use super::process_transport::{Few, Waits, sending};

/// An outgoing frame, or an announced message that waits for its clear. The frames of one link are sent in the order of
/// their list.
pub(super) struct MatchedOutbound<'a> {
    pub(super) link: usize,
    pub(super) parts: &'a [&'a [u8]],
    pub(super) message: Outbound,
    pub(super) kind: FrameKind,
    /// The position of the message in the list of sends; `None` for a frame that is no part of a message.
    pub(super) position: Option<usize>,
}

impl MatchedOutbound<'_> {
    /// Sends as much as the link takes.
    #[inline]
    pub(super) fn push(
        &mut self,
        (ranks, links, counts): (usize, &mut [Option<PeerLink>], &MessageCounts),
        staging: &mut StagingBuffer,
        waits: &mut Waits,
    ) -> Result<bool, PeerError> {
        let Self { link, parts, message, kind, .. } = self;
        // A message on the same link that was not sent completely goes first.
        if message.done() || waits.contains(&(Activity::Send, *link)) {
            return Ok(false);
        }
        let peer = if *link < ranks { *link } else { *link - ranks };
        let Some(open) = &mut links[*link] else { return Ok(false) };
        let had_begun = message.has_begun();
        let parts = if *kind == FrameKind::Announcement { &[][..] } else { *parts };
        let moved = message.push(open, staging, parts).map_err(sending(peer))?;
        if *kind != FrameKind::Marker && !had_begun && message.has_begun() {
            counts.record_sent(peer);
        }
        if !message.done() {
            waits.push((Activity::Send, *link));
        }
        Ok(moved)
    }

    /// Handles that the frame is sent.
    #[inline]
    pub(super) fn complete(
        &mut self,
        (ranks, matched): (usize, &mut [MatchedPeer]),
        traffic: &mut Traffic,
        inbox: &mut dyn Inbox,
    ) {
        let Some(position) = self.position else { return };
        if self.kind == FrameKind::Announcement {
            let peer = &mut matched[if self.link < ranks { self.link } else { self.link - ranks }];
            self.kind = FrameKind::Announced(peer.announcements_sent);
            peer.announcements_sent += 1;
            return;
        }
        traffic.count(Some(self.message.length()), None);
        inbox.sent(position);
    }

    /// Returns the receiver if this message waits for its clear.
    #[inline]
    pub(super) const fn announced_to(&self, ranks: usize) -> Option<usize> {
        match self.kind {
            FrameKind::Announced(_) if self.link < ranks => Some(self.link),
            FrameKind::Announced(_) => Some(self.link - ranks),
            _ => None,
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.message.done() && !matches!(self.kind, FrameKind::Announced(_))
    }
}

/// Adds a frame before the messages on its link that were not begun.
pub(super) fn insert_early<'a>(outbound: &mut Few<MatchedOutbound<'a>>, frame: MatchedOutbound<'a>) {
    let is_later = |other: &MatchedOutbound<'_>| {
        let is_new = matches!(other.kind, FrameKind::Message | FrameKind::Announcement);
        other.link == frame.link && is_new && !other.message.has_begun()
    };
    let index = outbound.iter().position(is_later).unwrap_or(outbound.len());
    outbound.insert(index, frame);
}

/// Names the receiver of an announced message if its clear was waited for, and no message of that rank.
#[cold]
pub(super) fn unmatched(
    peer_error: PeerError,
    outbound: &[MatchedOutbound<'_>],
    inbox: &dyn Inbox,
    ranks: usize,
) -> PeerError {
    let peer = peer_error.peer;
    let is_announced = outbound.iter().any(|outbound| outbound.announced_to(ranks) == Some(peer));
    if matches!(peer_error.link_error, LinkError::TimedOut) && is_announced && !inbox.awaits(peer) {
        return PeerError { activity: Activity::Match, ..peer_error };
    }
    peer_error
}

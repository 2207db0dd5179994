//! The messages of one rank that have arrived and that no receive has matched.

use std::collections::VecDeque;

use crate::Call;

/// The maximum number of bytes of one rank's messages that are kept for later receives. The last message may exceed it, and
/// those that arrive before the bytes of a claimed one.
pub(crate) const KEPT_BYTES_MAX: usize = 64 << 20;

/// The number of bytes that a kept message counts in addition to its elements, so that empty ones are bounded too.
pub(super) const KEPT_OVERHEAD: usize = 64;

/// The maximum number of messages that an error lists.
pub(super) const LISTED_MAX: usize = 8;

/// The messages of one rank that have arrived, and those that the current call awaits.
#[derive(Debug, Default)]
pub(super) struct MessageQueue {
    /// Messages that no receive has matched yet, the oldest first.
    pub(super) kept: VecDeque<KeptMessage>,
    /// The number of their bytes, with [`KEPT_OVERHEAD`].
    pub(super) kept_bytes: usize,
    /// The number of receives of the current call that no message has matched yet.
    pub(super) open: usize,
    /// The message that is arriving. A message that is kept may arrive in several calls.
    pub(super) arriving: Option<ArrivingMessage>,
    /// The announced messages that receives have matched, and whose bytes are not arriving yet.
    pub(super) claimed: Vec<ClaimedMessage>,
    /// `true` if the rank has left, as far as the current receive from any rank knows.
    pub(super) has_left: bool,
}

#[derive(Debug)]
pub(super) struct KeptMessage {
    /// The call of its sender.
    pub(super) call: Call,
    pub(super) content: KeptContent,
}

/// The bytes of a kept message, or its announcement: then the sender has the bytes.
#[derive(Debug)]
pub(super) enum KeptContent {
    Bytes(Vec<u8>),
    Announced {
        /// The number of the message among the announced ones of its sender.
        number: u64,
        /// Its length in bytes.
        len: usize,
    },
}

/// An announced message that a receive has matched.
#[derive(Debug)]
pub(super) struct ClaimedMessage {
    pub(super) number: u64,
    pub(super) claimed_by: Claimant,
    /// `true` if the transport knows that the bytes are wanted.
    pub(super) is_requested: bool,
}

impl KeptMessage {
    /// Returns the length of the message in bytes.
    pub(super) const fn len(&self) -> usize {
        match &self.content {
            KeptContent::Bytes(bytes) => bytes.len(),
            KeptContent::Announced { len, .. } => *len,
        }
    }

    /// Returns the number of bytes that the message counts in its queue.
    const fn counted(&self) -> usize {
        match &self.content {
            KeptContent::Bytes(bytes) => bytes.len() + KEPT_OVERHEAD,
            KeptContent::Announced { .. } => KEPT_OVERHEAD,
        }
    }
}

/// The destination of a message whose bytes are arriving.
#[derive(Debug)]
pub(super) enum ArrivingMessage {
    /// The memory of the receive at this position in the list.
    Receive(usize),
    /// The memory of the started receive with this number.
    Started(u64),
    Kept {
        /// The call of its sender.
        call: Call,
        bytes: Vec<u8>,
        /// The receive that gets the message when it is complete.
        claimed_by: Option<Claimant>,
    },
}

/// A receive that gets a message which began to arrive before it.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine) enum Claimant {
    /// The receive of the current call at this position.
    Call(usize),
    /// The started receive with this number.
    Started(u64),
}

/// The result of looking for a kept message.
pub(in crate::engine) enum KeptMatch {
    Nothing,
    /// The receive has its message.
    Filled,
    /// Its message is arriving, or its sender has the bytes.
    Claimed,
}

/// The message that a probe waits for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Probe {
    /// The sender; `None` for any rank.
    pub(super) from: Option<usize>,
    pub(super) tag: u32,
}

/// A message that has arrived and was not received.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FoundMessage {
    pub(crate) from: usize,
    /// The call of the sender, with its element type and its number of elements.
    pub(crate) call: Call,
}

impl MessageQueue {
    pub(super) const fn is_full(&self) -> bool {
        self.kept_bytes >= KEPT_BYTES_MAX
    }

    /// Counts an open receive less.
    pub(super) const fn close(&mut self) {
        self.open = self.open.saturating_sub(1);
    }

    pub(super) fn keep(&mut self, message: KeptMessage) {
        self.kept_bytes += message.counted();
        self.kept.push_back(message);
    }

    /// Takes the oldest kept message with this tag.
    pub(super) fn take(&mut self, tag: Option<u32>) -> Option<KeptMessage> {
        let position = self.kept.iter().position(|message| message.call.tag() == tag)?;
        let message = self.kept.remove(position)?;
        self.kept_bytes -= message.counted();
        Some(message)
    }

    /// Returns the oldest kept message with this tag.
    pub(super) fn find(&self, tag: u32) -> Option<&KeptMessage> {
        self.kept.iter().find(|message| message.call.tag() == Some(tag))
    }

    /// Returns the call and the length of the message that is arriving to be kept, if no receive has claimed it.
    pub(super) const fn unclaimed(&self) -> Option<(Call, usize)> {
        match &self.arriving {
            Some(ArrivingMessage::Kept { call, bytes, claimed_by: None }) => Some((*call, bytes.len())),
            _ => None,
        }
    }

    /// Adds an announced message that a receive has matched.
    pub(super) fn claim(&mut self, number: u64, claimed_by: Claimant, is_requested: bool) {
        self.claimed.push(ClaimedMessage { number, claimed_by, is_requested });
    }

    /// Returns `true` if a message that is arriving belongs to a receive, or if the bytes of an announced one do.
    pub(super) fn is_receiving(&self) -> bool {
        self.receivers().next().is_some()
    }

    /// Returns the receives whose messages are arriving, or whose messages were announced.
    pub(super) fn receivers(&self) -> impl Iterator<Item = Claimant> + '_ {
        let arriving = match self.arriving {
            Some(ArrivingMessage::Receive(position)) => Some(Claimant::Call(position)),
            Some(ArrivingMessage::Started(id)) => Some(Claimant::Started(id)),
            Some(ArrivingMessage::Kept { claimed_by, .. }) => claimed_by,
            None => None,
        };
        arriving.into_iter().chain(self.claimed.iter().map(|claimed| claimed.claimed_by))
    }

    /// Returns the calls of the oldest kept messages.
    pub(super) fn list(&self) -> Vec<Call> {
        self.kept.iter().take(LISTED_MAX).map(|message| message.call).collect()
    }
}

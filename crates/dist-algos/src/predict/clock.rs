//! The clock of one rank, and what steps do to it.

use super::{LinkModel, MessageCosts};

/// What a rank has come to.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankClock {
    /// When it takes up its next step.
    pub(super) now: f64,
    /// How many times as long its work takes.
    slowdown: f64,
    /// Until when its side of the link is taken by what leaves.
    up: f64,
    /// Until when it is taken by what arrives.
    down: f64,
    /// Bytes that it has sent.
    pub(super) sent: u64,
}

/// A message on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimedMessage {
    /// When its first byte arrives.
    pub(super) first: f64,
    /// When its last byte arrives, if nothing else is in the way.
    pub(super) last: f64,
    pub(super) bytes: u64,
}

/// A step of which not everything has come yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingStep {
    started: f64,
    /// When the last byte has been sent.
    left: f64,
    /// When the last byte so far has been read.
    read: f64,
    /// What the step has cost the rank so far.
    busy: f64,
}

impl PendingStep {
    /// When the step is over, if nothing more comes.
    pub(super) fn over(&self) -> f64 {
        self.left.max(self.read).max(self.started + self.busy)
    }
}

impl RankClock {
    pub(super) const fn new((late, slowdown): (f64, f64)) -> Self {
        Self { now: late, slowdown, up: late, down: 0.0, sent: 0 }
    }

    /// A step that may send and receive begins.
    pub(super) const fn begin(&self) -> PendingStep {
        PendingStep { started: self.now, left: self.now, read: self.now, busy: 0.0 }
    }

    /// A message leaves.
    pub(super) fn send(
        &mut self,
        pending: &mut PendingStep,
        bytes: u64,
        link: LinkModel,
        work: MessageCosts,
    ) -> TimedMessage {
        let (size, opens) = (work.weight(bytes), work.send * self.slowdown);
        let begins = (pending.started + pending.busy + opens).max(self.up);
        let left = begins + size * link.byte.max(work.byte * self.slowdown);
        pending.busy += opens + (work.sent + work.byte * size) * self.slowdown;
        pending.left = left;
        self.up = left;
        self.sent += bytes;
        TimedMessage { first: begins + link.latency, last: left + link.latency, bytes }
    }

    /// A message is here, to be reduced or to be kept.
    pub(super) fn receive(
        &mut self,
        pending: &mut PendingStep,
        message: TimedMessage,
        reduces: bool,
        link: LinkModel,
        work: MessageCosts,
    ) {
        let size = work.weight(message.bytes);
        let opens = work.receive * self.slowdown;
        let reads = work.reading(message.bytes, reduces) * self.slowdown;
        self.down = message.last.max(message.first.max(self.down) + size * link.byte);
        let read = self.down.max(message.first.max(pending.started) + reads) + opens;
        pending.read = pending.read.max(read);
        pending.busy += opens + reads;
    }

    /// Reduces or copies what the rank has already.
    pub(super) fn combine(&mut self, bytes: u64, work: MessageCosts) {
        self.now += work.reduce * self.slowdown * bytes as f64;
    }
}

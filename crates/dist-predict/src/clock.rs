//! The clock of one rank, and the effect of steps on it.

use crate::{LinkModel, MessageCosts};

/// The state of a rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankClock {
    /// The time of its next step.
    pub(crate) now: f64,
    /// The factor by which its work takes longer.
    slowdown: f64,
    /// The time until which outgoing data occupies its side of the link.
    up: f64,
    /// The time until which incoming data occupies its side of the link.
    down: f64,
    /// The number of bytes that it has sent.
    pub(crate) sent: u64,
}

/// A message in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimedMessage {
    /// The time at which its first byte arrives.
    pub(crate) first: f64,
    /// The time at which its last byte arrives, if nothing delays it.
    pub(crate) last: f64,
    pub(crate) bytes: u64,
}

/// A step that still waits for messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingStep {
    started: f64,
    /// The time at which the last byte has been sent.
    left: f64,
    /// The time at which the last byte so far has been read.
    read: f64,
    /// The work of the step for the rank so far.
    busy: f64,
}

impl PendingStep {
    /// Returns the end of the step if no more messages come.
    pub(crate) fn over(&self) -> f64 {
        self.left.max(self.read).max(self.started + self.busy)
    }
}

impl RankClock {
    pub(crate) const fn new((late, slowdown): (f64, f64)) -> Self {
        Self { now: late, slowdown, up: late, down: 0.0, sent: 0 }
    }

    /// Begins a step that may send and receive.
    pub(crate) const fn begin(&self) -> PendingStep {
        PendingStep { started: self.now, left: self.now, read: self.now, busy: 0.0 }
    }

    /// Sends a message.
    pub(crate) fn send(
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

    /// Receives a message, which is reduced or copied.
    pub(crate) fn receive(
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

    /// Reduces or copies data that the rank already has.
    pub(crate) fn combine(&mut self, bytes: u64, work: MessageCosts) {
        self.now += work.reduce * self.slowdown * bytes as f64;
    }
}

//! The waits of ranks, and their wake-up.

use std::time::Duration;

use crate::runtime::Unparker;

#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) on: WaitTarget,
    pub(super) since: Duration,
    pub(super) unparker: Unparker,
}

/// The target of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitTarget {
    /// A message of this rank.
    Message(usize),
    /// A message from any of several ranks, given the first of them.
    AnyMessage(usize),
    /// Room: this rank has to receive earlier messages.
    Room(usize),
}

impl WaitTarget {
    /// Returns the rank that reports name.
    pub(super) fn peer(self) -> usize {
        match self {
            Self::Message(peer) | Self::AnyMessage(peer) | Self::Room(peer) => peer,
        }
    }

    /// Returns `true` if a message of this rank may end the wait.
    pub(super) fn may_be_message_of(self, rank: usize) -> bool {
        matches!(self, Self::AnyMessage(_)) || self == Self::Message(rank)
    }

    /// Returns `true` if room at this rank may end the wait.
    pub(super) fn may_be_room_of(self, rank: usize) -> bool {
        matches!(self, Self::AnyMessage(_)) || self == Self::Room(rank)
    }

    /// Returns `true` if an event of this rank may end the wait.
    pub(super) fn may_be_of(self, rank: usize) -> bool {
        matches!(self, Self::AnyMessage(_)) || self.peer() == rank
    }
}

pub(super) fn wake(woken: impl IntoIterator<Item = Waiter>) {
    for waiting in woken {
        waiting.unparker.unpark();
    }
}

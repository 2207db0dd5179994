//! What ranks wait for, and how they are woken.

use std::time::Duration;

use crate::runtime::Unparker;

#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) on: WaitTarget,
    pub(super) since: Duration,
    pub(super) unparker: Unparker,
}

/// What a rank waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitTarget {
    /// A message of this rank.
    Message(usize),
    /// A message of one of several ranks, the first of which is this one.
    AnyMessage(usize),
    /// That this rank receives what was sent to it.
    Room(usize),
}

impl WaitTarget {
    /// The rank that is said to be waited for.
    pub(super) fn peer(self) -> usize {
        match self {
            Self::Message(peer) | Self::AnyMessage(peer) | Self::Room(peer) => peer,
        }
    }

    /// Whether a message of this rank may be what is waited for.
    pub(super) fn may_be_message_of(self, rank: usize) -> bool {
        matches!(self, Self::AnyMessage(_)) || self == Self::Message(rank)
    }

    /// Whether anything of this rank may be.
    pub(super) fn may_be_of(self, rank: usize) -> bool {
        matches!(self, Self::AnyMessage(_)) || self.peer() == rank
    }
}

pub(super) fn wake(woken: impl IntoIterator<Item = Waiter>) {
    for waiting in woken {
        waiting.unparker.unpark();
    }
}

//! A connection to a peer, for one channel: a socket, or memory that both share.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::PollFlags;
use socket2::Socket;

use crate::Activity;
use crate::shm::{ShmLink, StreamEnd};
use crate::tcp::message::{self, LinkError};
use crate::tcp::socket;

#[derive(Debug)]
pub(super) enum PeerLink {
    Socket(Socket),
    Shm(ShmLink),
}

impl PeerLink {
    /// Tells the peer that nothing more will come, if the connection takes it at once.
    pub(super) fn say_goodbye(&self) {
        match self {
            Self::Socket(stream) => {
                let _ = socket::send(stream, &message::goodbye());
            }
            Self::Shm(memory) => memory.say_goodbye(),
        }
    }

    /// Takes back what the peer may be copying, for a call that has failed.
    pub(super) fn cancel_offer(&mut self) {
        if let Self::Shm(memory) = self {
            memory.cancel_offer();
        }
    }

    /// Gets ready to sleep until the connection is ready for this; `false` if it is already.
    pub(super) fn prepare_sleep(&mut self, activity: Activity) -> bool {
        match self {
            Self::Socket(_) => true,
            Self::Shm(memory) => memory.prepare_sleep(activity != Activity::Send),
        }
    }

    /// Whether something has come that was not received yet; a goodbye is something.
    pub(super) fn has_arrived(&mut self) -> Result<bool, LinkError> {
        match self {
            Self::Socket(stream) => match socket::peek(stream)? {
                Some(0) => Err(LinkError::Closed),
                come => Ok(come.is_some()),
            },
            Self::Shm(memory) => match memory.has_arrived() {
                Err(StreamEnd::Goodbye) => Ok(true),
                come => Ok(come?),
            },
        }
    }

    /// Returns `true` if a message has come that was not received yet, which a goodbye is not.
    pub(super) fn has_message(&mut self) -> bool {
        match self {
            Self::Socket(stream) => {
                let mut start = [0; message::START_BYTES];
                let peeked = socket::peek_into(stream, &mut start);
                matches!(peeked, Ok(Some(count)) if count > 0) && !message::is_goodbye(&start)
            }
            Self::Shm(memory) => memory.has_arrived().unwrap_or(false),
        }
    }

    /// Whether the peer may have to run on this core.
    pub(super) fn may_share_core(&self) -> bool {
        match self {
            Self::Socket(_) => true,
            Self::Shm(memory) => memory.shares_core(),
        }
    }

    /// What to watch while sleeping.
    pub(super) fn events(&self, activity: Activity) -> PollFlags {
        match self {
            Self::Socket(_) if activity == Activity::Send => PollFlags::OUT,
            _ => PollFlags::IN,
        }
    }

    /// Ends the sleep.
    pub(super) fn end_sleep(&mut self) {
        if let Self::Shm(memory) = self {
            memory.end_sleep();
        }
    }
}

impl AsFd for PeerLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Socket(stream) => stream.as_fd(),
            Self::Shm(memory) => memory.as_fd(),
        }
    }
}

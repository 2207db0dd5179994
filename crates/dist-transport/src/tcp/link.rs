//! A connection to a peer, for one channel: a socket, or memory that both share.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::PollFlags;
use socket2::Socket;

use crate::Activity;
use crate::shm::{End, Memory};
use crate::tcp::message::{self, Fault};
use crate::tcp::socket;

#[derive(Debug)]
pub(super) enum Link {
    Socket(Socket),
    Memory(Memory),
}

impl Link {
    /// Tells the peer that nothing more will come, if the connection takes it at once.
    pub(super) fn say_goodbye(&self) {
        match self {
            Self::Socket(stream) => {
                let _ = socket::send(stream, &message::goodbye());
            }
            Self::Memory(memory) => memory.say_goodbye(),
        }
    }

    /// Takes back what the peer may be copying, for a call that has failed.
    pub(super) fn call_back(&mut self) {
        if let Self::Memory(memory) = self {
            memory.call_back();
        }
    }

    /// Gets ready to sleep until the connection is ready for this; `false` if it is already.
    pub(super) fn lie_down(&mut self, activity: Activity) -> bool {
        match self {
            Self::Socket(_) => true,
            Self::Memory(memory) => memory.lie_down(activity != Activity::Send),
        }
    }

    /// Whether something has come that was not received yet; a goodbye is something.
    pub(super) fn has_come(&mut self) -> Result<bool, Fault> {
        match self {
            Self::Socket(stream) => match socket::peek(stream)? {
                Some(0) => Err(Fault::Closed),
                come => Ok(come.is_some()),
            },
            Self::Memory(memory) => match memory.has_come() {
                Err(End::Goodbye) => Ok(true),
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
            Self::Memory(memory) => memory.has_come().unwrap_or(false),
        }
    }

    /// Whether the peer may have to run on this core.
    pub(super) fn may_share_core(&self) -> bool {
        match self {
            Self::Socket(_) => true,
            Self::Memory(memory) => memory.shares_core(),
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
    pub(super) fn get_up(&mut self) {
        if let Self::Memory(memory) = self {
            memory.get_up();
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Socket(stream) => stream.as_fd(),
            Self::Memory(memory) => memory.as_fd(),
        }
    }
}

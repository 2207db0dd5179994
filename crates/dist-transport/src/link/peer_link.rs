//! A link to a peer for one channel: TCP sockets, or shared memory.

use rustix::event::{PollFd, PollFlags};

use crate::Activity;
use crate::link::message::{self, LinkError};
use crate::link::shm::{ShmLink, StreamEnd};
use crate::link::socket;
use crate::link::striped_socket::StripedSocket;

#[derive(Debug)]
pub(crate) enum PeerLink {
    Socket(StripedSocket),
    Shm(ShmLink),
}

impl PeerLink {
    /// Sends a goodbye if the link takes it at once.
    pub(crate) fn say_goodbye(&self) {
        match self {
            Self::Socket(sockets) => {
                let _ = socket::send(sockets.first(), &message::goodbye());
            }
            Self::Shm(memory) => memory.say_goodbye(),
        }
    }

    /// Cancels a single-copy send that the peer may be reading, after a failed call.
    pub(crate) fn cancel_offer(&mut self) {
        if let Self::Shm(memory) = self {
            memory.cancel_offer();
        }
    }

    /// Prepares to sleep until the link is ready for this. Returns `false` if it is ready.
    pub(crate) fn prepare_sleep(&mut self, activity: Activity) -> bool {
        match self {
            Self::Socket(_) => true,
            Self::Shm(memory) => memory.prepare_sleep(activity != Activity::Send),
        }
    }

    /// Returns `true` if unread bytes have arrived, including those of a goodbye.
    pub(crate) fn has_arrived(&mut self) -> Result<bool, LinkError> {
        match self {
            Self::Socket(sockets) => match socket::peek(sockets.receive_at(0).0)? {
                Some(0) => Err(LinkError::Closed),
                come => Ok(come.is_some()),
            },
            Self::Shm(memory) => match memory.has_arrived() {
                Err(StreamEnd::Goodbye) => Ok(true),
                come => Ok(come?),
            },
        }
    }

    /// Returns `true` if a message has arrived that was not received yet. A goodbye is no message.
    pub(crate) fn has_message(&mut self) -> bool {
        match self {
            Self::Socket(sockets) => {
                let mut start = [0; message::START_BYTES];
                let peeked = socket::peek_into(sockets.first(), &mut start);
                matches!(peeked, Ok(Some(count)) if count > 0) && !message::is_goodbye(&start)
            }
            Self::Shm(memory) => memory.has_arrived().unwrap_or(false),
        }
    }

    /// Returns `true` if the peer may have to run on this core.
    pub(crate) fn may_share_core(&self) -> bool {
        match self {
            Self::Socket(_) => true,
            Self::Shm(memory) => memory.shares_core(),
        }
    }

    /// Adds the poll entries for a sleep until the link can continue this activity.
    pub(crate) fn watch<'a>(&'a self, activity: Activity, watched: &mut impl Extend<PollFd<'a>>) {
        match self {
            Self::Socket(sockets) => watched.extend(sockets.watch(activity)),
            Self::Shm(memory) => watched.extend([socket::watch(memory, PollFlags::IN)]),
        }
    }

    /// Ends the sleep.
    pub(crate) fn end_sleep(&mut self) {
        if let Self::Shm(memory) = self {
            memory.end_sleep();
        }
    }
}

//! A connection to a peer, for one channel: a socket, and perhaps another beside it, or memory that both share.

use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::PollFlags;
use socket2::Socket;

use crate::Activity;
use crate::shm::{End, Memory};
use crate::tcp::message::{self, Fault};
use crate::tcp::socket;

#[derive(Debug)]
pub(super) enum Link {
    Socket(Stream),
    Memory(Memory),
}

/// A connection over TCP.
///
/// Between two ranks of one host that have a core each there is a second one, beside it, for payloads of a middling size
/// from the rank that has dialled. Their headers stay where all others are, so messages keep their order. By one connection
/// alone what comes to a rank that is sending waits until that is sent, and the memory of what was received is given back
/// with what is sent next, on the other core than would use it again.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) socket: Socket,
    beside: Option<Beside>,
}

#[derive(Debug)]
struct Beside {
    socket: Socket,
    /// What this rank does by it.
    serves: Activity,
    /// Whether the payload that is under way goes by it.
    carries: bool,
}

/// Bytes of a payload that is sent beside its header: more than one segment of loopback takes together with the header, and
/// no more than pays.
const BESIDE_BYTES: RangeInclusive<usize> = 64 << 10..=256 << 10;

impl Stream {
    /// With one `beside` it, by which this rank does one thing alone.
    pub(super) fn new(socket: Socket, beside: Option<Socket>, serves: Activity) -> Self {
        Self { socket, beside: beside.map(|socket| Beside { socket, serves, carries: false }) }
    }

    /// Whether a payload of so many bytes is sent beside its header.
    pub(super) fn sends_beside(&self, bytes: usize) -> bool {
        self.goes_beside(Activity::Send, bytes)
    }

    /// Whether a payload of so many bytes may come beside its header.
    pub(super) fn may_come_beside(&self, bytes: usize) -> bool {
        self.goes_beside(Activity::Receive, bytes)
    }

    fn goes_beside(&self, activity: Activity, bytes: usize) -> bool {
        self.beside_for(activity).is_some() && BESIDE_BYTES.contains(&bytes)
    }

    fn beside_for(&self, activity: Activity) -> Option<&Beside> {
        self.beside.as_ref().filter(|beside| beside.serves == activity)
    }

    /// Says whether the next bytes that are sent, or received, are of a payload that goes beside its header.
    pub(super) fn go_beside(&mut self, activity: Activity, carries: bool) {
        if let Some(beside) = self.beside.as_mut().filter(|beside| beside.serves == activity) {
            beside.carries = carries;
        }
    }

    /// By which socket the next bytes are sent, or received.
    pub(super) fn socket_for(&self, activity: Activity) -> &Socket {
        self.beside_for(activity)
            .filter(|beside| beside.carries)
            .map_or(&self.socket, |beside| &beside.socket)
    }
}

impl Link {
    /// Tells the peer that nothing more will come, if the connection takes it at once.
    pub(super) fn say_goodbye(&self) {
        match self {
            Self::Socket(stream) => {
                let _ = socket::send(&stream.socket, &message::goodbye());
            }
            Self::Memory(memory) => memory.say_goodbye(),
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
            Self::Socket(stream) => match socket::peek(&stream.socket)? {
                Some(0) => Err(Fault::Closed),
                come => Ok(come.is_some()),
            },
            Self::Memory(memory) => match memory.peek(1) {
                Err(End::Goodbye) => Ok(true),
                come => Ok(!come?.is_empty()),
            },
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

    /// Where that is seen.
    pub(super) fn descriptor(&self, activity: Activity) -> BorrowedFd<'_> {
        match self {
            Self::Socket(stream) => stream.socket_for(activity).as_fd(),
            Self::Memory(memory) => memory.as_fd(),
        }
    }

    /// Ends the sleep.
    pub(super) fn get_up(&mut self) {
        if let Self::Memory(memory) = self {
            memory.get_up();
        }
    }
}

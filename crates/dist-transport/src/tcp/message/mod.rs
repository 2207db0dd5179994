//! Messages on one connection: a header of 64 bytes, then the payload, neither ever waiting.
//!
//! A connection takes and gives bytes as a socket does, or in memory that the peer sees: then whole grains move, and
//! what has come is delivered from where it lies.

mod inbound;
mod outbound;
#[cfg(test)]
#[cfg(all(feature = "shm", target_os = "linux"))]
mod tests;

use std::io;

use rustix::io::Errno;

pub(super) use self::inbound::Inbound;
pub(super) use self::outbound::Outbound;
use crate::bookkeeping::HEADER_BYTES;
use crate::shm::StreamEnd;
use crate::{Abort, Error, Fingerprint};

/// What is sent or received in one go at the most, by one system call or through memory.
const SEND_BYTES_MAX: usize = 1 << 20;
/// What is handed over in memory at once at the most: a header and 64 KiB.
const PUBLISH_BYTES_MAX: usize = HEADER_BYTES + (64 << 10);
/// Up to here a message is copied so that it leaves a socket, or comes, in one piece with its header: the system takes
/// longer to look at several pieces than the copy does.
const COPIED_BYTES_MAX: usize = 4 << 10;

type Magic = [u8; 8];
const MAGIC: Magic = *b"dist msg";
/// Of a message in memory that its sender keeps until it was copied from there.
const SINGLE_COPY_MAGIC: Magic = *b"dist len";
/// The length that stands for "nothing more will come".
const GOODBYE: u64 = u64::MAX;

/// Why a message failed.
#[derive(Debug)]
pub(super) enum LinkError {
    /// The peer has left in order.
    Goodbye,
    /// The connection has ended.
    Closed,
    /// The peer is in another call.
    Mismatch { theirs: Fingerprint },
    /// The peer sends another number of bytes.
    Length { got: u64, expected: u64 },
    /// The peer does not send_frames our language.
    Garbage,
    /// The system failed at this connection.
    Io(io::Error),
    /// The system failed this process, whatever the peer.
    Own(io::Error),
    /// The peer has named these members of the group, and not those that this process has named.
    OtherMembers(Vec<usize>),
    /// There is no connection, for this reason.
    Unconnected(Error),
    /// The deadline passed.
    TimedOut,
    /// The job was aborted meanwhile.
    Aborted(Abort),
}

impl LinkError {
    /// What the system says of a connection; that it has no memory left is not about the peer.
    pub(super) fn of_system(e: io::Error) -> Self {
        match Errno::from_io_error(&e) {
            Some(Errno::NOMEM | Errno::NOBUFS) => Self::Own(e),
            _ => Self::Io(e),
        }
    }
}

impl From<io::Error> for LinkError {
    fn from(e: io::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, UnexpectedEof};
        match e.kind() {
            BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected | UnexpectedEof => Self::Closed,
            _ => Self::of_system(e),
        }
    }
}

impl From<StreamEnd> for LinkError {
    fn from(end: StreamEnd) -> Self {
        match end {
            StreamEnd::Goodbye => Self::Goodbye,
            StreamEnd::Closed => Self::Closed,
            StreamEnd::Broken => Self::Garbage,
        }
    }
}

fn encode(length: u64, call: &Fingerprint) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[8..16].copy_from_slice(&length.to_le_bytes());
    header[16..].copy_from_slice(&call.0);
    header
}

/// Bytes of a message that tell a goodbye from others.
pub(super) const START_BYTES: usize = 16;

/// Whether a message that begins so says that nothing more will come.
pub(super) fn is_goodbye(start: &[u8; START_BYTES]) -> bool {
    goodbye()[..START_BYTES] == *start
}

/// The message that says that nothing more will come.
pub(super) fn goodbye() -> [u8; HEADER_BYTES] {
    encode(GOODBYE, &Fingerprint::NONE)
}

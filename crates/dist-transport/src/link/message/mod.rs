//! Message framing on one connection: a header of 64 bytes, then the payload. Nothing here waits.
//!
//! A socket moves any number of bytes. Shared memory moves whole cache lines of 64 bytes, and received bytes are
//! delivered in place.

mod inbound;
mod outbound;
#[cfg(test)]
mod striped_tests;
#[cfg(test)]
#[cfg(all(feature = "shm", target_os = "linux"))]
mod tests;

use std::io;

use rustix::io::Errno;

pub(crate) use self::inbound::{Inbound, NextHeader, length_of};
pub(crate) use self::outbound::Outbound;
use crate::bookkeeping::HEADER_BYTES;
use crate::link::shm::StreamEnd;
use crate::{Abort, Error, Fingerprint};

/// The most bytes that one step sends or receives, by a system call or through shared memory.
const SEND_BYTES_MAX: usize = 1 << 20;
/// The most bytes that are published at once in shared memory: a header and 64 KiB.
const PUBLISH_BYTES_MAX: usize = HEADER_BYTES + (64 << 10);
/// Messages up to this size are copied, so that header and payload are one piece for the socket. The system
/// takes longer to handle several pieces than the copy takes.
const COPIED_BYTES_MAX: usize = 4 << 10;

type Magic = [u8; 8];
const MAGIC: Magic = *b"dist msg";
/// The magic number of a single-copy message, which stays in its sender's memory until the receiver has
/// copied it.
const SINGLE_COPY_MAGIC: Magic = *b"dist len";
/// The length that means "nothing more will come".
const GOODBYE: u64 = u64::MAX;
/// The length that means "later messages come on the other link of this pair of ranks".
const MOVED: u64 = u64::MAX - 1;
/// The most bytes that are received together with the header of a matched message.
pub(crate) const READ_AHEAD_BYTES: usize = COPIED_BYTES_MAX;

/// The reason why a message failed.
#[derive(Debug)]
pub(crate) enum LinkError {
    /// The peer has left in order.
    Goodbye,
    /// The connection has ended.
    Closed,
    /// The peer is in another call.
    Mismatch { theirs: Fingerprint },
    /// The peer sends another number of bytes.
    Length { got: u64, expected: u64 },
    /// The peer sent bytes that are no message.
    Garbage,
    /// The system reported an error of this connection.
    Io(io::Error),
    /// The system lacks a resource for this process, whatever the peer.
    Own(io::Error),
    /// The peer has named these members of the group, and this process has named others.
    OtherMembers(Vec<usize>),
    /// There is no connection, for this reason.
    Unconnected(Error),
    /// The deadline passed.
    TimedOut,
    /// The job was aborted meanwhile.
    Aborted(Abort),
}

impl LinkError {
    /// Converts a system error of a connection. A lack of memory is not about the peer.
    pub(crate) fn of_system(e: io::Error) -> Self {
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
            StreamEnd::NoMemory => Self::Own(Errno::NOMEM.into()),
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

/// Bytes that are enough to recognise a goodbye.
pub(crate) const START_BYTES: usize = 16;

/// Returns `true` if a message that begins with these bytes is a goodbye.
pub(crate) fn is_goodbye(start: &[u8; START_BYTES]) -> bool {
    goodbye()[..START_BYTES] == *start
}

/// Returns the goodbye message, which is the last one on a connection.
pub(crate) fn goodbye() -> [u8; HEADER_BYTES] {
    encode(GOODBYE, &Fingerprint::NONE)
}

//! One or several TCP connections to the same peer, used as one stream of messages.
//!
//! The bytes that one connection may have in flight limit its speed on a long link: 4 MiB in 100 ms are 42 MB/s. So a
//! message of several segments is striped: its segments of 64 KiB go in turn over all connections, the first segment
//! with the header over the first connection. The position of a byte in its message determines its connection, so
//! segments need no headers. A shorter message goes over the first connection. Messages follow each other in order on
//! each connection, because the next one begins when the last byte of this one was sent, or received.

use rustix::event::{PollFd, PollFlags};
use socket2::Socket;

use crate::Activity;
use crate::link::socket;

/// The bytes of a segment. Segments of 64 KiB fit into the windows of new connections, and a system call for each takes
/// little of the time of its copy.
pub(crate) const SEGMENT_BYTES: usize = 64 << 10;

/// The most connections to one peer.
pub(crate) const SOCKETS_MAX: usize = 64;

/// The TCP connections to one peer.
#[derive(Debug)]
pub(crate) struct StripedSocket {
    first: Socket,
    /// The other connections, none by default.
    others: Vec<Socket>,
    /// The index of the connection that carries the next bytes to be received.
    receiving: usize,
    /// The connections that have bytes of the current message left to send, one bit for each.
    sending: u64,
}

impl StripedSocket {
    pub(crate) const fn new(first: Socket, others: Vec<Socket>) -> Self {
        Self { first, others, receiving: 0, sending: 1 }
    }

    /// Returns the number of connections.
    pub(crate) const fn count(&self) -> usize {
        1 + self.others.len()
    }

    /// Returns the connection that carries headers and small messages.
    pub(crate) const fn first(&self) -> &Socket {
        &self.first
    }

    /// Returns a connection.
    pub(crate) fn socket(&self, index: usize) -> &Socket {
        if index == 0 { &self.first } else { &self.others[index - 1] }
    }

    /// Returns `true` if a message of this many bytes, with its header, goes over several connections.
    pub(crate) const fn stripes(&self, total: usize) -> bool {
        !self.others.is_empty() && total > SEGMENT_BYTES
    }

    /// Returns the connection that carries the byte at this position of a message, and the number of bytes from there on
    /// that it carries without a gap.
    #[inline]
    pub(crate) fn receive_at(&mut self, position: usize) -> (&Socket, usize) {
        if self.others.is_empty() { (&self.first, usize::MAX) } else { self.receive_segment(position) }
    }

    #[inline(never)]
    fn receive_segment(&mut self, position: usize) -> (&Socket, usize) {
        self.receiving = position / SEGMENT_BYTES % self.count();
        (self.socket(self.receiving), SEGMENT_BYTES - position % SEGMENT_BYTES)
    }

    /// Sets the connections that have bytes of the current message left to send.
    pub(crate) const fn set_sending(&mut self, sending: u64) {
        self.sending = sending;
    }

    /// Returns the poll entries for the connections that can continue this activity.
    pub(crate) fn watch(&self, activity: Activity) -> impl Iterator<Item = PollFd<'_>> {
        let (sockets, events) = match activity {
            Activity::Send => (self.sending, PollFlags::OUT),
            _ => (1 << self.receiving, PollFlags::IN),
        };
        let is_watched = move |index: &usize| sockets >> index & 1 == 1;
        (0..self.count()).filter(is_watched).map(move |index| socket::watch(self.socket(index), events))
    }
}

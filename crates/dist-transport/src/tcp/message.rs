//! Messages on one connection: a header of 64 bytes, then the payload, neither ever waiting.
//!
//! A connection takes and gives bytes as a socket does, or in memory that the peer sees: then whole grains move, and
//! what has come is delivered from where it lies.

use std::io::{self, IoSlice, IoSliceMut};

use rustix::io::Errno;
use socket2::Socket;

use crate::shm::{End, Memory};
use crate::tcp::link::Link;
use crate::tcp::scratch::Scratch;
use crate::tcp::socket;
use crate::{Abort, Combine, Error, Fingerprint, Grain, Sink};

/// Bytes in front of every message.
pub(super) const HEADER_BYTES: usize = 64;
/// What is sent or received in one go at the most, by one system call or through memory.
const SEND_BYTES_MAX: usize = 1 << 20;
/// What is handed over in memory at once at the most: a header and 64 KiB.
const PUBLISH_BYTES_MAX: usize = HEADER_BYTES + (64 << 10);
/// Pieces of a message that one system call takes.
const PARTS_MAX: usize = 16;
/// Up to here a message is copied so that it leaves a socket, or comes, in one piece with its header: the system takes
/// longer to look at several pieces than the copy does.
const COPIED_BYTES_MAX: usize = 4 << 10;

const MAGIC: [u8; 8] = *b"dist msg";
/// Of a message in memory that does not follow its header but lies on the tray.
const LAID_MAGIC: [u8; 8] = *b"dist lay";
/// The length that stands for "nothing more will come".
const GOODBYE: u64 = u64::MAX;

/// Why a message failed.
#[derive(Debug)]
pub(super) enum Fault {
    /// The peer has left in order.
    Goodbye,
    /// The connection has ended.
    Closed,
    /// The peer is in another call.
    Mismatch { theirs: Fingerprint },
    /// The peer sends another number of bytes.
    Length { got: u64, expected: u64 },
    /// The peer does not speak our language.
    Garbage,
    /// The system failed at this connection.
    Io(io::Error),
    /// The system failed this process, whatever the peer.
    Own(io::Error),
    /// There is no connection, for this reason.
    Unconnected(Error),
    /// The deadline passed.
    TimedOut,
    /// The job was aborted meanwhile.
    Aborted(Abort),
}

impl Fault {
    /// What the system says of a connection; that it has no memory left is not about the peer.
    pub(super) fn of_system(e: io::Error) -> Self {
        match Errno::from_io_error(&e) {
            Some(Errno::NOMEM | Errno::NOBUFS) => Self::Own(e),
            _ => Self::Io(e),
        }
    }
}

impl From<io::Error> for Fault {
    fn from(e: io::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, UnexpectedEof};
        match e.kind() {
            BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected | UnexpectedEof => Self::Closed,
            _ => Self::of_system(e),
        }
    }
}

impl From<End> for Fault {
    fn from(end: End) -> Self {
        match end {
            End::Goodbye => Self::Goodbye,
            End::Closed => Self::Closed,
            End::Broken => Self::Garbage,
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

/// The message that says that nothing more will come.
pub(super) fn goodbye() -> [u8; HEADER_BYTES] {
    encode(GOODBYE, &Fingerprint::NONE)
}

/// A message on its way out.
#[derive(Debug)]
pub(super) struct Outbound {
    header: [u8; HEADER_BYTES],
    sent: usize,
    total: usize,
}

impl Outbound {
    pub(super) fn new(length: usize, call: &Fingerprint) -> Self {
        Self { header: encode(length as u64, call), sent: 0, total: HEADER_BYTES + length }
    }

    pub(super) fn done(&self) -> bool {
        self.sent == self.total
    }

    /// Bytes of the payload that have left.
    fn payload_sent(&self) -> usize {
        self.sent.saturating_sub(HEADER_BYTES)
    }

    /// Sends what the connection takes; `true` if it took something.
    pub(super) fn push(
        &mut self,
        link: &mut Link,
        scratch: &mut Scratch,
        parts: &[&[u8]],
    ) -> Result<bool, Fault> {
        match link {
            Link::Socket(stream) => self.push_to_socket(stream, scratch, parts),
            Link::Memory(memory) => self.push_to_memory(memory, parts),
        }
    }

    fn push_to_memory(&mut self, memory: &mut Memory, parts: &[&[u8]]) -> Result<bool, Fault> {
        let mut moved = false;
        if self.sent == 0 && self.total > HEADER_BYTES && self.lay_down(memory, parts)? {
            return Ok(true);
        }
        // No more in one go than a socket takes: the peer may take it as fast as it comes, and the deadline is looked at
        // in between.
        let enough = self.total.min(self.sent + SEND_BYTES_MAX);
        while self.sent < enough && self.push_piece(memory, parts)? {
            moved = true;
        }
        Ok(moved)
    }

    /// Hands the whole message over on the tray, if that can be.
    fn lay_down(&mut self, memory: &mut Memory, parts: &[&[u8]]) -> Result<bool, Fault> {
        let mut header = self.header;
        header[..LAID_MAGIC.len()].copy_from_slice(&LAID_MAGIC);
        let laid = memory.lay_down(&header, parts, self.total - HEADER_BYTES)?;
        self.sent = if laid { self.total } else { 0 };
        Ok(laid)
    }

    /// Copies and publishes what there is room for, but no more than the peer should wait for.
    fn push_piece(&mut self, memory: &mut Memory, parts: &[&[u8]]) -> Result<bool, Fault> {
        let wanted = (self.total - self.sent).min(PUBLISH_BYTES_MAX);
        let count = memory.room(wanted)?.min(wanted);
        let (mut written, mut skip) = (0, self.sent);
        for part in std::iter::once(&self.header[..]).chain(parts.iter().copied()) {
            if written == count {
                break;
            }
            let rest = &part[skip.min(part.len())..];
            skip -= part.len() - rest.len();
            let piece = &rest[..rest.len().min(count - written)];
            memory.write(written, piece);
            written += piece.len();
        }
        if count > 0 {
            memory.publish(count);
        }
        self.sent += count;
        Ok(count > 0)
    }

    fn push_to_socket(
        &mut self,
        stream: &Socket,
        scratch: &mut Scratch,
        parts: &[&[u8]],
    ) -> Result<bool, Fault> {
        let sent = if self.total <= COPIED_BYTES_MAX {
            let message = &mut scratch.outgoing;
            message.clear();
            message.extend_from_slice(&self.header);
            parts.iter().for_each(|part| message.extend_from_slice(part));
            socket::send(stream, &message[self.sent..])?
        } else {
            self.push_pieces(stream, parts)?
        };
        self.sent += sent.unwrap_or(0);
        Ok(sent.is_some())
    }

    fn push_pieces(&self, stream: &Socket, parts: &[&[u8]]) -> Result<Option<usize>, Fault> {
        let mut pieces = [IoSlice::new(&[]); PARTS_MAX];
        let mut count = 0;
        let mut room = SEND_BYTES_MAX;
        let mut skip = self.sent;
        for part in std::iter::once(&self.header[..]).chain(parts.iter().copied()) {
            let rest = &part[skip.min(part.len())..];
            skip -= part.len() - rest.len();
            if !rest.is_empty() {
                pieces[count] = IoSlice::new(&rest[..rest.len().min(room)]);
                room -= pieces[count].len();
                count += 1;
            }
            if count == PARTS_MAX || room == 0 {
                break;
            }
        }
        Ok(match &pieces[..count] {
            [one] => socket::send(stream, one)?,
            several => socket::send_pieces(stream, several)?,
        })
    }
}

/// A message on its way in.
#[derive(Debug)]
pub(super) struct Inbound {
    header: [u8; HEADER_BYTES],
    filled: usize,
    /// What the header has to be.
    expected: [u8; HEADER_BYTES],
    length: usize,
    received: usize,
    delivered: usize,
    /// Whether it lies on the tray of memory.
    laid: bool,
    /// Whether it may come through the scratch even if it goes straight into memory.
    copied: bool,
}

impl Inbound {
    pub(super) fn new(length: usize, call: &Fingerprint) -> Self {
        let copied = HEADER_BYTES + length <= COPIED_BYTES_MAX;
        let header = [0; HEADER_BYTES];
        Self {
            header,
            filled: 0,
            expected: encode(length as u64, call),
            length,
            received: 0,
            delivered: 0,
            laid: false,
            copied,
        }
    }

    /// The same, but never copied: for one of many messages, each of which would need a scratch of its own.
    pub(super) const fn straight(self) -> Self {
        Self { copied: false, ..self }
    }

    pub(super) fn done(&self) -> bool {
        self.filled == HEADER_BYTES && self.delivered == self.length
    }

    /// Whether more can be received now, if no more of `outbound` leaves: not while all of the scratch holds what may
    /// not be delivered yet, nor from memory what would have to lie there.
    pub(super) fn wants_more(&self, link: &Link, scratch: &Scratch, outbound: &Outbound) -> bool {
        let missing = self.filled < HEADER_BYTES || self.received < self.length;
        missing
            && match link {
                Link::Socket(_) => !scratch.is_full(),
                Link::Memory(_) => self.filled < HEADER_BYTES || self.delivered < self.lockstep(outbound),
            }
    }

    /// Up to where may be delivered what is combined with the bytes that `outbound` sends.
    fn lockstep(&self, outbound: &Outbound) -> usize {
        if outbound.done() { self.length } else { outbound.payload_sent() / Grain::BYTES * Grain::BYTES }
    }

    /// Receives and delivers what has come, through `scratch` if it comes in unequal pieces; `true` if something came.
    pub(super) fn pull(
        &mut self,
        link: &mut Link,
        scratch: &mut Scratch,
        sink: &mut Sink<'_>,
    ) -> Result<bool, Fault> {
        match (link, sink) {
            (Link::Socket(stream), Sink::Into(memory)) if self.copied => {
                let came = self.refill(stream, scratch)?;
                self.deliver(scratch, self.length, &mut |offset, bytes| {
                    memory[offset..][..bytes.len()].copy_from_slice(bytes);
                });
                Ok(came)
            }
            (Link::Socket(stream), Sink::Into(memory)) => {
                let received = self.received;
                let came = self.read(stream, &mut memory[received..])?;
                self.delivered = self.received;
                Ok(came)
            }
            (Link::Socket(stream), Sink::Each(sink)) => {
                let came = self.refill(stream, scratch)?;
                self.deliver(scratch, self.length, sink);
                Ok(came)
            }
            (Link::Memory(memory), Sink::Into(into)) => {
                self.pull_from_memory(memory, self.length, &mut |offset, bytes| {
                    crate::copy(bytes, &mut into[offset..][..bytes.len()]);
                })
            }
            (Link::Memory(memory), Sink::Each(sink)) => self.pull_from_memory(memory, self.length, sink),
        }
    }

    /// Like [`pull`](Self::pull), combining into the memory whose own bytes `outbound` sends, and never ahead of them.
    pub(super) fn pull_in_place(
        &mut self,
        link: &mut Link,
        scratch: &mut Scratch,
        outbound: &Outbound,
        memory: &mut [u8],
        combine: &mut Combine<'_>,
    ) -> Result<bool, Fault> {
        let limit = self.lockstep(outbound);
        let mut sink = |offset: usize, bytes: &[u8]| combine(&mut memory[offset..][..bytes.len()], bytes);
        match link {
            Link::Socket(stream) => {
                let came = self.refill(stream, scratch)?;
                Ok(self.deliver(scratch, limit, &mut sink) || came)
            }
            Link::Memory(memory) => self.pull_from_memory(memory, limit, &mut sink),
        }
    }

    /// Delivers the next piece of what has come, up to `limit` from the start of the message, from where it lies.
    fn pull_from_memory(
        &mut self,
        memory: &mut Memory,
        limit: usize,
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<bool, Fault> {
        let mut came = false;
        if self.filled < HEADER_BYTES {
            let header = memory.peek(HEADER_BYTES)?;
            if header.is_empty() {
                return Ok(false);
            }
            self.header.copy_from_slice(header);
            self.filled = HEADER_BYTES;
            memory.advance(HEADER_BYTES);
            self.laid = self.header.starts_with(&LAID_MAGIC);
            if self.laid {
                self.header[..MAGIC.len()].copy_from_slice(&MAGIC);
            }
            self.check()?;
            if self.laid {
                memory.receive_tray(self.length)?;
            }
            came = true;
        }
        if self.laid && self.delivered < limit {
            sink(self.delivered, memory.on_tray(self.delivered..limit));
            (self.delivered, self.received) = (limit, limit);
            if self.delivered == self.length {
                memory.clear_tray();
            }
            came = true;
        } else if self.delivered < limit {
            let piece = memory.peek((limit - self.delivered).min(PUBLISH_BYTES_MAX))?;
            let count = piece.len();
            if count > 0 {
                sink(self.delivered, piece);
                memory.advance(count);
                self.delivered += count;
                self.received = self.delivered;
                came = true;
            }
        }
        Ok(came)
    }

    /// Receives into the scratch, the header in front.
    fn refill(&mut self, stream: &Socket, scratch: &mut Scratch) -> Result<bool, Fault> {
        let missing = HEADER_BYTES - self.filled;
        let wanted = missing + self.length - self.received;
        let room = scratch.room();
        let count = wanted.min(room.len());
        if count == 0 {
            return Ok(false);
        }
        let Some(count) = arrived(socket::receive(stream, &mut room[..count])?)? else { return Ok(false) };
        scratch.stage(count);
        self.filled += count.min(missing);
        self.received += count.saturating_sub(missing);
        if missing > 0 && self.filled == HEADER_BYTES {
            self.header.copy_from_slice(scratch.take(HEADER_BYTES));
            self.check()?;
        }
        Ok(true)
    }

    /// Delivers what is staged, up to `limit` from the start of the message; `true` if that was anything.
    fn deliver(&mut self, scratch: &mut Scratch, limit: usize, sink: &mut dyn FnMut(usize, &[u8])) -> bool {
        if self.filled < HEADER_BYTES {
            return false;
        }
        let staged = scratch.staged();
        let whole = if self.received == self.length { staged } else { staged / Grain::BYTES * Grain::BYTES };
        let ready = whole.min(limit.saturating_sub(self.delivered));
        if ready > 0 {
            sink(self.delivered, scratch.take(ready));
            self.delivered += ready;
        }
        ready > 0
    }

    /// Reads the rest of the header and into `room`, which is for the rest of the message, what follows it.
    fn read(&mut self, stream: &Socket, room: &mut [u8]) -> Result<bool, Fault> {
        let missing = HEADER_BYTES - self.filled;
        let received = if missing > 0 {
            let head = IoSliceMut::new(&mut self.header[self.filled..]);
            socket::receive_pieces(stream, &mut [head, IoSliceMut::new(room)])?
        } else {
            socket::receive(stream, room)?
        };
        let Some(count) = arrived(received)? else { return Ok(false) };
        self.filled += count.min(missing);
        self.received += count.saturating_sub(missing);
        if missing > 0 && self.filled == HEADER_BYTES {
            self.check()?;
        }
        Ok(true)
    }

    /// Compares the header with what this rank expects.
    #[inline]
    fn check(&self) -> Result<(), Fault> {
        if self.header == self.expected { Ok(()) } else { Err(self.contradiction()) }
    }

    /// What a header says that is not as expected.
    #[cold]
    fn contradiction(&self) -> Fault {
        let (magic, rest) = self.header.split_at(8);
        let (length, call) = rest.split_at(8);
        let length = u64::from_le_bytes(length.try_into().expect("split at 8"));
        let theirs = Fingerprint(call.try_into().expect("what follows the length is a fingerprint"));
        if magic != MAGIC {
            Fault::Garbage
        } else if length == GOODBYE {
            Fault::Goodbye
        } else if call != &self.expected[16..] {
            Fault::Mismatch { theirs }
        } else {
            Fault::Length { got: length, expected: self.length as u64 }
        }
    }
}

/// What a system call received; nothing at all is the end of the connection.
fn arrived(received: Option<usize>) -> Result<Option<usize>, Fault> {
    if received == Some(0) { Err(Fault::Closed) } else { Ok(received) }
}

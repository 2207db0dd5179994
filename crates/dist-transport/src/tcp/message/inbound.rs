//! A message on its source in.

use std::io::IoSliceMut;

use socket2::Socket;

use super::outbound::Outbound;
use super::{
    COPIED_BYTES_MAX, GOODBYE, HEADER_BYTES, LinkError, MAGIC, PUBLISH_BYTES_MAX, SEND_BYTES_MAX,
    SINGLE_COPY_MAGIC,
};
use crate::shm::{NextMessage, ShmLink};
use crate::tcp::peer_link::PeerLink;
use crate::tcp::scratch::Scratch;
use crate::tcp::socket;
use crate::{Combine, Fingerprint, Grain, Sink};

/// Where the bytes of a message come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MessageSource {
    /// From a socket, or a ring in memory.
    Stream,
    /// From a tray in memory.
    Fastbox,
    /// From the sender's own memory, where they begin at this address.
    SingleCopy(u64),
}

/// A message on its source in.
#[derive(Debug)]
pub(in crate::tcp) struct Inbound {
    header: [u8; HEADER_BYTES],
    filled: usize,
    /// What the header has to say, beside the length.
    call: Fingerprint,
    length: usize,
    received: usize,
    pub(super) delivered: usize,
    source: MessageSource,
    /// Whether it may come through the scratch even if it goes straight into memory.
    copied: bool,
}

impl Inbound {
    pub(in crate::tcp) fn new(length: usize, call: &Fingerprint) -> Self {
        let copied = HEADER_BYTES + length <= COPIED_BYTES_MAX;
        let header = [0; HEADER_BYTES];
        Self {
            header,
            filled: 0,
            call: *call,
            length,
            received: 0,
            delivered: 0,
            source: MessageSource::Stream,
            copied,
        }
    }

    /// The same, but never copied: for one of many messages, each of which would need a scratch of its own.
    pub(in crate::tcp) const fn straight(self) -> Self {
        Self { copied: false, ..self }
    }

    pub(in crate::tcp) fn done(&self) -> bool {
        self.filled == HEADER_BYTES && self.delivered == self.length
    }

    /// Whether more can be received now, if no more of `outbound` leaves: not while all of the scratch holds what may
    /// not be delivered yet, nor from memory what would have to lie there.
    pub(in crate::tcp) fn wants_more(&self, link: &PeerLink, scratch: &Scratch, outbound: &Outbound) -> bool {
        let missing = self.filled < HEADER_BYTES || self.received < self.length;
        missing
            && match link {
                PeerLink::Socket(_) => !scratch.is_full(),
                PeerLink::Shm(_) => self.filled < HEADER_BYTES || self.delivered < self.lockstep(outbound),
            }
    }

    /// Up to where may be delivered what is combined with the bytes that `outbound` sends.
    fn lockstep(&self, outbound: &Outbound) -> usize {
        if outbound.done() { self.length } else { outbound.payload_sent() / Grain::BYTES * Grain::BYTES }
    }

    /// Receives and delivers what has come, through `scratch` if it comes in unequal pieces; `true` if something came.
    pub(in crate::tcp) fn pull(
        &mut self,
        link: &mut PeerLink,
        scratch: &mut Scratch,
        sink: &mut Sink<'_>,
    ) -> Result<bool, LinkError> {
        match (link, sink) {
            (PeerLink::Socket(stream), Sink::Into(memory)) if self.copied => {
                let came = self.refill(stream, scratch)?;
                self.deliver(scratch, self.length, &mut |offset, bytes| {
                    memory[offset..][..bytes.len()].copy_from_slice(bytes);
                });
                Ok(came)
            }
            (PeerLink::Socket(stream), Sink::Into(memory)) => {
                let received = self.received;
                let came = self.read(stream, &mut memory[received..])?;
                self.delivered = self.received;
                Ok(came)
            }
            (PeerLink::Socket(stream), Sink::Each(sink)) => {
                let came = self.refill(stream, scratch)?;
                self.deliver(scratch, self.length, sink);
                Ok(came)
            }
            (PeerLink::Shm(memory), sink) => {
                let came = self.open(memory)?;
                let moved = match (self.source, sink) {
                    (MessageSource::SingleCopy(address), Sink::Into(into)) => {
                        let start = self.delivered;
                        let piece = (self.length - start).min(SEND_BYTES_MAX);
                        self.get(memory, address, &mut into[start..][..piece])?
                    }
                    (_, Sink::Into(into)) => {
                        self.pull_from_memory(memory, scratch, self.length, &mut |offset, bytes| {
                            crate::copy(bytes, &mut into[offset..][..bytes.len()]);
                        })?
                    }
                    (_, Sink::Each(sink)) => self.pull_from_memory(memory, scratch, self.length, sink)?,
                };
                Ok(came || moved)
            }
        }
    }

    /// Like [`pull`](Self::pull), combining into the memory whose own bytes `outbound` sends, and never ahead of them.
    pub(in crate::tcp) fn pull_in_place(
        &mut self,
        link: &mut PeerLink,
        scratch: &mut Scratch,
        outbound: &Outbound,
        memory: &mut [u8],
        combine: &mut Combine<'_>,
    ) -> Result<bool, LinkError> {
        let limit = self.lockstep(outbound);
        let mut sink = |offset: usize, bytes: &[u8]| combine(&mut memory[offset..][..bytes.len()], bytes);
        match link {
            PeerLink::Socket(stream) => {
                let came = self.refill(stream, scratch)?;
                Ok(self.deliver(scratch, limit, &mut sink) || came)
            }
            PeerLink::Shm(memory) => {
                let came = self.open(memory)?;
                Ok(self.pull_from_memory(memory, scratch, limit, &mut sink)? || came)
            }
        }
    }

    /// Reads the header in memory, if it has come and was not read yet, and what it says of the message's source.
    #[inline]
    fn open(&mut self, memory: &mut ShmLink) -> Result<bool, LinkError> {
        if self.filled == HEADER_BYTES {
            return Ok(false);
        }
        let (magic, about, laid) = match memory.next(HEADER_BYTES)? {
            None => return Ok(false),
            Some(NextMessage::InFastbox(about)) => (&MAGIC, about, true),
            Some(NextMessage::InRing(header)) => {
                let (magic, about) = header.split_first_chunk().ok_or(LinkError::Garbage)?;
                (magic, about, false)
            }
        };
        let lent = *magic == SINGLE_COPY_MAGIC;
        if !self.is_expected(about) || !(lent || *magic == MAGIC) {
            self.header[..MAGIC.len()].copy_from_slice(if lent { &MAGIC } else { magic });
            self.header[MAGIC.len()..].copy_from_slice(about);
            return Err(self.contradiction());
        }
        self.filled = HEADER_BYTES;
        if laid {
            memory.receive_fastbox(self.length)?;
            self.source = MessageSource::Fastbox;
            return Ok(true);
        }
        memory.advance(HEADER_BYTES);
        if lent {
            self.source = MessageSource::SingleCopy(memory.receive_offer()?);
        }
        Ok(true)
    }

    /// Delivers the next piece of what has come, up to `limit` from the start of the message, from where it lies or through
    /// `scratch`; `true` if that was anything.
    fn pull_from_memory(
        &mut self,
        memory: &mut ShmLink,
        scratch: &mut Scratch,
        limit: usize,
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<bool, LinkError> {
        let start = self.delivered;
        if self.filled < HEADER_BYTES || start >= limit {
            return Ok(false);
        }
        match self.source {
            MessageSource::Fastbox => {
                sink(start, memory.fastbox_bytes(start..limit));
                self.delivered = limit;
                if limit == self.length {
                    memory.clear_fastbox();
                }
            }
            MessageSource::Stream => {
                let piece = memory.peek((limit - start).min(PUBLISH_BYTES_MAX))?;
                let count = piece.len();
                if count > 0 {
                    sink(start, piece);
                    memory.advance(count);
                    self.delivered += count;
                }
            }
            MessageSource::SingleCopy(address) => {
                let room = scratch.room();
                let piece = (limit - start).min(room.len());
                if self.get(memory, address, &mut room[..piece])? {
                    scratch.stage(piece);
                    sink(start, scratch.take(piece));
                }
            }
        }
        self.received = self.delivered;
        Ok(self.delivered > start)
    }

    /// Copies the next bytes of a message that the peer has lent; `false` if they are out of reach, and so will come through
    /// the ring, or count for nothing, since the peer's call has failed: then nothing more comes until this rank hears of it.
    fn get(&mut self, memory: &mut ShmLink, address: u64, into: &mut [u8]) -> Result<bool, LinkError> {
        let copied = memory.get_message(address.wrapping_add(self.delivered as u64), into);
        let taken = self.delivered + if copied { into.len() } else { 0 };
        if !copied || taken == self.length {
            self.source = MessageSource::Stream;
            if !memory.ack_offer(taken)? {
                return Ok(false);
            }
        }
        (self.delivered, self.received) = (taken, taken);
        Ok(copied)
    }

    /// Receives into the scratch, the header in front.
    fn refill(&mut self, stream: &Socket, scratch: &mut Scratch) -> Result<bool, LinkError> {
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
    fn read(&mut self, stream: &Socket, room: &mut [u8]) -> Result<bool, LinkError> {
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
    fn check(&self) -> Result<(), LinkError> {
        let (magic, about) = self.header.split_at(MAGIC.len());
        if magic == MAGIC && self.is_expected(about) { Ok(()) } else { Err(self.contradiction()) }
    }

    /// Whether a header says this behind its magic.
    fn is_expected(&self, about: &[u8]) -> bool {
        let (length, call) = about.split_at(size_of::<u64>());
        length == (self.length as u64).to_le_bytes() && call == self.call.0
    }

    /// What a header says that is not as expected.
    #[cold]
    fn contradiction(&self) -> LinkError {
        let (magic, rest) = self.header.split_at(8);
        let (length, call) = rest.split_at(8);
        let length = u64::from_le_bytes(length.try_into().expect("split at 8"));
        let theirs = Fingerprint(call.try_into().expect("what follows the length is a fingerprint"));
        if magic != MAGIC {
            LinkError::Garbage
        } else if length == GOODBYE {
            LinkError::Goodbye
        } else if theirs != self.call {
            LinkError::Mismatch { theirs }
        } else {
            LinkError::Length { got: length, expected: self.length as u64 }
        }
    }
}

/// What a system call received; nothing at all is the end of the connection.
fn arrived(received: Option<usize>) -> Result<Option<usize>, LinkError> {
    if received == Some(0) { Err(LinkError::Closed) } else { Ok(received) }
}

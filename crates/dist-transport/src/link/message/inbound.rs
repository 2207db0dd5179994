//! An incoming message.

use std::io::IoSliceMut;

use super::outbound::Outbound;
use super::{
    COPIED_BYTES_MAX, GOODBYE, HEADER_BYTES, LinkError, MAGIC, MOVED, Magic, PUBLISH_BYTES_MAX,
    READ_AHEAD_BYTES, SEND_BYTES_MAX, SINGLE_COPY_MAGIC,
};
use crate::announced::MatchedFrame;
use crate::cpu::CacheLine;
use crate::link::peer_link::PeerLink;
use crate::link::shm::{NextMessage, ShmLink};
use crate::link::socket;
use crate::link::staging_buffer::StagingBuffer;
use crate::link::striped_socket::StripedSocket;
use crate::{Combine, Fingerprint, Inbox, Sink};

/// The source of a message's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MessageSource {
    /// A socket, or a ring in shared memory.
    Stream,
    /// A fastbox in shared memory.
    Fastbox,
    /// The sender's own memory, from this address on (single-copy send).
    SingleCopy(u64),
}

/// The header of a message that its receiver matches.
#[derive(Debug)]
pub(crate) enum NextHeader {
    /// A frame with this fingerprint.
    Frame(MatchedFrame, Fingerprint),
    /// A marker: later messages come on the other link of this pair of ranks.
    Moved,
}

/// An incoming message.
#[derive(Debug)]
pub(crate) struct Inbound {
    header: [u8; HEADER_BYTES],
    filled: usize,
    /// The expected call; the header also has the length.
    call: Fingerprint,
    length: usize,
    received: usize,
    pub(super) delivered: usize,
    source: MessageSource,
    /// `true` if it may pass through the staging buffer even if it is received into memory.
    copied: bool,
}

impl Inbound {
    pub(crate) fn new(length: usize, call: &Fingerprint) -> Self {
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

    /// Creates a message whose call and length are not known before [`read_header`](Self::read_header).
    pub(crate) fn any() -> Self {
        Self::new(0, &Fingerprint::NONE).straight()
    }

    /// Reads the header of the next frame. If it is one of a message, expects that message from then on. Returns `None` until
    /// the header has arrived. Over a socket, the bytes after the header arrive with it: in the memory of the message if `inbox` knows
    /// the memory of this rank's next message and it is long, and otherwise in `read_ahead`.
    pub(crate) fn read_header(
        &mut self,
        link: &mut PeerLink,
        read_ahead: &mut StagingBuffer,
        inbox: Option<(&mut dyn Inbox, usize)>,
    ) -> Result<Option<NextHeader>, LinkError> {
        let mut in_place = 0;
        let header = match link {
            PeerLink::Socket(sockets) => {
                let next = inbox.and_then(|(inbox, from)| inbox.next_memory(from));
                match next.filter(|(_, memory)| read_ahead.staged() == 0 && memory.len() > READ_AHEAD_BYTES) {
                    Some(next) => Self::read_header_and_bytes(sockets, read_ahead, next, &mut in_place)?,
                    None => Self::read_header_from_socket(sockets, read_ahead)?,
                }
            }
            PeerLink::Shm(memory) => self.read_header_from_memory(memory)?,
        };
        let Some((length, call)) = header else { return Ok(None) };
        match length {
            GOODBYE => Err(LinkError::Goodbye),
            MOVED => Ok(Some(NextHeader::Moved)),
            _ => {
                let frame = MatchedFrame::decode(length);
                if let MatchedFrame::Message(length) = frame {
                    self.expect(length_of(length)?);
                    (self.received, self.delivered) = (in_place, in_place);
                }
                Ok(Some(NextHeader::Frame(frame, call)))
            }
        }
    }

    /// Expects the bytes of a message with this length, whose header was read.
    pub(crate) const fn expect(&mut self, length: usize) {
        self.length = length;
        (self.filled, self.received, self.delivered) = (HEADER_BYTES, 0, 0);
    }

    fn read_header_from_socket(
        sockets: &mut StripedSocket,
        read_ahead: &mut StagingBuffer,
    ) -> Result<Option<(u64, Fingerprint)>, LinkError> {
        if read_ahead.staged() < HEADER_BYTES {
            let (stream, _) = sockets.receive_at(0);
            let Some(count) = arrived(socket::receive(stream, read_ahead.room())?)? else { return Ok(None) };
            read_ahead.stage(count);
            if read_ahead.staged() < HEADER_BYTES {
                return Ok(None);
            }
        }
        take_header(read_ahead).map(Some)
    }

    /// Reads a header, and the bytes after it into the memory of the message that is expected next. Sets `in_place` to
    /// their number if they belong to that message, and stages them otherwise.
    fn read_header_and_bytes(
        sockets: &mut StripedSocket,
        read_ahead: &mut StagingBuffer,
        (call, memory): (Fingerprint, &mut [u8]),
        in_place: &mut usize,
    ) -> Result<Option<(u64, Fingerprint)>, LinkError> {
        let (stream, segment) = sockets.receive_at(0);
        let room = memory.len().min(segment - HEADER_BYTES);
        let head = IoSliceMut::new(&mut read_ahead.room()[..HEADER_BYTES]);
        let received = socket::receive_pieces(stream, &mut [head, IoSliceMut::new(&mut memory[..room])])?;
        let Some(count) = arrived(received)? else { return Ok(None) };
        read_ahead.stage(count.min(HEADER_BYTES));
        let Some(behind) = count.checked_sub(HEADER_BYTES) else { return Ok(None) };
        let header = take_header(read_ahead)?;
        if header == (memory.len() as u64, call) {
            *in_place = behind;
        } else {
            read_ahead.stage_copy(&memory[..behind]);
        }
        Ok(Some(header))
    }

    fn read_header_from_memory(
        &mut self,
        memory: &mut ShmLink,
    ) -> Result<Option<(u64, Fingerprint)>, LinkError> {
        let (magic, about) = match memory.next(HEADER_BYTES)? {
            None => return Ok(None),
            Some(NextMessage::InFastbox(about)) => {
                let (length, call) = split_about(about);
                let bytes = match MatchedFrame::decode(length) {
                    MatchedFrame::Message(length) => usize::try_from(length).unwrap_or(usize::MAX),
                    _ => 0,
                };
                memory.receive_fastbox(bytes)?;
                self.source = MessageSource::Fastbox;
                return Ok(Some((length, call)));
            }
            Some(NextMessage::InRing(header)) => {
                header.split_first_chunk::<{ MAGIC.len() }>().ok_or(LinkError::Garbage)?
            }
        };
        let (is_single_copy, is_whole) = (*magic == SINGLE_COPY_MAGIC, *magic == MAGIC);
        if !is_single_copy && !is_whole {
            return Err(LinkError::Garbage);
        }
        let header = split_about(about);
        memory.advance(HEADER_BYTES);
        self.source = MessageSource::Stream;
        if is_single_copy {
            self.source = MessageSource::SingleCopy(memory.receive_offer()?);
        }
        Ok(Some(header))
    }

    /// Receives bytes of a message whose header was [read](Self::read_header) into its memory. Returns `true` if there
    /// were any.
    pub(crate) fn pull_matched(
        &mut self,
        link: &mut PeerLink,
        (staging, read_ahead): (&mut StagingBuffer, &mut StagingBuffer),
        memory: &mut [u8],
    ) -> Result<bool, LinkError> {
        let ahead = read_ahead.staged().min(self.length - self.delivered);
        if ahead > 0 {
            memory[self.delivered..][..ahead].copy_from_slice(read_ahead.take(ahead));
            (self.delivered, self.received) = (self.delivered + ahead, self.received + ahead);
            if self.done() {
                return Ok(true);
            }
        }
        Ok(self.pull(link, staging, &mut Sink::Into(memory))? || ahead > 0)
    }

    /// Disables the staging buffer for this message. It is one of many, and each would need its own buffer.
    pub(crate) const fn straight(self) -> Self {
        Self { copied: false, ..self }
    }

    /// Returns the number of bytes of the message.
    pub(crate) const fn length(&self) -> usize {
        self.length
    }

    pub(crate) fn done(&self) -> bool {
        self.filled == HEADER_BYTES && self.delivered == self.length
    }

    /// Returns `true` if more of this message can be received before more of `outbound` is sent. Over a socket
    /// it cannot if the staging buffer is full. In shared memory it cannot if the next bytes may not be
    /// delivered yet, because they stay in the ring.
    pub(crate) fn wants_more(&self, link: &PeerLink, staging: &StagingBuffer, outbound: &Outbound) -> bool {
        let missing = self.filled < HEADER_BYTES || self.received < self.length;
        missing
            && match link {
                PeerLink::Socket(_) => !staging.is_full(),
                PeerLink::Shm(_) => self.filled < HEADER_BYTES || self.delivered < self.lockstep(outbound),
            }
    }

    /// Returns the offset up to which bytes may be combined: at most as far as `outbound` has sent.
    fn lockstep(&self, outbound: &Outbound) -> usize {
        if outbound.done() {
            self.length
        } else {
            outbound.payload_sent() / CacheLine::BYTES * CacheLine::BYTES
        }
    }

    /// Receives and delivers the bytes that have arrived, through `staging` if the pieces are unaligned.
    /// Returns `true` if anything arrived.
    pub(crate) fn pull(
        &mut self,
        link: &mut PeerLink,
        staging: &mut StagingBuffer,
        sink: &mut Sink<'_>,
    ) -> Result<bool, LinkError> {
        match (link, sink) {
            (PeerLink::Socket(sockets), Sink::Into(memory)) if self.copied => {
                let came = self.refill(sockets, staging)?;
                self.deliver(staging, self.length, &mut |offset, bytes| {
                    memory[offset..][..bytes.len()].copy_from_slice(bytes);
                });
                Ok(came)
            }
            (PeerLink::Socket(sockets), Sink::Into(memory)) => {
                let received = self.received;
                let came = self.read(sockets, &mut memory[received..])?;
                self.delivered = self.received;
                Ok(came)
            }
            (PeerLink::Socket(sockets), Sink::Each(sink)) => {
                let came = self.refill(sockets, staging)?;
                self.deliver(staging, self.length, sink);
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
                        self.pull_from_memory(memory, staging, self.length, &mut |offset, bytes| {
                            crate::cpu::copy(bytes, &mut into[offset..][..bytes.len()]);
                        })?
                    }
                    (_, Sink::Each(sink)) => self.pull_from_memory(memory, staging, self.length, sink)?,
                };
                Ok(came || moved)
            }
        }
    }

    /// Receives like [`pull`](Self::pull), but combines the bytes into memory whose own bytes `outbound` sends.
    /// Bytes that were not sent yet are not changed.
    pub(crate) fn pull_in_place(
        &mut self,
        link: &mut PeerLink,
        staging: &mut StagingBuffer,
        outbound: &Outbound,
        memory: &mut [u8],
        combine: &mut Combine<'_>,
    ) -> Result<bool, LinkError> {
        let limit = self.lockstep(outbound);
        let mut sink = |offset: usize, bytes: &[u8]| combine(&mut memory[offset..][..bytes.len()], bytes);
        match link {
            PeerLink::Socket(sockets) => {
                let came = self.refill(sockets, staging)?;
                Ok(self.deliver(staging, limit, &mut sink) || came)
            }
            PeerLink::Shm(memory) => {
                let came = self.open(memory)?;
                Ok(self.pull_from_memory(memory, staging, limit, &mut sink)? || came)
            }
        }
    }

    /// Reads the header in shared memory, if it has arrived and was not read yet, and sets the source of the
    /// message.
    #[inline]
    fn open(&mut self, memory: &mut ShmLink) -> Result<bool, LinkError> {
        if self.filled == HEADER_BYTES {
            return Ok(false);
        }
        let (magic, about, is_in_fastbox) = match memory.next(HEADER_BYTES)? {
            None => return Ok(false),
            Some(NextMessage::InFastbox(about)) => (&MAGIC, about, true),
            Some(NextMessage::InRing(header)) => {
                let (magic, about) = header.split_first_chunk().ok_or(LinkError::Garbage)?;
                (magic, about, false)
            }
        };
        let is_single_copy = *magic == SINGLE_COPY_MAGIC;
        if !self.is_expected(about) || !(is_single_copy || *magic == MAGIC) {
            self.header[..MAGIC.len()].copy_from_slice(if is_single_copy { &MAGIC } else { magic });
            self.header[MAGIC.len()..].copy_from_slice(about);
            return Err(self.contradiction());
        }
        self.filled = HEADER_BYTES;
        if is_in_fastbox {
            memory.receive_fastbox(self.length)?;
            self.source = MessageSource::Fastbox;
            return Ok(true);
        }
        memory.advance(HEADER_BYTES);
        if is_single_copy {
            self.source = MessageSource::SingleCopy(memory.receive_offer()?);
        }
        Ok(true)
    }

    /// Delivers the next piece, up to `limit` from the start of the message, in place or through `staging`.
    /// Returns `true` if there was one.
    fn pull_from_memory(
        &mut self,
        memory: &mut ShmLink,
        staging: &mut StagingBuffer,
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
                let room = staging.room();
                let piece = (limit - start).min(room.len());
                if self.get(memory, address, &mut room[..piece])? {
                    staging.stage(piece);
                    sink(start, staging.take(piece));
                }
            }
        }
        self.received = self.delivered;
        Ok(self.delivered > start)
    }

    /// Copies the next bytes of a single-copy message. Returns `false` if they are out of reach, in which case
    /// they arrive through the ring. Also returns `false` if the peer has cancelled the message because its
    /// call failed; then nothing arrives until this rank gets the error.
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

    /// Returns the position of the next byte to be received in the message with its header.
    const fn position(&self) -> usize {
        self.filled + self.received
    }

    /// Receives into the staging buffer, the header first.
    fn refill(
        &mut self,
        sockets: &mut StripedSocket,
        staging: &mut StagingBuffer,
    ) -> Result<bool, LinkError> {
        let (stream, segment) = sockets.receive_at(self.position());
        let missing = HEADER_BYTES - self.filled;
        let wanted = missing + self.length - self.received;
        let room = staging.room();
        let count = wanted.min(room.len()).min(segment);
        if count == 0 {
            return Ok(false);
        }
        let Some(count) = arrived(socket::receive(stream, &mut room[..count])?)? else { return Ok(false) };
        staging.stage(count);
        self.filled += count.min(missing);
        self.received += count.saturating_sub(missing);
        if missing > 0 && self.filled == HEADER_BYTES {
            self.header.copy_from_slice(staging.take(HEADER_BYTES));
            self.check()?;
        }
        Ok(true)
    }

    /// Delivers staged bytes, up to `limit` from the start of the message. Returns `true` if there were any.
    fn deliver(
        &mut self,
        staging: &mut StagingBuffer,
        limit: usize,
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> bool {
        if self.filled < HEADER_BYTES {
            return false;
        }
        let staged = staging.staged();
        let whole =
            if self.received == self.length { staged } else { staged / CacheLine::BYTES * CacheLine::BYTES };
        let ready = whole.min(limit.saturating_sub(self.delivered));
        if ready > 0 {
            sink(self.delivered, staging.take(ready));
            self.delivered += ready;
        }
        ready > 0
    }

    /// Reads the rest of the header, and the bytes after it into `room`, which is for the rest of the
    /// message.
    fn read(&mut self, sockets: &mut StripedSocket, room: &mut [u8]) -> Result<bool, LinkError> {
        let (stream, segment) = sockets.receive_at(self.position());
        let missing = HEADER_BYTES - self.filled;
        let room_len = room.len().min(segment - missing);
        let room = &mut room[..room_len];
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

    /// Compares the header with the expected one.
    #[inline]
    fn check(&self) -> Result<(), LinkError> {
        let (magic, about) = self.header.split_at(MAGIC.len());
        if magic == MAGIC && self.is_expected(about) { Ok(()) } else { Err(self.contradiction()) }
    }

    /// Returns `true` if a header is the expected one, apart from its magic number.
    fn is_expected(&self, about: &[u8]) -> bool {
        let (length, call) = about.split_at(size_of::<u64>());
        length == (self.length as u64).to_le_bytes() && call == self.call.0
    }

    /// Returns the magic number, the length and the call in the header.
    fn split_header(&self) -> (Magic, u64, Fingerprint) {
        let [magic, length] = [0, 8].map(|start| std::array::from_fn(|index| self.header[start + index]));
        let call = std::array::from_fn(|index| self.header[16 + index]);
        (magic, u64::from_le_bytes(length), Fingerprint(call))
    }

    /// Returns the error for an unexpected header.
    #[cold]
    fn contradiction(&self) -> LinkError {
        let (magic, length, theirs) = self.split_header();
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

/// Returns the length of a message, or an error if this process cannot address its bytes.
pub(crate) fn length_of(length: u64) -> Result<usize, LinkError> {
    usize::try_from(length).map_err(|_| LinkError::Own(std::io::ErrorKind::OutOfMemory.into()))
}

/// Returns the length and the call in the staged header, and unstages it.
fn take_header(staged: &mut StagingBuffer) -> Result<(u64, Fingerprint), LinkError> {
    let (magic, about) = staged.take(HEADER_BYTES).split_at(MAGIC.len());
    if magic == MAGIC { Ok(split_about(about)) } else { Err(LinkError::Garbage) }
}

/// Returns the length and the call in a header without its magic number.
fn split_about(about: &[u8]) -> (u64, Fingerprint) {
    let (length, call) = about.split_at(size_of::<u64>());
    let length = u64::from_le_bytes(length.try_into().expect("8 bytes"));
    (length, Fingerprint(call.try_into().expect("the rest of a header is a fingerprint")))
}

/// Converts the result of a receive: 0 bytes mean that the connection has ended.
fn arrived(received: Option<usize>) -> Result<Option<usize>, LinkError> {
    if received == Some(0) { Err(LinkError::Closed) } else { Ok(received) }
}

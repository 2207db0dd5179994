//! An outgoing message.

use std::io::IoSlice;

use socket2::Socket;

use super::{
    COPIED_BYTES_MAX, HEADER_BYTES, LinkError, MAGIC, MOVED, PUBLISH_BYTES_MAX, SEND_BYTES_MAX,
    SINGLE_COPY_MAGIC, encode,
};
use crate::Fingerprint;
use crate::announced::MatchedFrame;
use crate::link::peer_link::PeerLink;
use crate::link::shm::ShmLink;
use crate::link::socket;
use crate::link::staging_buffer::StagingBuffer;
use crate::link::striped_socket::{SEGMENT_BYTES, StripedSocket};

/// The most pieces of a message that one system call takes.
const PARTS_MAX: usize = 16;

/// An outgoing message.
#[derive(Debug)]
pub(crate) struct Outbound {
    header: [u8; HEADER_BYTES],
    sent: usize,
    total: usize,
    pub(super) single_copy: SingleCopy,
    /// The position of the next byte that each connection sends, if the message is striped.
    next: Vec<usize>,
}

/// The state of a single-copy send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SingleCopy {
    /// The message is not sent as a single copy.
    Off,
    /// The message will be offered as a single copy, if the link supports it.
    Wanted,
    /// The peer may be copying it.
    Offered,
}

impl Outbound {
    pub(crate) fn new(length: usize, call: &Fingerprint) -> Self {
        let (header, total) = (encode(length as u64, call), HEADER_BYTES + length);
        Self { header, sent: 0, total, single_copy: SingleCopy::Off, next: Vec::new() }
    }

    /// Creates a frame of a matched message, with this many bytes behind its header.
    pub(crate) fn frame(frame: MatchedFrame, length: usize, call: &Fingerprint) -> Self {
        Self { header: encode(frame.encode(), call), ..Self::new(length, call) }
    }

    /// Creates the marker that tells that later messages come on the other link of this pair of ranks.
    pub(crate) fn moved() -> Self {
        let header = encode(MOVED, &Fingerprint::NONE);
        Self { header, sent: 0, total: HEADER_BYTES, single_copy: SingleCopy::Off, next: Vec::new() }
    }

    /// Allows a single-copy send if `wanted` is `true`.
    pub(crate) fn single_copy_if(self, wanted: bool) -> Self {
        let single_copy = if wanted { SingleCopy::Wanted } else { SingleCopy::Off };
        Self { single_copy, ..self }
    }

    /// Returns the number of bytes of the message.
    pub(crate) const fn length(&self) -> usize {
        self.total - HEADER_BYTES
    }

    #[cfg(test)]
    pub(super) const fn header(&self) -> [u8; HEADER_BYTES] {
        self.header
    }

    pub(crate) fn done(&self) -> bool {
        self.sent == self.total
    }

    /// Returns `true` if the peer may have some of it.
    pub(crate) fn has_begun(&self) -> bool {
        self.sent > 0 || self.single_copy == SingleCopy::Offered
    }

    /// Returns how many bytes of the payload were sent. If it is striped, later bytes may have been sent too.
    pub(super) fn payload_sent(&self) -> usize {
        self.sent.saturating_sub(HEADER_BYTES)
    }

    /// Sends as many bytes as the link accepts now. Returns `true` if it accepted any.
    pub(crate) fn push(
        &mut self,
        link: &mut PeerLink,
        staging: &mut StagingBuffer,
        parts: &[&[u8]],
    ) -> Result<bool, LinkError> {
        match link {
            PeerLink::Socket(sockets) if sockets.stripes(self.total) => self.push_striped(sockets, parts),
            PeerLink::Socket(sockets) => self.push_to_socket(sockets, staging, parts),
            PeerLink::Shm(memory) => self.push_to_memory(memory, parts),
        }
    }

    fn push_to_memory(&mut self, memory: &mut ShmLink, parts: &[&[u8]]) -> Result<bool, LinkError> {
        let mut moved = false;
        if self.sent == 0 && self.put_in_fastbox(memory, parts)? {
            return Ok(true);
        }
        match (self.single_copy, parts) {
            (SingleCopy::Wanted, &[message]) => {
                let is_offered = memory.offer_message(&self.offering(), message)?;
                self.single_copy = if is_offered { SingleCopy::Offered } else { SingleCopy::Off };
                if is_offered {
                    return Ok(true);
                }
            }
            (SingleCopy::Offered, _) => {
                let Some(taken) = memory.acked(self.total - HEADER_BYTES)? else { return Ok(false) };
                self.single_copy = SingleCopy::Off;
                self.sent = HEADER_BYTES + taken;
                moved = true;
            }
            _ => {}
        }
        // Sends no more at once than a socket takes. The peer may read as fast as this side writes, and the
        // deadline has to be checked in between.
        let enough = self.total.min(self.sent + SEND_BYTES_MAX);
        while self.sent < enough && self.push_piece(memory, parts)? {
            moved = true;
        }
        Ok(moved)
    }

    /// Sends the whole message through the fastbox, if possible.
    fn put_in_fastbox(&mut self, memory: &mut ShmLink, parts: &[&[u8]]) -> Result<bool, LinkError> {
        let about = &self.header[MAGIC.len()..];
        let is_in_fastbox = memory.put_in_fastbox(about, parts, self.total - HEADER_BYTES)?;
        self.sent = if is_in_fastbox { self.total } else { 0 };
        Ok(is_in_fastbox)
    }

    /// Returns the header of a single-copy message.
    fn offering(&self) -> [u8; HEADER_BYTES] {
        let mut header = self.header;
        header[..SINGLE_COPY_MAGIC.len()].copy_from_slice(&SINGLE_COPY_MAGIC);
        header
    }

    /// Copies as many bytes as there is room for into the ring and publishes them, up to the size of a piece.
    fn push_piece(&mut self, memory: &mut ShmLink, parts: &[&[u8]]) -> Result<bool, LinkError> {
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
        sockets: &mut StripedSocket,
        staging: &mut StagingBuffer,
        parts: &[&[u8]],
    ) -> Result<bool, LinkError> {
        sockets.set_sending(1);
        let sent = if self.total <= COPIED_BYTES_MAX {
            let message = &mut staging.outgoing;
            message.clear();
            message.extend_from_slice(&self.header);
            parts.iter().for_each(|part| message.extend_from_slice(part));
            socket::send(sockets.first(), &message[self.sent..])?
        } else {
            self.push_pieces(sockets.first(), parts, (self.sent, SEND_BYTES_MAX))?
        };
        self.sent += sent.unwrap_or(0);
        Ok(sent.is_some())
    }

    /// Sends as much of the next segment of each connection as the connection accepts. A full connection does not delay
    /// the others.
    fn push_striped(&mut self, sockets: &mut StripedSocket, parts: &[&[u8]]) -> Result<bool, LinkError> {
        let (count, total) = (sockets.count(), self.total);
        if self.next.is_empty() {
            self.next = (0..count).map(|index| total.min(index * SEGMENT_BYTES)).collect();
        }
        let (mut moved, mut sending) = (false, 0);
        for index in 0..count {
            // Nothing is sent before the first connection has a part of the header: until then the message may be
            // given up.
            let start = self.next[index];
            let end = total.min((start / SEGMENT_BYTES + 1) * SEGMENT_BYTES);
            if start < end && (index == 0 || self.next[0] > 0) {
                let sent = self.push_pieces(sockets.socket(index), parts, (start, end - start))?;
                moved |= sent.is_some();
                self.next[index] += sent.unwrap_or(0);
                if self.next[index] == end {
                    self.next[index] = total.min(end + (count - 1) * SEGMENT_BYTES);
                }
            }
            sending |= u64::from(self.next[index] < total) << index;
        }
        self.sent = self.next.iter().copied().min().expect("there is a connection");
        sockets.set_sending(if self.sent == 0 { 1 } else { sending });
        Ok(moved)
    }

    /// Sends at most `most` bytes of the message from position `start` on.
    fn push_pieces(
        &self,
        stream: &Socket,
        parts: &[&[u8]],
        (start, most): (usize, usize),
    ) -> Result<Option<usize>, LinkError> {
        let mut pieces = [IoSlice::new(&[]); PARTS_MAX];
        let mut count = 0;
        let mut room = most;
        let mut skip = start;
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

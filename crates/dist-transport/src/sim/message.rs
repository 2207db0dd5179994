//! Messages of the in-process network: bytes in their own aligned memory.

use std::ops::Range;

use crate::announced::MatchedFrame;
use crate::bookkeeping::HEADER_BYTES;
use crate::cpu::CacheLine;
use crate::{Fingerprint, Outgoing};

/// A message in flight.
#[derive(Debug)]
pub(super) struct SimMessage {
    /// The call that the sender was in.
    pub(super) call: Fingerprint,
    /// The meaning of a matched message.
    pub(super) frame: MatchedFrame,
    lines: Vec<CacheLine>,
    len: usize,
    /// The effect of a changed byte on its header, if it has one.
    pub(super) spoilt: Option<Spoilt>,
}

/// The effect of a changed byte on a message's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spoilt {
    /// The bytes are no header.
    Garbage,
    /// The header has another length.
    Length(u64),
}

const PIECE_MAX: usize = 64 * 1024;

impl SimMessage {
    /// Copies a message to be sent.
    pub(super) fn new(call: Fingerprint, outgoing: Outgoing<'_>) -> Self {
        let len = outgoing.len();
        let mut lines = vec![CacheLine::ZERO; len.div_ceil(CacheLine::BYTES)];
        let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut lines);
        for part in outgoing.parts {
            let (head, tail) = rest.split_at_mut(part.len());
            head.copy_from_slice(part);
            rest = tail;
        }
        Self { call, frame: MatchedFrame::Message(len as u64), lines, len, spoilt: None }
    }

    /// Creates a frame of a matched message.
    pub(super) fn of_frame(frame: MatchedFrame, call: Fingerprint, outgoing: Outgoing<'_>) -> Self {
        Self { frame, ..Self::new(call, outgoing) }
    }

    /// Changes one bit of one byte. Bytes are counted as TCP sends them, modulo their number: 8 bytes of
    /// magic, 8 of the length, those of the call, and the payload.
    pub(super) fn change_byte(&mut self, byte: usize) {
        let payload: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len];
        match byte % (HEADER_BYTES + payload.len()) {
            0..8 => self.spoilt = Some(Spoilt::Garbage),
            8..16 if self.frame != MatchedFrame::Message(self.len as u64) => {
                self.spoilt = Some(Spoilt::Garbage)
            }
            byte @ 8..16 => self.spoilt = Some(Spoilt::Length(self.len as u64 ^ 1 << (8 * (byte - 8)))),
            byte @ 16..HEADER_BYTES => self.call.0[byte - 16] ^= 1,
            byte => payload[byte - HEADER_BYTES] ^= 1,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }

    /// Splits the message into pieces as [`Sink::Each`](crate::Sink::Each) promises. Their sizes double from 64
    /// bytes to 64 KiB, so that even a short message has several pieces.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let len = self.len;
        let mut end = 0;
        let mut size = CacheLine::BYTES;
        std::iter::from_fn(move || {
            let start = end;
            end = len.min(start + size);
            size = PIECE_MAX.min(2 * size);
            (start < end).then_some(start..end)
        })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    fn pieces_tile_the_message_on_aligned_borders(#[values(0, 1, 63, 64, 65, 1000, 1_000_000)] len: usize) {
        let bytes: Vec<u8> = (0..=250).cycle().take(len).collect();
        let (head, tail) = bytes.split_at(len / 3);
        let message = SimMessage::new(Fingerprint::NONE, Outgoing { to: 0, parts: &[head, &[], tail] });
        assert_eq!(message.bytes(), bytes);
        let mut end = 0;
        for piece in message.pieces() {
            assert_eq!(piece.start, end);
            assert!(piece.start.is_multiple_of(64) && !piece.is_empty());
            assert!(message.bytes()[piece.clone()].as_ptr().addr().is_multiple_of(64));
            end = piece.end;
        }
        assert_eq!(end, len);
        assert!(len <= 64 || message.pieces().count() > 1);
    }
}

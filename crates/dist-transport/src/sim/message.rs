//! Messages of the in-process network: bytes in aligned memory of their own.

use std::ops::Range;

use crate::{Fingerprint, Grain, Outgoing};

/// A message on its way.
#[derive(Debug)]
pub(super) struct Message {
    /// The call that the sender was in.
    pub(super) call: Fingerprint,
    grains: Vec<Grain>,
    len: usize,
}

const PIECE_MAX: usize = 64 * 1024;

impl Message {
    /// Copies what is to be sent.
    pub(super) fn new(call: Fingerprint, outgoing: Outgoing<'_>) -> Self {
        let len = outgoing.len();
        let mut grains = vec![Grain::ZERO; len.div_ceil(Grain::BYTES)];
        let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut grains);
        for part in outgoing.parts {
            let (head, tail) = rest.split_at_mut(part.len());
            head.copy_from_slice(part);
            rest = tail;
        }
        Self { call, grains, len }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.grains)[..self.len]
    }

    /// The message cut as a [`Sink::Each`](crate::Sink::Each) promises. The pieces double from 64 bytes to
    /// 64 KiB, so that even short messages come in several.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let len = self.len;
        let mut end = 0;
        let mut size = Grain::BYTES;
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
        let message = Message::new(Fingerprint::NONE, Outgoing { to: 0, parts: &[head, &[], tail] });
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

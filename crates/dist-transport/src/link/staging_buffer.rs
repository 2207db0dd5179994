//! A buffer for bytes between their arrival and their delivery.

use crate::cpu::CacheLine;

/// The most bytes that are received before they are delivered, unless a buffer has another limit.
const BYTES: usize = 256 << 10;

/// A buffer for bytes between their arrival and their delivery. It is small enough for the cache, aligned for
/// any element, and allocated on first use.
#[derive(Debug)]
pub(crate) struct StagingBuffer {
    /// A small message to be sent, in one piece.
    pub(crate) outgoing: Vec<u8>,
    lines: Vec<CacheLine>,
    /// The number of bytes that fit, in whole cache lines.
    limit: usize,
    start: usize,
    end: usize,
}

impl Default for StagingBuffer {
    fn default() -> Self {
        Self::with_limit(BYTES)
    }
}

impl StagingBuffer {
    /// Creates a buffer for this many bytes, in whole cache lines.
    pub(crate) const fn with_limit(limit: usize) -> Self {
        Self { outgoing: Vec::new(), lines: Vec::new(), limit, start: 0, end: 0 }
    }

    /// Discards the staged bytes.
    pub(crate) fn clear(&mut self) {
        (self.start, self.end) = (0, 0);
    }

    /// Returns how many bytes are staged.
    pub(crate) const fn staged(&self) -> usize {
        self.end - self.start
    }

    /// Returns `true` if there is no room for more until some bytes are delivered.
    pub(crate) const fn is_full(&self) -> bool {
        self.staged() == self.limit
    }

    /// Stages bytes that were written into the [room](Self::room).
    pub(crate) const fn stage(&mut self, count: usize) {
        self.end += count;
    }

    /// Stages bytes that were received elsewhere. They may exceed the limit.
    pub(crate) fn stage_copy(&mut self, bytes: &[u8]) {
        let end = self.end + bytes.len();
        let lines = end.div_ceil(CacheLine::BYTES);
        self.lines.resize(lines.max(self.lines.len()), CacheLine::ZERO);
        bytemuck::cast_slice_mut(&mut self.lines)[self.end..end].copy_from_slice(bytes);
        self.end = end;
    }

    /// Delivers a complete message by the rules of a [`Sink`](crate::Sink).
    pub(crate) fn pass(&mut self, message: &[u8], sink: &mut dyn FnMut(usize, &[u8])) {
        let mut offset = 0;
        while offset < message.len() {
            let room = self.room();
            let count = room.len().min(message.len() - offset);
            room[..count].copy_from_slice(&message[offset..][..count]);
            self.stage(count);
            sink(offset, self.take(count));
            offset += count;
        }
    }

    /// Returns the free memory behind the staged bytes.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        let lines = self.limit / CacheLine::BYTES;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.lines.len() != lines {
                self.lines = vec![CacheLine::ZERO; lines];
            }
        }
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.lines);
        if self.end == bytes.len() && self.start > 0 {
            bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut bytes[self.end..]
    }

    /// Returns the first `count` staged bytes, and unstages them.
    pub(crate) fn take(&mut self, count: usize) -> &[u8] {
        let taken = self.start..self.start + count;
        self.start = taken.end;
        &bytemuck::cast_slice(&self.lines)[taken]
    }
}

//! Memory beside the buffer that is kept between calls.

use dist_transport::cpu::CacheLine;

/// Memory aligned to 64 bytes that is kept between calls. It grows as needed.
///
/// For [`run`](crate::run) it holds the slots of a schedule: none for most, at most 2⌈log₂ p⌉ chunks for a pairwise
/// reduce-scatter. It also holds arriving data if a step sends and receives the same chunks. A
/// [`RingTransport`](crate::RingTransport) can use another one for received data.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    lines: Vec<CacheLine>,
    /// Data that has arrived and will replace the data that was sent.
    staged: Vec<CacheLine>,
}

impl Scratch {
    /// Returns empty memory.
    pub const fn new() -> Self {
        Self { lines: Vec::new(), staged: Vec::new() }
    }

    /// Returns the number of bytes that are allocated.
    pub fn capacity_bytes(&self) -> usize {
        (self.lines.len() + self.staged.len()) * CacheLine::BYTES
    }

    /// Returns the first `len` bytes, aligned to 64. Their content is left from earlier calls.
    pub fn bytes(&mut self, len: usize) -> &mut [u8] {
        let lines = len.div_ceil(CacheLine::BYTES);
        self.grow(lines);
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..len]
    }

    /// Returns `len` bytes beside all slots.
    pub(crate) fn staged(&mut self, len: usize) -> &mut [u8] {
        let lines = len.div_ceil(CacheLine::BYTES);
        if self.staged.len() < lines {
            self.staged.resize(lines, CacheLine::ZERO);
        }
        &mut bytemuck::cast_slice_mut(&mut self.staged)[..len]
    }

    /// Returns the first `len` bytes of a slot, if each slot has `slot_bytes` bytes.
    pub(crate) fn slot(&mut self, slot: usize, slot_bytes: usize, len: usize) -> &mut [u8] {
        let lines = slot_bytes.div_ceil(CacheLine::BYTES);
        self.grow((slot + 1) * lines);
        &mut bytemuck::cast_slice_mut(&mut self.lines[slot * lines..])[..len]
    }

    /// Returns the first `len` bytes of two different slots.
    pub(crate) fn two_slots(
        &mut self,
        slots: (usize, usize),
        slot_bytes: usize,
        len: usize,
    ) -> (&mut [u8], &mut [u8]) {
        let lines = slot_bytes.div_ceil(CacheLine::BYTES);
        let (low, high) = (slots.0.min(slots.1), slots.0.max(slots.1));
        self.grow((high + 1) * lines);
        let (before, after) = self.lines.split_at_mut(high * lines);
        let low = &mut bytemuck::cast_slice_mut(&mut before[low * lines..])[..len];
        let high = &mut bytemuck::cast_slice_mut(after)[..len];
        if slots.0 < slots.1 { (low, high) } else { (high, low) }
    }

    fn grow(&mut self, lines: usize) {
        if self.lines.len() < lines {
            self.lines.resize(lines, CacheLine::ZERO);
        }
    }
}

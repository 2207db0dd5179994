//! Memory beside the buffer, kept between calls.

use bytemuck::{Pod, Zeroable};

/// A cache line: memory made of these is aligned to 64 bytes.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Memory aligned to 64 bytes, which grows to what was needed so far and is kept for the next time.
///
/// For [`run`](crate::run) it holds the slots of a schedule: none for most, 2⌈log₂ p⌉ chunks at most for a
/// pairwise reduce-scatter. A [`RingTransport`](crate::RingTransport) can keep what it receives in another one.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    lines: Vec<Line>,
}

impl Scratch {
    /// No memory yet.
    pub const fn new() -> Self {
        Self { lines: Vec::new() }
    }

    /// Bytes that are held.
    pub fn capacity_bytes(&self) -> usize {
        self.lines.len() * size_of::<Line>()
    }

    /// The first `len` bytes, aligned to 64; what they hold is left from before.
    pub fn bytes(&mut self, len: usize) -> &mut [u8] {
        let lines = len.div_ceil(size_of::<Line>());
        self.grow(lines);
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..len]
    }

    /// The first `len` bytes of a slot, of slots that hold `slot_bytes` each.
    pub(crate) fn slot(&mut self, slot: usize, slot_bytes: usize, len: usize) -> &mut [u8] {
        let lines = slot_bytes.div_ceil(size_of::<Line>());
        self.grow((slot + 1) * lines);
        &mut bytemuck::cast_slice_mut(&mut self.lines[slot * lines..])[..len]
    }

    /// The first `len` bytes of two different slots.
    pub(crate) fn two_slots(
        &mut self,
        slots: (usize, usize),
        slot_bytes: usize,
        len: usize,
    ) -> (&mut [u8], &mut [u8]) {
        let lines = slot_bytes.div_ceil(size_of::<Line>());
        let (low, high) = (slots.0.min(slots.1), slots.0.max(slots.1));
        self.grow((high + 1) * lines);
        let (before, after) = self.lines.split_at_mut(high * lines);
        let low = &mut bytemuck::cast_slice_mut(&mut before[low * lines..])[..len];
        let high = &mut bytemuck::cast_slice_mut(after)[..len];
        if slots.0 < slots.1 { (low, high) } else { (high, low) }
    }

    fn grow(&mut self, lines: usize) {
        if self.lines.len() < lines {
            self.lines.resize(lines, Line::zeroed());
        }
    }
}

//! Memory in addition to the buffer, which is reused by later calls.

use dist_transport::cpu::CacheLine;

/// A region of memory that is aligned to 64 bytes and reused by later calls. It grows as needed.
///
/// [`run`](crate::run) stores the slots of a schedule in it: none for most schedules, at most 2⌈log₂ p⌉
/// chunks for a pairwise reduce-scatter. It also stores arriving data if a step sends and receives the same
/// chunks, or if pieces of messages end inside of elements. A [`RingTransport`](crate::RingTransport) can use
/// another one for received data.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    slots: Slots,
    /// Data that has arrived and was not used yet.
    staged: Vec<CacheLine>,
}

/// The slots of a schedule.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slots(Vec<CacheLine>);

impl Scratch {
    /// Returns empty memory.
    pub const fn new() -> Self {
        Self { slots: Slots(Vec::new()), staged: Vec::new() }
    }

    /// Returns the number of bytes that are allocated.
    pub fn capacity_bytes(&self) -> usize {
        (self.slots.0.len() + self.staged.len()) * CacheLine::BYTES
    }

    /// Returns the first `len` bytes, aligned to 64. Their content is left from earlier calls.
    pub fn bytes(&mut self, len: usize) -> &mut [u8] {
        self.slots.slot(0, len, len)
    }

    /// Returns the slots.
    pub(crate) const fn slots(&mut self) -> &mut Slots {
        &mut self.slots
    }

    /// Returns the slots and `len` additional bytes, aligned to 64.
    pub(crate) fn slots_and_staged(&mut self, len: usize) -> (&mut Slots, &mut [u8]) {
        let lines = len.div_ceil(CacheLine::BYTES);
        if self.staged.len() < lines {
            self.staged.resize(lines, CacheLine::ZERO);
        }
        (&mut self.slots, &mut bytemuck::cast_slice_mut(&mut self.staged)[..len])
    }
}

impl Slots {
    /// Returns the first `len` bytes of a slot, if each slot has `slot_bytes` bytes.
    pub(crate) fn slot(&mut self, slot: usize, slot_bytes: usize, len: usize) -> &mut [u8] {
        let lines = slot_bytes.div_ceil(CacheLine::BYTES);
        self.grow((slot + 1) * lines);
        &mut bytemuck::cast_slice_mut(&mut self.0[slot * lines..])[..len]
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
        let (before, after) = self.0.split_at_mut(high * lines);
        let low = &mut bytemuck::cast_slice_mut(&mut before[low * lines..])[..len];
        let high = &mut bytemuck::cast_slice_mut(after)[..len];
        if slots.0 < slots.1 { (low, high) } else { (high, low) }
    }

    fn grow(&mut self, lines: usize) {
        if self.0.len() < lines {
            self.0.resize(lines, CacheLine::ZERO);
        }
    }
}

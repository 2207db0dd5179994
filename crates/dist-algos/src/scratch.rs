//! Memory beside the buffer that is kept between calls.

use dist_transport::Grain;

/// Memory aligned to 64 bytes that is kept between calls. It grows as needed.
///
/// For [`run`](crate::run) it holds the slots of a schedule: none for most, at most 2⌈log₂ p⌉ chunks for a pairwise
/// reduce-scatter. It also holds arriving data if a step sends and receives the same chunks. A
/// [`RingTransport`](crate::RingTransport) can use another one for received data.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    grains: Vec<Grain>,
    /// Data that has arrived and will replace the data that was sent.
    staged: Vec<Grain>,
}

impl Scratch {
    /// Returns empty memory.
    pub const fn new() -> Self {
        Self { grains: Vec::new(), staged: Vec::new() }
    }

    /// Returns the number of bytes that are allocated.
    pub fn capacity_bytes(&self) -> usize {
        (self.grains.len() + self.staged.len()) * Grain::BYTES
    }

    /// Returns the first `len` bytes, aligned to 64. Their content is left from earlier calls.
    pub fn bytes(&mut self, len: usize) -> &mut [u8] {
        let grains = len.div_ceil(Grain::BYTES);
        self.grow(grains);
        &mut bytemuck::cast_slice_mut(&mut self.grains)[..len]
    }

    /// Returns `len` bytes beside all slots.
    pub(crate) fn staged(&mut self, len: usize) -> &mut [u8] {
        let grains = len.div_ceil(Grain::BYTES);
        if self.staged.len() < grains {
            self.staged.resize(grains, Grain::ZERO);
        }
        &mut bytemuck::cast_slice_mut(&mut self.staged)[..len]
    }

    /// Returns the first `len` bytes of a slot, if each slot has `slot_bytes` bytes.
    pub(crate) fn slot(&mut self, slot: usize, slot_bytes: usize, len: usize) -> &mut [u8] {
        let grains = slot_bytes.div_ceil(Grain::BYTES);
        self.grow((slot + 1) * grains);
        &mut bytemuck::cast_slice_mut(&mut self.grains[slot * grains..])[..len]
    }

    /// Returns the first `len` bytes of two different slots.
    pub(crate) fn two_slots(
        &mut self,
        slots: (usize, usize),
        slot_bytes: usize,
        len: usize,
    ) -> (&mut [u8], &mut [u8]) {
        let grains = slot_bytes.div_ceil(Grain::BYTES);
        let (low, high) = (slots.0.min(slots.1), slots.0.max(slots.1));
        self.grow((high + 1) * grains);
        let (before, after) = self.grains.split_at_mut(high * grains);
        let low = &mut bytemuck::cast_slice_mut(&mut before[low * grains..])[..len];
        let high = &mut bytemuck::cast_slice_mut(after)[..len];
        if slots.0 < slots.1 { (low, high) } else { (high, low) }
    }

    fn grow(&mut self, grains: usize) {
        if self.grains.len() < grains {
            self.grains.resize(grains, Grain::ZERO);
        }
    }
}

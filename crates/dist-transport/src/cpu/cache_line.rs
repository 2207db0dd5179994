//! The cache line, the unit of message delivery.

/// A block of 64 bytes, aligned to 64: a cache line, which holds whole elements of any type. Memory of cache
/// lines has the alignment that a [`Sink`](crate::Sink) promises. `bytemuck` converts it to bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub struct CacheLine(pub [u8; 64]);

impl CacheLine {
    /// Bytes of a cache line.
    pub const BYTES: usize = size_of::<Self>();

    /// A cache line of zeros.
    pub const ZERO: Self = Self([0; Self::BYTES]);
}

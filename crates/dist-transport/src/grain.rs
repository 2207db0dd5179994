//! The unit that messages are delivered in.

/// 64 bytes, aligned to as many: a cache line, and whole elements of any type. Memory made of these is aligned for
/// what a [`Sink`](crate::Sink) promises; see bytes of it through bytemuck.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub struct Grain(pub [u8; 64]);

impl Grain {
    /// Bytes of a grain.
    pub const BYTES: usize = size_of::<Self>();

    /// All zeros.
    pub const ZERO: Self = Self([0; Self::BYTES]);
}

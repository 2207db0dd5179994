//! What says that two ranks are in the same call.

/// Names the operation that a message belongs to, as bytes that the layer above encodes.
///
/// A transport sends the fingerprint in front of every message and compares it with its own before it delivers
/// a byte. What the bytes mean is not its business.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; Self::SIZE]);

impl Fingerprint {
    /// Bytes of a fingerprint.
    pub const SIZE: usize = 48;

    /// Of messages outside any call.
    pub const NONE: Self = Self([0; Self::SIZE]);
}

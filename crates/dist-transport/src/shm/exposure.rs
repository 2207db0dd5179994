//! What ranks tell each other of memory that they lay open.

/// Bytes of what a rank tells.
pub(super) const EXPOSURE_BYTES: usize = 32;

/// What a rank has laid open in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exposure {
    pub(crate) len: u64,
    pub(crate) writable: bool,
    pub(crate) origin: Origin,
}

/// Where laid-open memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// In the rank's process, at this address.
    Process { address: u64 },
    /// In this arena of the rank's part of the heap, from this byte on.
    Heap { arena: u32, offset: u64 },
}

impl Exposure {
    pub(crate) const NOTHING: Self = Self { len: 0, writable: false, origin: Origin::Process { address: 0 } };

    pub(super) fn encode(self) -> [u8; EXPOSURE_BYTES] {
        let (kind, arena, start) = match self.origin {
            Origin::Process { address } => (0_u32, 0_u32, address),
            Origin::Heap { arena, offset } => (1, arena, offset),
        };
        let mut bytes = [0; EXPOSURE_BYTES];
        bytes[..4].copy_from_slice(&kind.to_ne_bytes());
        bytes[4..8].copy_from_slice(&arena.to_ne_bytes());
        bytes[8..16].copy_from_slice(&start.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.len.to_ne_bytes());
        bytes[24] = u8::from(self.writable);
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Self {
        let half = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let origin = match half(0) {
            0 => Origin::Process { address: word(8) },
            _ => Origin::Heap { arena: half(4), offset: word(8) },
        };
        Self { len: word(16), writable: bytes[24] != 0, origin }
    }
}

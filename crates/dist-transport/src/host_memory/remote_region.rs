//! The description of exposed memory that ranks give each other.

/// Words of an encoded region.
const REGION_WORDS: usize = 4;

/// The memory that a rank has exposed in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RemoteRegion {
    pub(crate) len: u64,
    pub(crate) writable: bool,
    pub(crate) origin: RegionOrigin,
}

/// The location of exposed memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RegionOrigin {
    /// The memory is in the rank's process, at this address.
    Process { address: u64 },
    /// The memory is in this arena of the rank's heap, from this byte on.
    Heap { arena: u32, offset: u64 },
}

impl RemoteRegion {
    pub(crate) const NOTHING: Self =
        Self { len: 0, writable: false, origin: RegionOrigin::Process { address: 0 } };

    /// Encodes the region as words. The first word is the arena, counted from 1, or 0 for memory of the
    /// process.
    pub(super) fn encode(self) -> [u64; REGION_WORDS] {
        let (arena, start) = match self.origin {
            RegionOrigin::Process { address } => (0, address),
            RegionOrigin::Heap { arena, offset } => (1 + u64::from(arena), offset),
        };
        [arena, start, self.len, u64::from(self.writable)]
    }

    pub(super) fn decode([arena, start, len, writable]: [u64; REGION_WORDS]) -> Self {
        let origin = match arena.checked_sub(1).and_then(|arena| u32::try_from(arena).ok()) {
            None => RegionOrigin::Process { address: start },
            Some(arena) => RegionOrigin::Heap { arena, offset: start },
        };
        Self { len, writable: writable != 0, origin }
    }
}

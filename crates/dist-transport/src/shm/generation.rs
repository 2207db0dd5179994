//! Calls that may be under way at once: which lines, eager_buffers and slots each has, and whether ranks are in the same one.

use crate::{CALLS_MAX, Fingerprint};

/// Of which of the calls that may be under way at once something is, and whether that is the first or the second time of
/// two that calls go round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Generation(usize);

impl Generation {
    /// That of the call with this number, counted by each rank.
    #[inline]
    pub(crate) const fn of(call: usize) -> Self {
        Self(call % GENERATIONS)
    }

    pub(crate) const fn index(self) -> usize {
        self.0 % CALLS_MAX
    }

    /// That of the call before the next one with the same index.
    pub(crate) const fn before_next(self) -> Self {
        Self((self.0 + CALLS_MAX - 1) % GENERATIONS)
    }

    /// Whether of two ranks each has its line in the other's block: in every second round.
    pub(super) const fn uses_peer_block(self) -> bool {
        self.0 >= CALLS_MAX
    }

    /// Which parity of the slots it has.
    pub(super) const fn parity(self) -> usize {
        const { assert!(CALLS_MAX.is_multiple_of(2), "halves take turns too") };
        self.0 % 2
    }
}

/// Two rounds of calls.
const GENERATIONS: usize = 2 * CALLS_MAX;

/// Whether a rank that has signalled in a call was in the same as this one, whose hash is this and before which this often was
/// signalled.
///
/// Another hash that is `found` in its line may be that of the next call with the same index. Then the rank has signalled in
/// the call before that one, which it entered after it had compared this one itself: the line of that call says so, and no
/// more than was signalled before this one otherwise.
#[inline(always)]
pub(crate) fn is_same_call(
    (hash, signalled_before): (u64, u64),
    found: impl FnOnce() -> u64,
    signalled_in_line_before: impl FnOnce() -> u64,
) -> bool {
    found() == hash || signalled_in_line_before() > signalled_before
}

/// What tells one call from others in a line, beside which there is no room for more. Calls of which only eight bytes
/// differ, as all their fields but names do, never have the same.
pub(crate) fn hash(call: &Fingerprint) -> u64 {
    // Any odd numbers will do: multiplication by one loses nothing.
    const FACTORS: [u64; Fingerprint::SIZE / 8] = [
        0x9e37_79b9_7f4a_7c15,
        0xff51_afd7_ed55_8ccd,
        0xc4ce_b9fe_1a85_ec53,
        0xbf58_476d_1ce4_e5b9,
        0x94d0_49bb_1331_11eb,
        0xd6e8_feb8_6659_fd93,
    ];
    let words = call.0.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")));
    words.zip(FACTORS).fold(0, |hash, (word, factor)| word.wrapping_mul(factor).wrapping_add(hash))
}

//! Generations of calls: the flag lines, eager buffers and slots of each, and the comparison of calls.

use crate::Fingerprint;
use crate::shm_group::CALLS_MAX;

/// The generation of a call: its index among the calls that may be active, and whether it is the first or the
/// second of two consecutive rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Generation(usize);

impl Generation {
    /// Returns the generation of the call with this number, which each rank counts.
    #[inline]
    pub(crate) const fn of(call: usize) -> Self {
        Self(call % GENERATIONS)
    }

    pub(crate) const fn index(self) -> usize {
        self.0 % CALLS_MAX
    }

    /// Returns the generation of the call before the next call that has the same index.
    pub(crate) const fn before_next(self) -> Self {
        Self((self.0 + CALLS_MAX - 1) % GENERATIONS)
    }

    /// Returns `true` if the ranks of a group of two have their flag lines in each other's blocks: in every
    /// second round.
    pub(super) const fn uses_peer_block(self) -> bool {
        self.0 >= CALLS_MAX
    }

    /// Returns the parity of the call, which selects its slots.
    pub(super) const fn parity(self) -> usize {
        const { assert!(CALLS_MAX.is_multiple_of(2), "generations have alternating parity") };
        self.0 % 2
    }
}

/// The number of generations: two rounds of calls.
const GENERATIONS: usize = 2 * CALLS_MAX;

/// Returns `true` if a rank that has signalled in a call was in the same call as this rank. `hash` is the hash
/// of this rank's call, and `signalled_before` the number of signals before that call.
///
/// A different hash may belong to the next call with the same index. The rank has then signalled in the call
/// before that one, which it entered after it had compared this call itself. The flag line of that call then
/// holds more signals than were given before this call, and otherwise does not.
#[inline(always)]
pub(crate) fn is_same_call(
    (hash, signalled_before): (u64, u64),
    found: impl FnOnce() -> u64,
    signalled_in_line_before: impl FnOnce() -> u64,
) -> bool {
    found() == hash || signalled_in_line_before() > signalled_before
}

/// Returns a hash of a call for flag lines, which have no room for a fingerprint. Two calls that differ in
/// only eight bytes, as in any field except names, have different hashes.
pub(crate) fn hash(call: &Fingerprint) -> u64 {
    // Any odd factors are valid: multiplication by an odd number loses nothing.
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

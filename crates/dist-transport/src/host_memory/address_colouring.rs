//! Address colouring of large segments: bytes at the same offset of several segments get different sets of
//! the L1 cache.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The alias distance of the L1 cache on AMD processors from Zen to Zen 4. They select a cache way by the
/// offset in the page and eight hashed bits: each of the address bits 12 to 19 XORed with one of the bits 20
/// to 27. Two lines with the same hash evict each other, and a loop over both takes ten times as long.
/// Segments that begin a multiple of this distance apart have that problem at every offset.
pub(super) const HASHED_BYTES: usize = 1 << 28;

/// The distance between the beginnings of consecutive large segments, modulo [`HASHED_BYTES`]. It is the size
/// of a huge page, so that segments can use those, and 128 consecutive segments differ in the upper bits
/// alone.
const COLOUR_STEP_BYTES: usize = 2 << 20;

const _: () = assert!(
    HASHED_BYTES.is_power_of_two() && HASHED_BYTES.is_multiple_of(COLOUR_STEP_BYTES),
    "after the last comes the first"
);

/// Returns the offset at which the next segment should begin, modulo [`HASHED_BYTES`].
pub(super) fn next_colour() -> usize {
    LARGE.fetch_add(1, Ordering::Relaxed).wrapping_mul(COLOUR_STEP_BYTES)
}

/// The number of large segments that this process has mapped.
static LARGE: AtomicUsize = AtomicUsize::new(0);

//! Where large segments begin, so that what lies at one offset of several has room beside each other in the first cache.

use std::sync::atomic::{AtomicUsize, Ordering};

/// AMD's processors from Zen to Zen 4 find a line in their first cache by its place in a page and by eight bits that they make
/// of its address: bits 12 to 27, each of the lower eight joined with one of the upper eight. Two lines that look alike to
/// them throw each other out, and a loop over both takes ten times as long. So it is with what ranks have at one offset of
/// segments that begin a multiple of this address_colouring.
pub(super) const HASHED_BYTES: usize = 1 << 28;

/// How much further each large segment begins in such a stretch of addresses than the one before: as much as a huge page, so
/// that segments can have those, and so that 128 in a row differ in the upper bits alone.
const COLOUR_STEP_BYTES: usize = 2 << 20;

const _: () = assert!(
    HASHED_BYTES.is_power_of_two() && HASHED_BYTES.is_multiple_of(COLOUR_STEP_BYTES),
    "after the last comes the first"
);

/// Where the next one is to begin, in every stretch of [`HASHED_BYTES`] addresses alike.
pub(super) fn next_colour() -> usize {
    LARGE.fetch_add(1, Ordering::Relaxed).wrapping_mul(COLOUR_STEP_BYTES)
}

/// How many large segments this process has mapped.
static LARGE: AtomicUsize = AtomicUsize::new(0);

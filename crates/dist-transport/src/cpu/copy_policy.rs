//! The copy policy: cached or non-temporal copies into memory that another core reads.
//!
//! Lines that the other core has read since they were written have to be fetched back, one after the other.
//! If the cores share a cache, that costs nothing. If they do not, each line takes as long as a memory
//! access, and all together ten times as long as the copy. Non-temporal stores fetch nothing: the reader
//! finds the bytes in memory, which takes twice as long as the copy if the cores share a cache.
//!
//! The topology is not reported and can change during a job. Therefore one large copy in four is timed, and
//! the policy follows the measurement.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::cpu::tuning;
use crate::host_memory::mapping::{copy_non_temporal, string};

/// The least number of bytes for which a copy is timed.
pub(crate) const LONG_BYTES: usize = 32 << 10;
/// The time per KiB from which on a copy has waited for lines: two thirds of such a copy's time, and several
/// times that of a copy from memory to memory.
const SLOW_KIB: Duration = Duration::from_nanos(300);
/// The number of consecutive slow copies that change the policy. A single one may have been interrupted.
const SLOW_COPIES: u32 = 2;
/// One in this many copies is timed, as long as none was slow.
const JUDGED_COPIES: u32 = 4;
/// The bytes that are then copied with non-temporal stores before one copy is timed again. If the cores share
/// a cache by then, that costs 2 ms.
const NON_TEMPORAL_BYTES: usize = 64 << 20;

/// The copy policy of one writer, and its measurements.
#[derive(Debug, Default)]
pub(crate) struct CopyPolicy {
    copies: u32,
    slow: u32,
    non_temporal_left: usize,
}

impl CopyPolicy {
    /// Copies bytes to memory that another core reads.
    ///
    /// # Panics
    /// If the lengths differ.
    pub(crate) fn copy(&mut self, from: &[u8], into: &mut [u8]) {
        if self.is_non_temporal(from.len()) {
            copy_non_temporal(from, into);
        } else if from.len() >= LONG_BYTES && self.judges() {
            let before = now();
            crate::cpu::copy(from, into);
            self.learn(from.len(), now().saturating_sub(before));
        } else {
            copy_to_reader(from, into);
        }
    }

    /// Returns `true` if the next copy of this length uses non-temporal stores.
    fn is_non_temporal(&mut self, len: usize) -> bool {
        let non_temporal_left = self.non_temporal_left > 0 && len >= LONG_BYTES;
        if non_temporal_left {
            self.non_temporal_left = self.non_temporal_left.saturating_sub(len);
        }
        non_temporal_left
    }

    fn judges(&mut self) -> bool {
        self.copies = self.copies.wrapping_add(1);
        self.slow > 0 || self.copies.is_multiple_of(JUDGED_COPIES)
    }

    fn learn(&mut self, len: usize, lasted: Duration) {
        let kib = u32::try_from(len >> 10).unwrap_or(u32::MAX);
        self.slow = if lasted >= SLOW_KIB.saturating_mul(kib) { self.slow + 1 } else { 0 };
        if self.slow == SLOW_COPIES {
            // After that, one slow copy is enough.
            (self.slow, self.non_temporal_left) = (SLOW_COPIES - 1, NON_TEMPORAL_BYTES);
        }
    }
}

/// Copies to memory that another core has read.
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub(crate) fn copy_to_reader(from: &[u8], into: &mut [u8]) {
    if string::BYTES.contains(&from.len()) && tuning().copies_by_string {
        string::copy(from, into);
    } else {
        crate::cpu::copy(from, into);
    }
}

fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    let nanoseconds = u32::try_from(now.tv_nsec).expect("a second has fewer than 2^32");
    Duration::new(now.tv_sec.cast_unsigned(), nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOW: Duration = Duration::from_micros(26);
    const QUICK: Duration = Duration::from_micros(19);
    const PIECE: usize = 64 << 10;

    /// Returns how many of these copies are non-temporal, if the others take this long.
    fn non_temporal_left(
        copy_policy: &mut CopyPolicy,
        copies: usize,
        lasted: impl Fn(usize) -> Duration,
    ) -> usize {
        let is_non_temporal = |&number: &usize| {
            let non_temporal_left = copy_policy.is_non_temporal(PIECE);
            if !non_temporal_left && copy_policy.judges() {
                copy_policy.learn(PIECE, lasted(number));
            }
            non_temporal_left
        };
        (0..copies).filter(is_non_temporal).count()
    }

    #[test]
    fn slow_copies_are_followed_by_non_temporal_ones() {
        let mut copy_policy = CopyPolicy::default();
        // The fourth copy is the first that is timed.
        assert_eq!(non_temporal_left(&mut copy_policy, 5, |_| SLOW), 0);
        assert_eq!(non_temporal_left(&mut copy_policy, 1024, |_| SLOW), 1024);
        assert_eq!(
            non_temporal_left(&mut copy_policy, 1025, |_| SLOW),
            1024,
            "one copy tells that nothing has changed"
        );
        assert_eq!(non_temporal_left(&mut copy_policy, 100, |_| QUICK), 0);
    }

    #[test]
    fn one_slow_copy_changes_nothing() {
        let slow_now_and_then = |number| if number % 2 == 1 { SLOW } else { QUICK };
        assert_eq!(non_temporal_left(&mut CopyPolicy::default(), 10_000, slow_now_and_then), 0);
        assert_eq!(non_temporal_left(&mut CopyPolicy::default(), 10_000, |_| QUICK), 0);
    }

    #[test]
    fn few_bytes_go_through_the_caches() {
        let mut copy_policy = CopyPolicy { non_temporal_left: NON_TEMPORAL_BYTES, ..CopyPolicy::default() };
        assert!(!copy_policy.is_non_temporal(LONG_BYTES - 1) && copy_policy.is_non_temporal(LONG_BYTES));
        assert_eq!(copy_policy.non_temporal_left, NON_TEMPORAL_BYTES - LONG_BYTES);
    }

    #[test]
    fn all_is_copied_either_way() {
        let bytes: Vec<u8> = (0..=250).cycle().take(PIECE + 7).collect();
        for non_temporal_left in [0, NON_TEMPORAL_BYTES] {
            let mut copy = vec![0; bytes.len()];
            CopyPolicy { non_temporal_left, ..CopyPolicy::default() }.copy(&bytes, &mut copy);
            assert!(copy == bytes, "{non_temporal_left}");
        }
    }
}

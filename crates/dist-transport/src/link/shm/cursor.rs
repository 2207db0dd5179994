//! The cursors of a ring: positions only, no memory.
//!
//! Counters count bytes since the beginning and never decrease. A position is a counter modulo the ring's
//! length. All counters are whole cache lines, so contiguous bytes are aligned.

use std::ops::Range;

use super::segment::RING_BYTES;
use crate::cpu::CacheLine;

/// The bytes that are consumed before the room is given back: often enough for the producer, and rare for small
/// messages.
const GIVE_BACK_BYTES: u64 = RING_BYTES as u64 / 4;

/// The producer's cursor.
#[derive(Debug, Default)]
pub(crate) struct Produced {
    produced: u64,
    /// The consumer's counter as last read.
    consumed: u64,
}

impl Produced {
    /// Returns how many bytes can be written. The consumer's counter is read only if there seems to be less
    /// room than `wanted`. Returns `None` if the counter is invalid.
    pub(crate) fn room(&mut self, wanted: usize, consumed: impl FnOnce() -> u64) -> Option<usize> {
        if self.free() < wanted {
            let now = consumed();
            if now < self.consumed || now > self.produced || !is_whole(now) {
                return None;
            }
            self.consumed = now;
        }
        Some(self.free())
    }

    fn free(&self) -> usize {
        let used = usize::try_from(self.produced - self.consumed);
        RING_BYTES - used.expect("no more than the ring holds")
    }

    /// Returns the ranges for bytes that are written `ahead` of the published ones: two ranges if they wrap
    /// around the end of the ring.
    pub(crate) fn places(&self, ahead: usize, len: usize) -> [Range<usize>; 2] {
        assert!(ahead + len <= self.free(), "no room for this was seen");
        let start = position(self.produced + ahead as u64);
        let first = len.min(RING_BYTES - start);
        [start..start + first, 0..len - first]
    }

    /// Returns the position of the next byte, which is in the first lap round the ring.
    pub(crate) fn first_lap(&self) -> usize {
        usize::try_from(self.produced).expect("it is at most the ring's length")
    }

    /// Counts bytes as produced, and returns the new counter.
    pub(crate) fn advance(&mut self, bytes: usize) -> u64 {
        assert!(bytes <= self.free(), "no room for this was seen");
        self.produced += bytes as u64;
        self.produced
    }
}

/// The consumer's cursor.
#[derive(Debug, Default)]
pub(crate) struct Consumed {
    consumed: u64,
    given_back: u64,
    /// The producer's counter as last read.
    produced: u64,
}

impl Consumed {
    /// Returns the range of the next contiguous bytes to read, at most `max`. The producer's counter is read
    /// only if no bytes seem to be there. Returns `None` if the counter is invalid.
    pub(crate) fn next(&mut self, max: usize, produced: impl FnOnce() -> u64) -> Option<Range<usize>> {
        if self.produced == self.consumed {
            let counted = produced();
            // Skipped cache lines may not be counted yet.
            let now = counted.max(self.produced);
            if now - self.given_back > RING_BYTES as u64 || !is_whole(counted) {
                return None;
            }
            self.produced = now;
        }
        let start = position(self.consumed);
        let there = usize::try_from(self.produced - self.consumed).expect("no more than the ring holds");
        Some(start..start + there.min(max).min(RING_BYTES - start))
    }

    /// Returns the counter behind the next cache line.
    pub(crate) const fn next_grain(&self) -> u64 {
        self.consumed + CacheLine::BYTES as u64
    }

    /// Counts the next cache line as present, because the producer has skipped it.
    pub(crate) fn skip(&mut self) {
        self.produced = self.produced.max(self.next_grain());
    }

    /// Counts bytes as consumed. Returns the counter if it should be published to the producer.
    pub(crate) fn advance(&mut self, bytes: usize) -> Option<u64> {
        assert!(bytes as u64 <= self.produced - self.consumed, "nothing like this has come");
        self.consumed += bytes as u64;
        let due = self.consumed - self.given_back >= GIVE_BACK_BYTES;
        due.then(|| {
            self.given_back = self.consumed;
            self.consumed
        })
    }
}

/// Returns `true` if a counter is a whole number of cache lines.
fn is_whole(counter: u64) -> bool {
    counter.is_multiple_of(CacheLine::BYTES as u64)
}

fn position(counter: u64) -> usize {
    usize::try_from(counter % RING_BYTES as u64).expect("below the ring's length")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_that_makes_no_sense_is_none() {
        let ring = RING_BYTES as u64;
        let ahead = |counter: u64| Consumed::default().next(64, || counter);
        assert_eq!(ahead(128), Some(0..64));
        assert_eq!([ahead(32), ahead(ring + 64)], [None, None]);
        for broken in [32, ring + 64] {
            let mut consumed = Consumed::default();
            let looks = [broken; 2].map(|counter| consumed.next(64, || counter));
            assert_eq!(looks, [None, None], "it makes no more sense at the next look");
        }
        let mut produced = Produced::default();
        produced.advance(RING_BYTES);
        let mut room = |counter: u64| produced.room(64, || counter);
        assert_eq!([room(32), room(ring + 64)], [None, None]);
        assert_eq!(room(64), Some(64));
        assert_eq!(produced.room(128, || 0), None, "it has been further");
    }
}

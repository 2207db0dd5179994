//! Where each side stands in a ring: positions only, no memory.
//!
//! Counters count bytes since the beginning and never go back; a position is a counter modulo the ring's length. All
//! are whole grains, so that what lies side by side is aligned.

use std::ops::Range;

use super::segment::RING_BYTES;
use crate::Grain;

/// How much is consumed before the room is given back: often enough for the producer, and rare for small messages.
const GIVE_BACK_BYTES: u64 = RING_BYTES as u64 / 4;

/// The producer's view of a ring.
#[derive(Debug, Default)]
pub(super) struct Produced {
    produced: u64,
    /// As last seen.
    consumed: u64,
}

impl Produced {
    /// How many bytes there is room for; `None` if the counter, which is looked at only when there seems to be room
    /// for less than `wanted`, makes no sense.
    pub(super) fn room(&mut self, wanted: usize, consumed: impl FnOnce() -> u64) -> Option<usize> {
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

    /// Where bytes go that lie `ahead` of what is produced, in two pieces where they meet the end of the ring.
    pub(super) fn places(&self, ahead: usize, len: usize) -> [Range<usize>; 2] {
        assert!(ahead + len <= self.free(), "no room for this was seen");
        let start = position(self.produced + ahead as u64);
        let first = len.min(RING_BYTES - start);
        [start..start + first, 0..len - first]
    }

    /// Counts bytes as produced, and gives the new counter.
    pub(super) fn advance(&mut self, bytes: usize) -> u64 {
        assert!(bytes <= self.free(), "no room for this was seen");
        self.produced += bytes as u64;
        self.produced
    }
}

/// The consumer's view of a ring.
#[derive(Debug, Default)]
pub(super) struct Consumed {
    consumed: u64,
    given_back: u64,
    /// As last seen.
    produced: u64,
}

impl Consumed {
    /// Where the next bytes lie, at most `max` and as far as they lie side by side; `None` if the counter, which is
    /// looked at only when nothing seems to be there, makes no sense.
    pub(super) fn next(&mut self, max: usize, produced: impl FnOnce() -> u64) -> Option<Range<usize>> {
        if self.produced == self.consumed {
            let counted = produced();
            // Grains that were left out may not be counted yet.
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

    /// The counter behind the next grain.
    pub(super) const fn next_grain(&self) -> u64 {
        self.consumed + Grain::BYTES as u64
    }

    /// Counts the next grain as there, which the other side has left out.
    pub(super) fn skip(&mut self) {
        self.produced = self.produced.max(self.next_grain());
    }

    /// Counts bytes as consumed. Gives the counter that is to be told to the producer, if it is.
    pub(super) fn advance(&mut self, bytes: usize) -> Option<u64> {
        assert!(bytes as u64 <= self.produced - self.consumed, "nothing like this has come");
        self.consumed += bytes as u64;
        let due = self.consumed - self.given_back >= GIVE_BACK_BYTES;
        due.then(|| {
            self.given_back = self.consumed;
            self.consumed
        })
    }
}

/// Whether a counter is one of whole grains.
fn is_whole(counter: u64) -> bool {
    counter.is_multiple_of(Grain::BYTES as u64)
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

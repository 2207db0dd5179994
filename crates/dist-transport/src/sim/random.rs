//! The random generator of a seed.

use std::time::Duration;

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): one addition
/// and one mix per number, and every seed is as good as any other.
#[derive(Debug, Clone)]
pub(super) struct SplitMix64(u64);

impl SplitMix64 {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a number in `0..limit`; `limit` must not be 0.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).expect("a remainder is smaller than its divisor, a usize")
    }

    /// Returns a number in `0..limit` for this moment, without a change of the generator.
    pub(super) fn choice(&self, limit: usize, now: Duration) -> usize {
        let nanos = u64::try_from(now.as_nanos() & u128::from(u64::MAX)).unwrap_or_default();
        Self(mix(self.0 ^ nanos)).below(limit)
    }

    /// Returns a random time from 0 to `limit`, inclusive, in whole nanoseconds. Draws no number if `limit` is 0.
    pub(super) fn up_to(&mut self, limit: Duration) -> Duration {
        match u64::try_from(limit.as_nanos()) {
            Ok(0) => Duration::ZERO,
            Ok(nanos) if nanos < u64::MAX => Duration::from_nanos(self.next() % (nanos + 1)),
            _ => Duration::from_nanos(self.next()),
        }
    }
}

/// Spreads every bit of `word` over all 64 bits, without collisions.
pub(super) const fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_the_published_one() {
        let mut random = SplitMix64::new(1_234_567);
        let first = [random.next(), random.next(), random.next()];
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn numbers_stay_below_the_limit_and_reach_all_of_it() {
        let mut random = SplitMix64::new(0);
        let mut seen = [false; 7];
        for _ in 0..1000 {
            seen[random.below(7)] = true;
        }
        assert_eq!(seen, [true; 7]);
    }
}

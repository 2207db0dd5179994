//! Random numbers that depend on their purpose, not on the rank.

/// A stream of random numbers that depends only on its keys, such as a seed, a step, a micro-batch or a name.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn keyed(keys: impl IntoIterator<Item = u64>) -> Self {
        Self(keys.into_iter().fold(GOLDEN, |state, key| mix(state ^ mix(key.wrapping_add(GOLDEN)))))
    }

    /// Returns the stream for a name.
    pub(crate) fn named(seed: u64, name: &str) -> Self {
        Self::keyed(std::iter::once(seed).chain(name.bytes().map(u64::from)))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// Returns a number below `bound`, which is at least 1. The distribution is uniform within the precision of 64
    /// bits.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        let scaled = (u128::from(self.next()) * bound as u128) >> 64;
        usize::try_from(scaled).expect("less than the bound, which is a usize")
    }

    /// Returns a number that is at least 0 and less than 1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// SplitMix64's output function: every bit of the result depends on every bit of the state.
fn mix(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_counts_and_so_does_their_order() {
        let first = |keys: &[u64]| Random::keyed(keys.iter().copied()).next();
        let streams = [first(&[0, 0]), first(&[0, 1]), first(&[1, 0]), first(&[0]), first(&[0, 0, 0])];
        for (index, stream) in streams.iter().enumerate() {
            assert!(!streams[..index].contains(stream), "{streams:x?}");
        }
    }

    #[test]
    fn numbers_fill_their_range_evenly() {
        let mut random = Random::named(3, "test");
        let mut counts = [0; 10];
        for _ in 0..10_000 {
            counts[random.below(10)] += 1;
            assert!((0.0..1.0).contains(&random.unit()));
        }
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }
}

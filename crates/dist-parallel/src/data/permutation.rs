//! A pseudo-random permutation with random access.

/// The swap-or-not shuffle (Hoang, Morris, Rogaway: "An enciphering scheme based on a card shuffle", CRYPTO 2012) of
/// the numbers below a length. Each round pairs x with k − x modulo the length, for a random k, and swaps a pair if a
/// random bit is 1. It needs no memory and works for every length.
///
/// The same key and length give the same permutation in every version of this crate, on every machine:
///
/// * mix(z) is the output function of SplitMix64, G is 0x9e3779b97f4a7c15, and all sums are modulo 2⁶⁴.
/// * key = mix(mix(G ⊕ mix(seed + G)) ⊕ mix(epoch + G)).
/// * For each round r from 0 to 63: k = ⌊mix(key + (2r + 1) · G) · length / 2⁶⁴⌋ and y = (k − x) mod length. If the
///   lowest bit of mix(mix(key + (2r + 2) · G) ⊕ max(x, y)) is 1, x becomes y.
#[derive(Debug, Clone, Copy)]
pub(super) struct Permutation {
    len: u64,
    key: u64,
}

const ROUNDS: u64 = 64;
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

impl Permutation {
    pub(super) fn new(len: u64, seed: u64, epoch: u64) -> Self {
        Self { len, key: keyed([seed, epoch]) }
    }

    /// Returns the number at this place, which must be below the length.
    pub(super) fn at(self, place: u64) -> u64 {
        (0..ROUNDS).fold(place, |x, round| self.swap_or_not(x, round))
    }

    fn swap_or_not(self, x: u64, round: u64) -> u64 {
        let Self { len, key } = self;
        let draw = |number: u64| mix(key.wrapping_add(number.wrapping_mul(GOLDEN)));
        let k = below(len, draw(2 * round + 1));
        let partner = if k >= x { k - x } else { len - (x - k) };
        let swaps = mix(draw(2 * round + 2) ^ x.max(partner)) & 1 == 1;
        if swaps { partner } else { x }
    }
}

/// Returns a pseudo-random number that depends only on these numbers and their order.
pub(super) fn keyed<const N: usize>(numbers: [u64; N]) -> u64 {
    numbers.into_iter().fold(GOLDEN, |state, number| mix(state ^ mix(number.wrapping_add(GOLDEN))))
}

/// Scales 64 random bits to a number below `len`.
fn below(len: u64, random: u64) -> u64 {
    let scaled = (u128::from(random) * u128::from(len)) >> 64;
    u64::try_from(scaled).expect("it is less than the length")
}

/// Computes the output function of SplitMix64 (Steele, Lea and Flood, 2014): a bijection. Every bit of the
/// result depends on every bit of the argument.
const fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

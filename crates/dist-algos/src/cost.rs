//! What a schedule costs, counted in rounds and chunks.

/// The price of one algorithm for one world size. The unit of the last two is a chunk of
/// `buffer / chunks(world_size)`; [`verify`](crate::verify) holds the schedules to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cost {
    /// Messages that follow one another when every message takes as long as every other.
    pub rounds: usize,
    /// Chunks that follow one another when a message takes as long as it has chunks.
    pub path: usize,
    /// Chunks that the busiest rank sends; of operations with a root, with the root that makes most of it.
    pub sent_max: usize,
}

/// Bytes that cross a link in the time that a message takes at least: what a round costs, in bytes.
///
/// With this value recursive doubling gives way to halving-doubling above 256 KiB on 4 ranks and above 154 KiB on
/// 8. On 4 ranks over TCP it was measured to be the better choice at 256 KiB, and to lose at 1 MiB.
pub const ROUND_BYTES: usize = 64 * 1024;

impl Cost {
    /// The cost of no communication.
    pub const NOTHING: Self = Self { rounds: 0, path: 0, sent_max: 0 };

    /// Rounds and chunks in a common unit: bytes, where a round counts [`ROUND_BYTES`].
    pub(crate) fn bytes(self, buffer_bytes: usize, chunks: usize) -> u128 {
        let moved = self.path as u128 * buffer_bytes as u128 / chunks.max(1) as u128;
        self.rounds as u128 * ROUND_BYTES as u128 + moved
    }
}

/// ⌈log₂ n⌉: rounds in which everybody can have heard of everybody. 0 for 0 and 1.
pub(crate) const fn log2_ceil(n: usize) -> usize {
    if n <= 1 { 0 } else { (usize::BITS - (n - 1).leading_zeros()) as usize }
}

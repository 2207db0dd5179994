//! What a schedule costs, and what that takes on a machine.

/// The price of one algorithm for one world size. The unit of all but the first is a chunk of
/// `buffer / chunks(world_size)`; [`verify`](crate::verify) holds the schedules to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cost {
    /// Messages that follow one another when every message takes as long as every other.
    pub rounds: usize,
    /// Chunks that follow one another when a message takes as long as it has chunks.
    pub path: usize,
    /// Chunks that the busiest rank sends; of operations with a root, with the root that makes most of it.
    pub sent_max: usize,
    /// Chunks that the rank reduces that reduces most of them, into others; with the root that makes most of it.
    pub reduced_max: usize,
}

impl Cost {
    /// The cost of no communication.
    pub const NOTHING: Self = Self { rounds: 0, path: 0, sent_max: 0, reduced_max: 0 };

    /// The cost where each chunk is so many chunks.
    pub(crate) const fn magnified(self, each: usize) -> Self {
        let Self { rounds, path, sent_max, reduced_max } = self;
        Self { rounds, path: path * each, sent_max: sent_max * each, reduced_max: reduced_max * each }
    }

    /// The cost of both, one after the other.
    pub(crate) const fn then(self, other: Self) -> Self {
        Self {
            rounds: self.rounds + other.rounds,
            path: self.path + other.path,
            sent_max: self.sent_max + other.sent_max,
            reduced_max: self.reduced_max + other.reduced_max,
        }
    }
}

/// How long things take, in picoseconds: by whole numbers every machine chooses the same.
///
/// ```
/// use dist_algos::{AllReduce, Choice, CostModel, Order};
///
/// let (slow, fast) = (CostModel::default(), CostModel { round_ps: 500_000, ..CostModel::default() });
/// let suggest = |model: &CostModel| AllReduce::suggest(8, 65_536, Order::Canonical, model);
/// assert_eq!(suggest(&slow), AllReduce::RecursiveDoubling);
/// assert_eq!(suggest(&fast), AllReduce::HalvingDoubling);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CostModel {
    /// What every message takes at least: α.
    pub round_ps: u64,
    /// What a byte of a message takes: β.
    pub byte_ps: u64,
    /// What it takes to reduce a byte into another: γ.
    pub reduced_byte_ps: u64,
}

impl CostModel {
    /// How long an operation takes on a buffer of so many bytes, of which the schedule makes so many chunks.
    pub fn picoseconds(&self, cost: Cost, buffer_bytes: usize, chunks: usize) -> u128 {
        let chunks_take = |count: usize, byte_ps: u64| {
            let bytes = (count as u128).saturating_mul(buffer_bytes as u128) / chunks.max(1) as u128;
            bytes.saturating_mul(byte_ps.into())
        };
        (cost.rounds as u128)
            .saturating_mul(self.round_ps.into())
            .saturating_add(chunks_take(cost.path, self.byte_ps))
            .saturating_add(chunks_take(cost.reduced_max, self.reduced_byte_ps))
    }
}

/// A round takes as long as 64 KiB, at 5 GB/s, and what arrives is reduced while more arrives.
///
/// So recursive doubling gives way to halving-doubling above 256 KiB on 4 ranks and above 154 KiB on 8. On 4 ranks
/// over TCP it was measured to be the better choice at 256 KiB, and to lose at 1 MiB.
impl Default for CostModel {
    fn default() -> Self {
        let byte_ps = 200;
        Self { round_ps: 65_536 * byte_ps, byte_ps, reduced_byte_ps: 0 }
    }
}

/// ⌈log₂ n⌉: rounds in which everybody can have heard of everybody. 0 for 0 and 1.
pub(crate) const fn log2_ceil(n: usize) -> usize {
    if n <= 1 { 0 } else { (usize::BITS - (n - 1).leading_zeros()) as usize }
}

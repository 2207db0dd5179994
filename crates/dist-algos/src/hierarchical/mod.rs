//! Two-level schedules: first inside each host, then between hosts, then inside each host again.
//!
//! Fewer messages and bytes go between hosts than in a schedule that ignores hosts. A two-level schedule
//! consists of other schedules of this crate with renumbered ranks and chunks. A rank whose world size
//! differs from that of the hosts has no schedule. Roots outside the world are taken modulo its size.

mod algorithm;
mod all_reduce;
mod barrier;
mod level;
mod position;
mod rooted;
mod scattered;

use crate::{Cost, CostModel};

pub use algorithm::{TwoLevelAlgorithm, TwoLevelPhases};
pub use all_reduce::{
    LEADERS_BINOMIAL, LEADERS_CIRCULANT, LEADERS_HALVING_DOUBLING, LEADERS_PAIRWISE,
    LEADERS_RECURSIVE_DOUBLING, LEADERS_RING, PARTS_BINOMIAL, PARTS_CIRCULANT, PARTS_HALVING_DOUBLING,
    PARTS_PAIRWISE, PARTS_RECURSIVE_DOUBLING, PARTS_RING, by_leaders, by_parts,
};
pub use barrier::{BARRIER_DISSEMINATION, BARRIER_RING, barrier};
pub use level::Steps;
pub use rooted::{
    BROADCAST_BINOMIAL, BROADCAST_CHAIN, BROADCAST_CIRCULANT, BROADCAST_KNOMIAL, REDUCE_BINOMIAL,
    REDUCE_PAIRWISE, broadcast, reduce,
};
pub use scattered::{ALL_GATHER, REDUCE_SCATTER};

/// The costs of a two-level schedule inside and between hosts, in chunks of that schedule. If hosts have different
/// numbers of ranks, the cost inside hosts is that of the largest host, for which the others wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LevelCosts {
    /// The cost inside hosts.
    pub inside: Cost,
    /// The cost between hosts.
    pub across: Cost,
}

impl LevelCosts {
    /// Returns the time for a buffer of `buffer_bytes` bytes in `chunks` chunks. The models are those of messages
    /// inside and between hosts.
    pub fn picoseconds(
        &self,
        inside: &CostModel,
        across: &CostModel,
        buffer_bytes: usize,
        chunks: usize,
    ) -> u128 {
        inside.picoseconds(self.inside, buffer_bytes, chunks).saturating_add(across.picoseconds(
            self.across,
            buffer_bytes,
            chunks,
        ))
    }
}

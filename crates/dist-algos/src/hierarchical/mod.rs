//! Two-level schedules: among the ranks of each host, across hosts, and among the ranks of each host again.
//!
//! Fewer messages and bytes go from host to host than in a schedule that does not know who shares one. They are made
//! of this crate's other schedules, whose ranks and chunks are renumbered. All of them give `None` to a rank of
//! another world than that of the hosts; roots outside the world are taken modulo its size.

mod all_reduce;
mod level;
mod position;
mod two_level;

use crate::{Cost, CostModel};

pub use all_reduce::{HostParticipants, TwoLevelAllReduce};
pub use level::Steps;
pub use two_level::TwoLevel;

/// What a two-level schedule costs at most, in its own chunks. Where hosts have different numbers of ranks, the
/// smaller ones wait for the larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LevelCosts {
    /// Inside of hosts.
    pub inside: Cost,
    /// From host to host.
    pub across: Cost,
}

impl LevelCosts {
    /// How long an operation takes on a buffer of so many bytes and chunks, if messages inside of hosts and across
    /// take different times.
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

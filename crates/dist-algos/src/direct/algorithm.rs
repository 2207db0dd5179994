//! The record of an algorithm for ranks that share memory.

use std::fmt;
use std::hash::{Hash, Hasher};

use dist_transport::shm_group::GroupLayout;

use super::collective::Division;
use super::step_context::{PhaseStep, StepContext};
use super::{Crossovers, Ownership};
use crate::CollectiveKind;

/// The record of an algorithm for ranks that share memory.
///
/// Two records are equal if the operation and the name are equal.
pub struct DirectAlgorithm {
    /// The operation.
    pub collective: CollectiveKind,
    /// The name, which is unique among the algorithms of the operation: `direct/` and the form of the schedule.
    pub name: &'static str,
    /// The access that other ranks need to a rank's own memory.
    pub remote_access: RemoteAccess,
    /// The partition of the memory.
    pub division: Division,
    /// `true` if every rank publishes each block and then uses what the others have published, and does nothing else.
    /// Short data is then published in a flag line or an eager buffer, and ranks alternate in the use of slots.
    pub is_one_shot: bool,
    /// Returns `true` if the algorithm is faster than those before it in the table. The first algorithm of an operation
    /// always fits.
    pub fits: fn(&DirectCase<'_>) -> bool,
    /// Returns the size of a block for a buffer of this many bytes.
    pub block_bytes: fn(usize) -> usize,
    /// Returns the number of rounds for a plan with this many blocks.
    pub rounds: fn(usize) -> usize,
    /// Returns how many times every rank signals for a plan with this many blocks.
    pub signals: fn(usize) -> usize,
    /// Returns the step of a rank at a position in a round. The arguments are the rank's view of the call, the round
    /// and the position, both counted from 0.
    pub step: fn(&StepContext, usize, usize) -> PhaseStep,
}

/// The values that the choice of an algorithm for ranks that share memory depends on.
#[derive(Clone, Copy, Debug)]
pub struct DirectCase<'a> {
    /// The number of ranks.
    pub world_size: usize,
    /// Bytes of the buffer.
    pub bytes: usize,
    /// The owner and kind of the memory.
    pub ownership: Ownership,
    /// The memory that the ranks share.
    pub shared: &'a GroupLayout,
    /// The sizes from which another algorithm is chosen.
    pub crossovers: Crossovers,
}

/// The access that other ranks need to a rank's own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteAccess {
    /// No access.
    Nothing,
    /// Other ranks read it.
    Read,
    /// Other ranks read and write it.
    Write,
}

impl DirectAlgorithm {
    /// Returns the name without `direct/`.
    pub fn short_name(&self) -> &'static str {
        self.name.strip_prefix("direct/").unwrap_or(self.name)
    }

    /// Returns the number of parts of the memory.
    #[inline]
    pub const fn parts(&self, world_size: usize) -> usize {
        match self.division {
            Division::Whole => 1,
            Division::PerRank => world_size,
        }
    }

    /// Returns the number of places in a slot. If there is one place, all parts use it in turn; otherwise each part
    /// has its own place.
    #[inline]
    pub const fn places(&self, world_size: usize) -> usize {
        match self.collective {
            CollectiveKind::AllGather => 1,
            _ => self.parts(world_size),
        }
    }
}

impl PartialEq for DirectAlgorithm {
    fn eq(&self, other: &Self) -> bool {
        (self.collective, self.name) == (other.collective, other.name)
    }
}

impl Eq for DirectAlgorithm {}

impl Hash for DirectAlgorithm {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.collective, self.name).hash(state);
    }
}

impl fmt::Debug for DirectAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.collective, self.name)
    }
}

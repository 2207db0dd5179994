//! What can be wrong with a group.

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can be wrong with a group. Ranks are numbered as in the parent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A group needs at least one rank.
    #[error("a group of no ranks")]
    Empty,
    /// A member does not exist.
    #[error("rank {rank} is outside the parent, which has {world_size}")]
    UnknownRank {
        /// The rank that was given.
        rank: usize,
        /// The size of the parent.
        world_size: usize,
    },
    /// A member is named twice.
    #[error("rank {rank} is named twice")]
    DuplicateRank {
        /// The rank.
        rank: usize,
    },
    /// The ranks of the parent could not agree on the groups.
    #[error("the groups could not be made")]
    Collective(#[from] dist_collectives::Error),
}

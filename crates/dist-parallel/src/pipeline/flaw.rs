//! What can be wrong with a pipeline schedule.

use super::Action;

dist_transport::error_enum! {
/// What is wrong with a schedule.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Flaw {
    /// It has no ranks, no stages, no micro-batches, or its parts are about different numbers of ranks.
    #[error(
        "there is no schedule of {ranks} ranks, {lists} lists of actions, {bounds} bounds, {stages} stages, {micro_batches} micro-batches"
    )]
    Shape {
        /// Number of ranks.
        ranks: usize,
        /// Number of lists of actions.
        lists: usize,
        /// Number of bounds of activations.
        bounds: usize,
        /// Number of stages.
        stages: usize,
        /// Number of micro-batches.
        micro_batches: usize,
    },
    /// A stage is on a rank that does not exist.
    #[error("stage {stage} is on rank {rank}, and there are {ranks} ranks")]
    Placement {
        /// The stage.
        stage: usize,
        /// Where it is said to be.
        rank: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// An action is on a rank that has no part in it.
    #[error("rank {rank} is to do {action}, which is not its own")]
    NotOwn {
        /// The rank.
        rank: usize,
        /// The action.
        action: Action,
    },
    /// An action that has to be done once is missing.
    #[error("nobody does {action}")]
    Missing {
        /// The action.
        action: Action,
    },
    /// An action that has to be done once is done twice, or a part of what another has already done whole.
    #[error("rank {rank} does {action} a second time")]
    Twice {
        /// The rank.
        rank: usize,
        /// The action.
        action: Action,
    },
    /// An action comes before what it needs on the same rank.
    #[error("rank {rank} does {action} before what it needs")]
    TooEarly {
        /// The rank.
        rank: usize,
        /// The action.
        action: Action,
    },
    /// A rank receives in another order than is sent.
    #[error("rank {rank} does {action} when {sent} comes next from its peer")]
    OtherOrder {
        /// The rank that receives.
        rank: usize,
        /// What it receives.
        action: Action,
        /// What its peer has sent.
        sent: Action,
    },
    /// Ranks wait for each other.
    #[error("rank {rank} waits forever with {action}")]
    Deadlock {
        /// The first rank that waits.
        rank: usize,
        /// What it waits with.
        action: Action,
    },
    /// A rank keeps more activations than it may.
    #[error("rank {rank} keeps {kept} activations after {action}, and may keep {kept_max}")]
    Memory {
        /// The rank.
        rank: usize,
        /// The action that makes it one too many.
        action: Action,
        /// How many it keeps then.
        kept: usize,
        /// How many it may keep.
        kept_max: usize,
    },
    /// Gathered parameters are gathered again, freed without being there, needed without being there, or never freed.
    #[error("rank {rank} does {action} with the parameters of stage {stage} {state}")]
    Parameters {
        /// The rank.
        rank: usize,
        /// The action; the last of the rank, if they are never freed.
        action: Action,
        /// The stage.
        stage: usize,
        /// Whether they are there.
        state: &'static str,
    },
}
}

/// What [`PipelineSchedule::validate`](super::PipelineSchedule::validate) has found of a schedule without flaw.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScheduleProof {
    /// For each rank, how many activations of a stage it keeps at most at once, between their forward and their
    /// backward or weight gradient.
    pub kept: Vec<usize>,
    /// How many messages travel between ranks.
    pub messages: usize,
}

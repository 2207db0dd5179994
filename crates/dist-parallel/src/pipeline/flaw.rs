//! The flaws of invalid pipeline schedules.

use super::Action;

dist_transport::error_enum! {
/// A reason why a schedule is invalid.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Flaw {
    /// The schedule has no ranks, stages or micro-batches, or its lists have different numbers of ranks.
    #[error(
        "a schedule cannot have {ranks} ranks, {lists} lists of actions, {bounds} bounds, {stages} stages and {micro_batches} micro-batches"
    )]
    Shape {
        /// The number of ranks.
        ranks: usize,
        /// The number of lists of actions.
        lists: usize,
        /// The number of bounds of activations.
        bounds: usize,
        /// The number of stages.
        stages: usize,
        /// The number of micro-batches.
        micro_batches: usize,
    },
    /// A stage is on a rank that does not exist.
    #[error("stage {stage} is on rank {rank}, but there are {ranks} ranks")]
    Placement {
        /// The stage.
        stage: usize,
        /// The rank of the stage.
        rank: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// An action is on a rank that does not take part in it.
    #[error("rank {rank} has {action}, which belongs to another rank")]
    NotOwn {
        /// The rank.
        rank: usize,
        /// The action.
        action: Action,
    },
    /// A required action is missing.
    #[error("no rank has {action}")]
    Missing {
        /// The action.
        action: Action,
    },
    /// An action is repeated, or it repeats a part of an earlier whole backward.
    #[error("rank {rank} has {action} a second time")]
    Twice {
        /// The rank.
        rank: usize,
        /// The action.
        action: Action,
    },
    /// An action comes before an action of the same rank that it needs.
    #[error("rank {rank} has {action} before an action that it needs")]
    TooEarly {
        /// The rank.
        rank: usize,
        /// The action.
        action: Action,
    },
    /// A rank receives messages in another order than they are sent.
    #[error("rank {rank} has {action}, but its peer sends {sent} next")]
    OtherOrder {
        /// The rank that receives.
        rank: usize,
        /// The receive.
        action: Action,
        /// The next send of its peer.
        sent: Action,
    },
    /// Ranks wait for each other forever.
    #[error("rank {rank} waits forever in {action}")]
    Deadlock {
        /// The first rank that waits.
        rank: usize,
        /// The action that waits.
        action: Action,
    },
    /// A rank holds more activations than allowed.
    #[error("rank {rank} holds {kept} activations after {action}, above its bound of {kept_max}")]
    Memory {
        /// The rank.
        rank: usize,
        /// The action that exceeds the bound.
        action: Action,
        /// The number of activations after it.
        kept: usize,
        /// The bound.
        kept_max: usize,
    },
    /// Sharded parameters are gathered twice, freed or used without being gathered, or never freed.
    #[error("rank {rank} has {action} while the parameters of stage {stage} are {state}")]
    Parameters {
        /// The rank.
        rank: usize,
        /// The action, or the last of the rank if they are never freed.
        action: Action,
        /// The stage.
        stage: usize,
        /// The state of the parameters.
        state: &'static str,
    },
}
}

/// The result of [`Schedule::validate`](super::PipelineSchedule::validate) for a valid schedule.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScheduleProof {
    /// For each rank, the largest number of activations of a stage that it holds at once. An activation is held
    /// between its forward and its backward or weight gradient.
    pub kept: Vec<usize>,
    /// The number of messages between ranks.
    pub messages: usize,
}

//! Why a job ended early: one record, the same on every rank.

use crate::Fingerprint;

/// The first thing that went wrong in a job. The first writer wins, and every rank is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} {cause} (reported by rank {reporter})")]
pub struct Abort {
    /// What happened.
    pub cause: Cause,
    /// The rank that it happened to, by its number in the world.
    pub rank: usize,
    /// The rank that noticed.
    pub reporter: usize,
    /// The call that the reporter was in.
    pub call: Fingerprint,
}

/// What happened to the rank that an [`Abort`] names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// Its process ended without a goodbye.
    #[error("died")]
    Died,
    /// Its process lives, or seems to, but gave no sign of life for too long.
    #[error("stopped responding")]
    Silent,
    /// It closed its communicator while a peer was still waiting for it.
    #[error("left while a peer was waiting for it")]
    Left,
    /// A peer waited for it until the deadline.
    #[error("was waited for until the deadline")]
    TimedOut,
    /// It made another call than its peer.
    #[error("made another call than its peer")]
    Mismatch {
        /// The call that the named rank was in; [`Abort::call`] is the reporter's.
        theirs: Fingerprint,
    },
    /// It sent what no correct peer sends.
    #[error("broke the protocol")]
    Protocol,
    /// Its program panicked or gave up, and said so.
    #[error("gave up")]
    GaveUp,
    /// The process that hosts the coordinator went away.
    #[error("hosted the coordinator, which went away")]
    CoordinatorLost,
}

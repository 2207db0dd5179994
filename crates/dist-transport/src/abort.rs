//! Why a job ended early: one record, the same on every rank.

use std::fmt;

use crate::Fingerprint;

/// The first thing that went wrong in a job. The first writer wins, and every rank is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

#[cfg(any(feature = "tcp", feature = "sim"))]
impl Abort {
    /// The same, but if a rank was waited for too long, of the rank for which that one and others have waited in turn, in this
    /// call: `waits_for` says for which a rank waits in it. Where they wait for each other in a circle, the first is as good
    /// as any.
    #[must_use]
    pub(crate) fn followed(self, waits_for: impl Fn(usize) -> Option<usize>) -> Self {
        if self.cause != Cause::TimedOut || self.call == Fingerprint::NONE {
            return self;
        }
        let mut chain = vec![self.reporter, self.rank];
        while let Some(next) = chain.last().copied().and_then(&waits_for) {
            if chain.contains(&next) {
                return self;
            }
            chain.push(next);
        }
        Self { rank: chain[chain.len() - 1], ..self }
    }
}

impl std::error::Error for Abort {}

impl fmt::Display for Abort {
    /// Of two ranks whose calls differ nobody knows which is wrong.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cause, rank, reporter, .. } = self;
        match cause {
            Cause::Mismatch { .. } => {
                let (lower, upper) = (rank.min(reporter), rank.max(reporter));
                write!(f, "ranks {lower} and {upper} are in different calls")
            }
            Cause::Length { expected, got } => {
                write!(f, "rank {rank} sends {got} bytes where rank {reporter} expects {expected}")
            }
            _ if rank == reporter => write!(f, "rank {rank} {cause}"),
            _ => write!(f, "rank {rank} {cause} (reported by rank {reporter})"),
        }
    }
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
    /// It was in another call than the reporter: one of the two has made a call that the other has not.
    #[error("was in another call than a peer")]
    Mismatch {
        /// The call that the named rank was in; [`Abort::call`] is the reporter's.
        theirs: Fingerprint,
    },
    /// It was in the same call as the reporter and sent another number of bytes than that expected: nobody knows which of the
    /// two is wrong.
    #[error("sent {got} bytes where {expected} were expected")]
    Length {
        /// Bytes that the reporter expected.
        expected: u64,
        /// Bytes that the named rank sent.
        got: u64,
    },
    /// It sent what no correct peer sends.
    #[error("broke the protocol")]
    Protocol,
    /// Its program panicked or gave up, and said so.
    #[error("panicked or gave up")]
    GaveUp,
    /// Its process, which hosts the coordinator, went away.
    #[error("hosted the coordinator, which went away")]
    CoordinatorLost,
    /// Its launcher, which hosts the coordinator, went away or stopped responding.
    #[error("lost its launcher, which hosts the coordinator")]
    LauncherLost,
}

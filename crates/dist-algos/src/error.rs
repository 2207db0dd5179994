//! Errors of schedules.

use crate::{Chunks, Order};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

dist_transport::error_enum! {
/// An error of a schedule or of its arguments. The steps of a rank are counted from 0.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No algorithm has this name.
    #[error("{name:?} is no algorithm of {operation}: there are {known}")]
    UnknownAlgorithm {
        /// The operation.
        operation: &'static str,
        /// The given name.
        name: String,
        /// A list of the names that exist.
        known: String,
    },
    /// The algorithm does not support a world of this size.
    #[error("{operation} by {algorithm} does not work for a world of {world_size}")]
    Unsupported {
        /// The operation.
        operation: &'static str,
        /// The algorithm.
        algorithm: &'static str,
        /// The size of the world.
        world_size: usize,
    },
    /// The buffer does not have the length of its partition.
    #[error("the buffer has {got} bytes, its partition {expected}")]
    BufferLength {
        /// Bytes of the partition.
        expected: usize,
        /// Bytes of the buffer.
        got: usize,
    },
    /// The input does not have the length of its partition.
    #[error("the input has {got} bytes, its partition {expected}")]
    InputLength {
        /// Bytes of the partition.
        expected: usize,
        /// Bytes of the input.
        got: usize,
    },
    /// The memory has another number of parts than the direct schedule.
    #[error("the memory has {got} parts, its direct schedule {expected}")]
    Parts {
        /// Parts of the schedule.
        expected: usize,
        /// Parts of the memory.
        got: usize,
    },
    /// The data that a direct schedule publishes does not fit into the slots.
    #[error("{needed} bytes do not fit into a slot of {slot_bytes}, or there are too few slots")]
    Slots {
        /// Bytes that are published at once.
        needed: usize,
        /// Bytes of a slot.
        slot_bytes: usize,
    },
    /// A direct schedule would reduce elements that are not whole in a cache line.
    #[error("elements of {element_size} bytes, which do not divide 64, cannot be reduced in shared memory: use an algorithm that sends messages")]
    DividedElements {
        /// Bytes of an element.
        element_size: usize,
    },
    /// Other ranks would write into memory that is only borrowed.
    #[error("this algorithm writes into memory of other ranks: lend the memory to the call")]
    Borrowed,
    /// Two ranks may access the same memory at the same time, and one of them writes.
    #[error("rank {rank}, step {step}: rank {other} may access the same memory of rank {of} at the same time")]
    Race {
        /// The rank of the later access, in the order of the verifier.
        rank: usize,
        /// Its step.
        step: usize,
        /// The other rank.
        other: usize,
        /// The rank that the memory belongs to.
        of: usize,
    },
    /// A step accesses memory that its owner has not exposed for this access.
    #[error("rank {rank}, step {step}: the step accesses memory that its owner has not exposed")]
    Closed {
        /// The rank whose step it is.
        rank: usize,
        /// Its step.
        step: usize,
    },
    /// A rank does not signal as often as all ranks have to.
    #[error("rank {rank} signals {got} times, not {expected}")]
    Signals {
        /// The rank.
        rank: usize,
        /// The required number of signals.
        expected: u32,
        /// The actual number of signals.
        got: u32,
    },
    /// A step names a peer that does not exist, or its own rank.
    #[error("rank {rank}, step {step}: rank {peer} is not in the world, or is the rank itself")]
    NoPeer {
        /// The rank whose step it is.
        rank: usize,
        /// Its step.
        step: usize,
        /// The peer that it names.
        peer: usize,
    },
    /// A step names a chunk that does not exist, or one chunk twice.
    #[error("rank {rank}, step {step}: {chunks:?} are not among the {parts} chunks, or one is named twice")]
    NoChunk {
        /// The rank whose step it is.
        rank: usize,
        /// Its step.
        step: usize,
        /// The chunks that it names.
        chunks: Chunks,
        /// The number of chunks; 0 if it sends from an input and there is none.
        parts: usize,
    },
    /// A step names a slot that does not exist, moves another number of chunks than one to or from a slot, or
    /// combines a slot with itself.
    #[error("rank {rank}, step {step}: slot {slot} does not exist, gets another number of chunks than one, or is combined with itself")]
    BadSlot {
        /// The rank whose step it is.
        rank: usize,
        /// Its step.
        step: usize,
        /// The slot that it names.
        slot: usize,
    },
    /// A step receives into a chunk that it sends.
    #[error("rank {rank}, step {step}: the received chunks overwrite chunks that are sent")]
    Overlap {
        /// The rank whose step it is.
        rank: usize,
        /// Its step.
        step: usize,
    },
    /// The transport delivered fewer or more bytes than the message has, or not in order.
    #[error("rank {rank}, step {step}: the transport did not deliver all bytes of the message once and in order")]
    Delivery {
        /// The rank whose step it is.
        rank: usize,
        /// Its step.
        step: usize,
    },
    /// A step reads a location that was never written.
    #[error("rank {rank}, step {step}: chunk {chunk} is read before it is written")]
    Unwritten {
        /// The rank whose step it is.
        rank: usize,
        /// Its step.
        step: usize,
        /// The chunk that it reads.
        chunk: usize,
    },
    /// A slot that still holds a contribution is overwritten.
    #[error("rank {rank}, step {step}: slot {slot} is overwritten before it is combined")]
    Lost {
        /// The rank whose step it is.
        rank: usize,
        /// Its step.
        step: usize,
        /// The slot.
        slot: usize,
    },
    /// A contribution is added to a sum that already contains it.
    #[error("rank {rank}, step {step}: rank {contributor}'s part of chunk {chunk} is added twice")]
    AddedTwice {
        /// The rank whose step it is.
        rank: usize,
        /// Its step.
        step: usize,
        /// The chunk.
        chunk: usize,
        /// The rank of the contribution.
        contributor: usize,
    },
    /// Two ranks disagree about a message between them.
    #[error("rank {rank}, step {step} sends {sent:?}; rank {peer}, step {peer_step} expects {expected:?}")]
    Mismatch {
        /// The sending rank.
        rank: usize,
        /// Its step.
        step: usize,
        /// The chunks that it sends.
        sent: Chunks,
        /// The receiving rank.
        peer: usize,
        /// Its step.
        peer_step: usize,
        /// The chunks that it expects.
        expected: Chunks,
    },
    /// Ranks wait for ever: for each other, or for a rank that has finished.
    #[error("rank {rank}, step {step}: deadlock, it waits for rank {peer} ({blocked} ranks cannot continue)")]
    Deadlock {
        /// The lowest of the waiting ranks.
        rank: usize,
        /// Its step.
        step: usize,
        /// The peer that it waits for.
        peer: usize,
        /// The step of the peer, if it has not finished.
        peer_step: Option<usize>,
        /// The number of waiting ranks.
        blocked: usize,
    },
    /// A chunk does not have the required content at the end: contributions are missing, or it holds something
    /// else.
    #[error("rank {rank}: chunk {chunk} does not hold the result after step {steps}")]
    WrongResult {
        /// The rank.
        rank: usize,
        /// The number of steps that it has done.
        steps: usize,
        /// The chunk.
        chunk: usize,
    },
    /// Two ranks end with the same contributions, reduced in different orders.
    #[error("rank {rank}: chunk {chunk} was reduced in another order than on other ranks")]
    Disagreement {
        /// The rank.
        rank: usize,
        /// The chunk.
        chunk: usize,
    },
    /// A rank can leave the barrier before another has entered it.
    #[error("rank {rank} can leave the barrier before rank {absent} has entered it")]
    LeavesEarly {
        /// The rank that leaves.
        rank: usize,
        /// The rank that may not have entered.
        absent: usize,
    },
    /// A slot still holds data at the end.
    #[error("rank {rank}: slot {slot} still holds data after the last step")]
    Leftover {
        /// The rank.
        rank: usize,
        /// The slot.
        slot: usize,
    },
    /// The schedules are correct but do not have the declared cost.
    #[error("the schedules have {found} {what}, the algorithm declares {claimed}")]
    Claim {
        /// The quantity: rounds, path, or chunks sent.
        what: &'static str,
        /// The declared value.
        claimed: usize,
        /// The value of the schedules.
        found: usize,
    },
    /// The schedules are correct but reduce in another order than the algorithm declares.
    #[error("the schedules reduce in {found} order, the algorithm declares {claimed}")]
    OrderClaim {
        /// The declared order.
        claimed: Order,
        /// The order of the schedules.
        found: Order,
    },
}
}

/// The reason why a schedule did not run to its end.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum RunError<E: std::error::Error + 'static> {
    /// The transport failed.
    #[error("step {step} of the schedule failed")]
    Transport {
        /// The current step.
        step: usize,
        /// The error of the transport.
        source: E,
    },
    /// The schedule is invalid, or does not fit the buffer.
    #[error("the schedule cannot be executed")]
    Schedule(#[source] Error),
}

impl RunError<dist_transport::Error> {
    /// Returns `true` if a deadline passed.
    pub const fn is_timeout(&self) -> bool {
        match self {
            Self::Transport { source, .. } => source.is_timeout(),
            Self::Schedule(_) => false,
        }
    }

    /// Returns the rank that the error is about, if it is about one, as the transport numbers it.
    pub const fn peer(&self) -> Option<usize> {
        match self {
            Self::Transport { source, .. } => source.peer(),
            Self::Schedule(_) => None,
        }
    }
}

impl<E: std::error::Error + 'static> std::fmt::Debug for RunError<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Transport { step, source } => {
                dist_transport::show_error(f, self, "Transport", &[("step", step), ("source", source)])
            }
            Self::Schedule(error) => dist_transport::show_error(f, self, "Schedule", &[("", error)]),
        }
    }
}

impl<E: std::error::Error + 'static> From<Error> for RunError<E> {
    fn from(error: Error) -> Self {
        Self::Schedule(error)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use dist_transport::{Activity, Error as TransportError};

    use super::*;

    #[test]
    fn the_error_of_a_run_names_the_peer_of_the_transport() {
        let limit = Duration::from_secs(1);
        let late = TransportError::Timeout {
            activity: Activity::Receive,
            peer: 3,
            elapsed: limit,
            limit,
            waits: Vec::new(),
            count: 0,
        };
        let error = RunError::Transport { step: 2, source: late };
        assert_eq!((error.peer(), error.is_timeout()), (Some(3), true));
        let claimed = Error::OrderClaim { claimed: Order::Canonical, found: Order::Canonical };
        let error = RunError::<TransportError>::from(claimed);
        assert_eq!((error.peer(), error.is_timeout()), (None, false));
    }
}

//! One step of a schedule.
//!
//! A step names the chunks that a rank sends and receives, its peers, and the use of the arriving chunks. It does
//! not depend on bytes, element types or operations.

use dist_transport::Rank;
use smallvec::SmallVec;

use crate::Chunks;

/// The next step of a rank.
///
/// The list of variants is complete: code that executes, proves or predicts schedules must not skip a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Sends to one peer while receiving from another, or the same.
    ///
    /// The chunks are sent as they are when the step begins. The two halves share no chunk of the buffer, with two
    /// exceptions: the exchange that [`in_place`](Step::in_place) recognises, and an exchange in which the arriving
    /// chunks replace exactly those that are sent.
    Exchange {
        /// The half that is sent.
        send: Option<SendHalf>,
        /// The half that is received.
        receive: Option<ReceiveHalf>,
    },
    /// Reduces the content of a slot into another location without communication. The slot is free afterwards.
    Combine {
        /// The chunk that the slot holds a contribution to.
        chunk: usize,
        /// The slot.
        from: usize,
        /// The location, which holds another contribution to the same chunk.
        into: ChunkLocation,
    },
    /// Copies a chunk from one location to another without communication. The previous content of the destination
    /// is lost.
    Copy {
        /// The chunk.
        chunk: usize,
        /// The source.
        from: ChunkLocation,
        /// The destination.
        into: ChunkLocation,
    },
    /// Exchanges with all ranks at the distances `d` from the first to the last. Rank `r` sends chunk `r + d` of its
    /// input to rank `r + d` and receives chunk `r − d` of its buffer from rank `r − d`, modulo the world size. All of
    /// these messages are in flight together.
    Window {
        /// The shortest distance, at least 1.
        first: usize,
        /// The longest distance, less than the world size.
        last: usize,
    },
}

/// The sending half of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SendHalf {
    /// The receiving rank.
    pub to: usize,
    /// The chunks that make up the message.
    pub chunks: Chunks,
    /// The memory of the chunks.
    pub of: Source,
}

/// The receiving half of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReceiveHalf {
    /// The sending rank.
    pub from: usize,
    /// The chunks that make up the message.
    pub chunks: Chunks,
    /// The destination of the chunks. A slot takes one chunk.
    pub place: ChunkLocation,
    /// The effect on the content of the destination.
    pub then: OnArrival,
}

/// The memory that a step sends from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// The buffer that the operation works on.
    Buffer,
    /// The input: a second memory with its own partition, which no step changes.
    Input,
}

/// The location of a chunk on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChunkLocation {
    /// The chunk is in the buffer that the operation works on.
    Buffer,
    /// The chunk is in a slot outside of the buffer. Slots are numbered from 0, below [`SLOTS_MAX`], and hold
    /// one chunk each.
    Slot(usize),
}

/// The effect of an arriving chunk on its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnArrival {
    /// The arriving chunk replaces the content.
    Replace,
    /// The arriving chunk is reduced with the content.
    Reduce,
}

/// Maximum number of slots of a schedule; twice the logarithm of any world size is enough for those of this crate.
pub const SLOTS_MAX: usize = 128;

/// The sending halves and the receiving halves of a step.
pub(crate) type Halves = (SmallVec<[SendHalf; 1]>, SmallVec<[ReceiveHalf; 1]>);

impl Step {
    /// Returns a step that only sends, from the buffer.
    pub const fn send(to: usize, chunks: Chunks) -> Self {
        Self::Exchange { send: Some(SendHalf::buffer(to, chunks)), receive: None }
    }

    /// Returns a step that only sends, from either memory.
    pub(crate) const fn send_half(send: SendHalf) -> Self {
        Self::Exchange { send: Some(send), receive: None }
    }

    /// Returns a step that only receives.
    pub const fn receive(receive: ReceiveHalf) -> Self {
        Self::Exchange { send: None, receive: Some(receive) }
    }

    /// Returns a step that sends and receives at once.
    pub const fn exchange(send: SendHalf, receive: ReceiveHalf) -> Self {
        Self::Exchange { send: Some(send), receive: Some(receive) }
    }

    /// Returns a step in which two ranks send each other the same chunks and reduce the received chunks into their
    /// own.
    pub const fn exchange_in_place(peer: usize, chunks: Chunks) -> Self {
        Self::exchange(SendHalf::buffer(peer, chunks), ReceiveHalf::reduce(peer, chunks))
    }

    /// Returns the step with sends from the input instead of the buffer.
    pub const fn from_input(self) -> Self {
        match self {
            Self::Exchange { send: Some(send), receive } => {
                Self::Exchange { send: Some(SendHalf::input(send.to, send.chunks)), receive }
            }
            step => step,
        }
    }

    /// Returns the peer and the chunks, if this step exchanges contiguous chunks with one peer and reduces the peer's
    /// chunks into them.
    #[inline]
    pub fn in_place(self) -> Option<(usize, Chunks)> {
        let Self::Exchange { send: Some(send), receive: Some(receive) } = self else { return None };
        let ReceiveHalf { from, chunks, place: ChunkLocation::Buffer, then: OnArrival::Reduce } = receive
        else {
            return None;
        };
        let same = send == SendHalf::buffer(from, chunks) && chunks.is_contiguous();
        (same && !chunks.is_empty()).then_some((from, chunks))
    }

    /// Returns the first chunk that this step receives, and the number of chunks, if it is an exchange that
    /// receives.
    pub(crate) fn receives(self) -> Option<(usize, usize)> {
        let Self::Exchange { receive: Some(receive), .. } = self else { return None };
        Some((receive.chunks.first(), receive.chunks.len()))
    }

    /// Returns `true` if this is an exchange in which the arriving chunks replace exactly those that are sent.
    pub(crate) fn swaps(self) -> bool {
        let Self::Exchange { send: Some(send), receive: Some(receive) } = self else { return false };
        let in_buffer = (send.of, receive.place) == (Source::Buffer, ChunkLocation::Buffer);
        in_buffer && receive.then == OnArrival::Replace && send.chunks == receive.chunks
    }

    /// Returns all halves of the step: what it sends, and what it receives.
    pub(crate) fn halves(self, rank: Rank) -> Halves {
        match self {
            Self::Exchange { send, receive } => (send.into_iter().collect(), receive.into_iter().collect()),
            Self::Window { first, last } => (first..=last)
                .map(|distance| {
                    let (to, from) = (rank.plus(distance).index(), rank.minus(distance).index());
                    let send = SendHalf::input(to, Chunks::one(to));
                    (send, ReceiveHalf::replace(from, Chunks::one(from)))
                })
                .unzip(),
            Self::Combine { .. } | Self::Copy { .. } => Halves::default(),
        }
    }
}

impl SendHalf {
    /// Returns a half that sends chunks of the buffer.
    pub const fn buffer(to: usize, chunks: Chunks) -> Self {
        Self { to, chunks, of: Source::Buffer }
    }

    /// Returns a half that sends chunks of the input.
    pub const fn input(to: usize, chunks: Chunks) -> Self {
        Self { to, chunks, of: Source::Input }
    }
}

impl ReceiveHalf {
    /// Returns a half whose chunks replace the content of the buffer.
    pub const fn replace(from: usize, chunks: Chunks) -> Self {
        Self { from, chunks, place: ChunkLocation::Buffer, then: OnArrival::Replace }
    }

    /// Returns a half whose chunks are reduced into the buffer.
    pub const fn reduce(from: usize, chunks: Chunks) -> Self {
        Self { from, chunks, place: ChunkLocation::Buffer, then: OnArrival::Reduce }
    }
}

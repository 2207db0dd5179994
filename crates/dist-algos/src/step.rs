//! One step of a schedule.
//!
//! A step says who sends which chunks to whom and what becomes of the chunks that arrive. It knows no bytes, no
//! element type and no operation.

use dist_transport::Rank;
use smallvec::SmallVec;

use crate::Chunks;

/// What a rank does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// Sends to one peer while receiving from another, or the same.
    ///
    /// What is sent is what the chunks hold when the step begins. The two halves share no chunk of the buffer,
    /// except in the form that [`in_place`](Step::in_place) recognises, and where what arrives takes the place of
    /// just what is sent.
    Exchange {
        /// What leaves.
        send: Option<SendHalf>,
        /// What arrives.
        receive: Option<ReceiveHalf>,
    },
    /// Reduces what a slot holds into another place, without any communication; the slot is free afterwards.
    Combine {
        /// The chunk that the slot holds a contribution to.
        chunk: usize,
        /// The slot.
        from: usize,
        /// The place, which holds another contribution to the same chunk.
        into: ChunkLocation,
    },
    /// Copies a chunk from one place to another, without any communication. What was there is lost.
    Copy {
        /// The chunk.
        chunk: usize,
        /// Where it is.
        from: ChunkLocation,
        /// Where it is in the end as well.
        into: ChunkLocation,
    },
    /// Rank `r` sends chunk `r + d` of its input to rank `r + d` and receives chunk `r − d` of its buffer from rank
    /// `r − d`, modulo the world size, for every distance `d` from the first to the last: all of these messages are
    /// under way together.
    Window {
        /// The shortest distance, at least 1.
        first: usize,
        /// The longest distance, less than the world size.
        last: usize,
    },
}

/// What a step sends, and to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SendHalf {
    /// The receiving rank.
    pub to: usize,
    /// The chunks that make up the message.
    pub chunks: Chunks,
    /// Whose chunks they are.
    pub of: Source,
}

/// What a step receives, from whom, and what becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReceiveHalf {
    /// The sending rank.
    pub from: usize,
    /// The chunks that make up the message.
    pub chunks: Chunks,
    /// Where they go. A slot takes one chunk.
    pub place: ChunkLocation,
    /// What happens to what is there.
    pub then: OnArrival,
}

/// Where a step reads what it sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// The buffer that the operation works on.
    Buffer,
    /// The input: a second memory, cut by a partition of its own, that no step changes.
    Input,
}

/// Where a rank keeps a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChunkLocation {
    /// In the buffer that the operation works on.
    Buffer,
    /// Beside it: slots are numbered from 0, below [`SLOTS_MAX`], and hold one chunk each.
    Slot(usize),
}

/// What happens to the content of the place where a chunk arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnArrival {
    /// It is lost.
    Replace,
    /// It is reduced with what arrives.
    Reduce,
}

/// Slots that a schedule can have; twice the logarithm of any world size is enough for those of this crate.
pub const SLOTS_MAX: usize = 128;

/// All that a step sends, and all that it receives.
pub(crate) type Halves = (SmallVec<[SendHalf; 1]>, SmallVec<[ReceiveHalf; 1]>);

impl Step {
    /// Sends only, from the buffer.
    pub const fn send(to: usize, chunks: Chunks) -> Self {
        Self::Exchange { send: Some(SendHalf::buffer(to, chunks)), receive: None }
    }

    /// Sends only, from either memory.
    pub(crate) const fn send_half(send: SendHalf) -> Self {
        Self::Exchange { send: Some(send), receive: None }
    }

    /// Receives only.
    pub const fn receive(receive: ReceiveHalf) -> Self {
        Self::Exchange { send: None, receive: Some(receive) }
    }

    /// Sends and receives at once.
    pub const fn exchange(send: SendHalf, receive: ReceiveHalf) -> Self {
        Self::Exchange { send: Some(send), receive: Some(receive) }
    }

    /// Both ranks send the same chunks to each other and reduce what arrives into them.
    pub const fn exchange_in_place(peer: usize, chunks: Chunks) -> Self {
        Self::exchange(SendHalf::buffer(peer, chunks), ReceiveHalf::reduce(peer, chunks))
    }

    /// The same step, which sends from the input what it would send from the buffer.
    pub const fn from_input(self) -> Self {
        match self {
            Self::Exchange { send: Some(send), receive } => {
                Self::Exchange { send: Some(SendHalf::input(send.to, send.chunks)), receive }
            }
            step => step,
        }
    }

    /// The peer and the chunks, if this step is the one exchange whose halves may share chunks: neighbouring
    /// chunks go to a peer, and what the same peer has for them is reduced into them.
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

    /// The first chunk that this step receives, and how many they are, if it is an exchange that receives.
    pub(crate) fn receives(self) -> Option<(usize, usize)> {
        let Self::Exchange { receive: Some(receive), .. } = self else { return None };
        Some((receive.chunks.first(), receive.chunks.len()))
    }

    /// Whether this step is an exchange in which what arrives takes the place of just what is sent.
    pub(crate) fn swaps(self) -> bool {
        let Self::Exchange { send: Some(send), receive: Some(receive) } = self else { return false };
        let in_buffer = (send.of, receive.place) == (Source::Buffer, ChunkLocation::Buffer);
        in_buffer && receive.then == OnArrival::Replace && send.chunks == receive.chunks
    }

    /// What the step sends and receives, all at once.
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
    /// Chunks of the buffer.
    pub const fn buffer(to: usize, chunks: Chunks) -> Self {
        Self { to, chunks, of: Source::Buffer }
    }

    /// Chunks of the input.
    pub const fn input(to: usize, chunks: Chunks) -> Self {
        Self { to, chunks, of: Source::Input }
    }
}

impl ReceiveHalf {
    /// Chunks that take the place of what the buffer holds.
    pub const fn replace(from: usize, chunks: Chunks) -> Self {
        Self { from, chunks, place: ChunkLocation::Buffer, then: OnArrival::Replace }
    }

    /// Chunks that are reduced into the buffer.
    pub const fn reduce(from: usize, chunks: Chunks) -> Self {
        Self { from, chunks, place: ChunkLocation::Buffer, then: OnArrival::Reduce }
    }
}

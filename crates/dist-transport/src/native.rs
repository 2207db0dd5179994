//! Collectives that a library below a transport executes, such as those of MPI.

use crate::{LazyDeadline, Result};

/// The collectives of a library below a transport.
///
/// A library reduces in an order of its own. It decides about NaN and signed zeros in its own way, and may return other
/// bits for another number of ranks.
pub trait NativeCollectives {
    /// Returns `true` if the library executes this collective. The result depends only on the argument and on options
    /// that are equal on all ranks.
    fn supports(&self, collective: &NativeCollective) -> bool;

    /// Executes a collective that is [supported](Self::supports), as the call that [`begin`](crate::Transport::begin)
    /// has set. All ranks of the group make the same call.
    ///
    /// The calls of all ranks are compared before any memory changes. If the ranks differ, all get an error. The
    /// library never uses the memory of the caller after this method has returned.
    ///
    /// # Errors
    /// As described for [`Transport`](crate::Transport).
    fn execute(
        &mut self,
        collective: &NativeCollective,
        memory: NativeMemory<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()>;
}

/// A collective, as a library executes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NativeCollective {
    /// The operation.
    pub operation: NativeOperation,
    /// The size of the buffer, or of the parts of all ranks together. In an all_to_all of parts of different sizes it is the
    /// mean over the ranks.
    pub bytes: usize,
}

/// The operation of a [`NativeCollective`]. Ranks count in the group. Operations that end in `V` have parts of different
/// sizes, which [`NativeMemory::parts`] states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NativeOperation {
    /// Every rank gets the reduction of all buffers.
    AllReduce(NativeReduction),
    /// The root gets the reduction of all buffers. The other buffers keep their contents.
    Reduce {
        /// The reduction.
        reduction: NativeReduction,
        /// The rank that gets the result.
        root: usize,
    },
    /// Rank `r` gets part `r` of the reduction of all inputs.
    ReduceScatter(NativeReduction),
    /// Every rank gets the buffer of this rank.
    Broadcast {
        /// The rank that has the data.
        root: usize,
    },
    /// Every rank gets the parts of all ranks.
    AllGather,
    /// Every rank gets the parts of all ranks.
    AllGatherV,
    /// Rank `r` gets part `r` of the reduction of all inputs.
    ReduceScatterV(NativeReduction),
    /// Part `d` of rank `s` becomes part `s` of rank `d`.
    AllToAll,
    /// Part `d` of rank `s` becomes part `s` of rank `d`.
    AllToAllV,
}

/// A reduction of a [`NativeOperation`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NativeReduction {
    /// The type of the elements.
    pub element: NativeElement,
    /// The function that combines two elements.
    pub op: NativeOp,
}

/// The type of the elements that a library reduces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants are named like the types")]
pub enum NativeElement {
    F32,
    F64,
    I8,
    I32,
    I64,
    U8,
    U32,
    U64,
    ComplexF32,
    ComplexF64,
}

impl NativeElement {
    /// Returns the number of bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 | Self::ComplexF32 => 8,
            Self::ComplexF64 => 16,
        }
    }
}

/// A function that combines two elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants are named like the functions")]
pub enum NativeOp {
    Sum,
    Product,
    Min,
    Max,
}

/// The memory of a [`NativeCollective`].
#[derive(Debug)]
pub struct NativeMemory<'a> {
    /// The memory that the call only reads: this rank's part in an all_gather, and the parts for all ranks otherwise. If
    /// there is none, the call reads the buffer, in which an all_gather has this rank's part at its place.
    pub input: Option<&'a [u8]>,
    /// The memory that the call changes: the result of this rank. In a reduce_scatter without an input it is the parts
    /// for all ranks, of which this rank's gets the result.
    pub buffer: &'a mut [u8],
    /// The sizes of the parts, if they differ.
    pub parts: Option<NativeParts<'a>>,
}

/// The sizes of parts of different sizes, in bytes: one for each rank. Parts lie one after the other.
#[derive(Debug, Clone, Copy)]
pub struct NativeParts<'a> {
    /// The parts that this rank sends: in an all_to_all to each rank. In an all_gather and in a reduce_scatter these are
    /// the parts of all ranks.
    pub sent: &'a [usize],
    /// The parts that this rank receives: in an all_to_all from each rank. Otherwise the same as `sent`.
    pub received: &'a [usize],
    /// The largest part of all ranks.
    pub largest: usize,
}

impl<'a> NativeParts<'a> {
    /// Returns the parts of an all_gather or a reduce_scatter, in which each rank has one.
    pub fn of_all(sizes: &'a [usize]) -> Self {
        Self { sent: sizes, received: sizes, largest: sizes.iter().copied().max().unwrap_or(0) }
    }
}

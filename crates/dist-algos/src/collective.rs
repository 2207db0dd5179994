//! The collective operations that algorithms exist for.

use std::fmt;

/// A collective operation, without its root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CollectiveKind {
    /// Every rank ends with the sum of all buffers.
    #[doc(alias = "MPI_Allreduce")]
    #[doc(alias = "allreduce")]
    #[doc(alias = "ncclAllReduce")]
    AllReduce,
    /// Rank `r` ends with chunk `r` of the sum; the other chunks of its buffer are lost. There are as many chunks as
    /// ranks.
    #[doc(alias = "MPI_Reduce_scatter_block")]
    #[doc(alias = "ncclReduceScatter")]
    ReduceScatter,
    /// Every rank ends with every chunk; rank `r` has chunk `r` at the start. There are as many chunks as ranks.
    #[doc(alias = "MPI_Allgather")]
    #[doc(alias = "allgather")]
    #[doc(alias = "ncclAllGather")]
    AllGather,
    /// Every rank ends with the root's buffer.
    #[doc(alias = "MPI_Bcast")]
    #[doc(alias = "bcast")]
    #[doc(alias = "ncclBroadcast")]
    Broadcast,
    /// The root ends with the sum of all buffers. The content of the other buffers is lost.
    #[doc(alias = "MPI_Reduce")]
    #[doc(alias = "ncclReduce")]
    Reduce,
    /// The root ends with chunk `r` of every rank `r`. There are as many chunks as ranks, of any sizes.
    ///
    /// A rank needs a buffer for the chunks that [`held`](crate::MessageAlgorithm::held) returns and no others (see
    /// [`Partition::among`](crate::Partition::among)). Its own chunk must be in its place at the start. A rank that
    /// holds no chunks has its chunk in its input.
    #[doc(alias = "MPI_Gather")]
    #[doc(alias = "ncclGather")]
    Gather,
    /// Every other rank `r` ends with chunk `r` of the root's input. There are as many chunks as ranks, of any sizes.
    ///
    /// A rank needs a buffer for the chunks that [`held`](crate::MessageAlgorithm::held) returns and no others (see
    /// [`Partition::among`](crate::Partition::among)). The root has an input and no buffer.
    #[doc(alias = "MPI_Scatter")]
    #[doc(alias = "ncclScatter")]
    Scatter,
    /// Rank `d` ends with one chunk of every rank `s`, which has a chunk for every `d`. There are as many chunks as
    /// ranks.
    ///
    /// An algorithm that [sends from](crate::MessageAlgorithm::sends_from) its input sends chunk `d` of the input to
    /// rank `d` and receives chunk `s` of the buffer from rank `s`. A rank's own chunk must be in its place at the
    /// start. Chunks can have any sizes.
    ///
    /// An algorithm that sends from its buffer has no input. Chunk `j` of the buffer of rank `r` is at first for
    /// rank `r + j`, and at the end it is from rank `r − j`, modulo the world size. All chunks have the same size.
    #[doc(alias = "MPI_Alltoall")]
    #[doc(alias = "alltoall")]
    #[doc(alias = "ncclAlltoAll")]
    AllToAll,
    /// Rank `r` ends with the sum of the buffers of ranks 0 to `r`. A canonical order is T(r + 1) on rank `r`.
    #[doc(alias = "MPI_Scan")]
    #[doc(alias = "prefix_sum")]
    Scan,
    /// Rank `r` ends with the sum of the buffers of ranks 0 to `r − 1`. A canonical order is T(r) on rank `r`. The
    /// content of the buffer of rank 0 is unspecified.
    #[doc(alias = "MPI_Exscan")]
    ExclusiveScan,
    /// No rank leaves before every rank has entered. The messages are empty; there is one chunk.
    #[doc(alias = "MPI_Barrier")]
    Barrier,
}

impl CollectiveKind {
    /// All operations.
    pub const ALL: [Self; 11] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::Reduce,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::Scan,
        Self::ExclusiveScan,
        Self::Barrier,
    ];

    /// Returns the name in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all_to_all",
            Self::Scan => "scan",
            Self::ExclusiveScan => "exclusive_scan",
            Self::Barrier => "barrier",
        }
    }

    /// Returns `true` if the operation reduces elements.
    pub const fn reduces(self) -> bool {
        matches!(
            self,
            Self::AllReduce | Self::ReduceScatter | Self::Reduce | Self::Scan | Self::ExclusiveScan
        )
    }

    /// Returns `true` if the operation has a root.
    pub const fn is_rooted(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter)
    }

    /// Returns the possible roots: every rank, or one number if the operation has no root.
    pub const fn roots(self, world_size: usize) -> std::ops::Range<usize> {
        if self.is_rooted() { 0..world_size } else { 0..1 }
    }
}

impl fmt::Display for CollectiveKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

//! Divides a world of any size into blocks of powers of two: the binary digits of its size, the largest block
//! first, as T(p) is split.

use dist_transport::Rank;

use crate::Chunks;

/// The 2^bits ranks from `start` on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankBlock {
    pub(crate) start: usize,
    pub(crate) bits: usize,
}

impl RankBlock {
    /// Returns the block of a rank. A block belongs to a binary digit of the world size that is 1, and has as many
    /// ranks as the digit's value.
    pub(crate) const fn of(rank: Rank) -> Self {
        let bits = (rank.index() ^ rank.world_size()).ilog2() as usize;
        Self { start: rank.index() >> bits << bits, bits }
    }

    /// Returns the block of 2^bits ranks, if the world has one.
    pub(crate) const fn at(rank: Rank, bits: usize) -> Option<Self> {
        let digits = rank.world_size() >> bits;
        if digits % 2 == 1 { Some(Self { start: (digits - 1) << bits, bits }) } else { None }
    }

    pub(crate) const fn size(self) -> usize {
        1 << self.bits
    }

    /// Returns the next larger block.
    pub(crate) const fn larger(self, rank: Rank) -> Option<Self> {
        if self.start == 0 { None } else { Self::at(rank, self.start.trailing_zeros() as usize) }
    }

    /// Returns the next smaller block.
    pub(crate) const fn smaller(self, rank: Rank) -> Option<Self> {
        match (rank.world_size() % self.size()).checked_ilog2() {
            Some(bits) => Self::at(rank, bits as usize),
            None => None,
        }
    }

    /// Returns the number of messages that a rank of this block sends to the next larger block.
    pub(crate) const fn feeds(self, rank: Rank) -> usize {
        match self.larger(rank) {
            Some(larger) => 1 << (larger.bits - self.bits),
            None => 0,
        }
    }
}

/// Returns log₂ of the largest block. A world of no ranks counts as one rank.
pub(crate) const fn levels(world_size: usize) -> usize {
    match world_size.checked_ilog2() {
        Some(levels) => levels as usize,
        None => 0,
    }
}

/// The chunks that a rank still has after some rounds of halving: a half, a quarter and so on. No other rank of the block
/// has these chunks, except ranks that agree with it in the lower digits that are not halved yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockAssignment {
    /// There are as many chunks as the largest block has ranks. A rank has the chunks whose first digits are the
    /// rank's last digits in reverse order; they are consecutive.
    Runs,
    /// There are as many chunks as ranks. A rank has the chunks whose last digits are the rank's; its own chunk is
    /// one of them.
    Strided,
}

impl BlockAssignment {
    pub(crate) const fn held(self, rank: Rank, rounds: usize) -> Chunks {
        let levels = levels(rank.world_size());
        match self {
            Self::Runs if levels == 0 => Chunks::one(0),
            Self::Runs => {
                let count = 1 << (levels - rounds);
                let start = rank.index().reverse_bits() >> (usize::BITS as usize - levels);
                Chunks::range(start & !(count - 1), count)
            }
            Self::Strided => {
                let (start, stride) = (rank.index() % (1 << rounds), 1 << rounds);
                Chunks::strided(start, stride, strided_count(rank.world_size(), start, rounds))
            }
        }
    }
}

/// Returns how many numbers below `world_size` have the same last `digits` binary digits as `start`.
pub(crate) const fn strided_count(world_size: usize, start: usize, digits: usize) -> usize {
    (world_size - start).div_ceil(1 << digits)
}

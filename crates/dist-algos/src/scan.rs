//! Scans: every rank gets the sum of the ranks up to it.
//!
//! Recursive doubling: ranks at distance 1, 2, 4, … tell each other the sums of their blocks. What comes from a block on
//! the left is added to the rank's own result; so rank r adds the blocks that the digits of r name, the largest
//! outermost, which is T(r + 1): the scan is canonical for every world size, and so is the exclusive one with T(r).
//!
//! A rank asks for the sum of a block only if there is a rank at its own place in the next block: nobody else waits
//! for that sum.

use dist_transport::Rank;

use crate::cost::log2_ceil;
use crate::schedule::Kind;
use crate::{ChunkLocation, Chunks, Cost, Messages, OnArrival, ReceiveHalf, Schedule, SendHalf, Step};

/// Whether a rank's own part is in its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extent {
    /// Rank `r` gets the sum of ranks 0 to `r`.
    Inclusive,
    /// Rank `r` gets the sum of ranks 0 to `r − 1`; what the buffer of rank 0 holds in the end means nothing.
    Exclusive,
}

/// The buffer is one chunk.
const WHOLE: Chunks = Chunks::one(0);

/// The result, where the buffer has to hold the sum of the rank's block.
const RESULT: ChunkLocation = ChunkLocation::Slot(0);

/// Slots for what has arrived, while it is still to be added to both.
const ARRIVED: usize = 1;
const COPY: usize = 2;

/// Steps that a round has at most.
const PARTS: usize = 4;

/// The buffer, which is one chunk, becomes the sum of the ranks up to this one.
pub const fn recursive_doubling(rank: Rank, extent: Extent) -> Schedule {
    let rounds = log2_ceil(rank.world_size());
    Schedule::new(rank, rounds * PARTS + 2, Kind::DoublingScan { extent, rounds })
}

/// First the result is taken out of the buffer, then there are rounds, then it is put back.
pub(crate) fn step(rank: Rank, extent: Extent, rounds: usize, index: usize) -> Option<Step> {
    let apart = result(rank) == RESULT;
    let copy = |from, into| Some(Step::Copy { chunk: 0, from, into });
    let Some(after) = index.checked_sub(1) else {
        return if apart && extent == Extent::Inclusive { copy(ChunkLocation::Buffer, RESULT) } else { None };
    };
    if after / PARTS < rounds {
        return ScanRound::of(rank, extent, after / PARTS)?.part(after % PARTS);
    }
    let empty = extent == Extent::Exclusive && rank.index() == 0;
    if apart && !empty { copy(RESULT, ChunkLocation::Buffer) } else { None }
}

/// Where the result is kept: in the buffer, unless that is sent or added to after something has arrived.
const fn result(rank: Rank) -> ChunkLocation {
    let pair_end = (rank.index() | 1) + 1;
    if pair_end < rank.world_size() { RESULT } else { ChunkLocation::Buffer }
}

/// What it costs. A rank receives once for each sum that it reduces, and once more for what an exclusive scan begins
/// with.
pub(crate) const fn cost(world_size: usize, extent: Extent) -> Cost {
    let rounds = log2_ceil(world_size);
    let (mut index, mut received, mut reduced, mut reduced_max) = (0, 0, 0, 0);
    while index < world_size {
        let results = index.count_ones() as usize;
        let added = if matches!(extent, Extent::Exclusive) { results.saturating_sub(1) } else { results };
        let (mut level, mut sums, mut both) = (0, 0, 0);
        while index + (2 << level) < world_size {
            both += index >> level & 1;
            (level, sums) = (level + 1, sums + 1);
        }
        received += results + sums - both;
        reduced += added + sums;
        reduced_max = if added + sums > reduced_max { added + sums } else { reduced_max };
        index += 1;
    }
    Cost {
        rounds,
        path: rounds,
        sent_max: rounds,
        reduced_max,
        all: Messages::new(received, received),
        depth: Messages::new(rounds, rounds),
        reduced,
    }
}

/// What a rank and a peer across one binary digit of their numbers tell each other.
struct ScanRound {
    rank: usize,
    peer: usize,
    /// The rank needs the sum of both blocks.
    is_onward: bool,
    /// The peer needs the sum of both blocks.
    is_peer_onward: bool,
    /// The result has nothing in it so far.
    is_first: bool,
    result: ChunkLocation,
}

impl ScanRound {
    fn of(rank: Rank, extent: Extent, level: usize) -> Option<Self> {
        let (index, size) = (rank.index(), 1 << level);
        let peer = index ^ size;
        let is_onward = |place: usize| place + 2 * size < rank.world_size();
        (peer < rank.world_size()).then(|| Self {
            rank: index,
            peer,
            is_onward: is_onward(index),
            is_peer_onward: is_onward(peer),
            is_first: extent == Extent::Exclusive && index % size == 0,
            result: result(rank),
        })
    }

    /// Whether the peer's block is to the left.
    const fn is_right(&self) -> bool {
        self.peer < self.rank
    }

    fn part(&self, part: usize) -> Option<Step> {
        let doubled = self.is_right() && self.is_onward;
        match part {
            0 => Some(self.exchange()),
            1 if doubled => {
                let into = if self.is_first { self.result } else { ChunkLocation::Slot(COPY) };
                Some(Step::Copy { chunk: 0, from: ChunkLocation::Slot(ARRIVED), into })
            }
            2 if doubled && !self.is_first => Some(Step::Combine { chunk: 0, from: COPY, into: self.result }),
            3 if self.is_onward => {
                Some(Step::Combine { chunk: 0, from: ARRIVED, into: ChunkLocation::Buffer })
            }
            _ => None,
        }
    }

    fn exchange(&self) -> Step {
        let (place, then) = match (self.is_onward, self.is_first) {
            (true, _) => (ChunkLocation::Slot(ARRIVED), OnArrival::Replace),
            (false, true) => (self.result, OnArrival::Replace),
            (false, false) => (self.result, OnArrival::Reduce),
        };
        Step::Exchange {
            send: (!self.is_right() || self.is_peer_onward).then(|| SendHalf::buffer(self.peer, WHOLE)),
            receive: (self.is_right() || self.is_onward).then_some(ReceiveHalf {
                from: self.peer,
                chunks: WHOLE,
                place,
                then,
            }),
        }
    }
}

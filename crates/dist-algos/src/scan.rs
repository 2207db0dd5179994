//! Scans: every rank gets the sum of the ranks up to it.
//!
//! Recursive doubling: ranks at distance 1, 2, 4, … exchange the sums of their blocks. The sum of a block on
//! the left is added to the rank's own result. Rank r thus adds the blocks of the binary digits of r, the
//! largest outermost, which is T(r + 1). The scan is canonical for every world size, and the exclusive scan
//! is canonical with T(r).
//!
//! A rank only receives the sum of a block if there is a rank at the same position in the next block. No other rank
//! waits for that sum.

use dist_transport::Rank;

use crate::cost::log2_ceil;
use crate::{
    ChunkLocation, Chunks, CollectiveKind, Cost, MessageAlgorithm, Messages, OnArrival, Order, Phases,
    ReceiveHalf, Schedule, SendHalf, Step,
};

/// Scan: sends the sums of blocks to ranks at distance 1, 2, 4, ….
pub static SCAN: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::Scan,
    name: "recursive_doubling",
    about: "Blocks of 1, 2, 4, … ranks exchange their sums, and the sum of the left block is added to the results of the right one.",
    order: |_| Some(Order::Canonical),
    cost: |world_size| cost(world_size, Extent::Inclusive),
    phases: |rank, _| Phases::one(rank, recursive_doubling(rank, Extent::Inclusive)),
    ..MessageAlgorithm::NOTHING
};

/// Exclusive scan: the same without the rank's own contribution.
pub static EXCLUSIVE_SCAN: MessageAlgorithm = MessageAlgorithm {
    collective: CollectiveKind::ExclusiveScan,
    name: "recursive_doubling",
    about: "The same without the rank's own contribution.",
    order: |_| Some(Order::Canonical),
    cost: |world_size| cost(world_size, Extent::Exclusive),
    phases: |rank, _| Phases::one(rank, recursive_doubling(rank, Extent::Exclusive)),
    ..MessageAlgorithm::NOTHING
};

/// The ranks whose contributions are in a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extent {
    /// Rank `r` gets the sum of ranks 0 to `r`.
    Inclusive,
    /// Rank `r` gets the sum of ranks 0 to `r − 1`. The content of the buffer of rank 0 is unspecified.
    Exclusive,
}

/// The buffer is one chunk.
const WHOLE: Chunks = Chunks::one(0);

/// The location of the result, if the buffer has to hold the sum of the rank's block.
const RESULT: ChunkLocation = ChunkLocation::Slot(0);

/// The slot of an arrived sum that still has to be added twice.
const ARRIVED: usize = 1;
const COPY: usize = 2;

/// Maximum number of steps in a round.
const PARTS: usize = 4;

/// Returns a scan: the buffer, which is one chunk, is replaced by the sum over the ranks before this one. An
/// inclusive scan adds this rank's own contribution.
pub const fn recursive_doubling(rank: Rank, extent: Extent) -> Schedule {
    let steps = log2_ceil(rank.world_size()) * PARTS + 2;
    match extent {
        Extent::Inclusive => {
            Schedule::new(rank, steps, |rank, _, index| step(rank, Extent::Inclusive, index))
        }
        Extent::Exclusive => {
            Schedule::new(rank, steps, |rank, _, index| step(rank, Extent::Exclusive, index))
        }
    }
}

/// Returns a step of a scan: first the own contribution is copied out of the buffer, then the rounds follow, then the
/// result is copied back.
fn step(rank: Rank, extent: Extent, index: usize) -> Option<Step> {
    let apart = result(rank) == RESULT;
    let copy = |from, into| Some(Step::Copy { chunk: 0, from, into });
    let Some(after) = index.checked_sub(1) else {
        return if apart && extent == Extent::Inclusive { copy(ChunkLocation::Buffer, RESULT) } else { None };
    };
    if after / PARTS < log2_ceil(rank.world_size()) {
        return ScanRound::of(rank, extent, after / PARTS)?.part(after % PARTS);
    }
    let empty = extent == Extent::Exclusive && rank.index() == 0;
    if apart && !empty { copy(RESULT, ChunkLocation::Buffer) } else { None }
}

/// Returns the location of the result. It is the buffer, unless the buffer is sent or added to after a message has
/// arrived.
const fn result(rank: Rank) -> ChunkLocation {
    let pair_end = (rank.index() | 1) + 1;
    if pair_end < rank.world_size() { RESULT } else { ChunkLocation::Buffer }
}

/// Returns the cost. A rank receives once for each sum that it reduces, and once more for the first sum of an
/// exclusive scan.
const fn cost(world_size: usize, extent: Extent) -> Cost {
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

/// The exchange between a rank and its peer, whose numbers differ in one binary digit.
struct ScanRound {
    rank: usize,
    peer: usize,
    /// `true` if the rank needs the sum of both blocks.
    is_onward: bool,
    /// `true` if the peer needs the sum of both blocks.
    is_peer_onward: bool,
    /// `true` if the result is still empty.
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

    /// Returns `true` if the peer's block is to the left.
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

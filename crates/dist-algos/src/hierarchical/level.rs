//! A level of a two-level schedule: a schedule among some ranks, on chunks of the whole buffer.

use crate::{Chunks, Hosts, ReceiveHalf, Schedule, SendHalf, Step};

/// An iterator over one rank's steps of a two-level schedule: the steps of one level after those of another.
#[derive(Debug)]
pub struct Steps<'a> {
    levels: [LevelSchedule<'a>; 3],
}

/// A schedule among the ranks of one level. Its ranks and chunks are numbered within the level.
#[derive(Debug)]
pub(super) struct LevelSchedule<'a> {
    pub(super) schedule: Schedule,
    pub(super) ranks: LevelRanks<'a>,
    pub(super) chunk_map: ChunkMap,
}

/// The ranks of a level.
#[derive(Clone, Copy, Debug)]
pub(super) enum LevelRanks<'a> {
    /// The ranks of one host.
    Members(&'a [usize]),
    /// The ranks at one place of every host, for example all second ranks.
    Places { hosts: &'a Hosts, place: usize },
    /// One leader of every host: the root on its own host, and the first rank on the others.
    Leaders { hosts: &'a Hosts, root: usize },
}

/// The mapping from chunks of a level to chunks of the buffer.
#[derive(Clone, Copy, Debug)]
pub(super) enum ChunkMap {
    /// Chunk `c` becomes the `each` consecutive chunks from `first + c * each` on.
    Neighbours { first: usize, each: usize },
    /// Chunk `c` becomes chunk `first + c * step`.
    Apart { first: usize, step: usize },
    /// Chunk `c` becomes the `times` chunks `c`, `c + period`, `c + 2 * period` and so on.
    Repeated { period: usize, times: usize },
}

impl<'a> Steps<'a> {
    pub(super) const fn new(levels: [LevelSchedule<'a>; 3]) -> Self {
        Self { levels }
    }
}

impl Iterator for Steps<'_> {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        self.levels.iter_mut().find_map(Iterator::next)
    }
}

impl Iterator for LevelSchedule<'_> {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        let chunk_of = |chunk_map: ChunkMap, chunk| chunk_map.of(Chunks::one(chunk)).first();
        Some(match self.schedule.next()? {
            Step::Exchange { send, receive } => Step::Exchange {
                send: send.map(|half| SendHalf {
                    to: self.ranks.rank(half.to),
                    chunks: self.chunk_map.of(half.chunks),
                    ..half
                }),
                receive: receive.map(|half| ReceiveHalf {
                    from: self.ranks.rank(half.from),
                    chunks: self.chunk_map.of(half.chunks),
                    ..half
                }),
            },
            Step::Combine { chunk, from, into } => {
                Step::Combine { chunk: chunk_of(self.chunk_map, chunk), from, into }
            }
            Step::Copy { chunk, from, into } => {
                Step::Copy { chunk: chunk_of(self.chunk_map, chunk), from, into }
            }
            Step::Window { .. } => unreachable!("only an all_to_all has windows, and it has no levels"),
        })
    }
}

impl LevelRanks<'_> {
    /// Returns the number in the world of a rank of the level.
    fn rank(self, number: usize) -> usize {
        match self {
            Self::Members(members) => members[number],
            Self::Places { hosts, place } => hosts.members(number)[place],
            Self::Leaders { hosts, root } if hosts.of(root) == number => root,
            Self::Leaders { hosts, .. } => hosts.members(number)[0],
        }
    }
}

impl ChunkMap {
    /// Maps each chunk of the level to the chunk of the buffer with the same index.
    pub(super) const SAME: Self = Self::Neighbours { first: 0, each: 1 };

    /// Returns the chunks of the buffer for these chunks of the level.
    pub(super) const fn of(self, chunks: Chunks) -> Chunks {
        match self {
            Self::Neighbours { first, each } => chunks.magnified(first, each),
            Self::Apart { first, step } => chunks.apart(first, step),
            Self::Repeated { period, times } => chunks.repeated(period, times),
        }
    }
}

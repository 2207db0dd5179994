//! A schedule of some of the ranks, on chunks of the whole world's buffer.

use crate::{Chunks, Hosts, ReceiveHalf, Schedule, SendHalf, Step};

/// One rank's steps of a two-level schedule: those of one level after those of another.
#[derive(Clone, Debug)]
pub struct Steps<'a> {
    levels: [LevelSchedule<'a>; 3],
}

/// A schedule among the ranks of one level, in whose numbers and chunks it is made.
#[derive(Clone, Debug)]
pub(super) struct LevelSchedule<'a> {
    pub(super) schedule: Schedule,
    pub(super) ranks: LevelRanks<'a>,
    pub(super) chunk_map: ChunkMap,
}

/// Who takes part in a level.
#[derive(Clone, Copy, Debug)]
pub(super) enum LevelRanks<'a> {
    /// The ranks of one host.
    Members(&'a [usize]),
    /// Of every host the rank at one place.
    Places { hosts: &'a Hosts, place: usize },
    /// Of every host the leader; of the root's host the root.
    Leaders { hosts: &'a Hosts, root: usize },
}

/// Which chunks of the buffer a chunk of the level is.
#[derive(Clone, Copy, Debug)]
pub(super) enum ChunkMap {
    /// So many neighbours.
    Neighbours { first: usize, each: usize },
    /// One, as far from the next one's.
    Apart { first: usize, step: usize },
    /// The one with the same index, and those a multiple of the period after it.
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
    /// The rank in the world of a rank of the level.
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
    /// Each chunk of the level is the same chunk of the buffer.
    pub(super) const SAME: Self = Self::Neighbours { first: 0, each: 1 };

    pub(super) const fn of(self, chunks: Chunks) -> Chunks {
        match self {
            Self::Neighbours { first, each } => chunks.magnified(first, each),
            Self::Apart { first, step } => chunks.apart(first, step),
            Self::Repeated { period, times } => chunks.repeated(period, times),
        }
    }
}

//! Rotations of schedules in the ring of ranks: one rank does what another one does, with other numbers.

use super::RankProgram;
use crate::{Chunks, ReceiveHalf, SendHalf, Step};

/// The relation between the chunk numbers of different ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChunkNumbering {
    /// Chunk `c` of one rank corresponds to chunk `c + 1` of the next rank.
    Rotating(usize),
    /// Chunks have the same number on all ranks.
    Fixed,
}

/// The rotation from rank 0 to another rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rotation {
    pub(super) by: usize,
    pub(super) world_size: usize,
    pub(super) numbering: ChunkNumbering,
}

impl Rotation {
    pub(super) fn rank(self, rank: usize) -> usize {
        (rank + self.by) % self.world_size
    }

    pub(super) fn chunk(self, chunk: usize) -> usize {
        match self.numbering {
            ChunkNumbering::Rotating(chunks) => (chunk + self.by) % chunks,
            ChunkNumbering::Fixed => chunk,
        }
    }

    pub(super) fn chunks(self, chunks: Chunks) -> Option<Chunks> {
        match self.numbering {
            ChunkNumbering::Rotating(within) => chunks.rotated(self.by, within),
            ChunkNumbering::Fixed => Some(chunks),
        }
    }

    fn step(self, step: Step) -> Option<Step> {
        Some(match step {
            Step::Exchange { send, receive } => {
                let send = match send {
                    Some(half) => {
                        Some(SendHalf { to: self.rank(half.to), chunks: self.chunks(half.chunks)?, ..half })
                    }
                    None => None,
                };
                let receive = match receive {
                    Some(half) => {
                        let (from, chunks) = (self.rank(half.from), self.chunks(half.chunks)?);
                        Some(ReceiveHalf { from, chunks, ..half })
                    }
                    None => None,
                };
                Step::Exchange { send, receive }
            }
            Step::Combine { chunk, from, into } => Step::Combine { chunk: self.chunk(chunk), from, into },
            Step::Copy { chunk, from, into } => Step::Copy { chunk: self.chunk(chunk), from, into },
            Step::Window { .. } => step,
        })
    }

    /// Returns `true` if one program is the rotation of another.
    pub(super) fn is_of(self, rotated: &RankProgram, program: &RankProgram) -> bool {
        let finish = match (rotated.finish, program.finish) {
            (Some(rotated), Some(finish)) => {
                rotated.after == finish.after && Some(rotated.owned) == self.chunks(finish.owned)
            }
            (rotated, finish) => rotated == finish,
        };
        finish
            && rotated.steps.len() == program.steps.len()
            && rotated
                .steps
                .iter()
                .zip(&program.steps)
                .all(|(rotated, step)| Some(*rotated) == self.step(*step))
    }
}

/// Returns `true` if these programs for a root are those for root 0, rotated by the root. Then they are correct if
/// those are, except for the order of additions.
pub(super) fn are_rotated(
    chunks: usize,
    first: &[RankProgram],
    programs: &[RankProgram],
    root: usize,
) -> bool {
    let world_size = programs.len();
    let numberings = [ChunkNumbering::Fixed, ChunkNumbering::Rotating(chunks)];
    numberings.into_iter().any(|numbering| {
        let rotation = Rotation { by: root, world_size, numbering };
        (0..world_size).all(|rank| rotation.is_of(&programs[rotation.rank(rank)], &first[rank]))
    })
}

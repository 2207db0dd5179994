//! Wrong schedules, made from correct ones by one change each. The verifier has to reject them.

use std::fmt;

use dist_transport::Rank;

use super::messages::prove_programs;
use super::{RankProgram, Report, programs};
use crate::{ChunkLocation, Chunks, MessageAlgorithm, OnArrival, Result, Source, Step};

/// A change of a step or of its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mutation {
    /// The message goes to the next rank.
    SendToAnother,
    /// The message is expected from the next rank.
    ReceiveFromAnother,
    /// The message consists of other chunks.
    SendAnotherChunk,
    /// Other chunks are expected, copied or combined.
    ReceiveAnotherChunk,
    /// The message consists of the input instead of the buffer, or the reverse.
    SendAnotherMemory,
    /// The arriving data replaces the content instead of being reduced into it, or the reverse.
    ReplaceForReduce,
    /// The step uses the slot before.
    AnotherSlot,
    /// The step is left out.
    Missing,
    /// The step and the next one are swapped.
    SwappedWithNext,
    /// The step is executed twice.
    Doubled,
}

impl Mutation {
    /// All mutations.
    pub const ALL: [Self; 10] = [
        Self::SendToAnother,
        Self::ReceiveFromAnother,
        Self::SendAnotherChunk,
        Self::ReceiveAnotherChunk,
        Self::SendAnotherMemory,
        Self::ReplaceForReduce,
        Self::AnotherSlot,
        Self::Missing,
        Self::SwappedWithNext,
        Self::Doubled,
    ];
}

/// A change of one step of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mutant {
    /// The mutation.
    pub mutation: Mutation,
    /// The rank.
    pub rank: usize,
    /// The index of the step.
    pub step: usize,
}

impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of rank {}, step {}", self.mutation, self.rank, self.step)
    }
}

/// The number of mutants and those that were not rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Score<M = Mutant> {
    /// The number of mutants.
    pub mutants: usize,
    /// The mutants that were proven.
    pub survivors: Vec<M>,
}

impl<M> Default for Score<M> {
    fn default() -> Self {
        Self { mutants: 0, survivors: Vec::new() }
    }
}

impl<M> Score<M> {
    /// Returns the number of rejected mutants.
    pub const fn rejected(&self) -> usize {
        self.mutants - self.survivors.len()
    }
}

impl Score {
    /// Tries every mutant of an algorithm's schedules.
    ///
    /// # Errors
    /// If the schedules are not proven.
    fn of_algorithm(algorithm: &MessageAlgorithm, world_size: usize, root: usize) -> Result<Self> {
        let programs = programs(algorithm, world_size, root);
        Self::of(algorithm.chunks(world_size), &programs, |programs| {
            prove_programs(algorithm, programs, root)
        })
    }

    /// Tries all mutants of an algorithm in a world of this size, with the first and with the last root. Schedules
    /// whose original is not proven are left out, because other checks report them.
    pub fn of_roots(algorithm: &MessageAlgorithm, world_size: usize) -> impl Iterator<Item = Self> {
        let mut roots = vec![0, algorithm.collective.roots(world_size).end - 1];
        roots.dedup();
        roots.into_iter().map(move |root| Self::of_algorithm(algorithm, world_size, root).unwrap_or_default())
    }

    /// Tries every mutant of correct programs on memory of `chunks` chunks. A mutant survives if it is `proven` and
    /// has the cost of the original.
    ///
    /// # Errors
    /// If the original is not proven.
    pub fn of(
        chunks: usize,
        programs: &[RankProgram],
        proven: impl Fn(&[RankProgram]) -> Result<Report>,
    ) -> Result<Self> {
        let (original, mut score) = (proven(programs)?, Self::default());
        let mut programs = programs.to_vec();
        for rank in Rank::all(programs.len()) {
            let right = programs[rank.index()].clone();
            for step in 0..right.steps.len() {
                for mutation in Mutation::ALL {
                    let Some(wrong) = changed(&right, step, mutation, rank, chunks) else { continue };
                    programs[rank.index()] = wrong;
                    score.mutants += 1;
                    if proven(&programs).is_ok_and(|found| found.costs_as(&original)) {
                        score.survivors.push(Mutant { mutation, rank: rank.index(), step });
                    }
                }
            }
            programs[rank.index()] = right;
        }
        Ok(score)
    }
}

impl Report {
    fn costs_as(&self, other: &Self) -> bool {
        let cost = |report: &Self| (report.rounds, report.path, report.chunks_sent_max(), report.order);
        cost(self) == cost(other)
    }
}

/// Returns the program with one step changed, if the mutation applies to that step. Copying twice has no
/// effect and is left out.
fn changed(
    program: &RankProgram,
    index: usize,
    mutation: Mutation,
    rank: Rank,
    chunks: usize,
) -> Option<RankProgram> {
    let mut program = program.clone();
    let steps = &mut program.steps;
    let before = steps.clone();
    match mutation {
        Mutation::Missing => drop(steps.remove(index)),
        Mutation::Doubled if matches!(steps[index], Step::Copy { .. }) => return None,
        Mutation::Doubled => steps.insert(index, steps[index]),
        Mutation::SwappedWithNext if index + 1 < steps.len() => steps.swap(index, index + 1),
        Mutation::SwappedWithNext => return None,
        _ => change(&mut steps[index], mutation, rank, chunks),
    }
    (program.steps != before).then_some(program)
}

fn change(step: &mut Step, mutation: Mutation, rank: Rank, chunks: usize) {
    match step {
        Step::Exchange { .. } => change_exchange(step, mutation, rank, chunks),
        Step::Combine { chunk, .. } | Step::Copy { chunk, .. }
            if mutation == Mutation::ReceiveAnotherChunk =>
        {
            *chunk = (*chunk + 1) % chunks;
        }
        Step::Combine { from, .. } if mutation == Mutation::AnotherSlot => *from += 1,
        Step::Copy { from: ChunkLocation::Slot(slot), .. }
        | Step::Copy { into: ChunkLocation::Slot(slot), .. }
            if mutation == Mutation::AnotherSlot =>
        {
            *slot += 1;
        }
        Step::Window { first, .. } if mutation == Mutation::SendToAnother => *first += 1,
        Step::Window { last, .. } if mutation == Mutation::ReceiveFromAnother => *last -= 1,
        Step::Combine { .. } | Step::Copy { .. } | Step::Window { .. } => {}
    }
}

fn change_exchange(step: &mut Step, mutation: Mutation, rank: Rank, chunks: usize) {
    let another_peer = |peer: usize| {
        let other = (peer + 1) % rank.world_size();
        if other == rank.index() { rank.right().index() } else { other }
    };
    let another_chunk = |set: Chunks| Chunks::range((set.first() + 1) % chunks.max(1), set.len());
    let Step::Exchange { send, receive } = step else { return };
    match (send, receive, mutation) {
        (Some(send), _, Mutation::SendToAnother) => send.to = another_peer(send.to),
        (Some(send), _, Mutation::SendAnotherChunk) => send.chunks = another_chunk(send.chunks),
        (Some(send), _, Mutation::SendAnotherMemory) if !send.chunks.is_empty() => {
            send.of = if send.of == Source::Buffer { Source::Input } else { Source::Buffer };
        }
        (_, Some(receive), Mutation::ReceiveFromAnother) => receive.from = another_peer(receive.from),
        (_, Some(receive), Mutation::ReceiveAnotherChunk) => receive.chunks = another_chunk(receive.chunks),
        (_, Some(receive), Mutation::ReplaceForReduce) if !receive.chunks.is_empty() => {
            receive.then =
                if receive.then == OnArrival::Reduce { OnArrival::Replace } else { OnArrival::Reduce };
        }
        (_, Some(receive), Mutation::AnotherSlot) => {
            if let ChunkLocation::Slot(slot) = &mut receive.place {
                *slot += 1;
            }
        }
        _ => {}
    }
}

//! Proofs of large worlds by symmetry. If every rank does the same as rank 0, with all numbers rotated in the
//! ring of ranks, it is enough to simulate one rank.
//!
//! In a step, rank `r` sends the chunks of rank 0, rotated by `r`. The data that rank 0 receives thus follows
//! from the data that it holds. In every step all ranks exchange over the same distances. Every message
//! therefore has a receiver, and no rank waits. The order of additions is not checked.

use std::ops::Range;

use dist_transport::Rank;
use smallvec::{SmallVec, smallvec};

use super::goal::{Piece, RequiredContent};
use super::messages::{check_cost, program};
use super::rotation::{ChunkNumbering, Rotation};
use super::{Goal, RankProgram};
use crate::{
    ChunkLocation, Cost, Error, MessageAlgorithm, Messages, OnArrival, ReceiveHalf, Result, Source, Step,
};

/// Proves the schedules for a large world in which every rank does the same as rank 0, rotated. Returns their cost,
/// or `None` if ranks do different things.
///
/// # Errors
/// The error of rank 0, or if the algorithm does not have the declared properties.
pub fn prove(algorithm: &MessageAlgorithm, world_size: usize) -> Result<Option<Cost>> {
    let Some(rank) = Rank::new(0, world_size).filter(|_| algorithm.supports(world_size)) else {
        return Ok(None);
    };
    let chunks = algorithm.chunks(world_size);
    let goal = Goal::of(algorithm, world_size, 0);
    let numbering = match goal {
        Goal::AllReduce | Goal::ReduceScatter | Goal::AllGather | Goal::AllToAll if chunks == world_size => {
            ChunkNumbering::Rotating(chunks)
        }
        Goal::AllToAllRotated | Goal::Barrier => ChunkNumbering::Fixed,
        _ => return Ok(None),
    };
    let own = program(algorithm, rank, 0);
    let rotated = |other: Rank| {
        Rotation { by: other.index(), world_size, numbering }.is_of(&program(algorithm, other, 0), &own)
    };
    if !Rank::all(world_size).skip(1).all(rotated) {
        return Ok(None);
    }
    let mut one = RepresentativeRank::new(goal, chunks, world_size, numbering);
    for (index, step) in own.steps.iter().enumerate() {
        one.finish(&own, index)?;
        if !one.step(rank, index, *step)? {
            return Ok(None);
        }
    }
    one.finish(&own, own.steps.len())?;
    one.check_result(own.steps.len())?;
    check_cost(algorithm, world_size, one.cost, |found, claimed| found == claimed)?;
    Ok(Some(one.cost))
}

/// The content of a chunk of rank 0.
#[derive(Clone, Debug, PartialEq)]
enum Content {
    Nothing,
    Piece(Piece),
    /// The sum of these ranks; `true` if its owner has finished it.
    Sum(CyclicRanks, bool),
}

/// The state of rank 0, in a world whose ranks all do the same.
struct RepresentativeRank {
    goal: Goal,
    world_size: usize,
    numbering: ChunkNumbering,
    buffer: Vec<Content>,
    heard: CyclicRanks,
    cost: Cost,
}

impl RepresentativeRank {
    fn new(goal: Goal, chunks: usize, world_size: usize, numbering: ChunkNumbering) -> Self {
        let own = || CyclicRanks::one(0, world_size);
        let begins = |chunk| match goal.begins(world_size, 0, chunk) {
            Some(_) if goal.reduces() => Content::Sum(own(), false),
            Some(piece) => Content::Piece(piece),
            None => Content::Nothing,
        };
        let buffer = (0..chunks).map(begins).collect();
        Self { goal, world_size, numbering, buffer, heard: own(), cost: Cost::NOTHING }
    }

    /// Executes a step. Returns `false` if some message has no receiver.
    fn step(&mut self, rank: Rank, index: usize, step: Step) -> Result<bool> {
        let (sends, receives) = step.halves(rank);
        if sends.is_empty() || sends.len() != receives.len() {
            return Ok(false);
        }
        let mut arriving: SmallVec<[(ReceiveHalf, Vec<Content>, CyclicRanks); 1]> = SmallVec::new();
        let mut longest = Messages::default();
        for (send, receive) in sends.iter().zip(receives) {
            let distance = (self.world_size - receive.from) % self.world_size;
            if send.to != distance || receive.place != ChunkLocation::Buffer {
                return Ok(false);
            }
            let back = Rotation { by: receive.from, world_size: self.world_size, numbering: self.numbering };
            let sent = back.chunks(send.chunks);
            if !sent.is_some_and(|sent| self.goal.agree(receive.from, 0, (send.of, sent), receive.chunks)) {
                let (sent, expected) = (send.chunks, receive.chunks);
                let peer = receive.from;
                return Err(Error::Mismatch { rank: 0, step: index, sent, peer, peer_step: index, expected });
            }
            // Chunk c of the sender corresponds to chunk c - from of rank 0.
            let contents = match send.of {
                Source::Input => send.chunks.indices().map(|chunk| self.input(chunk, back)).collect(),
                Source::Buffer => {
                    let forth = Rotation { by: distance, ..back };
                    receive
                        .chunks
                        .indices()
                        .map(|chunk| self.buffer[forth.chunk(chunk)].rotated(back))
                        .collect()
                }
            };
            arriving.push((receive, contents, self.heard.rotated(back.by)));
            self.cost.sent_max += send.chunks.len();
            self.cost.path += send.chunks.len();
            let message = Messages::new(1, send.chunks.len());
            self.cost.all = self.cost.all.and(message.times(self.world_size));
            longest = longest.at_least(message);
        }
        self.cost.rounds += 1;
        self.cost.depth = self.cost.depth.and(longest);
        for (receive, contents, heard) in arriving {
            self.heard.add(&heard);
            for (chunk, content) in receive.chunks.indices().zip(contents) {
                self.receive(index, chunk, content, receive.then)?;
            }
        }
        Ok(true)
    }

    fn input(&self, chunk: usize, back: Rotation) -> Content {
        self.goal.input(0, chunk).map_or(Content::Nothing, |piece| Content::Piece(piece).rotated(back))
    }

    fn receive(&mut self, step: usize, chunk: usize, content: Content, then: OnArrival) -> Result<()> {
        if content == Content::Nothing {
            return Err(Error::Unwritten { rank: 0, step, chunk });
        }
        match then {
            OnArrival::Replace => self.buffer[chunk] = content,
            OnArrival::Reduce => {
                let (Content::Sum(sum, false), Content::Sum(other, false)) =
                    (&mut self.buffer[chunk], content)
                else {
                    return Err(Error::Unwritten { rank: 0, step, chunk });
                };
                if let Some(contributor) = sum.shared(&other) {
                    return Err(Error::AddedTwice { rank: 0, step, chunk, contributor });
                }
                sum.add(&other);
                self.cost.reduced_max += 1;
                self.cost.reduced += self.world_size;
            }
        }
        Ok(())
    }

    fn finish(&mut self, program: &RankProgram, steps: usize) -> Result<()> {
        let Some(finish) = program.finish.filter(|finish| finish.after == steps) else { return Ok(()) };
        for chunk in finish.owned.indices() {
            match &mut self.buffer[chunk] {
                Content::Sum(sum, finished) if sum.is_full() => *finished = true,
                _ => return Err(Error::WrongResult { rank: 0, steps, chunk }),
            }
        }
        Ok(())
    }

    fn check_result(&self, steps: usize) -> Result<()> {
        for (chunk, content) in self.buffer.iter().enumerate() {
            let holds = match (self.goal.ends(self.world_size, 0, chunk), content) {
                (RequiredContent::Anything, _) => true,
                (RequiredContent::Piece(piece), content) => *content == Content::Piece(piece),
                (RequiredContent::Sum(_), Content::Sum(sum, _)) => sum.is_full(),
                (RequiredContent::Finished, Content::Sum(_, finished)) => *finished,
                _ => false,
            };
            if !holds {
                return Err(Error::WrongResult { rank: 0, steps, chunk });
            }
        }
        match self.heard.missing() {
            Some(absent) if self.goal == Goal::Barrier => Err(Error::LeavesEarly { rank: 0, absent }),
            _ => Ok(()),
        }
    }
}

impl Content {
    fn rotated(&self, rotation: Rotation) -> Self {
        match self {
            Self::Nothing => Self::Nothing,
            Self::Piece(piece) => {
                Self::Piece(Piece { rank: rotation.rank(piece.rank), chunk: rotation.rank(piece.chunk) })
            }
            Self::Sum(ranks, finished) => Self::Sum(ranks.rotated(rotation.by), *finished),
        }
    }
}

/// A set of ranks in a ring, as runs of consecutive ranks. Sums of schedules have few runs.
#[derive(Clone, Debug, PartialEq)]
struct CyclicRanks {
    /// The runs in ascending order; no two are adjacent.
    runs: SmallVec<[Range<usize>; 1]>,
    world_size: usize,
}

impl CyclicRanks {
    fn one(rank: usize, world_size: usize) -> Self {
        Self { runs: smallvec![rank..rank + 1], world_size }
    }

    fn rotated(&self, by: usize) -> Self {
        let mut rotated = Self { runs: SmallVec::new(), world_size: self.world_size };
        for run in &self.runs {
            let (start, end) = (run.start + by, run.end + by);
            let within = |rank: usize| rank.min(self.world_size);
            let beyond = |rank: usize| rank.saturating_sub(self.world_size);
            rotated.runs.extend([within(start)..within(end), beyond(start)..beyond(end)]);
        }
        rotated.normalize();
        rotated
    }

    fn add(&mut self, other: &Self) {
        self.runs.extend(other.runs.iter().cloned());
        self.normalize();
    }

    fn normalize(&mut self) {
        self.runs.sort_unstable_by_key(|run| run.start);
        let mut normal: SmallVec<[Range<usize>; 1]> = SmallVec::new();
        for run in self.runs.drain(..).filter(|run| !run.is_empty()) {
            match normal.last_mut() {
                Some(last) if run.start <= last.end => last.end = last.end.max(run.end),
                _ => normal.push(run),
            }
        }
        self.runs = normal;
    }

    /// Returns a rank in both sets.
    fn shared(&self, other: &Self) -> Option<usize> {
        let (mut ours, mut theirs) = (self.runs.iter().peekable(), other.runs.iter().peekable());
        while let (Some(our), Some(their)) = (ours.peek(), theirs.peek()) {
            let start = our.start.max(their.start);
            if start < our.end.min(their.end) {
                return Some(start);
            }
            if our.end <= their.end {
                ours.next();
            } else {
                theirs.next();
            }
        }
        None
    }

    /// Returns the lowest rank that is not in the set.
    fn missing(&self) -> Option<usize> {
        let end = self.runs.first().filter(|run| run.start == 0).map_or(0, |run| run.end);
        (end < self.world_size).then_some(end)
    }

    fn is_full(&self) -> bool {
        self.missing().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::prove_world;
    use crate::{ALGORITHMS, Chunks, SendHalf, all_to_all, barrier, binomial, circulant, ring};

    fn set(ranks: &[usize]) -> CyclicRanks {
        let mut set = CyclicRanks { runs: SmallVec::new(), world_size: 7 };
        ranks.iter().for_each(|&rank| set.add(&CyclicRanks::one(rank, 7)));
        set
    }

    #[test]
    fn sets_in_a_ring_rotate_and_intersect() {
        let runs = set(&[5, 6, 0, 2]);
        assert_eq!(runs.runs.as_slice(), [0..1, 2..3, 5..7]);
        assert_eq!(runs.rotated(1), set(&[6, 0, 1, 3]));
        assert_eq!(runs.rotated(0), runs);
        assert_eq!(runs.shared(&set(&[1, 3, 6])), Some(6));
        assert_eq!(runs.shared(&set(&[1, 3, 4])), None);
        assert_eq!((runs.missing(), set(&[1]).missing()), (Some(1), Some(0)));
        let mut all = runs;
        all.add(&set(&[1, 3, 4]));
        assert!(all.is_full() && all == all.rotated(3));
    }

    #[test]
    fn symmetry_and_the_machine_agree() {
        for algorithm in ALGORITHMS.messages() {
            for world_size in (2..20).filter(|&world_size| algorithm.supports(world_size)) {
                if let Some(cost) = prove(algorithm, world_size).expect("no schedule is wrong") {
                    let proof = prove_world(algorithm, world_size).expect("it is proven");
                    assert_eq!(cost, proof.cost, "{algorithm:?}");
                }
            }
        }
    }

    #[test]
    fn rings_and_circles_are_symmetric_and_trees_are_not() {
        let rings = [&ring::ALL_REDUCE, &circulant::ALL_REDUCE, &barrier::DISSEMINATION];
        let exchanges = [&all_to_all::WINDOWED, &all_to_all::PAIRWISE, &all_to_all::BRUCK];
        let others = [&barrier::RING, &binomial::ALL_REDUCE];
        for (algorithms, expected) in [(&rings[..], true), (&exchanges, true), (&others, false)] {
            for algorithm in algorithms {
                let proven = prove(algorithm, 6).expect("it is right");
                assert_eq!(proven.is_some(), expected, "{algorithm:?}");
            }
        }
    }

    /// Returns the error of rank 0, if all ranks execute these steps, rotated.
    fn fault(goal: Goal, chunks: usize, world_size: usize, steps: &[Step]) -> Option<Error> {
        let rank = Rank::new(0, world_size)?;
        let mut one = RepresentativeRank::new(goal, chunks, world_size, ChunkNumbering::Rotating(chunks));
        let done =
            steps.iter().enumerate().try_for_each(|(index, step)| one.step(rank, index, *step).map(drop));
        done.and_then(|()| one.check_result(steps.len())).err()
    }

    #[test]
    fn symmetric_mistakes_are_found() {
        let ring = |send: usize, receive: usize| {
            let half = SendHalf::buffer(1, Chunks::one(send));
            Step::exchange(half, ReceiveHalf::reduce(2, Chunks::one(receive)))
        };
        let (first, second) = (ring(2, 1), ring(1, 0));
        let reduce_scatter = |steps: &[Step]| fault(Goal::ReduceScatter, 3, 3, steps);
        assert_eq!(reduce_scatter(&[first, second]), None);
        let unfinished = Error::WrongResult { rank: 0, steps: 1, chunk: 0 };
        assert_eq!(reduce_scatter(&[first]), Some(unfinished));
        let twice = Error::AddedTwice { rank: 0, step: 1, chunk: 1, contributor: 2 };
        assert_eq!(reduce_scatter(&[first, first]), Some(twice));
        assert!(matches!(reduce_scatter(&[ring(2, 2)]), Some(Error::Mismatch { step: 0, .. })));
        let pass_on = |send: usize, receive: usize| {
            let half = SendHalf::buffer(1, Chunks::one(send));
            Step::exchange(half, ReceiveHalf::replace(2, Chunks::one(receive)))
        };
        let unwritten = Error::Unwritten { rank: 0, step: 0, chunk: 0 };
        assert_eq!(fault(Goal::AllGather, 3, 3, &[pass_on(1, 0)]), Some(unwritten));
    }
}

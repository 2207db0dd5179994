//! Wrong direct schedules, made of right ones by one change each: what the verifier has to reject.

use std::fmt;

use dist_transport::Place;

use super::{Call, check};
use crate::direct::{DirectPlan, DirectStep, PartSet, PeerSet, SumTarget};
use crate::verify::mutate::Score;
use crate::{Result, Source};

/// How a step is changed, or its place among the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DirectMutation {
    /// The step is left out.
    Missing,
    /// The step and the next are in the wrong order.
    SwappedWithNext,
    /// It is done twice.
    Doubled,
    /// It waits for one post less.
    WaitsForLess,
    /// It waits for another rank, or copies from it.
    AnotherRank,
    /// It is about another part.
    AnotherPart,
    /// It is about another block.
    AnotherBlock,
    /// It is about another slot.
    AnotherSlot,
    /// It takes what was published for what lies in memory, or the other way round.
    AnotherPlace,
    /// It publishes of the input instead of the buffer, or the other way round.
    AnotherMemory,
    /// The sum goes elsewhere.
    AnotherTarget,
}

impl DirectMutation {
    /// Every mutation.
    pub const ALL: [Self; 11] = [
        Self::Missing,
        Self::SwappedWithNext,
        Self::Doubled,
        Self::WaitsForLess,
        Self::AnotherRank,
        Self::AnotherPart,
        Self::AnotherBlock,
        Self::AnotherSlot,
        Self::AnotherPlace,
        Self::AnotherMemory,
        Self::AnotherTarget,
    ];
}

/// A change of one step of one rank, in the call that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectMutant {
    /// What is changed.
    pub mutation: DirectMutation,
    /// The rank.
    pub rank: usize,
    /// Its step.
    pub step: usize,
    /// What the step was.
    pub was: DirectStep,
}

impl fmt::Display for DirectMutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of rank {}, step {} ({})", self.mutation, self.rank, self.step, self.was)
    }
}

impl Score<DirectMutant> {
    /// Tries every mutant of one of these calls, between the others.
    ///
    /// # Errors
    /// If the originals are not proven.
    pub fn of_call(plans: &[DirectPlan], mutated: usize) -> Result<Self> {
        let mut calls: Vec<Call> = plans.iter().map(|&plan| Call::new(plan)).collect();
        let original = check(&calls)?;
        let mut score = Self::default();
        for rank in 0..calls[mutated].programs.len() {
            let right = calls[mutated].programs[rank].clone();
            for step in 0..right.len() {
                for mutation in DirectMutation::ALL {
                    let Some(wrong) = changed(&right, step, mutation, rank, &plans[mutated]) else {
                        continue;
                    };
                    calls[mutated].programs[rank] = wrong;
                    score.mutants += 1;
                    if check(&calls).is_ok_and(|found| found.rounds <= original.rounds) {
                        score.survivors.push(DirectMutant { mutation, rank, step, was: right[step] });
                    }
                }
            }
            calls[mutated].programs[rank] = right;
        }
        Ok(score)
    }
}

/// The program with one step changed, if the mutation says anything about that step. To copy twice or to wait twice is
/// slower, not wrong, and no mutant; nor is what changes the order of steps that do not depend on each other.
fn changed(
    program: &[DirectStep],
    index: usize,
    mutation: DirectMutation,
    rank: usize,
    plan: &DirectPlan,
) -> Option<Vec<DirectStep>> {
    let mut steps = program.to_vec();
    match mutation {
        DirectMutation::Missing => drop(steps.remove(index)),
        DirectMutation::SwappedWithNext => match steps.get(index + 1) {
            Some(&next) if !may_follow(steps[index], next) => steps.swap(index, index + 1),
            _ => return None,
        },
        DirectMutation::Doubled if matches!(steps[index], DirectStep::Post | DirectStep::Reduce { .. }) => {
            steps.insert(index, steps[index]);
        }
        DirectMutation::Doubled => return None,
        _ => change(&mut steps[index], mutation, rank, plan),
    }
    (steps != program).then_some(steps)
}

/// Whether a step may as well come after the next: to post later or to wait earlier is slower, if it ends, and not wrong;
/// copies, blocks of their own, and a wait for one rank and a copy from another have nothing to do with each other.
fn may_follow(step: DirectStep, next: DirectStep) -> bool {
    match (step, next) {
        (DirectStep::Post, _) => true,
        (_, DirectStep::Post) => false,
        (_, DirectStep::Await { .. }) | (DirectStep::Take { .. }, DirectStep::Take { .. }) => true,
        (DirectStep::Await { ranks: PeerSet::One(peer), .. }, DirectStep::Take { from, .. }) => peer != from,
        (DirectStep::Await { .. }, _) => false,
        (step, next) => block(step) != block(next),
    }
}

/// Which block a step is about.
const fn block(step: DirectStep) -> Option<usize> {
    match step {
        DirectStep::Publish { block, .. }
        | DirectStep::Reduce { block, .. }
        | DirectStep::Take { block, .. }
        | DirectStep::Keep { block, .. } => Some(block),
        DirectStep::Post | DirectStep::Await { .. } => None,
    }
}

fn change(step: &mut DirectStep, mutation: DirectMutation, rank: usize, plan: &DirectPlan) {
    let (parts, blocks, world_size) = (plan.parts(), plan.blocks(), plan.world_size());
    let next_rank =
        |peer: usize| (1..world_size).map(|step| (peer + step) % world_size).find(|&next| next != rank);
    match (mutation, step) {
        (DirectMutation::WaitsForLess, DirectStep::Await { posts, .. }) => *posts -= 1,
        // Other ranks may have the same, but for the one that has computed it.
        (DirectMutation::AnotherRank, DirectStep::Take { from, part, .. }) if *from == rank => *from = *part,
        (
            DirectMutation::AnotherRank,
            DirectStep::Await { ranks: PeerSet::One(peer), .. }
            | DirectStep::Take { from: peer, .. }
            | DirectStep::Reduce { into: SumTarget::Back(PeerSet::One(peer)), .. },
        ) => {
            *peer = next_rank(*peer).unwrap_or(*peer);
        }
        // Where all parts have one place, it does not matter which of them is taken from there.
        (
            DirectMutation::AnotherPart,
            DirectStep::Take { of: Place::FlagLine | Place::EagerBuffer | Place::Slot(_), .. },
        ) if plan.places() == 1 => {}
        (
            DirectMutation::AnotherPart,
            DirectStep::Publish { parts: PartSet::One(part) | PartSet::Others(part), .. }
            | DirectStep::Reduce { part, .. }
            | DirectStep::Take { part, .. }
            | DirectStep::Keep { part, .. },
        ) => *part = (*part + 1) % parts,
        (
            DirectMutation::AnotherBlock,
            DirectStep::Publish { block, .. }
            | DirectStep::Reduce { block, .. }
            | DirectStep::Take { block, .. }
            | DirectStep::Keep { block, .. },
        ) => *block = (*block + 1) % blocks,
        (
            DirectMutation::AnotherSlot,
            DirectStep::Publish { place: Place::Slot(slot), .. }
            | DirectStep::Reduce { of: Place::Slot(slot), .. }
            | DirectStep::Take { of: Place::Slot(slot), .. },
        ) => *slot = (*slot + 1) % plan.slots(),
        (DirectMutation::AnotherPlace, DirectStep::Reduce { of, .. } | DirectStep::Take { of, .. }) => {
            *of = if *of == Place::Memory { Place::Slot(0) } else { Place::Memory };
        }
        (DirectMutation::AnotherMemory, DirectStep::Publish { of, .. }) => {
            *of = if *of == Source::Buffer { Source::Input } else { Source::Buffer };
        }
        (DirectMutation::AnotherTarget, DirectStep::Reduce { of, into, .. }) => {
            *into = match into {
                SumTarget::Back(_) => SumTarget::Buffer,
                SumTarget::Buffer if *of == Place::Memory => SumTarget::Back(PeerSet::Others),
                // Nobody looks at what comes back there.
                SumTarget::Buffer => SumTarget::Buffer,
            };
        }
        _ => {}
    }
}

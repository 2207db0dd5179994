//! Wrong direct schedules, made from correct ones by one change each. The verifier has to reject them.

use std::fmt;

use dist_transport::shm_group::MemoryArea;

use super::{DirectPrograms, check};
use crate::direct::{DirectPlan, DirectStep, PartSet, PeerSet, SumTarget};
use crate::verify::mutate::Score;
use crate::{Result, Source};

/// A change of a step or of its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DirectMutation {
    /// The step is left out.
    Missing,
    /// The step and the next one are swapped.
    SwappedWithNext,
    /// The step is executed twice.
    Doubled,
    /// The step waits for one signal less.
    WaitsForLess,
    /// The step waits for another rank, or copies from it.
    AnotherRank,
    /// The step uses another part.
    AnotherPart,
    /// The step uses another block.
    AnotherBlock,
    /// The step uses another slot.
    AnotherSlot,
    /// The step uses memory instead of the place where data is published, or the reverse.
    AnotherPlace,
    /// The step publishes the input instead of the buffer, or the reverse.
    AnotherMemory,
    /// The sum has another destination.
    AnotherTarget,
}

impl DirectMutation {
    /// All mutations.
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

/// A change of one step of one rank, in the call under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectMutant {
    /// The mutation.
    pub mutation: DirectMutation,
    /// The rank.
    pub rank: usize,
    /// The index of the step.
    pub step: usize,
    /// The original step.
    pub was: DirectStep,
}

impl fmt::Display for DirectMutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of rank {}, step {} ({})", self.mutation, self.rank, self.step, self.was)
    }
}

impl Score<DirectMutant> {
    /// Tries every mutant of one of these calls, between the other calls.
    ///
    /// # Errors
    /// If the original calls are not proven.
    pub fn of_call(plans: &[DirectPlan], mutated: usize) -> Result<Self> {
        let mut calls: Vec<DirectPrograms> = plans.iter().map(|&plan| DirectPrograms::new(plan)).collect();
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

/// Returns the program with one changed step; `None` if the mutation does not apply to that step. Mutants that are
/// slower but correct are left out: a second copy or wait, and swapped steps that do not depend on each other.
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
        DirectMutation::Doubled if matches!(steps[index], DirectStep::Signal | DirectStep::Reduce { .. }) => {
            steps.insert(index, steps[index]);
        }
        DirectMutation::Doubled => return None,
        _ => change(&mut steps[index], mutation, rank, plan),
    }
    (steps != program).then_some(steps)
}

/// Returns `true` if a program stays correct when a step is moved behind the next one. A later signal or an earlier
/// wait is slower but correct if the program ends. Copies of different blocks are independent, and so are a wait for
/// one rank and a copy from another.
fn may_follow(step: DirectStep, next: DirectStep) -> bool {
    match (step, next) {
        (DirectStep::Signal, _) => true,
        (_, DirectStep::Signal) => false,
        (_, DirectStep::Wait { .. }) | (DirectStep::Take { .. }, DirectStep::Take { .. }) => true,
        (DirectStep::Wait { ranks: PeerSet::One(peer), .. }, DirectStep::Take { from, .. }) => peer != from,
        (DirectStep::Wait { .. }, _) => false,
        (step, next) => block(step) != block(next),
    }
}

/// Returns the block of a step.
const fn block(step: DirectStep) -> Option<usize> {
    match step {
        DirectStep::Publish { block, .. }
        | DirectStep::Reduce { block, .. }
        | DirectStep::Take { block, .. }
        | DirectStep::Keep { block, .. } => Some(block),
        DirectStep::Signal | DirectStep::Wait { .. } => None,
    }
}

fn change(step: &mut DirectStep, mutation: DirectMutation, rank: usize, plan: &DirectPlan) {
    let (parts, blocks, world_size) = (plan.parts(), plan.blocks(), plan.world_size());
    let next_rank =
        |peer: usize| (1..world_size).map(|step| (peer + step) % world_size).find(|&next| next != rank);
    match (mutation, step) {
        (DirectMutation::WaitsForLess, DirectStep::Wait { signals, .. }) => *signals -= 1,
        // Other ranks may have the same data, except the rank that has computed it.
        (DirectMutation::AnotherRank, DirectStep::Take { from, part, .. }) if *from == rank => *from = *part,
        (
            DirectMutation::AnotherRank,
            DirectStep::Wait { ranks: PeerSet::One(peer), .. }
            | DirectStep::Take { from: peer, .. }
            | DirectStep::Reduce { into: SumTarget::Back(PeerSet::One(peer)), .. },
        ) => {
            *peer = next_rank(*peer).unwrap_or(*peer);
        }
        // If all parts have one place, it does not matter which part is copied from there.
        (
            DirectMutation::AnotherPart,
            DirectStep::Take {
                of: MemoryArea::FlagLine | MemoryArea::EagerBuffer | MemoryArea::Slot(_), ..
            },
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
            DirectStep::Publish { place: MemoryArea::Slot(slot), .. }
            | DirectStep::Reduce { of: MemoryArea::Slot(slot), .. }
            | DirectStep::Take { of: MemoryArea::Slot(slot), .. },
        ) => *slot = (*slot + 1) % plan.slots(),
        (DirectMutation::AnotherPlace, DirectStep::Reduce { of, .. } | DirectStep::Take { of, .. }) => {
            *of = if *of == MemoryArea::Exposed { MemoryArea::Slot(0) } else { MemoryArea::Exposed };
        }
        (DirectMutation::AnotherMemory, DirectStep::Publish { of, .. }) => {
            *of = if *of == Source::Buffer { Source::Input } else { Source::Buffer };
        }
        (DirectMutation::AnotherTarget, DirectStep::Reduce { of, into, .. }) => {
            *into = match into {
                SumTarget::Back(_) => SumTarget::Buffer,
                SumTarget::Buffer if *of == MemoryArea::Exposed => SumTarget::Back(PeerSet::Others),
                // No rank reads the data that is written back there.
                SumTarget::Buffer => SumTarget::Buffer,
            };
        }
        _ => {}
    }
}

//! The verifier of direct schedules. It executes the schedules of all ranks on symbols, and proves that two ranks
//! only access the same memory at the same time if both read.
//!
//! The signals that a rank waits for are fixed, so the happens-before relation is the same in every interleaving.
//! Each rank has a vector clock of the signals that it knows of. Every access must know of all earlier accesses
//! that conflict with it. One execution therefore proves all interleavings.
//!
//! The verifier also proves that every rank ends with the result of the operation, with complete sums in canonical
//! order, and that no rank waits for ever. All of this holds across consecutive calls. A call uses the slots of the
//! call before the previous one, and the flag lines and eager buffers of the fourth call before. Only the rule of
//! [`enter`](dist_transport::shm_group::ShmGroup::enter) separates these uses. When a call ends, its memory belongs to
//! the caller again.
//!
//! ```
//! use dist_algos::direct::{DirectCollective, staged, verify};
//!
//! let report = verify::prove(&verify::plans(DirectCollective::AllReduce, &staged::ALL_REDUCE, 5))?;
//! assert_eq!(report.calls, 5);
//! # Ok::<(), dist_algos::Error>(())
//! ```

mod clock;
mod draw;
mod machine;
pub mod mutate;

use dist_transport::shm_group::CALLS_MAX;

use super::step_context::PublishPlace;
use super::{DirectAlgorithm, DirectCollective, DirectPlan, DirectStep, RemoteAccess};
use crate::Result;
pub use draw::draw;
use machine::{DirectMachine, Knowledge};

/// The counts of correct schedules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DirectReport {
    /// The number of consecutive calls.
    pub calls: usize,
    /// The length of the longest chain of signals.
    pub rounds: usize,
    /// The number of steps of all ranks together.
    pub steps: usize,
}

/// The steps of every rank in one call.
#[derive(Clone, Debug)]
pub struct DirectPrograms {
    /// The plan, which defines the operation and the partition of memory.
    pub plan: DirectPlan,
    /// The steps of each rank.
    pub programs: Vec<Vec<DirectStep>>,
}

impl DirectPrograms {
    /// Returns the schedules of a plan.
    pub fn new(plan: DirectPlan) -> Self {
        let programs = dist_transport::Rank::all(plan.world_size()).map(|rank| plan.schedule(rank).collect());
        Self { plan, programs: programs.collect() }
    }
}

/// Returns sequences of calls that together use every feature of an algorithm. Some are pipelines that are shorter or
/// longer than the number of slots. Others are short calls with different roots, enough in a row to reuse every
/// place. The result is empty if the algorithm does not support the operation.
pub fn plans(
    collective: DirectCollective,
    algorithm: &'static DirectAlgorithm,
    world_size: usize,
) -> Vec<DirectPlan> {
    if algorithm.collective != collective.kind() {
        return Vec::new();
    }
    let is_pipeline =
        algorithm.remote_access == RemoteAccess::Nothing && collective != DirectCollective::Barrier;
    let blocks: &[usize] = if is_pipeline { &[6, 1, 9, 2] } else { &[1; 4] };
    let in_slots =
        |&blocks| DirectPlan::in_blocks((collective, algorithm), world_size, blocks, PublishPlace::Slot);
    let mut plans: Vec<DirectPlan> = blocks.iter().map(in_slots).collect();
    let in_line = algorithm.is_one_shot && algorithm.places(world_size) == 1;
    let at_last_rank = collective.rooted_at(world_size - 1);
    let short =
        |collective, published| DirectPlan::in_blocks((collective, algorithm), world_size, 1, published);
    plans.insert(2, short(at_last_rank, if in_line { PublishPlace::FlagLine } else { PublishPlace::Slot }));
    if in_line && collective.root().is_some() {
        plans.insert(3, short(at_last_rank, PublishPlace::EagerBuffer));
        let one_root = [collective].into_iter().cycle().take(CALLS_MAX + 1);
        let two_roots = [collective, at_last_rank].into_iter().cycle().take(CALLS_MAX + 1);
        for published in [PublishPlace::EagerBuffer, PublishPlace::FlagLine] {
            plans.extend(
                one_root.clone().chain(two_roots.clone()).map(|collective| short(collective, published)),
            );
        }
    }
    // The generation of the slots before a call is the sum over all earlier calls.
    let mut generations = [0; 2];
    for (call, plan) in plans.iter_mut().enumerate() {
        *plan = plan.with_generation(generations[call % 2]);
        generations[call % 2] += plan.generations();
    }
    plans
}

/// Proves that these calls, executed one after the other, are free of races and give the right results.
///
/// # Errors
/// The first error that is found, with the rank and the step in its call.
pub fn prove(plans: &[DirectPlan]) -> Result<DirectReport> {
    let calls: Vec<DirectPrograms> = plans.iter().map(|&plan| DirectPrograms::new(plan)).collect();
    check(&calls)
}

/// Proves calls with any steps, as [`prove`] does for plans.
///
/// # Errors
/// As for [`prove`].
pub fn check(calls: &[DirectPrograms]) -> Result<DirectReport> {
    let world_size = calls.first().map_or(0, |call| call.plan.world_size());
    let mut machine = DirectMachine::new(world_size, Knowledge::All);
    for call in calls {
        machine.call(&call.plan, call.programs.iter().map(|program| program.iter().copied()))?;
    }
    Ok(machine.report())
}

/// Proves one call of a plan, for any calls before and after it. That suffices for a program, because
/// [`enter`](dist_transport::shm_group::ShmGroup::enter) keeps the places of different calls apart, and a rank enters
/// a call only after it has left the one before.
///
/// The steps are computed one at a time. At first a rank only uses the signals that it has waited for itself, so
/// that the time grows with the square of the number of ranks. Only if that fails, the knowledge of the signalling
/// ranks is used too. For a plan of many blocks, fewer blocks are proven: see [`DirectPlan::shortened`].
///
/// # Errors
/// As for [`prove`].
pub fn prove_alone(plan: &DirectPlan) -> Result<DirectReport> {
    let plan = plan.shortened();
    let prove = |knowledge| {
        let mut machine = DirectMachine::new(plan.world_size(), knowledge);
        machine.call(&plan, dist_transport::Rank::all(plan.world_size()).map(|rank| plan.schedule(rank)))?;
        Ok(machine.report())
    };
    prove(Knowledge::Awaited).or_else(|_| prove(Knowledge::All))
}

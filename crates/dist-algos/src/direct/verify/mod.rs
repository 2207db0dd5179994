//! The verifier of direct schedules: executes those of all ranks on symbols, and proves that no two of them are ever at
//! the same memory at the same time unless both read.
//!
//! Who waits for which posts is fixed, so that what happens before what is the same in every interleaving: each rank has
//! a vector clock of the posts that it knows of, and every access has to know of all those before it that it conflicts
//! with. One execution proves them all. It proves as well that every rank ends with what the operation promises, sums
//! complete and in canonical order, that nobody waits for ever, and all of it across calls that follow one another: the
//! slots of a call are those of the call before the previous one, its lines and sheets those of the fourth before, and
//! nothing but the rule of [`enter`](dist_transport::Direct::enter) keeps them apart. When a call ends, its memory is the
//! caller's again.
//!
//! ```
//! use dist_algos::direct::{DirectAlgorithm, DirectCollective, verify};
//!
//! let report = verify::prove(&verify::plans(DirectCollective::AllReduce, DirectAlgorithm::Staged, 5))?;
//! assert_eq!(report.calls, 5);
//! # Ok::<(), dist_algos::Error>(())
//! ```

mod draw;
mod machine;
pub mod mutate;

use dist_transport::CALLS_MAX;

use super::schedule::PublishPlace;
use super::{DirectAlgorithm, DirectCollective, DirectPlan, DirectStep, RemoteAccess};
use crate::Result;
pub use draw::draw;
use machine::{DirectMachine, Knowledge};

/// What was counted in correct schedules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DirectReport {
    /// Calls in a row.
    pub calls: usize,
    /// Posts that follow one another.
    pub rounds: usize,
    /// Steps of all ranks together.
    pub steps: usize,
}

/// What every rank does in one call.
#[derive(Clone, Debug)]
pub struct Call {
    /// What the call is to achieve, and how memory is cut.
    pub plan: DirectPlan,
    /// The steps of each rank.
    pub programs: Vec<Vec<DirectStep>>,
}

impl Call {
    /// The schedules of a plan.
    pub fn new(plan: DirectPlan) -> Self {
        let programs = dist_transport::Rank::all(plan.world_size()).map(|rank| plan.schedule(rank).collect());
        Self { plan, programs: programs.collect() }
    }
}

/// Calls that show everything that a form can do: pipelines shorter and longer than there are slots, short calls in
/// between, whose root is another rank, and, where ranks go ahead of others, as many in a row as come back to their places.
/// None if the form does not serve the task.
pub fn plans(collective: DirectCollective, algorithm: DirectAlgorithm, world_size: usize) -> Vec<DirectPlan> {
    if !algorithm.serves(collective) {
        return Vec::new();
    }
    let is_pipeline =
        algorithm.remote_access() == RemoteAccess::Nothing && collective != DirectCollective::Barrier;
    let blocks: &[usize] = if is_pipeline { &[6, 1, 9, 2] } else { &[1; 4] };
    let in_slots =
        |&blocks| DirectPlan::in_blocks((collective, algorithm), world_size, blocks, PublishPlace::Slot);
    let mut plans: Vec<DirectPlan> = blocks.iter().map(in_slots).collect();
    let in_line = algorithm == DirectAlgorithm::OneShot && collective.places(algorithm, world_size) == 1;
    let turned = collective.rooted_at(world_size - 1);
    let short =
        |collective, published| DirectPlan::in_blocks((collective, algorithm), world_size, 1, published);
    plans.insert(2, short(turned, if in_line { PublishPlace::FlagLine } else { PublishPlace::Slot }));
    if in_line && collective.root().is_some() {
        plans.insert(3, short(turned, PublishPlace::EagerBuffer));
        let one_root = [collective].into_iter().cycle().take(CALLS_MAX + 1);
        let two_roots = [collective, turned].into_iter().cycle().take(CALLS_MAX + 1);
        for published in [PublishPlace::EagerBuffer, PublishPlace::FlagLine] {
            plans.extend(
                one_root.clone().chain(two_roots.clone()).map(|collective| short(collective, published)),
            );
        }
    }
    // Slots change hands from one call to the next as often as they have in all before.
    let mut generations = [0; 2];
    for (call, plan) in plans.iter_mut().enumerate() {
        *plan = plan.with_generation(generations[call % 2]);
        generations[call % 2] += plan.generations();
    }
    plans
}

/// Proves that these calls, one after the other, do what they are for.
///
/// # Errors
/// The first thing found to be wrong, with the rank and the step in its call.
pub fn prove(plans: &[DirectPlan]) -> Result<DirectReport> {
    let calls: Vec<Call> = plans.iter().map(|&plan| Call::new(plan)).collect();
    check(&calls)
}

/// As [`prove`], of any steps.
///
/// # Errors
/// As for [`prove`].
pub fn check(calls: &[Call]) -> Result<DirectReport> {
    let world_size = calls.first().map_or(0, |call| call.plan.world_size());
    let mut machine = DirectMachine::new(world_size, Knowledge::All);
    for call in calls {
        machine.call(&call.plan, call.programs.iter().map(|program| program.iter().copied()))?;
    }
    Ok(machine.report())
}

/// Proves one call of a plan, whatever calls come before and after it. That is enough for a program that runs it: between
/// calls, the rule of [`enter`](dist_transport::Direct::enter) keeps the places apart that they use, and a rank enters a call
/// when it has left the one before.
///
/// The steps are made one at a time. First a rank counts on the posts that it has waited for itself only, so that the time
/// grows with the square of the number of ranks; only a plan that needs it is proven with what the posters knew, too. Of a plan
/// of many blocks, fewer are proven: see [`DirectPlan::shortened`].
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

//! Proofs of the algorithms that treat all ranks alike.

use dist_transport::Rank;

use super::rotation::are_rotated;
use super::{Goal, RankProgram, Report, check, check_roots};
use crate::{Chunks, CollectiveKind, Cost, Error, MessageAlgorithm, Order, Result, Source};

/// The proven properties of an algorithm in a world, for the most expensive root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Proof {
    /// The cost.
    pub cost: Cost,
    /// The class of the reduction order; `None` if nothing is reduced.
    pub order: Option<Order>,
}

impl Proof {
    /// Adds the report of another root.
    fn add(&mut self, report: &Report) {
        self.cost = self.cost.at_least(report.cost());
        self.order = report.order;
    }
}

/// Returns the steps of every rank; none if the world is not supported.
pub fn programs(algorithm: &MessageAlgorithm, world_size: usize, root: usize) -> Vec<RankProgram> {
    Rank::all(world_size).map(|rank| program(algorithm, rank, root)).collect()
}

/// Returns the steps of a rank; none if the world is not supported.
pub(super) fn program(algorithm: &MessageAlgorithm, rank: Rank, root: usize) -> RankProgram {
    let phases = algorithm.phases(rank, root);
    RankProgram::new(algorithm.collective, phases)
}

/// Proves the schedules for a world of this size and one root. The root is ignored if the operation has none.
///
/// # Errors
/// As for [`check`], or if the algorithm does not have the properties that it declares.
pub fn prove(algorithm: &MessageAlgorithm, world_size: usize, root: usize) -> Result<Report> {
    check_exists(algorithm, world_size, root)?;
    prove_programs(algorithm, &programs(algorithm, world_size, root), root)
}

/// Proves these programs, one for each rank, as if they were those of the algorithm.
///
/// # Errors
/// As for [`prove`].
pub(super) fn prove_programs(
    algorithm: &MessageAlgorithm,
    programs: &[RankProgram],
    root: usize,
) -> Result<Report> {
    let world_size = programs.len();
    let report = check(Goal::of(algorithm, world_size, root), algorithm.chunks(world_size), programs)?;
    check_held(algorithm, programs, root)?;
    check_claims(algorithm, world_size, &report)?;
    Ok(report)
}

/// Proves the schedules for a world of this size and every root.
///
/// # Errors
/// As for [`prove`], or if no root has the declared cost.
pub fn prove_world(algorithm: &MessageAlgorithm, world_size: usize) -> Result<Proof> {
    check_exists(algorithm, world_size, 0)?;
    let mut proof = Proof { cost: Cost::NOTHING, order: None };
    let roots = algorithm.collective.roots(world_size);
    let goal = |root| Goal::of(algorithm, world_size, root);
    if goal(0).reduces() {
        let programs = |root| programs(algorithm, world_size, root);
        check_roots(goal, algorithm.chunks(world_size), roots, programs, |report| {
            check_claims(algorithm, world_size, report)?;
            proof.add(report);
            Ok(())
        })?;
    } else {
        // The order of additions depends on the root; everything else is only rotated with the root.
        let first = programs(algorithm, world_size, 0);
        proof.add(&prove_programs(algorithm, &first, 0)?);
        for root in roots.skip(1) {
            let programs = programs(algorithm, world_size, root);
            if !are_rotated(algorithm.chunks(world_size), &first, &programs, root) {
                proof.add(&prove_programs(algorithm, &programs, root)?);
            }
        }
    }
    check_cost(algorithm, world_size, proof.cost, |found, claimed| found == claimed)?;
    Ok(proof)
}

fn check_exists(algorithm: &MessageAlgorithm, world_size: usize, root: usize) -> Result<()> {
    if algorithm.supports(world_size) && algorithm.collective.roots(world_size).contains(&root) {
        return Ok(());
    }
    let (operation, algorithm) = (algorithm.collective.name(), algorithm.name);
    Err(Error::Unsupported { operation, algorithm, world_size })
}

/// Checks that no rank uses chunks that it needs no memory for.
fn check_held(algorithm: &MessageAlgorithm, programs: &[RankProgram], root: usize) -> Result<()> {
    if !matches!(algorithm.collective, CollectiveKind::Gather | CollectiveKind::Scatter) {
        return Ok(());
    }
    for (rank, program) in Rank::all(programs.len()).zip(programs) {
        let held = algorithm.held(rank, root);
        for (step, (sends, receives)) in program.steps.iter().map(|step| step.halves(rank)).enumerate() {
            let sends = sends.iter().filter(|send| send.of == Source::Buffer).map(|send| send.chunks);
            let touched = sends.chain(receives.iter().map(|receive| receive.chunks));
            if let Some(chunks) = touched.into_iter().find(|chunks: &Chunks| !held.includes(*chunks)) {
                return Err(Error::NoChunk { rank: rank.index(), step, chunks, parts: held.len() });
            }
        }
    }
    Ok(())
}

/// Compares the declared properties of an algorithm with the proven ones. With some roots an algorithm may cost less
/// than it declares. An algorithm that declares no order must be canonical, because it is chosen for any order.
fn check_claims(algorithm: &MessageAlgorithm, world_size: usize, report: &Report) -> Result<()> {
    let has_root = algorithm.collective.is_rooted();
    let holds = |found, claimed| found == claimed || has_root && found < claimed;
    check_cost(algorithm, world_size, report.cost(), holds)?;
    let claimed = algorithm.order(world_size).unwrap_or(Order::Canonical);
    match report.order {
        Some(found) if claimed != found => Err(Error::OrderClaim { claimed, found }),
        _ => Ok(()),
    }
}

/// Compares the declared cost of an algorithm with the proven one.
pub(super) fn check_cost(
    algorithm: &MessageAlgorithm,
    world_size: usize,
    found: Cost,
    holds: impl Fn(usize, usize) -> bool,
) -> Result<()> {
    let claimed = algorithm.cost(world_size);
    let table = [
        ("rounds", claimed.rounds, found.rounds),
        ("chunks on the longest path", claimed.path, found.path),
        ("chunks sent", claimed.sent_max, found.sent_max),
        ("chunks reduced", claimed.reduced_max, found.reduced_max),
        ("messages of all ranks", claimed.all.count, found.all.count),
        ("chunks sent by all ranks", claimed.all.chunks, found.all.chunks),
        ("messages that wait for one another", claimed.depth.count, found.depth.count),
        ("chunks that wait for one another", claimed.depth.chunks, found.depth.chunks),
        ("chunks reduced by all ranks", claimed.reduced, found.reduced),
    ];
    match table.into_iter().find(|&(_, claimed, found)| !holds(found, claimed)) {
        Some((what, claimed, found)) => Err(Error::Claim { what, claimed, found }),
        None => Ok(()),
    }
}

//! The verifier proves schedules by executing the schedules of all ranks on symbols instead of bytes.
//!
//! The content of a chunk is the tree of the additions that produced it. For one world size the verifier proves
//! several properties. Every contribution arrives exactly once. No data is read before it is written or lost before
//! it is used. Sends match receives, and no rank waits for ever, even without any buffering. It also counts
//! messages, chunks and rounds, and finds the class of the reduction order. The order and the cost that an
//! algorithm declares are compared with the results.
//!
//! ```
//! use dist_algos::{ALGORITHMS, Order, Partition, pairwise, verify};
//!
//! let report = verify::prove(&pairwise::ALL_REDUCE, 5, 0)?;
//! assert_eq!(report.order, Some(Order::Canonical));
//! assert_eq!(report.rounds, 7);
//! let partition = Partition::new(1000, 4, 5).unwrap();
//! assert_eq!(report.traffic(0, &partition, None).bytes_sent, 2 * 4 * 800);
//!
//! for algorithm in ALGORITHMS.messages().filter(|algorithm| algorithm.supports(6)) {
//!     verify::prove_world(algorithm, 6)?;
//! }
//! # Ok::<(), dist_algos::Error>(())
//! ```

mod draw;
mod forest;
mod goal;
mod machine;
mod messages;
pub mod mutate;
mod parallel;
mod report;
mod rotation;
pub mod symmetry;
mod two_level;

use std::ops::Range;

use crate::{Chunks, CollectiveKind, Error, Messages, Order, Phases, Result, Step};
use forest::{Forest, SumId};
use goal::RequiredContent;
use machine::Machine;

pub(crate) use draw::table;
pub use draw::{draw, draw_programs};
pub use goal::{Goal, LowerBound};
pub use messages::{Proof, programs, prove, prove_world};
pub use parallel::on_all_cores;
pub use report::Report;
pub use two_level::{two_level, two_level_programs};

/// The steps of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankProgram {
    /// The steps in order.
    pub steps: Vec<Step>,
    /// The point at which it finishes the sums that it owns, for [`Goal::AllReduce`].
    pub finish: Option<Finish>,
}

/// The point at which sums are finished, for example by the division of a mean. Nothing may be added to a finished
/// sum, and only finished sums count as results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Finish {
    /// The number of steps before it.
    pub after: usize,
    /// The chunks whose sums are complete there.
    pub owned: Chunks,
}

/// Proves that these programs, one for each rank, reach the goal on memory of `chunks` chunks.
///
/// # Errors
/// The first error that is found, with the rank and the step.
pub fn check(goal: Goal, chunks: usize, programs: &[RankProgram]) -> Result<Report> {
    let mut machine = Machine::new(goal, chunks, programs.len());
    machine.run(programs)?;
    conclude(&mut machine, chunks)
}

/// Proves programs for several roots. Steps that do not depend on the root are executed once.
///
/// # Errors
/// As for [`check`].
fn check_roots(
    goal: impl Fn(usize) -> Goal,
    chunks: usize,
    roots: Range<usize>,
    programs: impl Fn(usize) -> Vec<RankProgram>,
    mut found: impl FnMut(&Report) -> Result<()>,
) -> Result<()> {
    let (first, last) = (programs(roots.start), programs(roots.end - 1));
    let common: Vec<RankProgram> = first.iter().zip(&last).map(|(first, last)| first.common(last)).collect();
    let mut machine = Machine::new(goal(roots.start), chunks, common.len());
    machine.run(&common)?;
    let begun = machine.ranks.clone();
    for root in roots {
        let programs = programs(root);
        if !programs.iter().zip(&common).all(|(program, common)| program.steps.starts_with(&common.steps)) {
            found(&check(goal(root), chunks, &programs)?)?;
            continue;
        }
        machine.goal = goal(root);
        machine.ranks.clone_from(&begun);
        machine.run(&programs)?;
        found(&conclude(&mut machine, chunks)?)?;
    }
    Ok(())
}

impl RankProgram {
    /// Returns the program of a schedule. An all_reduce finishes its sums between the two phases.
    fn new(collective: CollectiveKind, phases: Phases<impl Iterator<Item = Step>>) -> Self {
        let Phases { first: mut steps, owned, second } = phases.computed();
        let finish = Finish { after: steps.len(), owned };
        steps.extend(second);
        Self { steps, finish: (collective == CollectiveKind::AllReduce).then_some(finish) }
    }

    /// Returns the steps that both begin with; none if sums are finished.
    fn common(&self, other: &Self) -> Self {
        let same = self.steps.iter().zip(&other.steps).take_while(|(step, other)| step == other).count();
        let same = if self.finish.or(other.finish).is_some() { 0 } else { same };
        Self { steps: self.steps[..same].to_vec(), finish: None }
    }
}

/// Checks that all ranks have reached their ends and the goal.
fn conclude(machine: &mut Machine, chunks: usize) -> Result<Report> {
    machine.deadlock()?;
    let (goal, world_size) = (machine.goal, machine.ranks.len());
    for (rank, state) in machine.ranks.iter().enumerate() {
        if let Some(slot) = state.slots.iter().position(|held| held.is_some_and(|held| !held.is_used)) {
            return Err(Error::Leftover { rank, slot });
        }
        if goal == Goal::Barrier
            && let Some(absent) = state.heard.missing(world_size)
        {
            return Err(Error::LeavesEarly { rank, absent });
        }
    }
    let order = check_final_content(goal, chunks, machine)?;
    let clocks = || machine.ranks.iter().map(|state| state.clock);
    let depths = || machine.ranks.iter().map(|state| state.depth);
    Ok(Report {
        rounds: clocks().map(|clock| clock.rounds).max().unwrap_or(0),
        path: clocks().map(|clock| clock.path).max().unwrap_or(0),
        depth: Messages::new(
            depths().map(|depth| depth.rounds).max().unwrap_or(0),
            depths().map(|depth| depth.path).max().unwrap_or(0),
        ),
        steps_max: machine.ranks.iter().map(|state| state.report.steps).max().unwrap_or(0),
        slots_max: machine.ranks.iter().map(|state| state.report.slots).max().unwrap_or(0),
        peers_max: machine.ranks.iter().map(|state| state.report.peers.len()).max().unwrap_or(0),
        order,
        ranks: machine.ranks.iter_mut().map(|state| std::mem::take(&mut state.report)).collect(),
    })
}

/// Checks the final content of every chunk and finds the class of the reduction order.
fn check_final_content(goal: Goal, chunks: usize, machine: &mut Machine) -> Result<Option<Order>> {
    let Machine { forest, ranks, .. } = machine;
    let mut sums = ResultSums::new(ranks.len(), chunks);
    for (rank, state) in ranks.iter().enumerate() {
        for chunk in 0..chunks {
            let end = goal.ends(ranks.len(), rank, chunk);
            let tree = state.buffer[chunk].filter(|&tree| is_result(end, tree, forest));
            match (end, tree) {
                (RequiredContent::Anything, _) | (RequiredContent::Piece(_), Some(_)) => {}
                (_, None) => return Err(Error::WrongResult { rank, steps: state.report.steps, chunk }),
                (RequiredContent::Finished, Some(tree)) => {
                    let whole = forest.unfinished(tree).expect("a result is finished");
                    sums.add(forest, (rank, chunk), ranks.len(), whole)?;
                }
                (RequiredContent::Sum(count), Some(tree)) => sums.add(forest, (rank, chunk), count, tree)?,
            }
        }
    }
    Ok((goal.reduces() && !ranks.is_empty()).then(|| sums.order()))
}

/// Returns `true` if a chunk with this content ends as required.
fn is_result(end: RequiredContent, tree: SumId, forest: &Forest) -> bool {
    match end {
        RequiredContent::Anything => true,
        RequiredContent::Piece(piece) => forest.is_leaf(tree, piece),
        RequiredContent::Sum(count) => forest.is_sum_of(tree, count),
        RequiredContent::Finished => forest.unfinished(tree).is_some_and(|sum| forest.is_total(sum)),
    }
}

/// The sums that are results, and the common properties of their trees.
struct ResultSums {
    /// T(n), for every n that has occurred.
    canonical: Vec<Option<SumId>>,
    /// The number of ranks in the last sum of each chunk, and its tree.
    found: Vec<Option<(usize, SumId)>>,
    last: Option<SumId>,
    are_canonical: bool,
    are_one: bool,
}

impl ResultSums {
    fn new(world_size: usize, chunks: usize) -> Self {
        let (canonical, found) = (vec![None; world_size + 1], vec![None; chunks]);
        Self { canonical, found, last: None, are_canonical: true, are_one: true }
    }

    /// Adds a result that is the sum of this many ranks.
    fn add(
        &mut self,
        forest: &mut Forest,
        (rank, chunk): (usize, usize),
        count: usize,
        tree: SumId,
    ) -> Result<()> {
        match self.found[chunk].replace((count, tree)) {
            Some((others, other)) if others == count && !forest.are_alike(other, tree) => {
                return Err(Error::Disagreement { rank, chunk });
            }
            _ => {}
        }
        let canonical = *self.canonical[count].get_or_insert_with(|| forest.canonical(0, count));
        self.are_canonical &= tree == canonical;
        self.are_one &= self.last.replace(tree).is_none_or(|last| forest.are_alike(last, tree));
        Ok(())
    }

    /// Returns the strictest class that all results are in.
    fn order(&self) -> Order {
        match (self.are_canonical, self.are_one) {
            (true, _) => Order::Canonical,
            (false, true) => Order::Uniform,
            (false, false) => Order::Any,
        }
    }
}

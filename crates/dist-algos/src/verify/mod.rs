//! The verifier: proves schedules correct by executing those of all ranks on symbols instead of bytes.
//!
//! A chunk's content is the tree of what was added, in which order. For one world size the verifier proves that
//! every contribution arrives exactly once, nothing is read before it is written or lost before it is used,
//! sends match receives, and no rank waits for ever, even if no message is ever buffered. It counts messages,
//! chunks and rounds, and finds the class of orders that the reduction is in. What an algorithm says about
//! itself (order, cost) is compared with what was found.
//!
//! ```
//! use dist_algos::{AllReduce, Order, Partition, verify};
//!
//! let report = verify::all_reduce(AllReduce::PairwiseRing, 5)?;
//! assert_eq!(report.order, Some(Order::Canonical));
//! assert_eq!(report.rounds, 8);
//! let partition = Partition::new(1000, 4, 5).unwrap();
//! assert_eq!(report.traffic(0, &partition).bytes_sent, 2 * 4 * 800);
//! # Ok::<(), dist_algos::Error>(())
//! ```

mod forest;
pub mod hierarchical;
mod machine;
mod report;

use dist_transport::Rank;

use crate::cost::log2_ceil;
use crate::{
    AllGather, AllReduce, Barrier, Broadcast, Chunks, Cost, Error, Order, Reduce, ReduceScatter, Result, Step,
};
use forest::Tree;
use machine::Machine;

pub use report::Report;

/// What schedules are to achieve together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Goal {
    /// Every rank has the finished sum of every chunk.
    AllReduce,
    /// Rank `r` has the sum of chunk `r`.
    ReduceScatter,
    /// Every rank has every chunk, where rank `r` had chunk `r`.
    AllGather,
    /// Every rank has every chunk, where the root had all.
    Broadcast {
        /// The rank that has something to begin with.
        root: usize,
    },
    /// The root has the sum of every chunk.
    Reduce {
        /// The rank that gets the result.
        root: usize,
    },
    /// No rank ends before every rank has begun.
    Barrier,
}

/// What one rank does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// Its steps, one after the other.
    pub steps: Vec<Step>,
    /// Where it finishes the sums that it owns, for [`Goal::AllReduce`].
    pub finish: Option<Finish>,
}

/// Where sums are finished, as by the division of a mean: what was finished must not be added to any more, and
/// only what was finished counts as a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Finish {
    /// After how many steps.
    pub after: usize,
    /// The chunks whose sums are complete there.
    pub owned: Chunks,
}

/// What no schedule can do better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LowerBound {
    /// Messages that follow one another.
    pub rounds: usize,
    /// What the busiest rank sends, or receives, at least; in units of `buffer / world_size`.
    pub moved: usize,
}

impl Goal {
    /// The fewest rounds and bytes for this goal, which one schedule may not be able to have together.
    pub const fn lower_bound(self, world_size: usize) -> LowerBound {
        let peers = world_size.saturating_sub(1);
        let moved = match self {
            Self::AllReduce => 2 * peers,
            Self::ReduceScatter | Self::AllGather => peers,
            Self::Broadcast { .. } | Self::Reduce { .. } if peers > 0 => world_size,
            Self::Broadcast { .. } | Self::Reduce { .. } | Self::Barrier => 0,
        };
        LowerBound { rounds: log2_ceil(world_size), moved }
    }

    /// Whether a rank has something in a chunk to begin with.
    fn begins_with(self, rank: usize, chunk: usize) -> bool {
        match self {
            Self::AllReduce | Self::ReduceScatter | Self::Reduce { .. } | Self::Barrier => true,
            Self::AllGather => rank == chunk,
            Self::Broadcast { root } => rank == root,
        }
    }

    /// Whether a rank has to have something in a chunk in the end.
    fn ends_with(self, rank: usize, chunk: usize) -> bool {
        match self {
            Self::AllReduce | Self::AllGather | Self::Broadcast { .. } => true,
            Self::ReduceScatter => rank == chunk,
            Self::Reduce { root } => rank == root,
            Self::Barrier => false,
        }
    }
}

/// Proves that these programs, one for each rank, reach the goal on a buffer cut into `chunks`.
///
/// # Errors
/// The first thing found to be wrong, with the rank and the step.
pub fn check(goal: Goal, chunks: usize, programs: &[Program]) -> Result<Report> {
    let mut machine = Machine::new(goal, chunks, programs);
    machine.run()?;
    for (rank, state) in machine.ranks.iter().enumerate() {
        if let Some(slot) = state.slots.iter().position(Option::is_some) {
            return Err(Error::Leftover { rank, slot });
        }
        if goal == Goal::Barrier
            && let Some(absent) = state.heard.missing(programs.len())
        {
            return Err(Error::LeavesEarly { rank, absent });
        }
    }
    let order = results(goal, chunks, &mut machine)?;
    let clocks = || machine.ranks.iter().map(|state| state.clock);
    Ok(Report {
        rounds: clocks().map(|clock| clock.rounds).max().unwrap_or(0),
        path: clocks().map(|clock| clock.path).max().unwrap_or(0),
        steps_max: machine.ranks.iter().map(|state| state.report.steps).max().unwrap_or(0),
        slots_max: machine.ranks.iter().map(|state| state.report.slots).max().unwrap_or(0),
        peers_max: machine.ranks.iter().map(|state| state.report.peers.len()).max().unwrap_or(0),
        order,
        ranks: machine.ranks.into_iter().map(|state| state.report).collect(),
    })
}

/// Checks what every chunk ends as, and finds the class of the order in which they were reduced.
fn results(goal: Goal, chunks: usize, machine: &mut Machine<'_>) -> Result<Option<Order>> {
    let mut trees: Vec<Option<Tree>> = vec![None; chunks];
    for (rank, state) in machine.ranks.iter().enumerate() {
        for chunk in (0..chunks).filter(|&chunk| goal.ends_with(rank, chunk)) {
            let wrong = Error::WrongResult { rank, steps: state.report.steps, chunk };
            let tree = result(goal, chunk, state.buffer[chunk], machine).ok_or(wrong)?;
            match trees[chunk] {
                Some(other) if other != tree => return Err(Error::Disagreement { rank, chunk }),
                _ => trees[chunk] = Some(tree),
            }
        }
    }
    let reduces = matches!(goal, Goal::AllReduce | Goal::ReduceScatter | Goal::Reduce { .. });
    if !reduces || machine.ranks.is_empty() {
        return Ok(None);
    }
    let canonical = machine.forest.canonical(0, machine.ranks.len());
    let order = if trees.iter().all(|tree| *tree == Some(canonical)) {
        Order::Canonical
    } else if trees.windows(2).all(|pair| pair[0] == pair[1]) {
        Order::Uniform
    } else {
        Order::Any
    };
    Ok(Some(order))
}

/// The tree of a chunk that ends as it should.
fn result(goal: Goal, chunk: usize, content: Option<Tree>, machine: &Machine<'_>) -> Option<Tree> {
    let content = content?;
    let forest = &machine.forest;
    match goal {
        Goal::AllReduce => forest.unfinished(content).filter(|&sum| forest.is_total(sum)),
        Goal::ReduceScatter | Goal::Reduce { .. } => Some(content).filter(|&sum| forest.is_total(sum)),
        Goal::AllGather => forest.is_leaf(content, chunk).then_some(content),
        Goal::Broadcast { root } => forest.is_leaf(content, root).then_some(content),
        Goal::Barrier => None,
    }
}

/// The programs of an all_reduce: one for each rank.
pub fn all_reduce_programs(algorithm: AllReduce, world_size: usize) -> Vec<Program> {
    Rank::all(world_size)
        .map(|rank| {
            let phases = algorithm.phases(rank);
            let mut steps: Vec<Step> = phases.reduce.collect();
            let finish = Some(Finish { after: steps.len(), owned: phases.owned });
            steps.extend(phases.gather);
            Program { steps, finish }
        })
        .collect()
}

/// Proves an all_reduce for a world of this size.
///
/// # Errors
/// As for [`check`], or if the algorithm is not what it says about itself.
pub fn all_reduce(algorithm: AllReduce, world_size: usize) -> Result<Report> {
    supported(algorithm.supports(world_size), AllReduce::OPERATION, algorithm.name(), world_size)?;
    let programs = all_reduce_programs(algorithm, world_size);
    let report = check(Goal::AllReduce, algorithm.chunks(world_size), &programs)?;
    claims(report, algorithm.cost(world_size), Some(algorithm.order(world_size)))
}

/// Proves a reduce_scatter for a world of this size.
///
/// # Errors
/// As for [`all_reduce`], or if the algorithm does not support the world.
pub fn reduce_scatter(algorithm: ReduceScatter, world_size: usize) -> Result<Report> {
    supported(algorithm.supports(world_size), ReduceScatter::OPERATION, algorithm.name(), world_size)?;
    let programs = programs(world_size, |rank| algorithm.schedule(rank).into_iter().flatten());
    let report = check(Goal::ReduceScatter, algorithm.chunks(world_size), &programs)?;
    claims(report, algorithm.cost(world_size), Some(algorithm.order(world_size)))
}

/// Proves an all_gather for a world of this size.
///
/// # Errors
/// As for [`all_reduce`], or if the algorithm does not support the world.
pub fn all_gather(algorithm: AllGather, world_size: usize) -> Result<Report> {
    supported(algorithm.supports(world_size), AllGather::OPERATION, algorithm.name(), world_size)?;
    let programs = programs(world_size, |rank| algorithm.schedule(rank).into_iter().flatten());
    let report = check(Goal::AllGather, algorithm.chunks(world_size), &programs)?;
    claims(report, algorithm.cost(world_size), None)
}

/// Proves a broadcast for a world of this size and a root.
///
/// # Errors
/// As for [`all_reduce`].
pub fn broadcast(algorithm: Broadcast, world_size: usize, root: usize) -> Result<Report> {
    let supports = algorithm.supports(world_size) && root < world_size;
    supported(supports, Broadcast::OPERATION, algorithm.name(), world_size)?;
    let programs = programs(world_size, |rank| algorithm.schedule(rank, root));
    let report = check(Goal::Broadcast { root }, algorithm.chunks(world_size), &programs)?;
    claims(report, algorithm.cost(world_size), None)
}

/// Proves a reduce for a world of this size and a root.
///
/// # Errors
/// As for [`all_reduce`].
pub fn reduce(algorithm: Reduce, world_size: usize, root: usize) -> Result<Report> {
    let supports = algorithm.supports(world_size) && root < world_size;
    supported(supports, Reduce::OPERATION, algorithm.name(), world_size)?;
    let programs = programs(world_size, |rank| algorithm.schedule(rank, root));
    let report = check(Goal::Reduce { root }, algorithm.chunks(world_size), &programs)?;
    claims(report, algorithm.cost(world_size), Some(algorithm.order(world_size)))
}

/// Proves a barrier for a world of this size.
///
/// # Errors
/// As for [`all_reduce`].
pub fn barrier(algorithm: Barrier, world_size: usize) -> Result<Report> {
    supported(algorithm.supports(world_size), Barrier::OPERATION, algorithm.name(), world_size)?;
    let programs = programs(world_size, |rank| algorithm.schedule(rank));
    let report = check(Goal::Barrier, 0, &programs)?;
    claims(report, algorithm.cost(world_size), None)
}

/// One program for each rank, without a finish.
fn programs<S: Iterator<Item = Step>>(world_size: usize, schedule: impl Fn(Rank) -> S) -> Vec<Program> {
    Rank::all(world_size).map(|rank| Program { steps: schedule(rank).collect(), finish: None }).collect()
}

fn supported(
    supports: bool,
    operation: &'static str,
    algorithm: &'static str,
    world_size: usize,
) -> Result<()> {
    if supports { Ok(()) } else { Err(Error::Unsupported { operation, algorithm, world_size }) }
}

/// Compares what an algorithm says about itself with what was found. For some roots the busiest rank sends or
/// reduces less than is said.
fn claims(report: Report, cost: Cost, order: Option<Order>) -> Result<Report> {
    let (sent, reduced) = (report.chunks_sent_max(), report.reductions_max());
    let table = [
        ("rounds", cost.rounds, report.rounds, cost.rounds == report.rounds),
        ("chunks on the longest path", cost.path, report.path, cost.path == report.path),
        ("chunks sent", cost.sent_max, sent, cost.sent_max >= sent),
        ("chunks reduced", cost.reduced_max, reduced, cost.reduced_max >= reduced),
    ];
    for (what, claimed, found, holds) in table {
        if !holds {
            return Err(Error::Claim { what, claimed, found });
        }
    }
    match (order, report.order) {
        (Some(claimed), Some(found)) if claimed != found => Err(Error::OrderClaim { claimed, found }),
        _ => Ok(report),
    }
}

//! The algorithms of all operations, as subjects of the verifier.

use dist_transport::Rank;

use super::symmetry::are_turned;
use super::{Finish, Goal, RankProgram, Report, check, check_roots};
use crate::scan::Extent;
use crate::{
    AllGather, AllReduce, AllToAll, Barrier, Broadcast, Choice, Chunks, Cost, CostModel, Error, Gather,
    Order, Reduce, ReduceScatter, Result, Scan, Scatter, Source, Step,
};

/// One algorithm of one operation.
///
/// ```
/// use dist_algos::verify::Subject;
///
/// for subject in Subject::all().filter(|subject| subject.supports(6)) {
///     for root in subject.roots(6) {
///         subject.prove(6, root)?;
///     }
/// }
/// # Ok::<(), dist_algos::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Subject {
    /// An algorithm of all_reduce.
    AllReduce(AllReduce),
    /// An algorithm of reduce_scatter.
    ReduceScatter(ReduceScatter),
    /// An algorithm of all_gather.
    AllGather(AllGather),
    /// An algorithm of broadcast.
    Broadcast(Broadcast),
    /// An algorithm of reduce.
    Reduce(Reduce),
    /// An algorithm of gather.
    Gather(Gather),
    /// An algorithm of scatter.
    Scatter(Scatter),
    /// An algorithm of all_to_all.
    AllToAll(AllToAll),
    /// An algorithm of scan, inclusive or exclusive.
    Scan(Scan, Extent),
    /// An algorithm of barrier.
    Barrier(Barrier),
}

/// The proven properties of an algorithm in a world, for the most expensive root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Proof {
    /// The cost.
    pub cost: Cost,
    /// The order in which it reduces, if it does.
    pub order: Option<Order>,
}

impl Proof {
    /// Adds the report of another root.
    fn add(&mut self, report: &Report) {
        self.cost = self.cost.at_least(report.cost());
        self.order = report.order;
    }
}

/// Evaluates an expression for the algorithm of any operation.
macro_rules! each {
    ($subject:expr, $algorithm:ident => $value:expr) => {
        match $subject {
            Subject::AllReduce($algorithm) => $value,
            Subject::ReduceScatter($algorithm) => $value,
            Subject::AllGather($algorithm) => $value,
            Subject::Broadcast($algorithm) => $value,
            Subject::Reduce($algorithm) => $value,
            Subject::Gather($algorithm) => $value,
            Subject::Scatter($algorithm) => $value,
            Subject::AllToAll($algorithm) => $value,
            Subject::Scan($algorithm, _) => $value,
            Subject::Barrier($algorithm) => $value,
        }
    };
}

const fn operation_of<A: Choice>(_: A) -> &'static str {
    A::OPERATION
}

const fn is_rooted<A: Choice>(_: A) -> bool {
    A::ROOTED
}

impl Subject {
    /// Returns all algorithms of all operations.
    pub fn all() -> impl Iterator<Item = Self> + Clone {
        fn of<A: Choice>(subject: fn(A) -> Subject) -> impl Iterator<Item = Subject> + Clone {
            A::ALL.iter().copied().map(subject)
        }
        of(Self::AllReduce)
            .chain(of(Self::ReduceScatter))
            .chain(of(Self::AllGather))
            .chain(of(Self::Broadcast))
            .chain(of(Self::Reduce))
            .chain(of(Self::Gather))
            .chain(of(Self::Scatter))
            .chain(of(Self::AllToAll))
            .chain(of(|scan| Self::Scan(scan, Extent::Inclusive)))
            .chain(of(|scan| Self::Scan(scan, Extent::Exclusive)))
            .chain(of(Self::Barrier))
    }

    /// Returns the name of the operation.
    pub fn operation(self) -> &'static str {
        match self {
            Self::Scan(_, Extent::Exclusive) => "exclusive_scan",
            _ => each!(self, algorithm => operation_of(algorithm)),
        }
    }

    /// Returns the name of the algorithm.
    pub const fn algorithm(self) -> &'static str {
        each!(self, algorithm => algorithm.name())
    }

    /// Returns `true` if there is a schedule for a world of this size.
    pub const fn supports(self, world_size: usize) -> bool {
        each!(self, algorithm => algorithm.supports(world_size))
    }

    /// Returns the possible roots: every rank, or one number if the operation has no root.
    pub fn roots(self, world_size: usize) -> std::ops::Range<usize> {
        if each!(self, algorithm => is_rooted(algorithm)) { 0..world_size } else { 0..1 }
    }

    /// Returns the number of chunks of the memory; a barrier has one empty chunk.
    pub const fn chunks(self, world_size: usize) -> usize {
        each!(self, algorithm => algorithm.chunks(world_size))
    }

    /// Returns the order in which it reduces, if it does.
    pub fn order(self, world_size: usize) -> Option<Order> {
        each!(self, algorithm => Choice::order(algorithm, world_size))
    }

    /// Returns the cost in a supported world.
    pub fn cost(self, world_size: usize) -> Cost {
        match self {
            Self::Scan(algorithm, extent) => algorithm.cost(world_size, extent),
            _ => each!(self, algorithm => Choice::cost(algorithm, world_size)),
        }
    }

    /// Returns the name of the algorithm that [`Choice::suggest`] returns for the operation.
    pub fn suggested(self, world_size: usize, bytes: usize, order: Order, model: &CostModel) -> &'static str {
        fn of<A: Choice>(_: A, (world_size, bytes): (usize, usize), order: Order, model: &CostModel) -> A {
            A::suggest(world_size, bytes, order, model)
        }
        each!(self, algorithm => of(algorithm, (world_size, bytes), order, model).name())
    }

    /// Returns the goal.
    pub const fn goal(self, root: usize) -> Goal {
        match self {
            Self::AllReduce(_) => Goal::AllReduce,
            Self::ReduceScatter(_) => Goal::ReduceScatter,
            Self::AllGather(_) => Goal::AllGather,
            Self::Broadcast(_) => Goal::Broadcast { root },
            Self::Reduce(_) => Goal::Reduce { root },
            Self::Gather(_) => Goal::Gather { root },
            Self::Scatter(_) => Goal::Scatter { root },
            Self::AllToAll(algorithm) => match algorithm.source() {
                Source::Input => Goal::AllToAll,
                Source::Buffer => Goal::AllToAllTurned,
            },
            Self::Scan(_, extent) => Goal::Scan(extent),
            Self::Barrier(_) => Goal::Barrier,
        }
    }

    /// Returns the steps of a rank; none if the world is not supported.
    pub fn program(self, rank: Rank, root: usize) -> RankProgram {
        let steps: Vec<Step> = match self {
            Self::Scan(algorithm, extent) => algorithm.schedule(rank, extent).collect(),
            _ => each!(self, algorithm => algorithm.steps(rank, root).collect()),
        };
        let finish = match self {
            Self::AllReduce(algorithm) => {
                let phases = algorithm.phases(rank);
                Some(Finish { after: phases.reduce.count(), owned: phases.owned })
            }
            _ => None,
        };
        RankProgram { steps, finish }
    }

    /// Returns the steps of every rank.
    pub fn programs(self, world_size: usize, root: usize) -> Vec<RankProgram> {
        Rank::all(world_size).map(|rank| self.program(rank, root)).collect()
    }

    /// Proves the schedules for a world of this size and one root. The root is ignored if the operation has none.
    ///
    /// # Errors
    /// As for [`check`], or if the algorithm does not have the properties that it declares.
    pub fn prove(self, world_size: usize, root: usize) -> Result<Report> {
        self.check_exists(world_size, root)?;
        self.prove_programs(&self.programs(world_size, root), root)
    }

    /// Proves programs, one for each rank, in place of the algorithm's own.
    ///
    /// # Errors
    /// As for [`prove`](Subject::prove).
    pub(super) fn prove_programs(self, programs: &[RankProgram], root: usize) -> Result<Report> {
        let world_size = programs.len();
        let report = check(self.goal(root), self.chunks(world_size), programs)?;
        self.check_held(programs, root)?;
        self.check_claims(world_size, &report)?;
        Ok(report)
    }

    /// Proves the schedules for a world of this size and every root.
    ///
    /// # Errors
    /// As for [`prove`](Subject::prove), or if no root has the declared cost.
    pub fn prove_world(self, world_size: usize) -> Result<Proof> {
        self.check_exists(world_size, 0)?;
        let mut proof = Proof { cost: Cost::NOTHING, order: None };
        if self.goal(0).reduces() {
            let programs = |root| self.programs(world_size, root);
            let (goal, chunks) = (|root| self.goal(root), self.chunks(world_size));
            check_roots(goal, chunks, self.roots(world_size), programs, |report| {
                self.check_claims(world_size, report)?;
                proof.add(report);
                Ok(())
            })?;
        } else {
            // The order of additions depends on the root; everything else is only rotated with the root.
            let first = self.programs(world_size, 0);
            proof.add(&self.prove_programs(&first, 0)?);
            for root in self.roots(world_size).skip(1) {
                let programs = self.programs(world_size, root);
                if !are_turned(self, &first, &programs, root) {
                    proof.add(&self.prove_programs(&programs, root)?);
                }
            }
        }
        self.check_cost(world_size, proof.cost, |found, claimed| found == claimed)?;
        Ok(proof)
    }

    fn check_exists(self, world_size: usize, root: usize) -> Result<()> {
        if self.supports(world_size) && self.roots(world_size).contains(&root) {
            return Ok(());
        }
        let (operation, algorithm) = (self.operation(), self.algorithm());
        Err(Error::Unsupported { operation, algorithm, world_size })
    }

    /// Checks that no rank uses chunks that it needs no memory for.
    fn check_held(self, programs: &[RankProgram], root: usize) -> Result<()> {
        let held: &dyn Fn(Rank) -> Chunks = match self {
            Self::Gather(algorithm) => &move |rank| algorithm.held(rank, root),
            Self::Scatter(algorithm) => &move |rank| algorithm.held(rank, root),
            _ => return Ok(()),
        };
        for (rank, program) in Rank::all(programs.len()).zip(programs) {
            let held = held(rank);
            for (step, (sends, receives)) in program.steps.iter().map(|step| step.halves(rank)).enumerate() {
                let sends = sends.iter().filter(|send| send.of == Source::Buffer).map(|send| send.chunks);
                let touched = sends.chain(receives.iter().map(|receive| receive.chunks));
                if let Some(chunks) = touched.into_iter().find(|chunks| !held.includes(*chunks)) {
                    return Err(Error::NoChunk { rank: rank.index(), step, chunks, parts: held.len() });
                }
            }
        }
        Ok(())
    }

    /// Compares the declared properties of an algorithm with the proven ones. For some roots they are better.
    fn check_claims(self, world_size: usize, report: &Report) -> Result<()> {
        let has_root = self.roots(2).len() > 1;
        let holds = |found, claimed| found == claimed || has_root && found < claimed;
        self.check_cost(world_size, report.cost(), holds)?;
        match (self.order(world_size), report.order) {
            (Some(claimed), Some(found)) if claimed != found => Err(Error::OrderClaim { claimed, found }),
            _ => Ok(()),
        }
    }

    /// Compares the declared cost of an algorithm with the proven one.
    pub(super) fn check_cost(
        self,
        world_size: usize,
        found: Cost,
        holds: impl Fn(usize, usize) -> bool,
    ) -> Result<()> {
        let claimed = self.cost(world_size);
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
}

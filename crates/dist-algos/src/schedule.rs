//! The iterator over one rank's steps.

use std::fmt;
use std::iter::Chain;

use dist_transport::Rank;

use crate::{Chunks, Step};

/// All steps of one rank, computed one at a time, in some tens of nanoseconds each.
///
/// [`Iterator::chain`] runs one schedule after another.
#[derive(Debug)]
pub struct Schedule(StepSource);

/// The source of the steps.
enum StepSource {
    Indexed {
        rank: Rank,
        root: usize,
        next: usize,
        end: usize,
        step: StepFn,
    },
    /// Steps that depend on the steps before them.
    Iterated(Box<dyn Iterator<Item = Step> + Send>),
}

/// A function that returns the step of a rank, for this root, with this index, or `None` if the rank takes no
/// part in it.
pub type StepFn = fn(Rank, usize, usize) -> Option<Step>;

impl Schedule {
    /// Returns the empty schedule.
    pub const fn nothing(rank: Rank) -> Self {
        Self::new(rank, 0, |_, _, _| None)
    }

    /// Returns the schedule of the steps with indices below `end`. They have no root.
    pub const fn new(rank: Rank, end: usize, step: StepFn) -> Self {
        Self::rooted(rank, 0, end, step)
    }

    /// Returns the schedule of the steps with indices below `end`, for a root. A root outside the world is taken
    /// modulo its size.
    pub const fn rooted(rank: Rank, root: usize, end: usize, step: StepFn) -> Self {
        Self(StepSource::Indexed { rank, root: root % rank.world_size(), next: 0, end, step })
    }

    /// Returns the schedule with these steps. A step may depend on the steps before it.
    pub fn iterated(steps: impl Iterator<Item = Step> + Send + 'static) -> Self {
        Self(StepSource::Iterated(Box::new(steps)))
    }
}

impl Iterator for Schedule {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        match &mut self.0 {
            StepSource::Iterated(steps) => steps.next(),
            StepSource::Indexed { rank, root, next, end, step } => loop {
                let index = *next;
                if index >= *end {
                    return None;
                }
                *next += 1;
                if let Some(step) = step(*rank, *root, index) {
                    return Some(step);
                }
            },
        }
    }
}

impl fmt::Debug for StepSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Indexed { rank, root, next, end, .. } => {
                write!(f, "steps {next} to {end} of {rank:?}, root {root}")
            }
            Self::Iterated(_) => f.write_str("steps that depend on one another"),
        }
    }
}

/// One rank's schedule, in two phases. The second phase may be empty.
///
/// Between the two phases of an all_reduce, the owner of each chunk completes its sum once, for example by the
/// division of a mean. If all ranks own a chunk, each of them completes it.
#[derive(Debug)]
pub struct Phases<S = Schedule> {
    /// The first steps. In an all_reduce they bring the sum of every chunk to its owners.
    pub first: S,
    /// The chunks that this rank then owns, in an all_reduce.
    pub owned: Chunks,
    /// The other steps. In an all_reduce they bring every chunk from its owners to the other ranks.
    pub second: S,
}

impl Phases {
    /// Returns a schedule of one phase.
    pub const fn one(rank: Rank, first: Schedule) -> Self {
        Self { first, owned: Chunks::NONE, second: Schedule::nothing(rank) }
    }
}

impl<S: Iterator<Item = Step>> Phases<S> {
    /// Computes all steps.
    pub fn computed(self) -> Phases<Vec<Step>> {
        let Self { first, owned, second } = self;
        Phases { first: first.collect(), owned, second: second.collect() }
    }

    /// Returns the steps of both phases.
    pub fn steps(self) -> Chain<S, S> {
        self.first.chain(self.second)
    }
}

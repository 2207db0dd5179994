//! What is done to which rank, and when: a seed decides.

use std::time::Duration;

use serde::Serialize;

/// What happens to a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    /// It gets SIGKILL.
    Kill,
    /// It gets SIGTERM, which its program does not expect.
    Terminate,
    /// It exits from another thread, in whatever call it is.
    Exit,
    /// It panics between two calls.
    Panic,
    /// It is stopped and never goes on.
    Stop,
    /// It is stopped for less time than makes a rank dead: nobody must mind.
    Stall,
}

impl Kind {
    pub(super) const ALL: [Self; 6] =
        [Self::Kill, Self::Terminate, Self::Exit, Self::Panic, Self::Stop, Self::Stall];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Terminate => "terminate",
            Self::Exit => "exit",
            Self::Panic => "panic",
            Self::Stop => "stop",
            Self::Stall => "stall",
        }
    }
}

/// Until when a fault has happened, counted from when all ranks have come.
const LATEST: Duration = Duration::from_millis(100);
/// How long a stalled rank stands still, at the least and at the most: less than the two seconds after which it is dead.
const STALL: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(1200)];

/// One job and its fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) kind: Kind,
    pub(super) victim: usize,
    /// How long after all ranks have come.
    pub(super) after: Duration,
    /// How long a stall takes.
    pub(super) stall: Duration,
    /// Which calls are made.
    pub(super) calls: u64,
}

impl Plan {
    /// The plan of one fault of a run: the same on all ranks, and in every run of this seed.
    pub(super) fn of(seed: u64, fault: u64, ranks: usize) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        // So that a fault does not depend on how many are asked for.
        let mut random = fastrand::Rng::with_seed(random.u64(..).wrapping_add(fault));
        let mut between = |[least, most]: [Duration; 2]| least + (most - least).mul_f64(random.f64());
        let (after, stall) = (between([Duration::ZERO, LATEST]), between(STALL));
        Self {
            kind: Kind::ALL[random.usize(..Kind::ALL.len())],
            victim: random.usize(..ranks),
            after,
            stall,
            calls: random.u64(..),
        }
    }

    /// Who does it to the victim, where it does not do it itself.
    pub(super) const fn doer(&self, ranks: usize) -> usize {
        (self.victim + 1) % ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_decides_and_everything_happens() {
        let plans: Vec<Plan> = (0..200).map(|fault| Plan::of(7, fault, 5)).collect();
        assert_eq!(plans[17], Plan::of(7, 17, 5));
        assert_ne!(plans[17], Plan::of(8, 17, 5));
        for kind in Kind::ALL {
            assert!(plans.iter().any(|plan| plan.kind == kind), "{kind:?}");
        }
        assert!((0..5).all(|rank| plans.iter().any(|plan| plan.victim == rank)));
    }
}

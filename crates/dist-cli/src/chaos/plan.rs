//! The faults of a run, which a seed determines.

use std::time::Duration;

use serde::Serialize;

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    /// The victim receives SIGKILL.
    Kill,
    /// The victim receives SIGTERM, which its program does not handle.
    Terminate,
    /// A second thread of the victim exits the process during a call.
    Exit,
    /// The victim panics between two calls.
    Panic,
    /// The victim is stopped by SIGSTOP and never continued.
    Stop,
    /// The victim is stopped for less time than the liveness limit: no rank may report an error.
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

/// Latest time of a fault after all ranks have joined.
const LATEST: Duration = Duration::from_millis(100);
/// Minimum and maximum duration of a stall: below the liveness limit of two seconds.
const STALL: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(1200)];

/// One job and its fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FaultPlan {
    pub(super) kind: Kind,
    pub(super) victim: usize,
    /// Time of the fault after all ranks have joined.
    pub(super) after: Duration,
    /// Duration of a stall.
    pub(super) stall: Duration,
    /// Seed of the calls.
    pub(super) calls: u64,
}

impl FaultPlan {
    /// Returns the plan of one fault. It is the same on all ranks and in every run with this seed.
    pub(super) fn of(seed: u64, fault: u64, ranks: usize) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        // A fault does not depend on the number of faults.
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

    /// Returns the rank that sends the signal to the victim.
    pub(super) const fn signaller(&self, ranks: usize) -> usize {
        (self.victim + 1) % ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_determines_the_faults_and_every_kind_occurs() {
        let plans: Vec<FaultPlan> = (0..200).map(|fault| FaultPlan::of(7, fault, 5)).collect();
        assert_eq!(plans[17], FaultPlan::of(7, 17, 5));
        assert_ne!(plans[17], FaultPlan::of(8, 17, 5));
        for kind in Kind::ALL {
            assert!(plans.iter().any(|plan| plan.kind == kind), "{kind:?}");
        }
        assert!((0..5).all(|rank| plans.iter().any(|plan| plan.victim == rank)));
    }
}

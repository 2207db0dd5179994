//! The policy of a rank that waits in shared memory: it spins, yields its core, or sleeps.
//!
//! A wake-up takes about 30 µs, a look at memory a few nanoseconds. A rank with its own core therefore spins
//! for a while before it sleeps. A rank that shares its core with a rank that is behind keeps that rank from
//! running if it spins.
//!
//! - With a core for each rank, it then sleeps at once: the system can wake it on an idle core.
//! - With fewer cores than ranks (oversubscribed), it yields its core, which takes 1 to 2 µs. Only ranks on
//!   the same core have to take turns.
//!
//! A yield may also give the core to a process outside the job (external load), which keeps it for
//! milliseconds. External load is told from a computing rank by the CPU time that the system reports for the
//! ranks. If external load persists, a rank stops yielding for longer and longer periods. All ranks then ask
//! for short scheduler slices, so that a woken rank gets a core after one short slice instead of several
//! milliseconds. Without external load, ranks run better without short slices.
//!
//! One wait in [`WAITS_ON_ONE_CORE`] sleeps instead, because the system leaves yielding ranks on their cores.

use std::time::Duration;

use crate::wait::link_wait::SPIN;

/// The most yields in one wait.
const YIELDS_MAX: u32 = 200;
/// A longer yield may have given the core to external load, which the system runs for milliseconds. It may
/// also have been a rank that computes between two collectives, so the next yields are measured.
const YIELD_TOO_LONG: Duration = Duration::from_millis(1);
/// How long yields are measured after one that was too long. External load that returns within this time
/// after a penalty counts as persistent.
const REMEMBERED: Duration = Duration::from_millis(20);
/// The scheduler slice that ranks ask for under external load: the shortest that the system grants.
pub(crate) const SHORT_SLICE: Duration = Duration::from_micros(100);
/// How long a rank does not yield after external load took its core; some of it ends soon.
const PENALTY: Duration = Duration::from_millis(1);
/// The longest penalty. Each further yield to persistent external load quadruples the penalty, up to this.
const PENALTY_MAX: Duration = Duration::from_secs(1);
/// The penalty from which on ranks ask for short slices.
const PENALTY_OF_SHORT_TURNS: Duration = Duration::from_millis(16);
/// After this many waits with yields, one wait sleeps, so that the rank may be woken on another core.
const WAITS_ON_ONE_CORE: u32 = 1000;

/// The next action of a waiting rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitStep {
    Spin,
    Yield,
    Sleep,
}

/// The wait policy of one rank in shared memory, and its state.
#[derive(Debug)]
pub(crate) struct GroupWaitPolicy {
    core_per_rank: bool,
    /// The last penalty, and the time at which it ends.
    penalty: Duration,
    penalty_ends: Duration,
    measured_until: Duration,
    /// Waits that may still yield before one has to sleep.
    waits_on_one_core: u32,
}

/// One wait that did not succeed at once.
#[derive(Debug)]
pub(crate) struct GroupWait {
    since: Duration,
    yields: u32,
}

impl GroupWait {
    pub(crate) const fn begin(now: Duration) -> Self {
        Self { since: now, yields: 0 }
    }
}

impl GroupWaitPolicy {
    pub(crate) const fn new(core_per_rank: bool) -> Self {
        Self {
            core_per_rank,
            penalty: Duration::ZERO,
            penalty_ends: Duration::ZERO,
            measured_until: Duration::ZERO,
            waits_on_one_core: 0,
        }
    }

    /// Returns `true` if yields are currently measured.
    pub(crate) fn is_measuring(&self, now: Duration) -> bool {
        now < self.measured_until
    }

    /// Records a yield that `lasted` until `now`. If it was too long and measured, `lost` returns how long no
    /// rank had the core. Returns `true` if ranks should ask for short slices.
    pub(crate) fn record_yield(
        &mut self,
        now: Duration,
        lasted: Duration,
        lost: impl FnOnce() -> Option<Duration>,
    ) -> bool {
        if lasted <= YIELD_TOO_LONG {
            return false;
        }
        self.measured_until = now + REMEMBERED;
        if lost().is_none_or(|lost| lost <= YIELD_TOO_LONG) {
            return false;
        }
        let stays = self.penalty > Duration::ZERO && now < self.penalty_ends + REMEMBERED;
        self.penalty = if stays { (4 * self.penalty).min(PENALTY_MAX) } else { PENALTY };
        self.penalty_ends = now + self.penalty;
        self.penalty >= PENALTY_OF_SHORT_TURNS
    }

    /// Chooses the next action. `is_wanted` says that a rank which is behind waits for this core.
    pub(crate) fn next(&mut self, wait: &mut GroupWait, now: Duration, is_wanted: bool) -> WaitStep {
        if !is_wanted {
            return if now - wait.since < SPIN { WaitStep::Spin } else { WaitStep::Sleep };
        }
        if self.core_per_rank || now < self.penalty_ends || wait.yields == YIELDS_MAX {
            return WaitStep::Sleep;
        }
        if wait.yields == 0 {
            let Some(left) = self.waits_on_one_core.checked_sub(1) else {
                self.waits_on_one_core = WAITS_ON_ONE_CORE;
                return WaitStep::Sleep;
            };
            self.waits_on_one_core = left;
        }
        wait.yields += 1;
        WaitStep::Yield
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(time: u64) -> Duration {
        Duration::from_micros(time)
    }

    const CORE_PER_RANK: GroupWaitPolicy = GroupWaitPolicy::new(true);
    const OVERSUBSCRIBED: GroupWaitPolicy = GroupWaitPolicy::new(false);

    #[test]
    fn a_rank_with_a_core_to_itself_looks_for_a_while_and_then_sleeps() {
        let mut wait_policy = CORE_PER_RANK;
        let mut wait = GroupWait::begin(us(1000));
        assert_eq!(wait_policy.next(&mut wait, us(1000), false), WaitStep::Spin);
        assert_eq!(wait_policy.next(&mut wait, us(999) + SPIN, false), WaitStep::Spin);
        assert_eq!(wait_policy.next(&mut wait, us(1000) + SPIN, false), WaitStep::Sleep);
    }

    #[test]
    fn with_a_core_per_rank_nobody_spins_on_a_wanted_core() {
        let mut wait_policy = CORE_PER_RANK;
        let mut wait = GroupWait::begin(us(0));
        assert_eq!(wait_policy.next(&mut wait, us(0), true), WaitStep::Sleep);
        assert_eq!(wait_policy.next(&mut wait, us(1), false), WaitStep::Spin);
    }

    /// Returns the policy of a rank that has just slept, so that it could be woken on another core.
    fn rested() -> GroupWaitPolicy {
        GroupWaitPolicy { waits_on_one_core: WAITS_ON_ONE_CORE, ..OVERSUBSCRIBED }
    }

    #[test]
    fn one_of_many_waits_on_one_core_sleeps() {
        let mut wait_policy = OVERSUBSCRIBED;
        for _ in 0..2 {
            let mut wait = GroupWait::begin(us(0));
            assert_eq!(wait_policy.next(&mut wait, us(0), true), WaitStep::Sleep);
            for number in 0..WAITS_ON_ONE_CORE {
                let mut wait = GroupWait::begin(us(0));
                assert_eq!(wait_policy.next(&mut wait, us(0), true), WaitStep::Yield, "wait {number}");
                assert_eq!(wait_policy.next(&mut wait, us(1), true), WaitStep::Yield, "wait {number}");
            }
        }
    }

    #[test]
    fn a_rank_whose_core_is_wanted_yields_and_finally_sleeps() {
        let mut wait_policy = rested();
        let mut wait = GroupWait::begin(us(0));
        for generation in 0..YIELDS_MAX {
            assert_eq!(wait_policy.next(&mut wait, us(u64::from(generation)), true), WaitStep::Yield);
        }
        assert_eq!(wait_policy.next(&mut wait, us(200), true), WaitStep::Sleep);
        let mut next = GroupWait::begin(us(300));
        assert_eq!(wait_policy.next(&mut next, us(300), true), WaitStep::Yield);
    }

    /// Records a yield that lasted this long until `now`, during which external load had the core for
    /// `to_external_load` µs.
    fn record_long_yield(
        wait_policy: &mut GroupWaitPolicy,
        now: u64,
        lasted: u64,
        to_external_load: u64,
    ) -> bool {
        let is_measuring = wait_policy.is_measuring(us(now - lasted));
        wait_policy.record_yield(us(now), us(lasted), || is_measuring.then_some(us(to_external_load)))
    }

    fn next(wait_policy: &mut GroupWaitPolicy, now: u64) -> WaitStep {
        let mut wait = GroupWait::begin(us(now));
        // A free core is used for spinning, whatever happened before.
        assert_eq!(wait_policy.next(&mut wait, us(now), false), WaitStep::Spin);
        wait_policy.next(&mut wait, us(now), true)
    }

    #[test]
    fn a_long_yield_may_have_been_to_a_rank_and_the_next_ones_are_watched() {
        let mut wait_policy = rested();
        assert!(!record_long_yield(&mut wait_policy, 10_000, 1000, 0));
        assert!(!wait_policy.is_measuring(us(10_000)));
        for now in [20_000, 30_000, 50_000] {
            assert!(!record_long_yield(&mut wait_policy, now, 1001, 1000));
            assert_eq!(next(&mut wait_policy, now), WaitStep::Yield);
            assert!(wait_policy.is_measuring(us(now)) && wait_policy.is_measuring(us(now + 19_999)));
            assert!(!wait_policy.is_measuring(us(now + 20_000)));
        }
    }

    #[test]
    fn persistent_external_load_makes_it_sleep_for_longer_and_longer() {
        let mut wait_policy = rested();
        let mut now = 10_000;
        for expected in [1000, 4000, 16_000, 64_000, 256_000, 1_000_000, 1_000_000] {
            // From here on yields are measured.
            record_long_yield(&mut wait_policy, now, 3000, 0);
            now += 10_000;
            assert_eq!(record_long_yield(&mut wait_policy, now, 3000, 1001), expected >= 16_000);
            assert_eq!(next(&mut wait_policy, now + expected - 1), WaitStep::Sleep);
            now += expected;
            assert_eq!(next(&mut wait_policy, now), WaitStep::Yield);
            now += 9_000;
        }
    }

    #[test]
    fn short_external_load_costs_little() {
        let mut wait_policy = rested();
        for now in (1..10).map(|round| round * 30_000) {
            record_long_yield(&mut wait_policy, now - 5000, 3000, 3000);
            assert!(!record_long_yield(&mut wait_policy, now, 3000, 3000));
            assert_eq!(next(&mut wait_policy, now + 999), WaitStep::Sleep);
            assert_eq!(next(&mut wait_policy, now + 1000), WaitStep::Yield);
        }
    }
}

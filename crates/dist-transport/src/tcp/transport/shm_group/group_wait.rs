//! What a rank does while it waits in memory: it looks again, gives its core away, or sleeps.
//!
//! A wake-up takes some 30 µs, a look at memory some nanoseconds: with a core to itself a rank looks for a while before
//! it sleeps. But a rank that shares its core with one that has not come as far keeps it from running by looking. With a
//! core for every rank it sleeps at once: the system can wake it on an idle one. With fewer cores than ranks it gives its
//! core away, at a microsecond or two, unless a stranger takes it for long; this goes by where the ranks run, as only
//! those on one core have to take turns. A stranger is told from a rank that computes by the time for which the system says
//! that ranks had processors. Once one of them has met a stranger who stays, all ask for short turns: a rank that is woken
//! then gets a core after one of those, instead of one of the milliseconds that a thread which only computes is given.
//! Among themselves they do better without. Now and then such a rank sleeps instead, because the system leaves ranks that
//! take turns where they are.

use std::time::Duration;

use crate::tcp::link_wait::SPIN;

/// How often to give the core away in one wait.
const YIELDS_MAX: u32 = 200;
/// A yield that lasts longer may have handed the core to a stranger, to whom the system gives milliseconds at a time. It
/// may as well have been a rank that computes between two collectives: at the next ones it is watched who has it.
const YIELD_TOO_LONG: Duration = Duration::from_millis(1);
/// For how long after one that lasted too long yields are watched, and a stranger who is met after a penalty is one who stays.
const REMEMBERED: Duration = Duration::from_millis(20);
/// The turns to be asked for where strangers want the cores: the shortest that the system grants.
pub(super) const SHORT_SLICE: Duration = Duration::from_micros(100);
/// For how long it does not yield after it did so to a stranger, of whom the system has some that are soon gone.
const PENALTY: Duration = Duration::from_millis(1);
/// The same after one who stays: four times as long after each yield to one, up to this.
const PENALTY_MAX: Duration = Duration::from_secs(1);
/// From which penalty on turns are to be short.
const PENALTY_OF_SHORT_TURNS: Duration = Duration::from_millis(16);
/// How many waits give the core away until one sleeps, so that it may be woken on another.
const WAITS_ON_ONE_CORE: u32 = 1000;

/// What a waiting rank does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitStep {
    Spin,
    Yield,
    Sleep,
}

/// What one rank has learnt about giving its core away.
#[derive(Debug)]
pub(super) struct GroupWaitPolicy {
    core_per_rank: bool,
    /// For how long it did not yield after the last stranger, and until when.
    penalty: Duration,
    penalty_ends: Duration,
    measured_until: Duration,
    /// Waits that may give the core away before one has to sleep.
    waits_on_one_core: u32,
}

/// One wait that was not over at once.
#[derive(Debug)]
pub(super) struct GroupWait {
    since: Duration,
    yields: u32,
}

impl GroupWait {
    pub(super) const fn begin(now: Duration) -> Self {
        Self { since: now, yields: 0 }
    }
}

impl GroupWaitPolicy {
    pub(super) const fn new(core_per_rank: bool) -> Self {
        Self {
            core_per_rank,
            penalty: Duration::ZERO,
            penalty_ends: Duration::ZERO,
            measured_until: Duration::ZERO,
            waits_on_one_core: 0,
        }
    }

    /// Whether to watch, from now on, who has the core.
    pub(super) fn is_measuring(&self, now: Duration) -> bool {
        now < self.measured_until
    }

    /// Learns for how long, until `now`, the core was away and, if that was too long and was watched, for how long no rank
    /// had it. Gives whether ranks had better take short turns.
    pub(super) fn record_yield(
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

    /// What to do now, if the core `is_wanted` by a rank that has not come as far, or not.
    pub(super) fn next(&mut self, wait: &mut GroupWait, now: Duration, is_wanted: bool) -> WaitStep {
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

    const ROOMY: GroupWaitPolicy = GroupWaitPolicy::new(true);
    const CROWDED: GroupWaitPolicy = GroupWaitPolicy::new(false);

    #[test]
    fn a_rank_with_a_core_to_itself_looks_for_a_while_and_then_sleeps() {
        let mut wait_policy = ROOMY;
        let mut wait = GroupWait::begin(us(1000));
        assert_eq!(wait_policy.next(&mut wait, us(1000), false), WaitStep::Spin);
        assert_eq!(wait_policy.next(&mut wait, us(999) + SPIN, false), WaitStep::Spin);
        assert_eq!(wait_policy.next(&mut wait, us(1000) + SPIN, false), WaitStep::Sleep);
    }

    #[test]
    fn where_there_is_another_core_nobody_spins_on_a_core_that_is_wanted() {
        let mut wait_policy = ROOMY;
        let mut wait = GroupWait::begin(us(0));
        assert_eq!(wait_policy.next(&mut wait, us(0), true), WaitStep::Sleep);
        assert_eq!(wait_policy.next(&mut wait, us(1), false), WaitStep::Spin);
    }

    /// Of a rank that has just slept so that it could be woken on another core.
    fn rested() -> GroupWaitPolicy {
        GroupWaitPolicy { waits_on_one_core: WAITS_ON_ONE_CORE, ..CROWDED }
    }

    #[test]
    fn one_of_many_waits_on_one_core_sleeps() {
        let mut wait_policy = CROWDED;
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
    fn a_rank_whose_core_is_wanted_gives_it_away_and_sleeps_in_the_end() {
        let mut wait_policy = rested();
        let mut wait = GroupWait::begin(us(0));
        for generation in 0..YIELDS_MAX {
            assert_eq!(wait_policy.next(&mut wait, us(u64::from(generation)), true), WaitStep::Yield);
        }
        assert_eq!(wait_policy.next(&mut wait, us(200), true), WaitStep::Sleep);
        let mut next = GroupWait::begin(us(300));
        assert_eq!(wait_policy.next(&mut next, us(300), true), WaitStep::Yield);
    }

    /// Gives the core away until then for this long, of which strangers had it for so long.
    fn give_away(wait_policy: &mut GroupWaitPolicy, now: u64, lasted: u64, to_strangers: u64) -> bool {
        let is_measuring = wait_policy.is_measuring(us(now - lasted));
        wait_policy.record_yield(us(now), us(lasted), || is_measuring.then_some(us(to_strangers)))
    }

    fn next(wait_policy: &mut GroupWaitPolicy, now: u64) -> WaitStep {
        let mut wait = GroupWait::begin(us(now));
        // A core to itself is used whatever there was.
        assert_eq!(wait_policy.next(&mut wait, us(now), false), WaitStep::Spin);
        wait_policy.next(&mut wait, us(now), true)
    }

    #[test]
    fn a_long_yield_may_have_been_to_a_rank_and_the_next_ones_are_watched() {
        let mut wait_policy = rested();
        assert!(!give_away(&mut wait_policy, 10_000, 1000, 0));
        assert!(!wait_policy.is_measuring(us(10_000)));
        for now in [20_000, 30_000, 50_000] {
            assert!(!give_away(&mut wait_policy, now, 1001, 1000));
            assert_eq!(next(&mut wait_policy, now), WaitStep::Yield);
            assert!(wait_policy.is_measuring(us(now)) && wait_policy.is_measuring(us(now + 19_999)));
            assert!(!wait_policy.is_measuring(us(now + 20_000)));
        }
    }

    #[test]
    fn after_yields_to_a_stranger_who_stays_it_sleeps_for_longer_and_longer() {
        let mut wait_policy = rested();
        let mut now = 10_000;
        for expected in [1000, 4000, 16_000, 64_000, 256_000, 1_000_000, 1_000_000] {
            // From here on it is watched.
            give_away(&mut wait_policy, now, 3000, 0);
            now += 10_000;
            assert_eq!(give_away(&mut wait_policy, now, 3000, 1001), expected >= 16_000);
            assert_eq!(next(&mut wait_policy, now + expected - 1), WaitStep::Sleep);
            now += expected;
            assert_eq!(next(&mut wait_policy, now), WaitStep::Yield);
            now += 9_000;
        }
    }

    #[test]
    fn strangers_who_are_soon_gone_cost_little() {
        let mut wait_policy = rested();
        for now in (1..10).map(|round| round * 30_000) {
            give_away(&mut wait_policy, now - 5000, 3000, 3000);
            assert!(!give_away(&mut wait_policy, now, 3000, 3000));
            assert_eq!(next(&mut wait_policy, now + 999), WaitStep::Sleep);
            assert_eq!(next(&mut wait_policy, now + 1000), WaitStep::Yield);
        }
    }
}

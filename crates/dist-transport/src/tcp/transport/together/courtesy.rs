//! What a rank does while it waits in memory: it looks again, gives its core away, or sleeps.
//!
//! A wake-up takes some 30 µs, a look at memory some nanoseconds: with a core to itself a rank looks for a while before
//! it sleeps. But a rank that shares its core with one that has not come as far keeps it from running by looking. With a
//! core for every rank it sleeps at once: the system can wake it on an idle one. With fewer cores than ranks it gives its
//! core away, at a microsecond or two, unless a stranger takes it for long; this goes by where the ranks run, as only
//! those on one core have to take turns. Once one of them has met a stranger, all ask for short turns: a rank that is woken
//! then gets a core after one of those, instead of one of the milliseconds that a thread which only computes is given.
//! Among themselves they do better without. Now and then such a rank sleeps instead, because the system leaves ranks that
//! take turns where they are.

use std::time::Duration;

/// For how long to look.
const SPIN: Duration = Duration::from_micros(30);
/// How often to give the core away in one wait.
const YIELDS_MAX: u32 = 200;
/// A yield that lasts longer has handed the core to a stranger, to whom the system gives milliseconds at a time; a rank is
/// through with a block in less. One that computes for longer between two collectives is taken for a stranger, too.
const YIELD_TOO_LONG: Duration = Duration::from_millis(1);
/// The turns to be asked for where strangers want the cores: the shortest that the system grants.
pub(super) const SHORT_TURN: Duration = Duration::from_micros(100);
/// How many waits do not yield after one that did so for too long.
const WAITS_WITHOUT_YIELD: u32 = 1000;
/// How many waits give the core away until one sleeps, so that it may be woken on another.
const WAITS_ON_ONE_CORE: u32 = 1000;

/// What a waiting rank does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    Look,
    Yield,
    Sleep,
}

/// What one rank has learnt about giving its core away.
#[derive(Debug)]
pub(super) struct Courtesy {
    core_per_rank: bool,
    waits_without_yield: u32,
    /// Waits that may give the core away before one has to sleep.
    waits_on_one_core: u32,
}

/// One wait that was not over at once.
#[derive(Debug)]
pub(super) struct Wait {
    since: Duration,
    yields: u32,
}

impl Courtesy {
    pub(super) const fn new(core_per_rank: bool) -> Self {
        Self { core_per_rank, waits_without_yield: 0, waits_on_one_core: 0 }
    }

    pub(super) fn begin(&mut self, now: Duration) -> Wait {
        self.waits_without_yield = self.waits_without_yield.saturating_sub(1);
        Wait { since: now, yields: 0 }
    }

    /// Learns for how long the core was away, and gives whether a stranger must have had it.
    pub(super) fn gave_away(&mut self, lasted: Duration) -> bool {
        let to_stranger = lasted > YIELD_TOO_LONG;
        if to_stranger {
            self.waits_without_yield = WAITS_WITHOUT_YIELD;
        }
        to_stranger
    }

    /// What to do now, if the core `is_wanted` by a rank that has not come as far, or not.
    pub(super) fn next(&mut self, wait: &mut Wait, now: Duration, is_wanted: bool) -> Next {
        if !is_wanted {
            return if now - wait.since < SPIN { Next::Look } else { Next::Sleep };
        }
        if self.core_per_rank || self.waits_without_yield > 0 || wait.yields == YIELDS_MAX {
            return Next::Sleep;
        }
        if wait.yields == 0 {
            let Some(left) = self.waits_on_one_core.checked_sub(1) else {
                self.waits_on_one_core = WAITS_ON_ONE_CORE;
                return Next::Sleep;
            };
            self.waits_on_one_core = left;
        }
        wait.yields += 1;
        Next::Yield
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(time: u64) -> Duration {
        Duration::from_micros(time)
    }

    const ROOMY: Courtesy = Courtesy { core_per_rank: true, waits_without_yield: 0, waits_on_one_core: 0 };
    const CROWDED: Courtesy = Courtesy { core_per_rank: false, ..ROOMY };

    #[test]
    fn a_rank_with_a_core_to_itself_looks_for_a_while_and_then_sleeps() {
        let mut courtesy = ROOMY;
        let mut wait = courtesy.begin(us(1000));
        assert_eq!(courtesy.next(&mut wait, us(1000), false), Next::Look);
        assert_eq!(courtesy.next(&mut wait, us(1029), false), Next::Look);
        assert_eq!(courtesy.next(&mut wait, us(1030), false), Next::Sleep);
    }

    #[test]
    fn where_there_is_another_core_nobody_spins_on_a_core_that_is_wanted() {
        let mut courtesy = ROOMY;
        let mut wait = courtesy.begin(us(0));
        assert_eq!(courtesy.next(&mut wait, us(0), true), Next::Sleep);
        assert_eq!(courtesy.next(&mut wait, us(1), false), Next::Look);
    }

    /// Of a rank that has just slept so that it could be woken on another core.
    fn rested() -> Courtesy {
        Courtesy { waits_on_one_core: WAITS_ON_ONE_CORE, ..CROWDED }
    }

    #[test]
    fn one_of_many_waits_on_one_core_sleeps() {
        let mut courtesy = CROWDED;
        for _ in 0..2 {
            let mut wait = courtesy.begin(us(0));
            assert_eq!(courtesy.next(&mut wait, us(0), true), Next::Sleep);
            for number in 0..WAITS_ON_ONE_CORE {
                let mut wait = courtesy.begin(us(0));
                assert_eq!(courtesy.next(&mut wait, us(0), true), Next::Yield, "wait {number}");
                assert_eq!(courtesy.next(&mut wait, us(1), true), Next::Yield, "wait {number}");
            }
        }
    }

    #[test]
    fn a_rank_whose_core_is_wanted_gives_it_away_and_sleeps_in_the_end() {
        let mut courtesy = rested();
        let mut wait = courtesy.begin(us(0));
        for turn in 0..YIELDS_MAX {
            assert_eq!(courtesy.next(&mut wait, us(u64::from(turn)), true), Next::Yield);
        }
        assert_eq!(courtesy.next(&mut wait, us(200), true), Next::Sleep);
        let mut next = courtesy.begin(us(300));
        assert_eq!(courtesy.next(&mut next, us(300), true), Next::Yield);
    }

    #[test]
    fn after_a_yield_to_a_stranger_a_thousand_waits_sleep_instead() {
        let mut courtesy = rested();
        let mut wait = courtesy.begin(us(0));
        assert_eq!(courtesy.next(&mut wait, us(0), true), Next::Yield);
        assert!(!courtesy.gave_away(us(1000)));
        assert_eq!(courtesy.next(&mut wait, us(1000), true), Next::Yield);
        assert!(courtesy.gave_away(us(1001)));
        assert_eq!(courtesy.next(&mut wait, us(2001), true), Next::Sleep);
        for number in 1..WAITS_WITHOUT_YIELD {
            let mut wait = courtesy.begin(us(200));
            assert_eq!(courtesy.next(&mut wait, us(200), true), Next::Sleep, "wait {number}");
            // A core to itself is used as before.
            assert_eq!(courtesy.next(&mut wait, us(200), false), Next::Look);
        }
        let mut wait = courtesy.begin(us(300));
        assert_eq!(courtesy.next(&mut wait, us(300), true), Next::Yield);
    }
}

//! How to wait for a peer that will answer soon.
//!
//! A wake-up from poll costs some 30 µs, a look at the socket half a microsecond. With a core for every rank a
//! rank therefore looks again and again for a while before it sleeps, and lets others run now and then: the system may
//! have put its peer on the same core. With fewer cores than ranks looking may keep the peer from running: then it
//! gives its core away between two looks, or after some microseconds of them where the peer is known to be on another core.
//!
//! Where a stranger takes the core, or the peer is long at work, that loses time. What was lost is made good before
//! the core is given away again.

use std::time::Duration;

use crate::Runtime;

/// For how long a rank that has a core looks: three times as long as a wake-up takes. Two ranks of which each wakes up later
/// than the other looks would take turns to sleep for each other, block after block, though both are at work.
pub(super) const SPIN: Duration = Duration::from_micros(100);
/// How long a rank that has a core looks between two yields.
const SPIN_BETWEEN_YIELDS: Duration = Duration::from_micros(5);
/// How often to look for a peer between two looks at the clock.
const LOOKS_PER_CLOCK: u32 = 16;
/// How often to look for a peer that is on another core before this one is given away: some 2 µs, in which a peer that is
/// at it has filled its first piece. To give the core away and get it back takes as long.
const LOOKS_PER_YIELD: u32 = 64;
const YIELDS_MAX: u32 = 200;
/// A yield that lasts longer has handed the core to a stranger, or to a peer with much to do.
const YIELD_TOO_LONG: Duration = Duration::from_micros(100);
/// How many times as long as was lost a rank that has a core does not yield then: it can do without, and loses at most a
/// tenth of its time that source. Where ranks share cores, yields are given up for as long as was lost.
const WITHOUT_YIELDS: u32 = 10;

/// The policy of one transport.
#[derive(Debug)]
pub(super) struct LinkWaitPolicy {
    core_per_rank: bool,
    /// When what was lost last has been made good.
    yields_from: Duration,
}

/// One wait.
#[derive(Debug, Default)]
pub(super) struct LinkWait {
    looks: u32,
    since: Option<Duration>,
    yields: u32,
}

impl LinkWait {
    /// Something has come: what is waited for now is the next.
    pub(super) const fn renew(&mut self) {
        *self = Self { looks: self.looks, since: None, yields: 0 };
    }
}

impl LinkWaitPolicy {
    pub(super) const fn new(core_per_rank: bool) -> Self {
        Self { core_per_rank, yields_from: Duration::ZERO }
    }

    /// Whether to look again without a look at the clock, which takes longer than one at memory.
    /// Not where a peer that is waited for `may_share_core`.
    pub(super) fn look_at_once(&self, wait: &mut LinkWait, may_share_core: impl FnOnce() -> bool) -> bool {
        wait.looks = wait.looks.wrapping_add(1);
        std::hint::spin_loop();
        let looks = if self.core_per_rank { LOOKS_PER_CLOCK } else { LOOKS_PER_YIELD };
        (self.core_per_rank || !may_share_core()) && !wait.looks.is_multiple_of(looks)
    }

    /// Whether to look again, after a pause, before sleeping.
    pub(super) fn wake_waiters(&mut self, wait: &mut LinkWait, runtime: &Runtime) -> bool {
        let now = runtime.now();
        let since = *wait.since.get_or_insert(now);
        let spent = now - since;
        let may_yield = now >= self.yields_from;
        let (on, due) = if self.core_per_rank {
            (spent < SPIN, spent >= SPIN_BETWEEN_YIELDS * (wait.yields + 1))
        } else {
            (may_yield && wait.yields < YIELDS_MAX, true)
        };
        if on && due && may_yield {
            wait.yields += 1;
            self.give_away(now, runtime);
        }
        on
    }

    /// Lets others run, and does without for a while if that took long.
    fn give_away(&mut self, before: Duration, runtime: &Runtime) {
        runtime.yield_now();
        let now = runtime.now();
        let lasted = now - before;
        if lasted > YIELD_TOO_LONG {
            self.yields_from = now + lasted * if self.core_per_rank { WITHOUT_YIELDS } else { 1 };
        }
    }
}

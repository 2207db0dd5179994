//! How to wait for a peer that will answer soon.
//!
//! A wake-up from poll costs some 30 µs, a look at the socket half a microsecond. With a core for every rank a
//! rank therefore looks again and again for a while before it sleeps, and lets others run now and then: the system may
//! have put its peer on the same core. With fewer cores than ranks looking would keep the peer from running: then it
//! gives its core away between two looks.
//!
//! Where a stranger takes the core, or the peer is long at work, that loses time. What was lost is made good before
//! the core is given away again.

use std::time::Duration;

use crate::Runtime;

const SPIN: Duration = Duration::from_micros(50);
/// How long a rank that has a core looks between two yields.
const SPIN_BETWEEN_YIELDS: Duration = Duration::from_micros(5);
/// How often to look for a peer between two looks at the clock.
const LOOKS_PER_CLOCK: u32 = 16;
const YIELDS_MAX: u32 = 200;
/// A yield that lasts longer has handed the core to a stranger, or to a peer with much to do.
const YIELD_TOO_LONG: Duration = Duration::from_micros(100);
/// How much of what was lost each of the next waits makes good, which do not yield: what a wake-up takes, so that yields
/// and wake-ups lose alike. A stranger keeps the core for milliseconds and costs many waits their yields, a peer that adds
/// up something large a few.
const MADE_GOOD_BY_WAIT: Duration = Duration::from_micros(34);

/// The policy of one transport.
#[derive(Debug)]
pub(super) struct Patience {
    core_per_rank: bool,
    /// What was lost last, as far as no wait has made it good yet.
    lost: Duration,
}

/// One wait.
#[derive(Debug, Default)]
pub(super) struct Wait {
    looks: u32,
    since: Option<Duration>,
    yields: u32,
}

impl Wait {
    /// Something has come: what is waited for now is the next.
    pub(super) const fn renew(&mut self) {
        *self = Self { looks: self.looks, since: None, yields: 0 };
    }
}

impl Patience {
    /// For a process that shares its host with `local_ranks` ranks, itself among them.
    pub(super) fn new(local_ranks: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self { core_per_rank: local_ranks <= cores, lost: Duration::ZERO }
    }

    /// Whether to look again without a look at the clock, which takes longer than one at memory.
    pub(super) fn look_at_once(&self, wait: &mut Wait) -> bool {
        wait.looks = wait.looks.wrapping_add(1);
        std::hint::spin_loop();
        self.core_per_rank && !wait.looks.is_multiple_of(LOOKS_PER_CLOCK)
    }

    /// Whether to look again, after a pause, before sleeping.
    pub(super) fn look_again(&mut self, wait: &mut Wait, runtime: &Runtime) -> bool {
        let now = runtime.now();
        if wait.since.is_none() {
            self.lost = self.lost.saturating_sub(MADE_GOOD_BY_WAIT);
        }
        let since = *wait.since.get_or_insert(now);
        let spent = now - since;
        let may_yield = self.lost.is_zero();
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

    /// Lets others run, and remembers it if that took long.
    fn give_away(&mut self, now: Duration, runtime: &Runtime) {
        runtime.yield_now();
        let lasted = runtime.now() - now;
        if lasted > YIELD_TOO_LONG {
            self.lost = lasted;
        }
    }
}

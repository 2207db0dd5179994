//! The wait policy for a peer that will answer soon: spin, yield, or sleep.
//!
//! A wake-up from `poll` takes about 30 µs, a look at the socket 0.5 µs. With a core for every rank, a rank
//! therefore spins for a while before it sleeps. It yields now and then, because the system may have put its
//! peer on the same core. With fewer cores than ranks, spinning may keep the peer from running: the rank then
//! yields between two looks. If the peer is known to be on another core, it spins for a few microseconds
//! first.
//!
//! A yield is slow if external load takes the core, or if the peer works for long. The rank then stops
//! yielding until the lost time is made up.

use std::time::Duration;

use crate::Runtime;

/// How long a rank with its own core spins: three times as long as a wake-up takes. With less, two ranks that
/// each wake up after the other has looked would sleep in turns, block after block, although both work.
pub(crate) const SPIN: Duration = Duration::from_micros(100);
/// How long a rank with its own core spins between two yields.
const SPIN_BETWEEN_YIELDS: Duration = Duration::from_micros(5);
/// How often to look for a peer between two looks at the clock.
const LOOKS_PER_CLOCK: u32 = 16;
/// How often to look for a peer on another core before yielding: about 2 µs, in which a working peer has
/// filled its first piece. A yield takes as long.
const LOOKS_PER_YIELD: u32 = 64;
const YIELDS_MAX: u32 = 200;
/// A longer yield gave the core to external load, or to a peer with much work.
const YIELD_TOO_LONG: Duration = Duration::from_micros(100);
/// A rank with its own core does not yield for this many times the lost time, so it loses at most a tenth of
/// its time. If ranks share cores, it does not yield for the lost time.
const WITHOUT_YIELDS: u32 = 10;

/// The wait policy of one transport, and its state.
#[derive(Debug)]
pub(crate) struct LinkWaitPolicy {
    core_per_rank: bool,
    /// The time from which yields are allowed again.
    yields_from: Duration,
}

/// One wait.
#[derive(Debug, Default)]
pub(crate) struct LinkWait {
    looks: u32,
    since: Option<Duration>,
    yields: u32,
}

impl LinkWait {
    /// Restarts the wait, because something has arrived.
    pub(crate) const fn renew(&mut self) {
        *self = Self { looks: self.looks, since: None, yields: 0 };
    }
}

impl LinkWaitPolicy {
    pub(crate) const fn new(core_per_rank: bool) -> Self {
        Self { core_per_rank, yields_from: Duration::ZERO }
    }

    /// Returns `true` if the rank should look again without reading the clock, which takes longer than a look
    /// at memory. That is not so if the awaited peer `may_share_core`.
    pub(crate) fn spin_again(&self, wait: &mut LinkWait, may_share_core: impl FnOnce() -> bool) -> bool {
        wait.looks = wait.looks.wrapping_add(1);
        std::hint::spin_loop();
        let looks = if self.core_per_rank { LOOKS_PER_CLOCK } else { LOOKS_PER_YIELD };
        (self.core_per_rank || !may_share_core()) && !wait.looks.is_multiple_of(looks)
    }

    /// Returns `true` if the rank should look again, after a pause, before sleeping.
    pub(crate) fn wait_again(&mut self, wait: &mut LinkWait, runtime: &Runtime) -> bool {
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
            self.yield_core(now, runtime);
        }
        on
    }

    /// Yields, and stops yielding for a while if that took long.
    fn yield_core(&mut self, before: Duration, runtime: &Runtime) {
        runtime.yield_now();
        let now = runtime.now();
        let lasted = now - before;
        if lasted > YIELD_TOO_LONG {
            self.yields_from = now + lasted * if self.core_per_rank { WITHOUT_YIELDS } else { 1 };
        }
    }
}

//! How to wait for a peer that will answer soon.
//!
//! A wake-up from poll costs some 30 µs, a look at the socket half a microsecond. With a core for every rank a
//! rank therefore looks again and again for a while before it sleeps. With fewer cores than ranks that would keep
//! the peer from running: then it gives its core away between two looks, unless somebody else takes it for long.

use std::time::Duration;

use crate::Runtime;

const SPIN: Duration = Duration::from_micros(50);
/// How often to look for a peer between two looks at the clock.
const LOOKS_PER_CLOCK: u32 = 16;
const YIELDS_MAX: u32 = 200;
/// A yield that lasts longer has handed the core to a stranger.
const YIELD_TOO_LONG: Duration = Duration::from_micros(100);
/// How many waits do not yield after one that did so for too long.
const WAITS_WITHOUT_YIELD: u32 = 1000;

/// The policy of one transport.
#[derive(Debug)]
pub(super) struct Patience {
    core_per_rank: bool,
    waits_without_yield: u32,
}

/// One wait.
#[derive(Debug, Default)]
pub(super) struct Wait {
    looks: u32,
    since: Option<Duration>,
    yields: u32,
}

impl Patience {
    /// For a process that shares its host with `local_ranks` ranks, itself among them.
    pub(super) fn new(local_ranks: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self { core_per_rank: local_ranks <= cores, waits_without_yield: 0 }
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
        let first = wait.since.is_none();
        let since = *wait.since.get_or_insert(now);
        if self.core_per_rank {
            return now - since < SPIN;
        }
        if first {
            self.waits_without_yield = self.waits_without_yield.saturating_sub(1);
        }
        if self.waits_without_yield > 0 || wait.yields == YIELDS_MAX {
            return false;
        }
        wait.yields += 1;
        runtime.yield_now();
        if runtime.now() - now > YIELD_TOO_LONG {
            self.waits_without_yield = WAITS_WITHOUT_YIELD;
        }
        true
    }
}

//! The runtime of the operating system.
#![allow(clippy::disallowed_methods, reason = "this is the runtime seam")]

use std::io;
use std::sync::Arc;
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

#[cfg(all(feature = "tcp", target_os = "linux"))]
use rustix::time::{ClockId, clock_gettime};

use super::{Executor, Wake};

pub(super) struct System {
    start: Instant,
    /// The same time on the coarse clock's time base.
    #[cfg(all(feature = "tcp", target_os = "linux"))]
    start_by_ticks: Duration,
}

impl System {
    pub(super) fn new() -> Self {
        Self {
            #[cfg(all(feature = "tcp", target_os = "linux"))]
            start_by_ticks: by_ticks(ClockId::Monotonic),
            start: Instant::now(),
        }
    }
}

#[cfg(all(feature = "tcp", target_os = "linux"))]
fn by_ticks(clock: ClockId) -> Duration {
    clock_gettime(clock).try_into().unwrap_or_default()
}

impl Executor for System {
    fn name(&self) -> &'static str {
        "system"
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    #[cfg(all(feature = "tcp", target_os = "linux"))]
    fn now_or_shortly_before(&self) -> Duration {
        // Reading the coarse clock takes a quarter of the time of the exact one.
        by_ticks(ClockId::MonotonicCoarse).saturating_sub(self.start_by_ticks)
    }

    fn spawn(&self, name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
    }

    fn park(&self, until: Option<Duration>) {
        match until {
            None => thread::park(),
            Some(until) => thread::park_timeout(until.saturating_sub(self.now())),
        }
    }

    fn is_waking_slow(&self) -> bool {
        true
    }

    #[cfg(all(feature = "tcp", target_os = "linux"))]
    fn make_waits_exact(&self) {
        // A system that refuses it only waits longer.
        let _refused = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
    }

    fn current(&self) -> Arc<dyn Wake> {
        Arc::new(ThreadWaker(thread::current()))
    }

    fn yield_now(&self) {
        thread::yield_now();
    }
}

struct ThreadWaker(Thread);

impl Wake for ThreadWaker {
    fn wake(&self) {
        self.0.unpark();
    }
}

//! Skewed clocks: each rank may see its own time.

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::runtime::{Executor, Wake};
use crate::{Deadline, Runtime};

/// The difference between a rank's clock and the network's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Skew {
    pub(super) ahead: Duration,
    /// Microseconds that it gains per second.
    pub(super) drift_ppm: i32,
}

const MILLION: i128 = 1_000_000;
/// The slowest clock still moves.
const DRIFT_MIN: i32 = -999_999;

impl Skew {
    /// Returns the time that the skewed clock shows at this virtual time.
    pub(super) fn show(self, time: Duration) -> Duration {
        nanos(nanos_of(time) * self.rate() / MILLION).saturating_add(self.ahead)
    }

    /// Returns the earliest virtual time at which the skewed clock shows this time.
    fn time(self, shown: Duration) -> Duration {
        let rate = self.rate();
        let shown = nanos_of(shown.saturating_sub(self.ahead));
        // `show` rounds the product down.
        nanos((shown * MILLION + rate - 1) / rate)
    }

    fn rate(self) -> i128 {
        MILLION + i128::from(self.drift_ppm.max(DRIFT_MIN))
    }
}

fn nanos_of(time: Duration) -> i128 {
    i128::try_from(time.as_nanos()).expect("a duration has fewer than 94 bits of nanoseconds")
}

/// Returns a duration in nanoseconds, at most about 584 years.
fn nanos(nanos: i128) -> Duration {
    u64::try_from(nanos).map_or(Duration::MAX, Duration::from_nanos)
}

/// Waits until this thread is woken, for the deadline of its rank's runtime, or for this virtual time.
pub(super) fn park(runtime: &Runtime, skew: Skew, deadline: Deadline, wake_by: Option<Duration>) {
    // The clock of the rank may round down: it shows the time one tick later at the latest.
    let shown =
        |time| skew.show(time).saturating_add(Duration::from_nanos(u64::from(skew != Skew::default())));
    let wake_by = wake_by.map(|time| runtime.deadline(shown(time).saturating_sub(runtime.now())));
    runtime.park(Some(wake_by.map_or(deadline, |wake_by| wake_by.earlier(deadline))));
}

/// A runtime with a skewed clock.
pub(super) struct Skewed {
    pub(super) executor: Arc<dyn Executor>,
    pub(super) skew: Skew,
}

impl Executor for Skewed {
    fn name(&self) -> &'static str {
        self.executor.name()
    }

    fn now(&self) -> Duration {
        self.skew.show(self.executor.now())
    }

    fn spawn(&self, name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        self.executor.spawn(name, work)
    }

    fn park(&self, until: Option<Duration>) {
        self.executor.park(until.map(|until| self.skew.time(until)));
    }

    fn current(&self) -> Arc<dyn Wake> {
        self.executor.current()
    }

    fn yield_now(&self) {
        self.executor.yield_now();
    }

    fn interleave(&self) {
        self.executor.interleave();
    }

    fn let_time_pass(&self) {
        self.executor.let_time_pass();
    }

    fn is_unwinding(&self, panic: &(dyn Any + Send)) -> bool {
        self.executor.is_unwinding(panic)
    }

    fn panicked(&self, panic: &(dyn Any + Send)) {
        self.executor.panicked(panic);
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    fn a_wait_for_a_shown_time_ends_when_it_is_shown_and_no_sooner(
        #[values(-999_999, -300_000, -1, 0, 1, 7, 500_000, i32::MAX)] drift_ppm: i32,
        #[values(0, 1, 999, 1_000_000_007)] nanos: u64,
    ) {
        let skew = Skew { ahead: Duration::from_secs(3), drift_ppm };
        let shown = Duration::from_secs(3) + Duration::from_nanos(nanos);
        let time = skew.time(shown);
        assert!(skew.show(time) >= shown, "not early");
        assert!(time.is_zero() || skew.show(time - Duration::from_nanos(1)) < shown, "not late");
        assert_eq!(skew.time(Duration::from_secs(2)), Duration::ZERO);
    }

    #[test]
    fn a_time_that_never_comes_stays_one() {
        let skew = Skew { ahead: Duration::ZERO, drift_ppm: 100 };
        assert_eq!(skew.time(Duration::MAX), Duration::MAX);
        assert_eq!(skew.show(Duration::MAX), Duration::MAX);
    }
}

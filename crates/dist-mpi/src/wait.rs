//! The pauses between two looks at the library.

use std::time::Duration;

use dist_transport::{LazyDeadline, Runtime};

/// The progress of a wait since the last event.
pub(crate) struct Wait {
    looks: u32,
    since: Option<Duration>,
    /// The time after which the rank sleeps between two looks.
    sleeps_after: Duration,
    pub(crate) is_reported: bool,
}

/// Looks at the library without a pause, before the clock is read.
const LOOKS: u32 = 32;
/// The time that a rank looks without a pause if it has a core of its own.
const SPIN: Duration = Duration::from_micros(50);
/// The time after which a rank sleeps between two looks. A collective of the library advances only while ranks look.
const YIELD: Duration = Duration::from_millis(2);
const PATIENT_YIELD: Duration = Duration::from_secs(1);
/// The time of such a sleep.
const SLEEP: Duration = Duration::from_micros(50);

impl Wait {
    pub(crate) const NEW: Self = Self { looks: 0, since: None, sleeps_after: YIELD, is_reported: false };
    /// The progress of a wait for a collective of the library.
    pub(crate) const PATIENT: Self = Self { sleeps_after: PATIENT_YIELD, ..Self::NEW };

    /// Begins anew, because something has happened.
    pub(crate) const fn renew(&mut self) {
        self.since = None;
    }

    /// Waits a little. Returns how long the wait has lasted, or `None` if the deadline has passed. A rank of an
    /// oversubscribed host leaves its core to others.
    pub(crate) fn pause(
        &mut self,
        runtime: &Runtime,
        is_oversubscribed: bool,
        due: &LazyDeadline<'_>,
    ) -> Option<Duration> {
        self.looks += 1;
        let patient = if is_oversubscribed { 1 } else { LOOKS };
        if !self.looks.is_multiple_of(patient) {
            std::hint::spin_loop();
            return Some(Duration::ZERO);
        }
        if runtime.expired(due.deadline()) {
            return None;
        }
        let now = runtime.now();
        let waited = now.saturating_sub(*self.since.get_or_insert(now));
        if waited > self.sleeps_after {
            runtime.park(Some(runtime.deadline(SLEEP)));
        } else if is_oversubscribed || waited > SPIN {
            runtime.yield_now();
        }
        Some(waited)
    }
}

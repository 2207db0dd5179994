//! The wait policy of a rank: it spins, yields its core, or sleeps.
//!
//! A wake-up takes about 30 µs, a look at a socket 0.5 µs, a look at memory a few nanoseconds. A rank that
//! waits for a peer therefore spins for a while before it sleeps. A rank that shares its core with the rank
//! that it waits for keeps that rank from running if it spins.
//!
//! A yield may also give the core to a process outside the job (external load), which keeps it for
//! milliseconds. In shared memory, external load is distinguished from a computing rank by the CPU time that
//! the system reports for the ranks. If external load persists, a rank stops yielding for longer and longer
//! periods. All ranks then request short scheduler slices, so that a woken rank gets a core after one short
//! slice instead of several milliseconds. Without external load, ranks run better without short slices.
//!
//! Detection of external load stays because of busy hosts; without other work it gains nothing. Beside another
//! busy process on each core, 4 ranks on 2 cores of a Xeon take longer without it: 1.04 to 1.65 times as long
//! for an all_reduce of 64 KiB, and 1.25 to 1.76 times for 1 MiB. Those are medians of three series of
//! 2026-11-28. A rule that needs no CPU times was tried: do not yield for as long as the last yield took. With
//! it, 8 B take 2 to 4 times as long.

use std::time::Duration;

use crate::Runtime;
#[cfg(all(feature = "shm", target_os = "linux"))]
use crate::{Rank, host_memory::GroupMemory, wait::external_load::ExternalLoad};

/// The time that a rank spins before it sleeps: three times as long as a wake-up takes. With less, two ranks that
/// each wake up after the other has looked would sleep in turns, block after block, although both work.
const SPIN: Duration = Duration::from_micros(100);
/// The time that a rank with its own core spins between two yields.
const SPIN_BETWEEN_YIELDS: Duration = Duration::from_micros(5);
/// The number of polls between two reads of the clock.
const LOOKS_PER_CLOCK: u32 = 16;
/// The number of polls for a peer on another core before yielding: about 2 µs, in which a working peer has
/// filled its first piece. A yield takes as long.
const LOOKS_PER_YIELD: u32 = 64;
/// The most yields in one wait on an oversubscribed host.
const YIELDS_MAX: u32 = 200;
/// A longer yield gave the core to external load, or to a peer with much work.
const YIELD_TOO_LONG: Duration = Duration::from_micros(100);
/// The settings of yields to ranks in shared memory, where external load is detected.
#[cfg(all(feature = "shm", target_os = "linux"))]
mod measured {
    use std::time::Duration;

    /// A longer yield may have given the core to external load, which the system runs for milliseconds. It may
    /// also have been a rank that computes between two collectives, so the next yields are measured.
    pub(super) const YIELD_TOO_LONG: Duration = Duration::from_millis(1);
    /// The time for which yields are measured after one that was too long. External load that returns within this time
    /// after a penalty counts as persistent.
    pub(super) const REMEMBERED: Duration = Duration::from_millis(20);
    /// The time for which a rank does not yield after external load took its core. Some external load ends soon.
    pub(super) const PENALTY: Duration = Duration::from_millis(1);
    /// The longest penalty. Each further yield to persistent external load quadruples the penalty, up to this.
    pub(super) const PENALTY_MAX: Duration = Duration::from_secs(1);
    /// The penalty from which on ranks ask for short slices.
    pub(super) const PENALTY_OF_SHORT_SLICES: Duration = Duration::from_millis(16);
}
/// A rank with its own core does not yield for this many times the lost time, so it loses at most a tenth of
/// its time. If ranks share cores, it does not yield for the lost time.
const WITHOUT_YIELDS: u32 = 10;
/// After this many waits with yields, one wait sleeps, because the system leaves yielding ranks on their
/// cores and wakes a sleeping one on an idle core.
const WAITS_ON_ONE_CORE: u32 = 1000;

/// The next action of a waiting rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitStep {
    Spin,
    Yield,
    Sleep,
}

/// The knowledge about other ranks that need this rank's core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(all(feature = "shm", target_os = "linux")), allow(dead_code, reason = "sockets tell nothing"))]
pub(crate) enum CoreDemand {
    /// No rank that is behind is on this core.
    Free,
    /// A rank that is behind is on this core.
    Wanted,
    /// A rank that is behind may be on this core.
    Unknown,
}

/// The wait policy of one rank, and its state.
#[derive(Debug)]
pub(crate) enum WaitPolicy {
    CorePerRank(CorePerRank),
    Oversubscribed(Oversubscribed),
}

/// One wait that did not succeed at once.
#[derive(Debug, Default)]
pub(crate) struct Wait {
    looks: u32,
    since: Option<Duration>,
    yields: u32,
}

impl Wait {
    /// Restarts the wait, because something has arrived.
    pub(crate) const fn renew(&mut self) {
        *self = Self { looks: self.looks, since: None, yields: 0 };
    }

    fn spent(&self, now: Duration) -> Duration {
        self.since.map_or(Duration::ZERO, |since| now - since)
    }
}

impl WaitPolicy {
    pub(crate) const fn new(core_per_rank: bool) -> Self {
        if core_per_rank {
            Self::CorePerRank(CorePerRank { yields_from: Duration::ZERO })
        } else {
            Self::Oversubscribed(Oversubscribed::new())
        }
    }

    /// Returns `true` if the rank should poll again without reading the clock, which takes longer than polling
    /// memory. On an oversubscribed host the result is `false` if the awaited peer `may_share_core`.
    pub(crate) fn spin_again(&self, wait: &mut Wait, may_share_core: impl FnOnce() -> bool) -> bool {
        wait.looks = wait.looks.wrapping_add(1);
        std::hint::spin_loop();
        match self {
            Self::CorePerRank(_) => !wait.looks.is_multiple_of(LOOKS_PER_CLOCK),
            Self::Oversubscribed(_) => !may_share_core() && !wait.looks.is_multiple_of(LOOKS_PER_YIELD),
        }
    }

    /// Chooses the next action.
    pub(crate) fn next(&mut self, wait: &mut Wait, now: Duration, demand: CoreDemand) -> WaitStep {
        wait.since.get_or_insert(now);
        match self {
            Self::CorePerRank(policy) => policy.next(wait, now, demand),
            Self::Oversubscribed(policy) => policy.next(wait, now, demand),
        }
    }

    /// Yields the core to any thread that waits for it. If the yield took long, the next yields are skipped for
    /// a while.
    pub(crate) fn yield_core(&mut self, before: Duration, runtime: &Runtime) {
        runtime.yield_now();
        let now = runtime.now();
        self.record_yield(now, now - before);
    }

    /// Yields the core to a rank of the group that is behind. Detects external load by the time that the yield
    /// takes.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(crate) fn yield_to_rank(&mut self, group: (&GroupMemory, Rank), before: Duration, runtime: &Runtime) {
        match self {
            Self::CorePerRank(_) => runtime.yield_now(),
            Self::Oversubscribed(policy) => policy.yield_to_rank(group, before, runtime),
        }
    }

    fn record_yield(&mut self, now: Duration, lasted: Duration) {
        let (yields_from, without_yields) = match self {
            Self::CorePerRank(policy) => (&mut policy.yields_from, WITHOUT_YIELDS),
            Self::Oversubscribed(policy) => (&mut policy.yields_from, 1),
        };
        if lasted > YIELD_TOO_LONG {
            *yields_from = now + lasted * without_yields;
        }
    }
}

/// The policy with a core for each rank. The system can wake the rank on an idle core.
///
/// If nothing is known about the peer, the rank yields now and then, because the system may have put the peer
/// on the same core.
#[derive(Debug)]
pub(crate) struct CorePerRank {
    /// The time from which yields are allowed again.
    yields_from: Duration,
}

impl CorePerRank {
    fn next(&self, wait: &mut Wait, now: Duration, demand: CoreDemand) -> WaitStep {
        let spent = wait.spent(now);
        match demand {
            CoreDemand::Wanted => WaitStep::Sleep,
            _ if spent >= SPIN => WaitStep::Sleep,
            CoreDemand::Unknown
                if now >= self.yields_from && spent >= SPIN_BETWEEN_YIELDS * (wait.yields + 1) =>
            {
                wait.yields += 1;
                WaitStep::Yield
            }
            _ => WaitStep::Spin,
        }
    }
}

/// The policy with fewer cores than ranks. Ranks on one core take turns: a yield takes 1 to 2 µs.
#[derive(Debug)]
pub(crate) struct Oversubscribed {
    /// The time from which yields are allowed again.
    yields_from: Duration,
    /// Waits that may still yield before one has to sleep.
    waits_on_one_core: u32,
    #[cfg(all(feature = "shm", target_os = "linux"))]
    detection: Detection,
}

/// The state of the detection of external load.
#[cfg(all(feature = "shm", target_os = "linux"))]
#[derive(Debug)]
struct Detection {
    /// The last time for which the rank did not yield.
    penalty: Duration,
    /// Until when yields are measured.
    measured_until: Duration,
    measurement: Option<ExternalLoad>,
}

impl Oversubscribed {
    const fn new() -> Self {
        Self {
            yields_from: Duration::ZERO,
            waits_on_one_core: 0,
            #[cfg(all(feature = "shm", target_os = "linux"))]
            detection: Detection {
                penalty: Duration::ZERO,
                measured_until: Duration::ZERO,
                measurement: None,
            },
        }
    }

    fn next(&mut self, wait: &mut Wait, now: Duration, demand: CoreDemand) -> WaitStep {
        let step = self.choose(wait, now, demand);
        #[cfg(all(feature = "shm", target_os = "linux"))]
        if step == WaitStep::Sleep {
            // The time of the sleep would count as lost.
            self.detection.measurement = None;
        }
        step
    }

    fn choose(&mut self, wait: &mut Wait, now: Duration, demand: CoreDemand) -> WaitStep {
        if demand == CoreDemand::Free {
            return if wait.spent(now) < SPIN { WaitStep::Spin } else { WaitStep::Sleep };
        }
        if now < self.yields_from || wait.yields == YIELDS_MAX {
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

#[cfg(all(feature = "shm", target_os = "linux"))]
impl Oversubscribed {
    fn yield_to_rank(&mut self, (memory, rank): (&GroupMemory, Rank), before: Duration, runtime: &Runtime) {
        let is_measuring = before < self.detection.measured_until;
        let measurement = &mut self.detection.measurement;
        if is_measuring && measurement.as_ref().is_none_or(|measurement| measurement.is_old(before)) {
            *measurement = ExternalLoad::begin(memory, rank, runtime);
        }
        runtime.yield_now();
        let now = runtime.now();
        // The awaited signal may be there now; the time that the core was away is recorded all the same.
        let measurement = self.detection.measurement.take();
        let lost = || measurement.as_ref().filter(|_| is_measuring)?.lost(now);
        let is_persistent = self.record_measured_yield(now, now - before, lost);
        self.detection.measurement = measurement;
        if is_persistent {
            memory.record_external_load();
        }
    }

    /// Records a yield that took `lasted`, until `now`. If it took too long, and a measurement was running,
    /// `lost` returns how long no rank had the core. Returns `true` if ranks should ask for short slices.
    fn record_measured_yield(
        &mut self,
        now: Duration,
        lasted: Duration,
        lost: impl FnOnce() -> Option<Duration>,
    ) -> bool {
        let Detection { penalty, measured_until, .. } = &mut self.detection;
        if lasted <= measured::YIELD_TOO_LONG {
            return false;
        }
        *measured_until = now + measured::REMEMBERED;
        if lost().is_none_or(|lost| lost <= measured::YIELD_TOO_LONG) {
            return false;
        }
        let stays = *penalty > Duration::ZERO && now < self.yields_from + measured::REMEMBERED;
        *penalty = if stays { (4 * *penalty).min(measured::PENALTY_MAX) } else { measured::PENALTY };
        self.yields_from = now + *penalty;
        *penalty >= measured::PENALTY_OF_SHORT_SLICES
    }
}

#[cfg(test)]
mod tests {
    use super::CoreDemand::{Free, Unknown, Wanted};
    use super::WaitStep::{Sleep, Spin, Yield};
    use super::*;

    const fn us(time: u64) -> Duration {
        Duration::from_micros(time)
    }

    /// Returns the policy of a rank that has just slept, so that it could be woken on another core.
    fn oversubscribed() -> WaitPolicy {
        WaitPolicy::Oversubscribed(rested())
    }

    fn rested() -> Oversubscribed {
        Oversubscribed { waits_on_one_core: WAITS_ON_ONE_CORE, ..Oversubscribed::new() }
    }

    #[test]
    fn a_rank_spins_yields_or_sleeps_depending_on_its_core() {
        const NEW: [fn() -> WaitPolicy; 2] = [|| WaitPolicy::new(true), oversubscribed];
        for (demand, at, core_per_rank, shared) in [
            (Free, 0, Spin, Spin),
            (Free, 99, Spin, Spin),
            (Free, 100, Sleep, Sleep),
            (Wanted, 0, Sleep, Yield),
            (Wanted, 99, Sleep, Yield),
            (Unknown, 0, Spin, Yield),
            (Unknown, 4, Spin, Yield),
            (Unknown, 5, Yield, Yield),
            (Unknown, 99, Yield, Yield),
            (Unknown, 100, Sleep, Yield),
        ] {
            for (new, expected) in NEW.into_iter().zip([core_per_rank, shared]) {
                let mut wait = Wait { since: Some(us(1000)), ..Wait::default() };
                let step = new().next(&mut wait, us(1000 + at), demand);
                assert_eq!(step, expected, "{demand:?} after {at} µs");
            }
        }
    }

    #[test]
    fn a_rank_with_its_own_core_yields_every_five_microseconds() {
        let (mut policy, mut wait) = (WaitPolicy::new(true), Wait::default());
        let steps = (0..100).map(|now| policy.next(&mut wait, us(now), Unknown));
        assert_eq!(steps.filter(|step| *step == Yield).count(), 19);
        assert_eq!(policy.next(&mut wait, us(100), Unknown), Sleep);
    }

    #[test]
    fn a_rank_on_a_shared_core_yields_and_finally_sleeps() {
        let (mut policy, mut wait) = (oversubscribed(), Wait::default());
        for now in 0..YIELDS_MAX {
            assert_eq!(policy.next(&mut wait, us(now.into()), Wanted), Yield);
        }
        assert_eq!(policy.next(&mut wait, us(200), Wanted), Sleep);
        assert_eq!(policy.next(&mut Wait::default(), us(300), Wanted), Yield);
    }

    #[test]
    fn one_of_many_waits_on_one_core_sleeps() {
        let mut policy = WaitPolicy::new(false);
        for _ in 0..2 {
            assert_eq!(policy.next(&mut Wait::default(), us(0), Wanted), Sleep);
            for number in 0..WAITS_ON_ONE_CORE {
                let mut wait = Wait::default();
                assert_eq!(policy.next(&mut wait, us(0), Wanted), Yield, "wait {number}");
                assert_eq!(policy.next(&mut wait, us(1), Wanted), Yield, "wait {number}");
            }
        }
    }

    #[test]
    fn after_a_long_yield_a_rank_does_not_yield_for_a_while() {
        for (mut policy, without, resting) in
            [(WaitPolicy::new(true), 1010, Spin), (oversubscribed(), 101, Sleep)]
        {
            let next = |policy: &mut WaitPolicy, now| {
                let mut wait = Wait { since: Some(us(now - 50)), ..Wait::default() };
                policy.next(&mut wait, us(now), Unknown)
            };
            policy.record_yield(us(5000), us(100));
            assert_eq!(next(&mut policy, 5000), Yield);
            policy.record_yield(us(5000), us(101));
            assert_eq!(next(&mut policy, 5000 + without - 1), resting);
            assert_eq!(next(&mut policy, 5000 + without), Yield);
        }
    }

    /// Records a long yield to a rank until `now`, during which external load had the core for `lost` µs.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    fn record(policy: &mut Oversubscribed, now: u64, lasted: u64, lost: u64) -> bool {
        let is_measuring = us(now - lasted) < policy.detection.measured_until;
        policy.record_measured_yield(us(now), us(lasted), || is_measuring.then_some(us(lost)))
    }

    #[cfg(all(feature = "shm", target_os = "linux"))]
    fn next_step(policy: &mut Oversubscribed, now: u64) -> WaitStep {
        let mut wait = Wait::default();
        // A free core is used for spinning, whatever happened before.
        assert_eq!(policy.next(&mut wait, us(now), Free), Spin);
        policy.next(&mut wait, us(now), Wanted)
    }

    #[cfg(all(feature = "shm", target_os = "linux"))]
    #[test]
    fn a_long_yield_may_have_been_to_a_rank_and_the_next_ones_are_measured() {
        let mut policy = rested();
        assert!(!record(&mut policy, 10_000, 1000, 0));
        assert_eq!(policy.detection.measured_until, us(0));
        for now in [20_000, 30_000, 50_000] {
            assert!(!record(&mut policy, now, 1001, 1000));
            assert_eq!(next_step(&mut policy, now), Yield);
            assert_eq!(policy.detection.measured_until, us(now + 20_000));
        }
    }

    #[cfg(all(feature = "shm", target_os = "linux"))]
    #[test]
    fn persistent_external_load_makes_it_sleep_for_longer_and_longer() {
        let mut policy = rested();
        let mut now = 10_000;
        for expected in [1000, 4000, 16_000, 64_000, 256_000, 1_000_000, 1_000_000] {
            // From this point on yields are measured.
            record(&mut policy, now, 3000, 0);
            now += 10_000;
            assert_eq!(record(&mut policy, now, 3000, 1001), expected >= 16_000);
            assert_eq!(next_step(&mut policy, now + expected - 1), Sleep);
            now += expected;
            assert_eq!(next_step(&mut policy, now), Yield);
            now += 9_000;
        }
    }

    #[cfg(all(feature = "shm", target_os = "linux"))]
    #[test]
    fn short_external_load_costs_little() {
        let mut policy = rested();
        for now in (1..10).map(|round| round * 30_000) {
            record(&mut policy, now - 5000, 3000, 3000);
            assert!(!record(&mut policy, now, 3000, 3000));
            assert_eq!(next_step(&mut policy, now + 999), Sleep);
            assert_eq!(next_step(&mut policy, now + 1000), Yield);
        }
    }
}

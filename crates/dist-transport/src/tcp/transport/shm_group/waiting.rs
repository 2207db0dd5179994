//! Waits for the signals of other ranks, and compares their calls with this rank's.

use std::sync::atomic::Ordering;

use super::{Entered, ShmGroup};
use crate::bootstrap::control::{Missing, WaitReport};
use crate::bootstrap::session::{LongWait, number};
use crate::link::message::LinkError;
use crate::processor::is_intel;
use crate::shm::{self, Generation, GroupMemory};
use crate::wait::external_load::ExternalLoad;
use crate::wait::group_wait::{self, SHORT_SLICE, WaitStep};
use crate::{Deadline, Direct, LazyDeadline, Result};

/// How often to look for a signal before looking at anything else, which takes longer.
const LOOKS: usize = 16;

/// Delays a rank by 15 to 30 ns between its signal and its first look for the other of two ranks, which
/// signals at the same time. An earlier look would take the cache line away from the core that is about to
/// write it.
///
/// `spin_loop` would take too long. The delay is the measured cost of this many stores to the stack; Intel
/// processors need more of them.
#[inline(always)]
pub(super) fn spin_delay() {
    #[inline(always)]
    fn pass(rounds: u32) {
        (0..rounds).for_each(|round| {
            std::hint::black_box(round);
        });
    }
    if is_intel() { pass(80) } else { pass(60) }
}

impl ShmGroup {
    /// Waits until every rank has signalled in this call, which is one of the last calls.
    #[inline(never)]
    pub(super) fn wait_for_all_in(&mut self, call: usize, due: &LazyDeadline<'_>) -> Result<()> {
        self.wait_for_all(call, due)
    }

    #[inline(always)]
    pub(super) fn wait_for_all(&mut self, call: usize, due: &LazyDeadline<'_>) -> Result<()> {
        self.wait_for_each(call, |_, _| {}, due)
    }

    /// Like `wait_for_all`, and calls `seen` with each rank as soon as it has signalled.
    #[inline(always)]
    pub(super) fn wait_for_each(
        &mut self,
        call: usize,
        mut seen: impl FnMut(&GroupMemory, usize),
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let mut peer = self.rank;
        for _ in 1..self.rank.world_size() {
            peer = peer.right();
            self.wait_in(call, peer.index(), 1, due)?;
            seen(&self.memory, peer.index());
        }
        self.compared = call + 1;
        Ok(())
    }

    /// Waits until a rank has signalled this many times in one of the last calls.
    #[inline(always)]
    pub(super) fn wait_in(
        &mut self,
        call: usize,
        rank: usize,
        signals: u32,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let generation = Generation::of(call);
        let Entered { hash, base } = self.entered[generation.index()];
        let wanted = base + u64::from(signals);
        if self.peers[rank].seen < wanted {
            let seen = match self.memory.look(rank, generation, wanted, 1) {
                Some(seen) => seen,
                None => self.wait_for((rank, generation), wanted, due)?,
            };
            self.peers[rank].seen = seen;
        }
        let compared = self.peers[rank].compared;
        if compared <= call && signals > 0 {
            if compared < call || self.memory.hash(rank, generation).load(Ordering::Acquire) != hash {
                (compared..=call).try_for_each(|call| self.compare(rank, call, due))?;
            }
            self.peers[rank].compared = call + 1;
        }
        Ok(())
    }

    /// Checks that a rank which has signalled in one of the last calls was in the same call as this one.
    #[cold]
    fn compare(&self, rank: usize, call: usize, due: &LazyDeadline<'_>) -> Result<()> {
        let generation = Generation::of(call);
        let Entered { hash, base } = self.entered[generation.index()];
        let found = || self.memory.hash(rank, generation).load(Ordering::Acquire);
        let in_line_before = || self.memory.signals(rank, generation.before_next()).load(Ordering::Acquire);
        if shm::is_same_call((hash, base), found, in_line_before) {
            return Ok(());
        }
        let link_error = LinkError::Mismatch { theirs: self.memory.call(rank, generation) };
        Err(self.fail(generation, (rank, link_error), due.deadline()))
    }

    /// Waits until the rank has signalled `wanted` times, and returns its number of signals.
    #[inline(never)]
    pub(super) fn wait_for(
        &mut self,
        (peer, generation): (usize, Generation),
        wanted: u64,
        due: &LazyDeadline<'_>,
    ) -> Result<u64> {
        if !self.is_wanted()
            && let Some(seen) = self.memory.look(peer, generation, wanted, LOOKS)
        {
            return Ok(seen);
        }
        let deadline = due.deadline();
        self.wait_long((peer, generation), wanted, deadline)
            .map_err(|link_error| self.fail(generation, (peer, link_error), deadline))
    }

    fn wait_long(
        &mut self,
        (peer, generation): (usize, Generation),
        wanted: u64,
        deadline: Deadline,
    ) -> Result<u64, LinkError> {
        let look = |memory: &GroupMemory, times| memory.look(peer, generation, wanted, times);
        // The awaited rank may sleep for this one.
        self.wake_waiters();
        let session = &*self.membership.session;
        let mut now = session.runtime.now();
        let mut wait = group_wait::GroupWait::begin(now);
        let mut long = LongWait::default();
        let seen = loop {
            if !self.uses_short_slices && self.memory.has_external_load() {
                self.uses_short_slices = true;
                if let Err(error) = shm::request_short_slices(SHORT_SLICE) {
                    tracing::debug!(%error, "the system grants no short scheduler slices");
                }
            }
            let is_wanted = self.is_wanted();
            match self.wait_policy.next(&mut wait, now, is_wanted) {
                WaitStep::Spin => {}
                WaitStep::Yield => {
                    let is_measuring = self.wait_policy.is_measuring(now);
                    if is_measuring
                        && self.external_load.as_ref().is_none_or(|external_load| external_load.is_old(now))
                    {
                        self.external_load = ExternalLoad::begin(&self.memory, self.rank, &session.runtime);
                    }
                    session.runtime.yield_now();
                    // The awaited signal may be there now; the time that the core was away is recorded all
                    // the same.
                    let after = session.runtime.now();
                    let external_load = self.external_load.as_ref().filter(|_| is_measuring);
                    let lost = || external_load.and_then(|external_load| external_load.lost(after));
                    if self.wait_policy.record_yield(after, after - now, lost) {
                        self.memory.note_external_load();
                    }
                }
                WaitStep::Sleep => {
                    self.external_load = None;
                    let limit = session.runtime.remaining(deadline.earlier(long.until(&session.runtime)));
                    let ready = || {
                        look(&self.memory, 1).is_some()
                            || self.memory.has_left(peer)
                            || session.abort_state.get().is_some()
                    };
                    self.memory.sleep(self.rank.index(), peer, limit, ready);
                    let seen = self.memory.all_signals(peer, self.current.number);
                    let wait = || WaitReport {
                        on: number(self.members[peer]),
                        // A signal that has arrived meanwhile is not missing.
                        missing: if seen < wanted { Missing::Signal(seen) } else { Missing::Anything },
                        messages: self.counts.sent(peer),
                        signals: self.signals(),
                    };
                    long.report_if_due(session, self.channel, &self.calls, wait);
                }
            }
            if let Some(seen) = look(&self.memory, if is_wanted { 1 } else { LOOKS }) {
                break seen;
            }
            if let Some(abort) = session.abort_state.get() {
                return Err(LinkError::Aborted(abort));
            }
            if self.memory.has_left(peer) {
                // The rank may have signalled before it left.
                break look(&self.memory, 1).ok_or(LinkError::Goodbye)?;
            }
            now = session.runtime.now();
            if deadline.has_passed(now) {
                return Err(LinkError::TimedOut);
            }
        };
        long.end(session, self.channel, &self.calls);
        Ok(seen)
    }

    /// Returns `true` if a rank of the group that is behind this one waits for this core.
    fn is_wanted(&self) -> bool {
        let (memory, call) = (&*self.memory, &self.current);
        let core = memory.note_core(self.rank.index());
        let come = call.base + u64::from(call.signalled);
        self.others().any(|peer| {
            memory.waits_for_core(peer, core) && memory.look(peer, call.generation(), come, 1).is_none()
        })
    }
}

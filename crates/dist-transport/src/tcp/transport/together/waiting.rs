//! Waits for the posts of other ranks, whose calls are compared with this rank's.

use std::sync::atomic::Ordering;

use super::courtesy::{self, Next, SHORT_TURN};
use super::watch::Watch;
use super::{Entered, Together};
use crate::processor::is_intel;
use crate::shm::{self, GroupMemory, Turn};
use crate::tcp::control::{Missing, Wait};
use crate::tcp::message::Fault;
use crate::tcp::session::{LongWait, number};
use crate::{Deadline, Direct, Due, Result};

/// How often to look for a post between two looks at anything else, which take longer.
const LOOKS: usize = 16;

/// Lets some 15 to 30 ns pass between a post and the first look for that of the other of two, who posts at the same
/// time: a look that comes before it takes the line away from the core that is about to write it. `spin_loop` would take
/// too long. What was measured is what the compiler makes of it: so many stores to the stack, on Intel's processors by a
/// loop.
#[inline(always)]
pub(super) fn linger() {
    #[inline(always)]
    fn pass(rounds: u32) {
        (0..rounds).for_each(|round| {
            std::hint::black_box(round);
        });
    }
    if is_intel() { pass(80) } else { pass(60) }
}

impl Together {
    /// Waits until every rank has posted in one of the last calls.
    #[inline(never)]
    pub(super) fn wait_for_all_in(&mut self, call: usize, due: &Due<'_>) -> Result<()> {
        self.wait_for_all(call, due)
    }

    #[inline(always)]
    pub(super) fn wait_for_all(&mut self, call: usize, due: &Due<'_>) -> Result<()> {
        self.wait_for_each(call, |_, _| {}, due)
    }

    /// The same, and `seen` hears of each rank as soon as it has been seen.
    #[inline(always)]
    pub(super) fn wait_for_each(
        &mut self,
        call: usize,
        mut seen: impl FnMut(&GroupMemory, usize),
        due: &Due<'_>,
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

    /// Waits until a rank has posted so often in one of the last calls.
    #[inline(always)]
    pub(super) fn wait_in(&mut self, call: usize, rank: usize, posts: u32, due: &Due<'_>) -> Result<()> {
        let turn = Turn::of(call);
        let Entered { hash, base } = self.entered[turn.index()];
        let wanted = base + u64::from(posts);
        if self.peers[rank].seen < wanted {
            let seen = match self.memory.look(rank, turn, wanted, 1) {
                Some(seen) => seen,
                None => self.wait_for((rank, turn), wanted, due)?,
            };
            self.peers[rank].seen = seen;
        }
        let compared = self.peers[rank].compared;
        if compared <= call && posts > 0 {
            if compared < call || self.memory.hash(rank, turn).load(Ordering::Acquire) != hash {
                (compared..=call).try_for_each(|call| self.compare(rank, call, due))?;
            }
            self.peers[rank].compared = call + 1;
        }
        Ok(())
    }

    /// Finds out whether a rank that has posted in one of the last calls was in the same as this one.
    #[cold]
    fn compare(&self, rank: usize, call: usize, due: &Due<'_>) -> Result<()> {
        let turn = Turn::of(call);
        let Entered { hash, base } = self.entered[turn.index()];
        let found = || self.memory.hash(rank, turn).load(Ordering::Acquire);
        let in_line_before = || self.memory.posts(rank, turn.before_next()).load(Ordering::Acquire);
        if shm::is_same_call((hash, base), found, in_line_before) {
            return Ok(());
        }
        let fault = Fault::Mismatch { theirs: self.memory.call(rank, turn) };
        Err(self.fail(turn, (rank, fault), due.deadline()))
    }

    /// Gives how often the rank has posted, in a call with this turn, which is as often as is wanted.
    #[inline(never)]
    pub(super) fn wait_for(
        &mut self,
        (peer, turn): (usize, Turn),
        wanted: u64,
        due: &Due<'_>,
    ) -> Result<u64> {
        if !self.is_wanted()
            && let Some(seen) = self.memory.look(peer, turn, wanted, LOOKS)
        {
            return Ok(seen);
        }
        let deadline = due.deadline();
        self.wait_long((peer, turn), wanted, deadline)
            .map_err(|fault| self.fail(turn, (peer, fault), deadline))
    }

    fn wait_long(
        &mut self,
        (peer, turn): (usize, Turn),
        wanted: u64,
        deadline: Deadline,
    ) -> Result<u64, Fault> {
        let look = |memory: &GroupMemory, times| memory.look(peer, turn, wanted, times);
        // Whoever this one waits for may sleep for it.
        self.settle();
        let session = &*self.membership.session;
        let mut now = session.runtime.now();
        let mut wait = courtesy::Wait::begin(now);
        let mut long = LongWait::default();
        let seen = loop {
            if !self.takes_short_turns && self.memory.has_met_stranger() {
                self.takes_short_turns = true;
                if let Err(error) = shm::take_short_turns(SHORT_TURN) {
                    tracing::debug!(%error, "no shorter turns on a core are to be had");
                }
            }
            let is_wanted = self.is_wanted();
            match self.courtesy.next(&mut wait, now, is_wanted) {
                Next::Look => {}
                Next::Yield => {
                    let is_watchful = self.courtesy.is_watchful(now);
                    if is_watchful && self.watch.as_ref().is_none_or(|watch| watch.is_old(now)) {
                        self.watch = Watch::begin(&self.memory, self.rank, &session.runtime);
                    }
                    session.runtime.yield_now();
                    // What it waited for may be there now: a stranger's turn counts all the same.
                    let after = session.runtime.now();
                    let watch = self.watch.as_ref().filter(|_| is_watchful);
                    let lost = || watch.and_then(|watch| watch.lost(after));
                    if self.courtesy.gave_away(after, after - now, lost) {
                        self.memory.note_stranger();
                    }
                }
                Next::Sleep => {
                    self.watch = None;
                    let limit = session.runtime.remaining(deadline.earlier(long.until(&session.runtime)));
                    let ready = || {
                        look(&self.memory, 1).is_some()
                            || self.memory.has_left(peer)
                            || session.verdict.get().is_some()
                    };
                    self.memory.sleep(self.rank.index(), peer, limit, ready);
                    let seen = self.memory.all_posts(peer, self.current.number);
                    let wait = || Wait {
                        on: number(self.members[peer]),
                        // What has come meanwhile is not missing.
                        missing: if seen < wanted { Missing::Post(seen) } else { Missing::Anything },
                        messages: self.counts.sent(peer),
                        posts: self.posts(),
                    };
                    long.tell(session, self.channel, &self.calls, wait);
                }
            }
            if let Some(seen) = look(&self.memory, if is_wanted { 1 } else { LOOKS }) {
                break seen;
            }
            if let Some(abort) = session.verdict.get() {
                return Err(Fault::Aborted(abort));
            }
            if self.memory.has_left(peer) {
                // It may have posted before it left.
                break look(&self.memory, 1).ok_or(Fault::Goodbye)?;
            }
            now = session.runtime.now();
            if deadline.has_passed(now) {
                return Err(Fault::TimedOut);
            }
        };
        long.end(session, self.channel, &self.calls);
        Ok(seen)
    }

    /// Whether this core is wanted by a rank of the group that has not come as far as this one in its call.
    fn is_wanted(&self) -> bool {
        let (memory, call) = (&*self.memory, &self.current);
        let core = memory.note_core(self.rank.index());
        let come = call.base + u64::from(call.posted);
        self.others().any(|peer| {
            memory.waits_for_core(peer, core) && memory.look(peer, call.turn(), come, 1).is_none()
        })
    }
}

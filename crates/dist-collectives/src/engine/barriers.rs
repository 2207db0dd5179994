//! Operations in which ranks wait for each other and move no elements.

use std::time::Duration;

use dist_algos::direct::DirectCollective;
use dist_transport::runtime::Deadline;
use dist_transport::{Abort, Cause, Incoming, LazyDeadline, Outgoing, Sink};

use super::memory::CallOperands;
use super::plan_cache::{CallKey, Collective};
use super::{CallOptions, Engine};
use crate::{Call, Error, Operation, Result};

impl Engine {
    pub(crate) fn barrier(&mut self, options: &CallOptions<'_>) -> Result<()> {
        let plan = self.compile(&of_nothing(options), |_| 0, options)?;
        let nothing: &mut [u8] = &mut [];
        self.execute(plan, CallOperands::of(nothing), None, options)
    }

    /// Every rank reports to rank 0 and waits for its answer: a bit mask of the absent ranks. Before that, rank 0
    /// tells each rank that it is present, and the rank answers how long it can wait. The answer is sent at once,
    /// so that a rank with a short deadline is heard in time.
    pub(crate) fn monitored_barrier(&mut self, options: &CallOptions<'_>) -> Result<()> {
        let (operation, order) = (Operation::MonitoredBarrier, options.settings.order);
        let call = self.begin(self.call_of(operation, &of_nothing(options), order));
        if self.is_given_up(&call) {
            return Err(Error::Late);
        }
        let mut word = vec![0; self.world_size().div_ceil(8)];
        if self.rank().index() == COUNTING {
            self.count_ranks(&call, &mut word, &options.due)?;
        } else {
            self.report(&call, &mut word, &options.due)?;
        }
        let is_absent = |rank: &usize| word[rank / 8] & (1 << (rank % 8)) != 0;
        let absent = (0..self.world_size()).filter(is_absent);
        let ranks: Vec<usize> = absent.map(|rank| self.in_world(rank)).collect();
        if ranks.is_empty() { Ok(()) } else { Err(Error::Absent { ranks }) }
    }

    /// Waits for the other ranks, but keeps enough time to tell the ranks that came.
    fn count_ranks(&mut self, call: &Call, word: &mut [u8], due: &LazyDeadline<'_>) -> Result<()> {
        let runtime = self.transport.runtime().clone();
        let share_of = |patience| runtime.deadline(share_of_waiting(patience));
        let mut end = share_of(runtime.remaining(due.deadline()));
        let mut absent: Vec<usize> = (0..self.world_size()).filter(|&rank| rank != COUNTING).collect();
        let mut came = Vec::new();
        while !absent.is_empty() {
            let newcomers = self.welcome(call, &mut absent, end, due)?;
            if newcomers.is_empty() {
                break;
            }
            for (rank, patience) in newcomers {
                // This rank may have less time left than the ranks before it.
                end = end.earlier(share_of(patience));
                came.push(rank);
            }
        }
        for &rank in &absent {
            word[rank / 8] |= 1 << (rank % 8);
        }
        for &rank in &came {
            self.tell(call, rank, word, due)?;
        }
        if let Some(&first) = absent.first() {
            // Each rank confirms that it received the result, because nobody receives anything in an aborted job.
            let _heard = came.iter().try_for_each(|&rank| self.take(call, rank, &mut [], due));
            // A wait with a deadline that has already passed ends the job, with the absent rank as the cause.
            let over = self.transport.runtime().deadline(Duration::ZERO).into();
            if self.take(call, first, &mut [], &over).is_ok() {
                let late = self.in_world(first);
                self.transport
                    .abort(Cause::gave_up(format_args!("rank {late} came to the barrier too late")));
            }
        }
        Ok(())
    }

    /// Waits until `end` for absent ranks to report and returns after the first report. Removes the ranks that
    /// reported from the absent ones, and returns how long each of them can wait.
    fn welcome(
        &mut self,
        call: &Call,
        absent: &mut Vec<usize>,
        until: Deadline,
        due: &LazyDeadline<'_>,
    ) -> Result<Vec<(usize, Duration)>> {
        let silent = self
            .transport
            .wait_any_peer(absent, &until.into())
            .map_err(|source| Error::in_call(*call, source))?;
        let mut came = std::mem::replace(absent, silent);
        came.retain(|rank| !absent.contains(rank));
        for &rank in &came {
            self.take(call, rank, &mut [], due)?;
            self.tell(call, rank, &[], due)?;
        }
        let patience = |rank| {
            let mut nanoseconds = [0; 8];
            self.take(call, rank, &mut nanoseconds, due)?;
            Ok((rank, Duration::from_nanos(u64::from_le_bytes(nanoseconds))))
        };
        came.into_iter().map(patience).collect()
    }

    fn report(&mut self, call: &Call, word: &mut [u8], due: &LazyDeadline<'_>) -> Result<()> {
        let here = self.tell(call, COUNTING, &[], due).and_then(|()| self.take(call, COUNTING, &mut [], due));
        here.map_err(|error| self.who_is_absent(call, error))?;
        let patience = self.transport.runtime().remaining(due.deadline()).as_nanos();
        let nanoseconds = u64::try_from(patience).unwrap_or(u64::MAX);
        self.tell(call, COUNTING, &nanoseconds.to_le_bytes(), due)?;
        self.take(call, COUNTING, word, due)?;
        if word.iter().any(|&bits| bits != 0) {
            self.tell(call, COUNTING, &[], due)?;
            // Nothing arrives and the job ends. A rank that learns before that this rank has left would report this
            // rank as the cause.
            let _ended = self.take(call, COUNTING, &mut [], due);
        }
        Ok(())
    }

    /// Returns `true` if this call was given up before this rank reached it. Either the counting rank waited for
    /// this rank in vain, or other ranks did.
    fn is_given_up(&self, call: &Call) -> bool {
        let [own, counting] = [self.rank().index(), COUNTING].map(|rank| self.in_world(rank));
        let of_this_call = self.transport.aborted().filter(|abort| abort.call == call.encode());
        of_this_call.is_some_and(|Abort { cause, rank, reporter, .. }| match cause {
            Cause::TimedOut => reporter == counting || rank == own,
            Cause::GaveUp { .. } => reporter == counting,
            _ => false,
        })
    }

    /// Reports the counting rank as absent if it has not reached this call. Other ranks may have waited for the
    /// counting rank in another call.
    fn who_is_absent(&self, call: &Call, error: Error) -> Error {
        let counting = self.in_world(COUNTING);
        let elsewhere =
            matches!(&error, Error::Aborted { reported, .. } if reported.as_deref() != Some(call));
        if !elsewhere && error.is_timeout() && error.peer() == Some(counting) {
            Error::Absent { ranks: vec![counting] }
        } else {
            error
        }
    }

    fn tell(&mut self, call: &Call, to: usize, bytes: &[u8], due: &LazyDeadline<'_>) -> Result<()> {
        let sent = self.transport.exchange(Some(Outgoing { to, parts: &[bytes] }), None, due);
        sent.map_err(|source| Error::in_call(*call, source))
    }

    fn take(&mut self, call: &Call, from: usize, bytes: &mut [u8], due: &LazyDeadline<'_>) -> Result<()> {
        let incoming = Incoming { from, len: bytes.len(), sink: Sink::Into(bytes) };
        let received = self.transport.exchange(None, Some(incoming), due);
        received.map_err(|source| Error::in_call(*call, source))
    }
}

/// Returns the key of a call that moves no elements.
const fn of_nothing(options: &CallOptions<'_>) -> CallKey {
    CallKey {
        dtype: None,
        ..CallKey::of::<u8>(Collective::Direct(DirectCollective::Barrier), 0, 0, options.sizes)
    }
}

/// The rank that the others report to.
const COUNTING: usize = 0;

/// Returns the share of a time limit that the counting rank spends waiting.
fn share_of_waiting(limit: Duration) -> Duration {
    limit / 4 * 3
}

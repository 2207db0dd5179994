//! Operations that let ranks wait for each other and move no elements.

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
        self.execute_moving(plan, CallOperands::of(nothing), options)
    }

    /// Waits for all ranks; if some are absent, every rank that came gets their numbers.
    ///
    /// 1. Every other rank sends an empty report to rank 0.
    /// 2. Rank 0 confirms each report as soon as it arrives, and the rank replies with the time until its deadline.
    ///    Rank 0 then waits no longer than the rank with the shortest deadline can.
    /// 3. Rank 0 sends a bit mask of the absent ranks to the ranks that came.
    pub(crate) fn monitored_barrier(&mut self, options: &CallOptions<'_>) -> Result<()> {
        let (operation, order) = (Operation::MonitoredBarrier, options.settings.order);
        let call = self.begin(self.call_of(operation, &of_nothing(options), order));
        if self.is_given_up(&call) {
            return Err(Error::Late);
        }
        let mut word = vec![0; self.world_size().div_ceil(8)];
        if self.rank().index() == COUNTING_RANK {
            self.count_ranks(&call, &mut word, &options.due)?;
        } else {
            self.report(&call, &mut word, &options.due)?;
        }
        let is_absent = |rank: &usize| word[rank / 8] & (1 << (rank % 8)) != 0;
        let absent = (0..self.world_size()).filter(is_absent);
        let ranks: Vec<usize> = absent.map(|rank| self.in_world(rank)).collect();
        if ranks.is_empty() { Ok(()) } else { Err(Error::Absent { ranks }) }
    }

    /// Waits for the other ranks, and marks the absent ones in `word`. Keeps enough time to send the result to the
    /// ranks that came.
    fn count_ranks(&mut self, call: &Call, word: &mut [u8], due: &LazyDeadline<'_>) -> Result<()> {
        let runtime = self.transport.runtime().clone();
        let share_of = |limit| runtime.deadline(share_of_waiting(limit));
        let mut end = share_of(runtime.remaining(due.deadline()));
        let mut absent: Vec<usize> = (0..self.world_size()).filter(|&rank| rank != COUNTING_RANK).collect();
        let mut came = Vec::new();
        while !absent.is_empty() {
            let newcomers = self.receive_reports(call, &mut absent, end, due)?;
            if newcomers.is_empty() {
                break;
            }
            for (rank, time_left) in newcomers {
                // This rank may have less time left than the ranks before it.
                end = end.earlier(share_of(time_left));
                came.push(rank);
            }
        }
        for &rank in &absent {
            word[rank / 8] |= 1 << (rank % 8);
        }
        for &rank in &came {
            self.send_bytes(call, rank, word, due)?;
        }
        if let Some(&first) = absent.first() {
            // Each rank confirms that it received the result, because no message arrives in an aborted job.
            let _heard = came.iter().try_for_each(|&rank| self.receive_bytes(call, rank, &mut [], due));
            // A wait with a deadline that has already passed ends the job, with the absent rank as the cause.
            let over = self.transport.runtime().deadline(Duration::ZERO).into();
            if self.receive_bytes(call, first, &mut [], &over).is_ok() {
                let late = self.in_world(first);
                self.transport
                    .abort(Cause::gave_up(format_args!("rank {late} came to the barrier too late")));
            }
        }
        Ok(())
    }

    /// Waits until `until` for the first report of an absent rank, and receives all reports that have arrived. Removes
    /// their ranks from `absent`, and returns each of them with the time until its deadline.
    fn receive_reports(
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
            self.receive_bytes(call, rank, &mut [], due)?;
            self.send_bytes(call, rank, &[], due)?;
        }
        let time_left = |rank| {
            let mut nanoseconds = [0; 8];
            self.receive_bytes(call, rank, &mut nanoseconds, due)?;
            Ok((rank, Duration::from_nanos(u64::from_le_bytes(nanoseconds))))
        };
        came.into_iter().map(time_left).collect()
    }

    /// Reports to the counting rank, and receives the bit mask of absent ranks into `word`.
    fn report(&mut self, call: &Call, word: &mut [u8], due: &LazyDeadline<'_>) -> Result<()> {
        let here = self
            .send_bytes(call, COUNTING_RANK, &[], due)
            .and_then(|()| self.receive_bytes(call, COUNTING_RANK, &mut [], due));
        here.map_err(|error| self.absent_counting_rank(call, error))?;
        let time_left = self.transport.runtime().remaining(due.deadline()).as_nanos();
        let nanoseconds = u64::try_from(time_left).unwrap_or(u64::MAX);
        self.send_bytes(call, COUNTING_RANK, &nanoseconds.to_le_bytes(), due)?;
        self.receive_bytes(call, COUNTING_RANK, word, due)?;
        if word.iter().any(|&bits| bits != 0) {
            self.send_bytes(call, COUNTING_RANK, &[], due)?;
            // Nothing arrives, and this wait ends with the job. If this rank returned earlier, another rank could
            // report it as the cause because it has left.
            let _ended = self.receive_bytes(call, COUNTING_RANK, &mut [], due);
        }
        Ok(())
    }

    /// Returns `true` if the job was aborted in this call before this rank reached it, because a rank had waited too
    /// long for this one or for another.
    fn is_given_up(&self, call: &Call) -> bool {
        let [own, counting] = [self.rank().index(), COUNTING_RANK].map(|rank| self.in_world(rank));
        let of_this_call = self.transport.aborted().filter(|abort| abort.call == call.encode());
        of_this_call.is_some_and(|Abort { cause, rank, reporter, .. }| match cause {
            Cause::TimedOut { .. } => reporter == counting || rank == own,
            Cause::GaveUp { .. } => reporter == counting,
            _ => false,
        })
    }

    /// Converts a timeout while waiting for the counting rank: it is absent from this barrier. An abort that belongs to
    /// another call is returned unchanged.
    fn absent_counting_rank(&self, call: &Call, error: Error) -> Error {
        let counting = self.in_world(COUNTING_RANK);
        let elsewhere =
            matches!(&error, Error::Aborted { reported, .. } if reported.as_deref() != Some(call));
        if !elsewhere && error.is_timeout() && error.peer() == Some(counting) {
            Error::Absent { ranks: vec![counting] }
        } else {
            error
        }
    }

    fn send_bytes(&mut self, call: &Call, to: usize, bytes: &[u8], due: &LazyDeadline<'_>) -> Result<()> {
        let sent = self.transport.exchange(Some(Outgoing { to, parts: &[bytes] }), None, due);
        sent.map_err(|source| Error::in_call(*call, source))
    }

    fn receive_bytes(
        &mut self,
        call: &Call,
        from: usize,
        bytes: &mut [u8],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let incoming = Incoming { from, len: bytes.len(), sink: Sink::Into(bytes) };
        let received = self.transport.exchange(None, Some(incoming), due);
        received.map_err(|source| Error::in_call(*call, source))
    }
}

/// Returns the key of a call that moves no elements.
fn of_nothing(options: &CallOptions<'_>) -> CallKey {
    CallKey {
        element: None,
        ..CallKey::of::<u8>(Collective::Direct(DirectCollective::Barrier), 0, 0, options.sizes)
    }
}

/// The rank that the others report to.
const COUNTING_RANK: usize = 0;

/// Returns how long the counting rank waits within a time limit: three quarters of it.
fn share_of_waiting(limit: Duration) -> Duration {
    limit / 4 * 3
}

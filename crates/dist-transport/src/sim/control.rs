//! The simulated coordinator: heartbeats and the abort record, as with TCP.
//!
//! Every rank sends heartbeats to the coordinator, and receives its heartbeats. The coordinator's abort
//! record is final and goes to every rank that it reaches. A rank that does not hear the coordinator ends the
//! job for itself.

use std::time::Duration;

use super::network_conditions::NetworkConditions;
use crate::bookkeeping::{HEARTBEAT, LIVENESS_BETWEEN_HOSTS, LIVENESS_ON_HOST};
use crate::{Abort, Cause, Fingerprint};

#[derive(Debug)]
pub(super) struct Control {
    /// The rank that hosts the coordinator; `None` if it is elsewhere and every rank reaches it.
    coordinator_rank: Option<usize>,
    lost: bool,
    /// The coordinator's abort record.
    abort_record: Option<Abort>,
    ranks: Vec<RankControl>,
    /// The time of the next heartbeats, while any rank checks them.
    next_heartbeat: Option<Duration>,
    watch_until: Duration,
}

/// The state between one rank and the coordinator.
#[derive(Debug)]
struct RankControl {
    status: RankStatus,
    stalled: bool,
    /// The longest time without a message between it and the coordinator.
    liveness: Duration,
    /// The abort record that the rank knows.
    known: Option<Abort>,
    /// The time at which the coordinator last heard from the rank; `None` once it ignores the rank.
    seen: Option<Duration>,
    /// The time at which the rank last heard from the coordinator; `None` once it ignores the coordinator.
    heard: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RankStatus {
    Here,
    Left,
    Dead,
}

impl Control {
    /// Creates the state for ranks on these hosts. A coordinator that no rank hosts is on the host of rank 0.
    pub(super) fn new(hosts: &[u64], coordinator_rank: Option<usize>) -> Self {
        let own_host = hosts.get(coordinator_rank.unwrap_or(0));
        let rank_control = |host: &u64| RankControl {
            status: RankStatus::Here,
            stalled: false,
            liveness: silence_limit(Some(host) == own_host),
            known: None,
            seen: Some(Duration::ZERO),
            heard: Some(Duration::ZERO),
        };
        let ranks = hosts.iter().map(rank_control).collect();
        Self {
            coordinator_rank,
            lost: false,
            abort_record: None,
            ranks,
            next_heartbeat: None,
            watch_until: Duration::ZERO,
        }
    }

    /// Returns the abort record that this rank knows.
    pub(super) fn known(&self, rank: usize) -> Option<Abort> {
        self.ranks[rank].known.clone()
    }

    pub(super) fn is_dead(&self, rank: usize) -> bool {
        self.ranks[rank].status == RankStatus::Dead
    }

    /// Proposes an abort to the ranks that the reporter can reach. Returns the known record as the error if the
    /// reporter has one already.
    pub(super) fn propose(
        &mut self,
        abort: Abort,
        now: Duration,
        conditions: &NetworkConditions,
    ) -> Result<(), Abort> {
        let known = &mut self.ranks[abort.reporter].known;
        if let Some(first) = known {
            return Err(first.clone());
        }
        *known = Some(abort);
        self.spread(now, conditions);
        Ok(())
    }

    /// Watches heartbeats for a while, because a fault has happened.
    pub(super) fn watch(&mut self, now: Duration) {
        if self.next_heartbeat.is_none() {
            // All have sent heartbeats until now.
            for rank in &mut self.ranks {
                rank.seen = rank.seen.map(|_| now);
                rank.heard = rank.heard.map(|_| now);
            }
            self.next_heartbeat = Some(now.saturating_add(HEARTBEAT));
        }
        // Silence can be noticed for this long after a fault.
        let longest = self.ranks.iter().map(|rank| rank.liveness).max().unwrap_or(LIVENESS_ON_HOST);
        self.watch_until = now.saturating_add(3 * longest);
    }

    /// Returns the time of the next heartbeats, or when a rank has been silent for too long.
    pub(super) fn next_look(&self) -> Option<Duration> {
        let silences = self.ranks.iter().filter(|rank| rank.status != RankStatus::Left).flat_map(|rank| {
            let heard = rank.heard.filter(|_| rank.status == RankStatus::Here && !rank.stalled);
            let seen = rank.seen.filter(|_| self.runs());
            [seen, heard].into_iter().flatten().map(|last| last.saturating_add(rank.liveness))
        });
        self.next_heartbeat.map(|beat| silences.fold(beat, Duration::min))
    }

    /// Aborts the job because these two ranks cannot reach each other, if the coordinator reaches both.
    pub(super) fn report_partition(
        &mut self,
        [rank, reporter]: [usize; 2],
        now: Duration,
        conditions: &NetworkConditions,
    ) {
        let is_heard = |rank: usize| {
            let rank_control = &self.ranks[rank];
            let gives_heartbeats = rank_control.status == RankStatus::Here
                && !rank_control.stalled
                && rank_control.heard.is_some();
            gives_heartbeats && rank_control.seen.is_some() && self.reaches(rank, now, conditions)
        };
        if self.runs() && is_heard(rank) && is_heard(reporter) {
            let abort = Abort { reporter, ..ended(Cause::Unreachable { hosts: None }, rank) };
            self.commit(abort, now, conditions);
        }
    }

    pub(super) fn kill(&mut self, rank: usize, now: Duration, conditions: &NetworkConditions) {
        let rank_control = &mut self.ranks[rank];
        // A rank that has said goodbye is not missed.
        if rank_control.status == RankStatus::Here {
            rank_control.status = RankStatus::Dead;
            rank_control.known = Some(ended(Cause::Died, rank));
        }
        if self.coordinator_rank == Some(rank) {
            self.lose(now, conditions);
        }
        self.find_dead_ranks(now, conditions);
    }

    /// Ends the coordinator. Ranks that notice it believe it at once.
    pub(super) fn lose(&mut self, now: Duration, conditions: &NetworkConditions) {
        self.lost = true;
        for rank in 0..self.ranks.len() {
            if self.receives_from_coordinator(rank, now, conditions) {
                self.ranks[rank].lose_coordinator(rank, self.coordinator_rank);
            }
        }
    }

    pub(super) fn stall(&mut self, rank: usize) {
        self.ranks[rank].stalled = true;
    }

    pub(super) fn resume(&mut self, rank: usize, now: Duration, conditions: &NetworkConditions) {
        let rank_control = &mut self.ranks[rank];
        rank_control.stalled = false;
        // The coordinator was not silent; this rank was stopped.
        rank_control.heard = rank_control.heard.map(|_| now);
        if self.coordinator_rank == Some(rank) {
            self.ranks.iter_mut().for_each(|rank| rank.seen = rank.seen.map(|_| now));
        }
        self.spread(now, conditions);
    }

    /// Records that a rank's last transport was dropped.
    pub(super) fn leave(&mut self, rank: usize, now: Duration, conditions: &NetworkConditions) {
        let rank_control = &mut self.ranks[rank];
        if rank_control.status == RankStatus::Here {
            // A rank that has given up the coordinator sends no goodbye.
            rank_control.status =
                if rank_control.heard.is_some() { RankStatus::Left } else { RankStatus::Dead };
            self.find_dead_ranks(now, conditions);
        }
    }

    /// Sends the heartbeats of all ranks if they are due, and looks for silent ranks.
    pub(super) fn look(&mut self, now: Duration, conditions: &NetworkConditions) {
        let is_heartbeat = self.next_heartbeat.is_some_and(|beat| beat <= now);
        if is_heartbeat {
            let next = now.saturating_add(HEARTBEAT);
            self.next_heartbeat = Some(next).filter(|next| *next <= self.watch_until);
        }
        for rank in 0..self.ranks.len() {
            if is_heartbeat && self.receives_from_coordinator(rank, now, conditions) && self.runs() {
                self.ranks[rank].heard = Some(now);
            }
            let rank_control = &mut self.ranks[rank];
            let silent =
                rank_control.heard.is_some_and(|heard| now.saturating_sub(heard) >= rank_control.liveness);
            if silent && rank_control.status == RankStatus::Here && !rank_control.stalled {
                rank_control.lose_coordinator(rank, self.coordinator_rank);
            }
        }
        if self.runs() {
            self.find_silent_ranks(is_heartbeat, now, conditions);
        }
        self.find_dead_ranks(now, conditions);
        self.spread(now, conditions);
    }

    fn find_silent_ranks(&mut self, is_heartbeat: bool, now: Duration, conditions: &NetworkConditions) {
        for rank in 0..self.ranks.len() {
            let reaches = self.reaches(rank, now, conditions);
            let rank_control = &mut self.ranks[rank];
            if rank_control.status == RankStatus::Left {
                continue;
            }
            let gives_heartbeats = rank_control.status == RankStatus::Here
                && !rank_control.stalled
                && rank_control.heard.is_some();
            if is_heartbeat && gives_heartbeats && reaches {
                rank_control.seen = rank_control.seen.map(|_| now);
            }
            if rank_control.seen.is_some_and(|seen| now.saturating_sub(seen) >= rank_control.liveness) {
                self.commit(ended(Cause::Silent, rank), now, conditions);
                self.ranks[rank].seen = None;
            }
        }
    }

    fn find_dead_ranks(&mut self, now: Duration, conditions: &NetworkConditions) {
        if !self.runs() {
            return;
        }
        for rank in 0..self.ranks.len() {
            let rank_control = &self.ranks[rank];
            let dead = rank_control.status == RankStatus::Dead && rank_control.seen.is_some();
            if dead && self.reaches(rank, now, conditions) {
                self.ranks[rank].seen = None;
                self.commit(ended(Cause::Died, rank), now, conditions);
            }
        }
    }

    fn commit(&mut self, abort: Abort, now: Duration, conditions: &NetworkConditions) {
        self.abort_record.get_or_insert(abort);
        self.spread(now, conditions);
    }

    /// Passes proposals of ranks to the coordinator, and its record to the ranks.
    fn spread(&mut self, now: Duration, conditions: &NetworkConditions) {
        if !self.runs() {
            return;
        }
        let proposals = (0..self.ranks.len()).filter(|&rank| {
            let rank_control = &self.ranks[rank];
            let speaks = rank_control.status == RankStatus::Here && !rank_control.stalled;
            speaks && rank_control.heard.is_some() && rank_control.seen.is_some()
        });
        let mut proposals = proposals.filter(|&rank| self.reaches(rank, now, conditions));
        let proposal = proposals.find_map(|rank| self.ranks[rank].known.clone());
        self.abort_record = self.abort_record.take().or(proposal);
        if let Some(abort_record) = self.abort_record.clone() {
            for rank in 0..self.ranks.len() {
                if self.receives_from_coordinator(rank, now, conditions) && self.ranks[rank].seen.is_some() {
                    self.ranks[rank].known = Some(abort_record.clone());
                }
            }
        }
    }

    /// Returns `true` if the coordinator runs.
    fn runs(&self) -> bool {
        !self.lost
            && self.coordinator_rank.is_none_or(|coordinator_rank| !self.ranks[coordinator_rank].stalled)
    }

    /// Returns the rank that hosts the coordinator, if one does.
    pub(super) fn coordinator_rank(&self) -> Option<usize> {
        self.coordinator_rank
    }

    /// Returns `true` if the coordinator serves requests of this rank now.
    pub(super) fn serves(&self, rank: usize, now: Duration, conditions: &NetworkConditions) -> bool {
        self.runs() && self.reaches(rank, now, conditions)
    }

    /// Returns `true` if messages of this rank reach the coordinator.
    fn reaches(&self, rank: usize, now: Duration, conditions: &NetworkConditions) -> bool {
        self.coordinator_rank.is_none_or(|coordinator_rank| conditions.reaches(rank, coordinator_rank, now))
    }

    /// Returns `true` if this rank listens to the coordinator, and its messages arrive.
    fn receives_from_coordinator(&self, rank: usize, now: Duration, conditions: &NetworkConditions) -> bool {
        let rank_control = &self.ranks[rank];
        let listens = rank_control.status == RankStatus::Here && rank_control.heard.is_some();
        listens
            && self
                .coordinator_rank
                .is_none_or(|coordinator_rank| conditions.reaches(coordinator_rank, rank, now))
    }
}

impl RankControl {
    /// Ends the job for this rank, because it has lost the coordinator, which `coordinator_rank` or the
    /// launcher hosts.
    fn lose_coordinator(&mut self, rank: usize, coordinator_rank: Option<usize>) {
        self.heard = None;
        let abort = match coordinator_rank {
            Some(coordinator_rank) => {
                Abort { reporter: rank, ..ended(Cause::CoordinatorLost, coordinator_rank) }
            }
            None => ended(Cause::LauncherLost, rank),
        };
        self.known.get_or_insert(abort);
    }
}

/// Returns how long two processes may be silent before one counts as lost. The limit on one host differs from
/// that between hosts.
pub(super) const fn silence_limit(is_within_host: bool) -> Duration {
    if is_within_host { LIVENESS_ON_HOST } else { LIVENESS_BETWEEN_HOSTS }
}

fn ended(cause: Cause, rank: usize) -> Abort {
    Abort { cause, rank, reporter: rank, call: Fingerprint::NONE }
}

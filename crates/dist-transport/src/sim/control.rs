//! Who is told what of the job's end: the coordinator and the ranks' lines to it, as with TCP.
//!
//! Every rank gives signs of life to the coordinator, and hears its. The coordinator's word on why the job ends is
//! final and goes to every rank that it reaches; a rank that does not hear the coordinator ends the job for itself.

use std::time::Duration;

use super::weather::Weather;
use crate::bookkeeping::{BEAT, LIVENESS_BETWEEN_HOSTS, LIVENESS_ON_HOST};
use crate::{Abort, Cause, Fingerprint};

#[derive(Debug)]
pub(super) struct Control {
    /// The rank that hosts the coordinator; `None` if it is elsewhere, where every rank reaches it.
    home: Option<usize>,
    lost: bool,
    /// The coordinator's word.
    verdict: Option<Abort>,
    ranks: Vec<Standing>,
    /// When signs of life are given next, while anybody looks for them.
    next_beat: Option<Duration>,
    watch_until: Duration,
}

/// What is between one rank and the coordinator.
#[derive(Debug)]
struct Standing {
    presence: Presence,
    stalled: bool,
    /// How long nothing may get from it to the coordinator or back.
    liveness: Duration,
    /// What the rank knows of the job's end.
    known: Option<Abort>,
    /// When the coordinator last heard of it; `None` when it does not listen to it any more.
    seen: Option<Duration>,
    /// When it last heard of the coordinator; `None` when it does not listen any more.
    heard: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Here,
    Left,
    Dead,
}

impl Control {
    /// Of ranks on these hosts. A coordinator that no rank hosts is on the host of rank 0.
    pub(super) fn new(hosts: &[u64], home: Option<usize>) -> Self {
        let own_host = hosts.get(home.unwrap_or(0));
        let standing = |host: &u64| Standing {
            presence: Presence::Here,
            stalled: false,
            liveness: silence_limit(Some(host) == own_host),
            known: None,
            seen: Some(Duration::ZERO),
            heard: Some(Duration::ZERO),
        };
        let ranks = hosts.iter().map(standing).collect();
        Self { home, lost: false, verdict: None, ranks, next_beat: None, watch_until: Duration::ZERO }
    }

    /// What this rank knows of the job's end.
    pub(super) fn known(&self, rank: usize) -> Option<Abort> {
        self.ranks[rank].known.clone()
    }

    pub(super) fn is_dead(&self, rank: usize) -> bool {
        self.ranks[rank].presence == Presence::Dead
    }

    /// Ends the job as far as the reporter's word reaches; if it knows of an end already, gives that.
    pub(super) fn propose(&mut self, abort: Abort, now: Duration, weather: &Weather) -> Result<(), Abort> {
        let known = &mut self.ranks[abort.reporter].known;
        if let Some(first) = known {
            return Err(first.clone());
        }
        *known = Some(abort);
        self.spread(now, weather);
        Ok(())
    }

    /// From now on signs of life are looked for, for a while: something has happened.
    pub(super) fn watch(&mut self, now: Duration) {
        if self.next_beat.is_none() {
            // All have given them until now.
            for rank in &mut self.ranks {
                rank.seen = rank.seen.map(|_| now);
                rank.heard = rank.heard.map(|_| now);
            }
            self.next_beat = Some(now.saturating_add(BEAT));
        }
        // So long after a fault somebody's silence can still be news.
        let longest = self.ranks.iter().map(|rank| rank.liveness).max().unwrap_or(LIVENESS_ON_HOST);
        self.watch_until = now.saturating_add(3 * longest);
    }

    /// When signs of life are given next, or somebody has been silent for too long.
    pub(super) fn next_look(&self) -> Option<Duration> {
        let silences = self.ranks.iter().filter(|rank| rank.presence != Presence::Left).flat_map(|rank| {
            let heard = rank.heard.filter(|_| rank.presence == Presence::Here && !rank.stalled);
            let seen = rank.seen.filter(|_| self.runs());
            [seen, heard].into_iter().flatten().map(|last| last.saturating_add(rank.liveness))
        });
        self.next_beat.map(|beat| silences.fold(beat, Duration::min))
    }

    /// Ends the job because these two ranks cannot reach each other, if the coordinator reaches both.
    pub(super) fn part(&mut self, [rank, reporter]: [usize; 2], now: Duration, weather: &Weather) {
        let is_heard = |rank: usize| {
            let standing = &self.ranks[rank];
            let beats = standing.presence == Presence::Here && !standing.stalled && standing.heard.is_some();
            beats && standing.seen.is_some() && self.reaches(rank, now, weather)
        };
        if self.runs() && is_heard(rank) && is_heard(reporter) {
            let abort = Abort { reporter, ..ended(Cause::Unreachable, rank) };
            self.decide(abort, now, weather);
        }
    }

    pub(super) fn kill(&mut self, rank: usize, now: Duration, weather: &Weather) {
        let standing = &mut self.ranks[rank];
        // Who has said goodbye is not missed.
        if standing.presence == Presence::Here {
            standing.presence = Presence::Dead;
            standing.known = Some(ended(Cause::Died, rank));
        }
        if self.home == Some(rank) {
            self.lose(now, weather);
        }
        self.look_for_the_dead(now, weather);
    }

    /// The coordinator is gone: who hears that believes it at once.
    pub(super) fn lose(&mut self, now: Duration, weather: &Weather) {
        self.lost = true;
        for rank in 0..self.ranks.len() {
            if self.heard_by(rank, now, weather) {
                self.ranks[rank].lose_coordinator(rank, self.home);
            }
        }
    }

    pub(super) fn stall(&mut self, rank: usize) {
        self.ranks[rank].stalled = true;
    }

    pub(super) fn resume(&mut self, rank: usize, now: Duration, weather: &Weather) {
        let standing = &mut self.ranks[rank];
        standing.stalled = false;
        // It was not the coordinator that was silent.
        standing.heard = standing.heard.map(|_| now);
        if self.home == Some(rank) {
            self.ranks.iter_mut().for_each(|rank| rank.seen = rank.seen.map(|_| now));
        }
        self.spread(now, weather);
    }

    /// Notes that a rank's last transport was dropped.
    pub(super) fn leave(&mut self, rank: usize, now: Duration, weather: &Weather) {
        let standing = &mut self.ranks[rank];
        if standing.presence == Presence::Here {
            // Whoever has given up the coordinator says no goodbye.
            standing.presence = if standing.heard.is_some() { Presence::Left } else { Presence::Dead };
            self.look_for_the_dead(now, weather);
        }
    }

    /// Everybody gives a sign of life, if it is time, and looks for those of the others.
    pub(super) fn look(&mut self, now: Duration, weather: &Weather) {
        let is_beat = self.next_beat.is_some_and(|beat| beat <= now);
        if is_beat {
            let next = now.saturating_add(BEAT);
            self.next_beat = Some(next).filter(|next| *next <= self.watch_until);
        }
        for rank in 0..self.ranks.len() {
            if is_beat && self.heard_by(rank, now, weather) && self.runs() {
                self.ranks[rank].heard = Some(now);
            }
            let standing = &mut self.ranks[rank];
            let silent = standing.heard.is_some_and(|heard| now.saturating_sub(heard) >= standing.liveness);
            if silent && standing.presence == Presence::Here && !standing.stalled {
                standing.lose_coordinator(rank, self.home);
            }
        }
        if self.runs() {
            self.look_for_the_silent(is_beat, now, weather);
        }
        self.look_for_the_dead(now, weather);
        self.spread(now, weather);
    }

    fn look_for_the_silent(&mut self, is_beat: bool, now: Duration, weather: &Weather) {
        for rank in 0..self.ranks.len() {
            let reaches = self.reaches(rank, now, weather);
            let standing = &mut self.ranks[rank];
            if standing.presence == Presence::Left {
                continue;
            }
            let beats = standing.presence == Presence::Here && !standing.stalled && standing.heard.is_some();
            if is_beat && beats && reaches {
                standing.seen = standing.seen.map(|_| now);
            }
            if standing.seen.is_some_and(|seen| now.saturating_sub(seen) >= standing.liveness) {
                self.decide(ended(Cause::Silent, rank), now, weather);
                self.ranks[rank].seen = None;
            }
        }
    }

    fn look_for_the_dead(&mut self, now: Duration, weather: &Weather) {
        if !self.runs() {
            return;
        }
        for rank in 0..self.ranks.len() {
            let standing = &self.ranks[rank];
            let dead = standing.presence == Presence::Dead && standing.seen.is_some();
            if dead && self.reaches(rank, now, weather) {
                self.ranks[rank].seen = None;
                self.decide(ended(Cause::Died, rank), now, weather);
            }
        }
    }

    fn decide(&mut self, abort: Abort, now: Duration, weather: &Weather) {
        self.verdict.get_or_insert(abort);
        self.spread(now, weather);
    }

    /// What ranks have proposed reaches the coordinator, and its word the ranks.
    fn spread(&mut self, now: Duration, weather: &Weather) {
        if !self.runs() {
            return;
        }
        let proposals = (0..self.ranks.len()).filter(|&rank| {
            let standing = &self.ranks[rank];
            let speaks = standing.presence == Presence::Here && !standing.stalled;
            speaks && standing.heard.is_some() && standing.seen.is_some()
        });
        let mut proposals = proposals.filter(|&rank| self.reaches(rank, now, weather));
        let proposal = proposals.find_map(|rank| self.ranks[rank].known.clone());
        self.verdict = self.verdict.take().or(proposal);
        if let Some(verdict) = self.verdict.clone() {
            for rank in 0..self.ranks.len() {
                if self.heard_by(rank, now, weather) && self.ranks[rank].seen.is_some() {
                    self.ranks[rank].known = Some(verdict.clone());
                }
            }
        }
    }

    /// Whether the coordinator does anything.
    fn runs(&self) -> bool {
        !self.lost && self.home.is_none_or(|home| !self.ranks[home].stalled)
    }

    /// Whether what this rank says gets to the coordinator.
    fn reaches(&self, rank: usize, now: Duration, weather: &Weather) -> bool {
        self.home.is_none_or(|home| weather.reaches(rank, home, now))
    }

    /// Whether this rank listens to the coordinator, and what it says gets there.
    fn heard_by(&self, rank: usize, now: Duration, weather: &Weather) -> bool {
        let standing = &self.ranks[rank];
        let listens = standing.presence == Presence::Here && standing.heard.is_some();
        listens && self.home.is_none_or(|home| weather.reaches(home, rank, now))
    }
}

impl Standing {
    /// The rank gives up the coordinator, which a rank hosts or its launcher, and ends the job for itself.
    fn lose_coordinator(&mut self, rank: usize, home: Option<usize>) {
        self.heard = None;
        let abort = match home {
            Some(home) => Abort { reporter: rank, ..ended(Cause::CoordinatorLost, home) },
            None => ended(Cause::LauncherLost, rank),
        };
        self.known.get_or_insert(abort);
    }
}

/// How long nothing may get from one process to another, on one host or between two.
pub(super) const fn silence_limit(is_within_host: bool) -> Duration {
    if is_within_host { LIVENESS_ON_HOST } else { LIVENESS_BETWEEN_HOSTS }
}

fn ended(cause: Cause, rank: usize) -> Abort {
    Abort { cause, rank, reporter: rank, call: Fingerprint::NONE }
}

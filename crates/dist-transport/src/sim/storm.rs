//! How faults happen: which are planned, when, and what each does to the network and to the threads of ranks.

use std::time::Duration;

use super::fabric::State;
use super::fault::{Fault, Ways, When};
use super::link::NEVER;
use super::waiting::Waiting;
use super::weather::{Cut, Delay, Loss};
use crate::runtime::Unparker;

/// The faults to come, and the ends of those that last.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) faults: Vec<(When, Fault)>,
    pub(super) ends: Vec<(Duration, End)>,
    /// Operations of each rank so far.
    pub(super) operations: Vec<u64>,
    /// The faults that have happened.
    pub(super) happened: Vec<String>,
    /// The thread that waits for the next of these times.
    pub(super) station: Option<Unparker>,
}

#[derive(Debug, PartialEq)]
pub(super) enum End {
    Resume(usize),
    Partition,
}

/// What is to be done when the lock of the network is released.
#[derive(Debug, Default)]
#[must_use]
pub(super) struct Effects {
    /// Threads of these ranks are to unwind, to stand still, or to go on.
    pub(super) fates: Vec<(usize, Turn)>,
    pub(super) woken: Vec<Waiting>,
    pub(super) station: Option<Unparker>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    Unwind,
    StandStill { for_ever: bool },
    GoOn,
}

impl State {
    /// Counts an operation of this rank, and does the faults that were planned for it.
    pub(super) fn count_operation(&mut self, rank: usize, now: Duration) -> Effects {
        let count = &mut self.plan.operations[rank];
        *count += 1;
        let current = When::Operation { rank, number: *count };
        self.strike(now, |when| when == current)
    }

    /// Does what is due by now; gives when something is due next as well.
    pub(super) fn turn(&mut self, now: Duration, station: Unparker) -> (Effects, Option<Duration>) {
        let mut effects = self.strike(now, |when| matches!(when, When::At(time) if time <= now));
        let (due, later) =
            std::mem::take(&mut self.plan.ends).into_iter().partition(|(time, _)| *time <= now);
        self.plan.ends = later;
        let due: Vec<(Duration, End)> = due;
        for (_, end) in due {
            self.control.watch(now);
            if let End::Resume(rank) = end {
                self.control.resume(rank, now, &self.weather);
                effects.fates.push((rank, Turn::GoOn));
            }
        }
        if self.control.next_look().is_some_and(|look| look <= now) {
            self.control.look(now, &self.weather);
        }
        effects.woken.extend(self.wake_if_told());
        self.plan.station = Some(station);
        let planned = self.plan.faults.iter().filter_map(|(when, _)| match when {
            When::At(time) => Some(*time),
            When::Operation { .. } => None,
        });
        let ends = self.plan.ends.iter().map(|(time, _)| *time);
        (effects, planned.chain(ends).chain(self.control.next_look()).min())
    }

    /// Lets the faults happen whose time has come.
    fn strike(&mut self, now: Duration, due: impl Fn(When) -> bool) -> Effects {
        let mut effects = Effects::default();
        while let Some(next) = self.plan.faults.iter().position(|(when, _)| due(*when)) {
            let (_, fault) = self.plan.faults.remove(next);
            self.plan.happened.push(format!("at {now:?} {fault}"));
            self.happen(fault, now, &mut effects);
            // Two that strike at once wake it once.
            effects.station = effects.station.or_else(|| self.plan.station.take());
        }
        effects.woken.extend(self.wake_if_told());
        effects
    }

    fn happen(&mut self, fault: Fault, now: Duration, effects: &mut Effects) {
        let end = |lasts: Option<Duration>| lasts.map_or(NEVER, |lasts| now.saturating_add(lasts));
        match fault {
            Fault::Kill { rank } if !self.control.is_dead(rank) => {
                self.control.watch(now);
                self.control.kill(rank, now, &self.weather);
                effects.fates.push((rank, Turn::Unwind));
            }
            Fault::Kill { .. } => {}
            Fault::Stall { rank, lasts } => {
                self.control.watch(now);
                self.control.stall(rank);
                effects.fates.push((rank, Turn::StandStill { for_ever: lasts.is_none() }));
                self.plan.ends.extend(lasts.map(|_| (end(lasts), End::Resume(rank))));
            }
            Fault::Slow { rank, pause } => self.weather.pauses.push((rank, pause)),
            Fault::Delay { from, to, by, lasts } => {
                self.weather.delays.push(Delay { pair: (from, to), by, until: end(Some(lasts)) });
            }
            Fault::Loss { from, to, one_in, lasts } => {
                self.weather.losses.push(Loss { pair: (from, to), one_in, until: end(Some(lasts)) });
            }
            Fault::Partition { from, to, ways, lasts } => {
                self.control.watch(now);
                let until = end(lasts);
                if ways == Ways::Both {
                    self.weather.cuts.push(Cut { from: to.clone(), to: from.clone(), since: now, until });
                }
                self.weather.cuts.push(Cut { from, to, since: now, until });
                self.plan.ends.extend(lasts.map(|_| (until, End::Partition)));
                self.hold_back(now);
            }
            Fault::Corrupt { from, to, byte } => self.weather.corruptions.push((from, to, byte)),
            Fault::CoordinatorDeath => {
                self.control.watch(now);
                self.control.lose(now, &self.weather);
            }
        }
    }
}

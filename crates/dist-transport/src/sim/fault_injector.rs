//! The fault injector: planned faults, and their effects on the network and on the threads of ranks.

use std::time::Duration;

use super::fabric::FabricState;
use super::fault::{Directions, Fault, When};
use super::link::NEVER;
use super::network_conditions::{Delay, NetworkPartition, PacketLoss};
use super::waiting::Waiter;
use crate::runtime::Unparker;

/// The planned faults, and the ends of faults that last for a while.
#[derive(Debug, Default)]
pub(super) struct FaultInjector {
    pub(super) faults: Vec<(When, Fault)>,
    pub(super) ends: Vec<(Duration, FaultEnd)>,
    /// The number of operations of each rank so far.
    pub(super) operations: Vec<u64>,
    /// Descriptions of the faults that have happened.
    pub(super) happened: Vec<String>,
    /// Wakes the thread that waits for the next event.
    pub(super) timer: Option<Unparker>,
}

/// The end of a fault that lasts for a while.
#[derive(Debug, PartialEq)]
pub(super) enum FaultEnd {
    /// This rank, which stalled, continues.
    Resume(usize),
    /// A network partition ends.
    Partition,
}

/// The effects of faults on threads. They are performed after the lock of the network is released.
#[derive(Debug, Default)]
#[must_use]
pub(super) struct Effects {
    /// Ranks, each with the change to its threads.
    pub(super) thread_actions: Vec<(usize, ThreadAction)>,
    /// Threads that wait for something that has happened.
    pub(super) woken: Vec<Waiter>,
    /// The thread that waits for the next event, if that event has changed.
    pub(super) timer: Option<Unparker>,
}

/// A change to the threads of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ThreadAction {
    /// They unwind, because the rank was killed.
    Unwind,
    /// They stop, because the rank stalls.
    Stop { for_ever: bool },
    /// They continue after a stall.
    Continue,
}

impl FabricState {
    /// Counts an operation of a rank, and injects the faults that are planned for this operation.
    pub(super) fn count_operation(&mut self, rank: usize, now: Duration) -> Effects {
        let count = &mut self.injector.operations[rank];
        *count += 1;
        let current = When::Operation { rank, number: *count };
        self.inject(now, |when| when == current)
    }

    /// Applies the faults and the ends of faults that are due. Returns the effects, and the time of the next event.
    pub(super) fn apply_due(&mut self, now: Duration, timer: Unparker) -> (Effects, Option<Duration>) {
        let mut effects = self.inject(now, |when| matches!(when, When::At(time) if time <= now));
        let (due, later) =
            std::mem::take(&mut self.injector.ends).into_iter().partition(|(time, _)| *time <= now);
        self.injector.ends = later;
        let due: Vec<(Duration, FaultEnd)> = due;
        for (_, end) in due {
            self.control.watch(now);
            if let FaultEnd::Resume(rank) = end {
                self.control.resume(rank, now, &self.conditions);
                effects.thread_actions.push((rank, ThreadAction::Continue));
            }
        }
        if self.control.next_look().is_some_and(|look| look <= now) {
            self.control.look(now, &self.conditions);
        }
        effects.woken.extend(self.wake_if_known());
        self.injector.timer = Some(timer);
        let planned = self.injector.faults.iter().filter_map(|(when, _)| match when {
            When::At(time) => Some(*time),
            When::Operation { .. } => None,
        });
        let ends = self.injector.ends.iter().map(|(time, _)| *time);
        (effects, planned.chain(ends).chain(self.control.next_look()).min())
    }

    /// Injects the planned faults for whose time or operation `due` returns `true`.
    fn inject(&mut self, now: Duration, due: impl Fn(When) -> bool) -> Effects {
        let mut effects = Effects::default();
        while let Some(next) = self.injector.faults.iter().position(|(when, _)| due(*when)) {
            let (_, fault) = self.injector.faults.remove(next);
            self.injector.happened.push(format!("at {now:?} {fault}"));
            self.apply(fault, now, &mut effects);
            // The thread takes its unparker back when it waits again, so two faults at the same time wake it once.
            effects.timer = effects.timer.or_else(|| self.injector.timer.take());
        }
        effects.woken.extend(self.wake_if_known());
        effects
    }

    /// Applies one fault to the network, and adds its effects on threads.
    fn apply(&mut self, fault: Fault, now: Duration, effects: &mut Effects) {
        let end = |lasts: Option<Duration>| lasts.map_or(NEVER, |lasts| now.saturating_add(lasts));
        match fault {
            Fault::Kill { rank } if !self.control.is_dead(rank) => {
                self.control.watch(now);
                self.control.kill(rank, now, &self.conditions);
                effects.thread_actions.push((rank, ThreadAction::Unwind));
            }
            Fault::Kill { .. } => {}
            Fault::Stall { rank, lasts } => {
                self.control.watch(now);
                self.control.stall(rank);
                effects.thread_actions.push((rank, ThreadAction::Stop { for_ever: lasts.is_none() }));
                self.injector.ends.extend(lasts.map(|_| (end(lasts), FaultEnd::Resume(rank))));
            }
            Fault::Slow { rank, pause } => self.conditions.pauses.push((rank, pause)),
            Fault::Delay { from, to, by, lasts } => {
                self.conditions.delays.push(Delay { pair: (from, to), by, until: end(Some(lasts)) });
            }
            Fault::Loss { from, to, one_in, lasts } => {
                self.conditions.losses.push(PacketLoss { pair: (from, to), one_in, until: end(Some(lasts)) });
            }
            Fault::Partition { from, to, directions, lasts } => {
                self.control.watch(now);
                let until = end(lasts);
                if directions == Directions::Both {
                    self.conditions.partitions.push(NetworkPartition {
                        from: to.clone(),
                        to: from.clone(),
                        since: now,
                        until,
                    });
                }
                self.conditions.partitions.push(NetworkPartition { from, to, since: now, until });
                self.injector.ends.extend(lasts.map(|_| (until, FaultEnd::Partition)));
                self.delay_messages_in_flight(now);
            }
            Fault::Corrupt { from, to, byte } => self.conditions.corruptions.push((from, to, byte)),
            Fault::CoordinatorDeath => {
                self.control.watch(now);
                self.control.lose(now, &self.conditions);
            }
        }
    }
}

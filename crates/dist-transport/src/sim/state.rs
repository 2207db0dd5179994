//! Whose turn it is: the scheduler's decisions, without its threads.

use std::thread::Thread;
use std::time::Duration;

use super::random::{SplitMix64, mix};
use super::scheduler::{Failure, Statistics, YIELDS_MAX};

pub(super) struct State {
    random: SplitMix64,
    now: Duration,
    tasks: Vec<Task>,
    /// The tasks that have not ended, oldest first.
    live: Vec<usize>,
    /// How many of them are ranks.
    live_ranks: usize,
    turn: Option<usize>,
    /// Whether threads are to unwind.
    ending: bool,
    failure: Option<Failure>,
    /// The tasks whose threads will never end.
    abandoned: Vec<usize>,
    trace_hash: u64,
    switches: u64,
    steps: u64,
    yields_in_a_row: u64,
}

struct Task {
    name: String,
    thread: Thread,
    is_rank: bool,
    phase: Phase,
    /// Whether it was woken when it did not wait: its next wait ends at once.
    woken: bool,
    /// Whether it came to the scheduler in the middle of a panic that was not the end of the run's doing.
    panicking: bool,
}

/// What a task is about to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// It could go on.
    Ready,
    /// It waits to be woken, or for the clock.
    Waiting { until: Option<Duration> },
}

/// Where the turn went.
#[must_use]
pub(super) enum Turn {
    /// It stayed where it was.
    Kept,
    /// To this thread, which has to be woken.
    Given(Thread),
    /// Nobody will have one again.
    Over,
}

/// Why a task came to the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    Park,
    Wake,
    Yield,
    Interleave,
    Spawn,
    End,
}

impl State {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            random: SplitMix64::new(seed),
            now: Duration::ZERO,
            tasks: Vec::new(),
            live: Vec::new(),
            live_ranks: 0,
            turn: None,
            ending: false,
            failure: None,
            abandoned: Vec::new(),
            trace_hash: 0,
            switches: 0,
            steps: 0,
            yields_in_a_row: 0,
        }
    }

    pub(super) fn add(&mut self, name: String, is_rank: bool, thread: Thread) {
        self.live.push(self.tasks.len());
        self.live_ranks += usize::from(is_rank);
        self.tasks.push(Task { name, thread, is_rank, phase: Phase::Ready, woken: false, panicking: false });
    }

    /// A scheduling point of task `me`.
    pub(super) fn switch(&mut self, me: usize, event: Event, phase: Phase) -> Turn {
        self.note(me, event);
        let task = &mut self.tasks[me];
        let waits = matches!(phase, Phase::Waiting { .. });
        task.phase = if waits && std::mem::take(&mut task.woken) { Phase::Ready } else { phase };
        if self.yields_in_a_row > YIELDS_MAX {
            let tasks = self.names(|task| task.phase == Phase::Ready);
            self.fail(Failure::Livelock { tasks });
            self.yields_in_a_row = 0;
        }
        self.choose()
    }

    /// Notes that task `me` is in the middle of a panic.
    pub(super) fn note_panic(&mut self, me: usize) {
        self.tasks[me].panicking |= !self.ending;
    }

    /// The end of task `me`, in a panic if it left a message.
    pub(super) fn end(&mut self, me: usize, panic: Option<String>) -> Turn {
        self.note(me, Event::End);
        self.live.retain(|&task| task != me);
        self.live_ranks -= usize::from(self.tasks[me].is_rank);
        if let Some(message) = panic {
            let task = &self.tasks[me];
            if task.panicking && !matches!(self.failure, Some(Failure::Panicked { .. })) {
                // It waited for others in its destructors: its panic is the reason why they all stood still.
                self.failure = None;
            }
            self.fail(Failure::Panicked { task: task.name.clone(), message });
        }
        self.choose()
    }

    pub(super) fn wake(&mut self, task: usize) {
        let task = &mut self.tasks[task];
        match task.phase {
            Phase::Ready => task.woken = true,
            Phase::Waiting { .. } => task.phase = Phase::Ready,
        }
    }

    /// Gives the turn to one of the tasks that could go on, moving the clock if none could now.
    pub(super) fn choose(&mut self) -> Turn {
        loop {
            let ready = self.live.iter().filter(|&&task| self.tasks[task].phase == Phase::Ready);
            let ready: Vec<usize> = ready.copied().collect();
            if !ready.is_empty() {
                let chosen = ready[self.random.below(ready.len())];
                return self.give_turn(chosen);
            }
            if !self.resolve_standstill() {
                self.turn = None;
                return Turn::Over;
            }
        }
    }

    fn give_turn(&mut self, task: usize) -> Turn {
        self.trace(task as u64);
        if self.turn.replace(task) == Some(task) {
            return Turn::Kept;
        }
        self.switches += 1;
        Turn::Given(self.tasks[task].thread.clone())
    }

    /// Nobody could go on: moves the clock, or begins the end. False when there is nothing left to do.
    fn resolve_standstill(&mut self) -> bool {
        if self.live.is_empty() {
            return false;
        }
        let over = self.live_ranks == 0 && !self.ending;
        if !over && let Some(earliest) = self.deadlines().min() {
            self.advance(earliest);
            return true;
        }
        if self.ending {
            // They wait in their destructors: a second panic would end the process.
            self.abandoned.clone_from(&self.live);
            return false;
        }
        let tasks = self.names(|task| task.phase == Phase::Waiting { until: None });
        match over {
            true if tasks.is_empty() => self.begin_end(),
            true => self.fail(Failure::LeftBehind { tasks }),
            false => self.fail(Failure::Deadlock { tasks }),
        }
        true
    }

    fn deadlines(&self) -> impl Iterator<Item = Duration> {
        self.live.iter().filter_map(|&task| match self.tasks[task].phase {
            Phase::Waiting { until } => until,
            Phase::Ready => None,
        })
    }

    /// Moves the clock, and ends the waits that were for no later.
    fn advance(&mut self, to: Duration) {
        self.now = self.now.max(to);
        for &task in &self.live {
            let task = &mut self.tasks[task];
            if matches!(task.phase, Phase::Waiting { until: Some(until) } if until <= self.now) {
                task.phase = Phase::Ready;
            }
        }
    }

    /// Ends the run, with this reason if it is the first.
    pub(super) fn fail(&mut self, failure: Failure) {
        self.failure.get_or_insert(failure);
        self.begin_end();
    }

    /// Wakes every task, so that it unwinds.
    fn begin_end(&mut self) {
        if !std::mem::replace(&mut self.ending, true) {
            for &task in &self.live {
                self.tasks[task].phase = Phase::Ready;
            }
        }
    }

    fn names(&self, wanted: impl Fn(&Task) -> bool) -> Vec<String> {
        let live = self.live.iter().map(|&task| &self.tasks[task]);
        live.filter(|&task| wanted(task)).map(|task| task.name.clone()).collect()
    }

    fn note(&mut self, me: usize, event: Event) {
        self.steps += 1;
        self.yields_in_a_row = if event == Event::Yield { self.yields_in_a_row + 1 } else { 0 };
        self.trace(event as u64);
        self.trace(me as u64);
        self.trace(self.now.as_secs());
        self.trace(u64::from(self.now.subsec_nanos()));
    }

    fn trace(&mut self, word: u64) {
        self.trace_hash = mix(self.trace_hash.rotate_left(5) ^ word).wrapping_add(1);
    }

    pub(super) fn has_turn(&self, me: usize) -> bool {
        self.turn == Some(me)
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending
    }

    /// Whether no task will ever have a turn again.
    pub(super) fn is_over(&self) -> bool {
        self.turn.is_none()
    }

    /// What to report when threads had to be left behind.
    pub(super) fn abandoned(&mut self) -> Option<Failure> {
        let tasks: Vec<_> = self.abandoned.iter().map(|&task| self.tasks[task].name.clone()).collect();
        let after = self.failure.take().map(Box::new);
        if tasks.is_empty() {
            self.failure = after.map(|failure| *failure);
            return None;
        }
        Some(Failure::CannotUnwind { tasks, after })
    }

    pub(super) fn take_failure(&mut self) -> Option<Failure> {
        self.failure.take()
    }

    pub(super) fn statistics(&self) -> Statistics {
        Statistics { elapsed: self.now, trace_hash: self.trace_hash, switches: self.switches }
    }

    pub(super) fn running_name(&self) -> String {
        self.turn.map_or_else(String::new, |task| self.name(task))
    }

    pub(super) fn name(&self, task: usize) -> String {
        self.tasks[task].name.clone()
    }

    pub(super) fn task_count(&self) -> usize {
        self.tasks.len()
    }

    pub(super) fn now(&self) -> Duration {
        self.now
    }

    pub(super) fn steps(&self) -> u64 {
        self.steps
    }
}

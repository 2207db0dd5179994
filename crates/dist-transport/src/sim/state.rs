//! The state of the scheduler, and its decisions, without its threads.

use std::collections::BTreeSet;
use std::thread::Thread;
use std::time::Duration;

use super::random::{SplitMix64, mix};
use super::scheduler::{Failure, Statistics, YIELDS_MAX};

pub(super) struct SchedulerState {
    random: SplitMix64,
    now: Duration,
    tasks: Vec<SimTask>,
    /// The tasks that have not ended, oldest first.
    live: Vec<usize>,
    /// The tasks that can run, in no particular order.
    ready: Vec<usize>,
    /// The tasks that wait for the clock, by time.
    timers: BTreeSet<(Duration, usize)>,
    /// The number of ranks whose program has not returned.
    live_ranks: usize,
    turn: Option<usize>,
    /// `true` if threads have to unwind.
    ending: bool,
    failure: Option<Failure>,
    /// The message of the first spawned thread that panicked, in one line.
    first_panic: Option<String>,
    /// The function that is called if the run fails, before any thread unwinds.
    failure_hook: Option<FailureHook>,
    /// The tasks whose threads will never end.
    abandoned: Vec<usize>,
    trace_hash: u64,
    switches: u64,
    steps: u64,
    yields_in_a_row: u64,
}

struct SimTask {
    name: String,
    thread: Thread,
    role: Role,
    phase: Phase,
    /// The index of the task in the list of tasks that can run.
    ready_at: Option<usize>,
    process_state: ProcessState,
    /// `true` if it was woken while it did not wait. Its next wait then ends at once.
    woken: bool,
    /// `true` if it reached the scheduler during a panic that the end of the run did not cause.
    panicking: bool,
}

/// A function that is called if a run fails. It must not call the scheduler.
pub(super) type FailureHook = Box<dyn FnOnce() + Send>;

/// The role of a thread in the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// The thread runs the program of this rank; the run waits for it to return.
    Rank(usize),
    /// The thread was spawned by a thread of this rank.
    SimTask(usize),
    /// The thread belongs to the network: it may wait when all other threads have ended.
    Daemon,
}

impl Role {
    fn rank(self) -> Option<usize> {
        match self {
            Self::Rank(rank) | Self::SimTask(rank) => Some(rank),
            Self::Daemon => None,
        }
    }
}

/// The state of a task's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProcessState {
    Running,
    /// The threads of the process are not chosen for a while.
    Stalled,
    /// The threads of the process are never chosen again.
    Frozen,
    /// The threads of the process unwind.
    Killed,
}

impl ProcessState {
    fn runs(self) -> bool {
        matches!(self, Self::Running | Self::Killed)
    }

    fn may_return(self) -> bool {
        matches!(self, Self::Running | Self::Stalled)
    }
}

/// The phase of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// The task can run.
    Ready,
    /// The task waits to be woken, or for the clock.
    Waiter { until: Option<Duration> },
    /// The task has ended.
    Ended,
}

/// The thread that got the turn.
#[must_use]
pub(super) enum Handover {
    /// The caller keeps it.
    Kept,
    /// This thread, which has to be woken.
    Given(Thread),
    /// No thread will have it again.
    Over,
}

/// The event with which a task enters the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    Park,
    Wake,
    Yield,
    Interleave,
    Spawn,
    End,
}

impl SchedulerState {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            random: SplitMix64::new(seed),
            now: Duration::ZERO,
            tasks: Vec::new(),
            live: Vec::new(),
            ready: Vec::new(),
            timers: BTreeSet::new(),
            live_ranks: 0,
            turn: None,
            ending: false,
            failure: None,
            first_panic: None,
            failure_hook: None,
            abandoned: Vec::new(),
            trace_hash: 0,
            switches: 0,
            steps: 0,
            yields_in_a_row: 0,
        }
    }

    pub(super) fn set_failure_hook(&mut self, failure_hook: FailureHook) {
        self.failure_hook = Some(failure_hook);
    }

    pub(super) fn add(&mut self, name: String, role: Role, thread: Thread) {
        let (me, phase) = (self.tasks.len(), Phase::Waiter { until: None });
        self.live.push(me);
        self.live_ranks += usize::from(matches!(role, Role::Rank(_)));
        let of_rank = |task: &&SimTask| role.rank().is_some_and(|rank| task.role == Role::Rank(rank));
        let process_state =
            self.tasks.iter().find(of_rank).map_or(ProcessState::Running, |task| task.process_state);
        let (ready_at, woken, panicking) = (None, false, false);
        self.tasks.push(SimTask { name, thread, role, phase, ready_at, process_state, woken, panicking });
        self.set_phase(me, Phase::Ready);
    }

    /// Changes a task's phase, and updates the lists of tasks that can run and of timers. No other function
    /// changes phases.
    fn set_phase(&mut self, me: usize, phase: Phase) {
        let task = &mut self.tasks[me];
        if let Phase::Waiter { until: Some(until) } = task.phase {
            self.timers.remove(&(until, me));
        }
        task.phase = phase;
        let runs = task.process_state.runs();
        if let (true, Phase::Waiter { until: Some(until) }) = (runs, phase) {
            self.timers.insert((until, me));
        }
        let was_ready = task.ready_at;
        match (was_ready, runs && phase == Phase::Ready) {
            (None, true) => {
                task.ready_at = Some(self.ready.len());
                self.ready.push(me);
            }
            (Some(place), false) => {
                task.ready_at = None;
                self.ready.swap_remove(place);
                if let Some(&moved) = self.ready.get(place) {
                    self.tasks[moved].ready_at = Some(place);
                }
            }
            _ => {}
        }
    }

    /// Passes a scheduling point of task `me`.
    pub(super) fn switch(&mut self, me: usize, event: Event, phase: Phase) -> Handover {
        self.record(me, event);
        let waits = matches!(phase, Phase::Waiter { .. });
        let woken = waits && std::mem::take(&mut self.tasks[me].woken);
        self.set_phase(me, if woken { Phase::Ready } else { phase });
        if self.yields_in_a_row > YIELDS_MAX {
            let tasks = self.names(|task| task.phase == Phase::Ready);
            self.fail(Failure::Livelock { tasks });
            self.yields_in_a_row = 0;
        }
        self.choose()
    }

    /// Records that task `me` is panicking.
    pub(super) fn record_panic(&mut self, me: usize) {
        self.tasks[me].panicking |= !self.ending;
    }

    /// Records the panic that the thread which joins task `me` will get.
    pub(super) fn record_panic_of_task(&mut self, me: usize, message: String) {
        let task = &self.tasks[me];
        if !self.ending && task.process_state != ProcessState::Killed {
            self.first_panic.get_or_insert_with(|| format!("{} panicked: {message}", task.name));
        }
    }

    pub(super) fn first_panic(&mut self) -> Option<String> {
        self.first_panic.take()
    }

    /// Ends task `me`. A message means that the task has panicked.
    pub(super) fn end(&mut self, me: usize, panic: Option<String>) -> Handover {
        self.record(me, Event::End);
        self.live.retain(|&task| task != me);
        self.set_phase(me, Phase::Ended);
        let task = &self.tasks[me];
        self.live_ranks -= usize::from(matches!(task.role, Role::Rank(_)) && task.process_state.may_return());
        if let Some(message) = panic.filter(|_| task.process_state != ProcessState::Killed) {
            if task.panicking && !matches!(self.failure, Some(Failure::Panicked { .. })) {
                // It waited for other threads in its destructors: its panic is the reason why all stood
                // still.
                self.failure = None;
            }
            self.fail(Failure::Panicked { task: task.name.clone(), message });
        }
        self.choose()
    }

    pub(super) fn wake(&mut self, me: usize) {
        let task = &mut self.tasks[me];
        match task.phase {
            Phase::Ready => task.woken = true,
            Phase::Waiter { .. } => self.set_phase(me, Phase::Ready),
            Phase::Ended => {}
        }
    }

    /// Makes the threads of a rank unwind, each at its next scheduling point.
    pub(super) fn kill(&mut self, rank: usize) {
        self.change_process_state(rank, ProcessState::Killed);
    }

    pub(super) fn is_killed(&self, rank: usize) -> bool {
        self.tasks
            .iter()
            .any(|task| task.role == Role::Rank(rank) && task.process_state == ProcessState::Killed)
    }

    /// Stops the threads of a rank, for a while or forever.
    pub(super) fn stall(&mut self, rank: usize, for_ever: bool) {
        self.change_process_state(rank, if for_ever { ProcessState::Frozen } else { ProcessState::Stalled });
    }

    /// Lets the threads of a rank run again.
    pub(super) fn resume(&mut self, rank: usize) {
        self.change_process_state(rank, ProcessState::Running);
    }

    fn change_process_state(&mut self, rank: usize, process_state: ProcessState) {
        let is_of_rank = |task: &usize| self.tasks[*task].role.rank() == Some(rank);
        for me in self.live.iter().copied().filter(is_of_rank).collect::<Vec<_>>() {
            let task = &mut self.tasks[me];
            let before = std::mem::replace(&mut task.process_state, process_state);
            if before == ProcessState::Killed {
                task.process_state = before;
                continue;
            }
            if let Role::Rank(_) = task.role {
                self.live_ranks -= usize::from(before.may_return());
                self.live_ranks += usize::from(process_state.may_return());
            }
            let phase = match task.phase {
                _ if process_state == ProcessState::Killed => Phase::Ready,
                Phase::Waiter { until: Some(until) } if until <= self.now => Phase::Ready,
                phase => phase,
            };
            self.set_phase(me, phase);
        }
    }

    /// Chooses the task that runs next. Advances the clock if no task can run now.
    pub(super) fn choose(&mut self) -> Handover {
        loop {
            if !self.ready.is_empty() {
                let chosen = self.ready[self.random.below(self.ready.len())];
                return self.give_turn(chosen);
            }
            if !self.resolve_standstill() {
                self.turn = None;
                return Handover::Over;
            }
        }
    }

    fn give_turn(&mut self, task: usize) -> Handover {
        self.trace(task as u64);
        if self.turn.replace(task) == Some(task) {
            return Handover::Kept;
        }
        self.switches += 1;
        Handover::Given(self.tasks[task].thread.clone())
    }

    /// Handles a state in which no task can run: advances the clock, or ends the run. Returns `false` if all
    /// tasks have ended.
    fn resolve_standstill(&mut self) -> bool {
        if self.live.is_empty() {
            return false;
        }
        let over = self.live_ranks == 0 && !self.ending;
        if !over && let Some(&(earliest, _)) = self.timers.first() {
            self.advance(earliest);
            return true;
        }
        if self.ending {
            // The tasks wait in their destructors: a second panic would end the process.
            self.abandoned.clone_from(&self.live);
            return false;
        }
        let waits = |task: &SimTask| {
            task.phase == Phase::Waiter { until: None } && task.process_state == ProcessState::Running
        };
        let tasks = self.names(|task| waits(task) && task.role != Role::Daemon);
        match over {
            true if tasks.is_empty() => self.begin_end(),
            true => self.fail(Failure::LeftBehind { tasks }),
            false => self.fail(Failure::Deadlock { tasks }),
        }
        true
    }

    /// Moves the clock, and ends the waits until that time.
    fn advance(&mut self, to: Duration) {
        self.now = self.now.max(to);
        while let Some(&(_, task)) = self.timers.first().filter(|(until, _)| *until <= self.now) {
            self.set_phase(task, Phase::Ready);
        }
    }

    /// Ends the run, with this reason if it is the first.
    pub(super) fn fail(&mut self, failure: Failure) {
        self.failure.get_or_insert(failure);
        if let Some(failure_hook) = self.failure_hook.take() {
            failure_hook();
        }
        self.begin_end();
    }

    /// Makes every task ready, so that it unwinds.
    fn begin_end(&mut self) {
        if !std::mem::replace(&mut self.ending, true) {
            for me in self.live.clone() {
                let task = &mut self.tasks[me];
                if !task.process_state.runs() {
                    let returns = usize::from(matches!(task.role, Role::Rank(_)));
                    self.live_ranks += returns - returns * usize::from(task.process_state.may_return());
                    task.process_state = ProcessState::Running;
                }
                self.set_phase(me, Phase::Ready);
            }
        }
    }

    fn names(&self, wanted: impl Fn(&SimTask) -> bool) -> Vec<String> {
        let live = self.live.iter().map(|&task| &self.tasks[task]);
        live.filter(|&task| wanted(task)).map(|task| task.name.clone()).collect()
    }

    fn record(&mut self, me: usize, event: Event) {
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

    /// Returns `true` if task `me` has to unwind.
    pub(super) fn unwinds(&self, me: usize) -> bool {
        self.ending || self.tasks[me].process_state == ProcessState::Killed
    }

    pub(super) fn role(&self, task: usize) -> Role {
        self.tasks[task].role
    }

    /// Returns `true` if no task will ever have the turn again.
    pub(super) fn is_over(&self) -> bool {
        self.turn.is_none()
    }

    /// Returns the failure to report if threads had to be left behind.
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

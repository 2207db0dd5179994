//! The scheduler: runs one thread at a time, chosen by a seed, over a clock that jumps.
//!
//! A thread keeps the turn until it reaches a scheduling point. There it says whether it can run, the
//! generator picks one of the threads that can, and that one is woken. If none can, the clock moves to the
//! earliest deadline. At the end of a run, or if it cannot continue, every thread unwinds at its next
//! scheduling point.
#![allow(
    clippy::disallowed_methods,
    reason = "this is the runtime seam: turns are handed over by park and unpark"
)]

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use super::state::{Event, Handover, Phase, Role, SchedulerState};
use crate::runtime::{Executor, Wake};

/// A handle to one simulated run; clones refer to the same run.
#[derive(Clone)]
pub(super) struct Scheduler(Arc<RunState>);

/// The reason why a run could not be completed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("{task} panicked: {message}")]
    Panicked { task: String, message: String },
    #[error("deadlock: nobody can wake those who wait without a deadline: {}", tasks.join(", "))]
    Deadlock { tasks: Vec<String> },
    #[error("every rank has returned, but nobody can wake those who wait without a deadline: {}", tasks.join(", "))]
    LeftBehind { tasks: Vec<String> },
    #[error("livelock: {YIELDS_MAX} yields in a row, and nothing else, by {}", tasks.join(", "))]
    Livelock { tasks: Vec<String> },
    #[error("{task} has not reached the runtime for {limit:?}: does it wait in another way, or for a lock?")]
    Stalled { task: String, limit: Duration },
    #[error("threads are left behind that wait without a deadline while they unwind: {}{}", tasks.join(", "),
        after.as_ref().map(|failure| format!("; first, {failure}")).unwrap_or_default())]
    CannotUnwind { tasks: Vec<String>, after: Option<Box<Self>> },
    #[error("the system has no thread left for the run")]
    NoThread(#[from] io::Error),
}

/// The statistics of a completed run.
#[derive(Debug)]
pub(super) struct Statistics {
    pub(super) elapsed: Duration,
    pub(super) trace_hash: u64,
    pub(super) switches: u64,
}

struct RunState {
    state: Mutex<SchedulerState>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The thread that waits for the run to end.
    controller: Thread,
}

/// The panic payload of a thread that has to unwind.
struct Unwound;

/// The most yields in a row of threads that do nothing else.
pub(super) const YIELDS_MAX: u64 = 100_000;

thread_local! {
    /// The run that this thread belongs to, by address, and the thread's number there.
    static CURRENT: Cell<Option<(usize, usize)>> = const { Cell::new(None) };
}

impl Scheduler {
    /// Creates a run that the calling thread will wait for.
    pub(super) fn new(seed: u64) -> Self {
        Self(Arc::new(RunState {
            state: Mutex::new(SchedulerState::new(seed)),
            threads: Mutex::default(),
            controller: thread::current(),
        }))
    }

    /// Creates the thread of a rank, which waits for the run to begin.
    pub(super) fn add_rank(&self, index: usize, work: impl FnOnce() + Send + 'static) {
        self.add_or_fail(format!("rank {index}"), Role::Rank(index), Box::new(work));
    }

    /// Creates a thread of the network, which waits for the run to begin.
    pub(super) fn add_daemon(&self, name: &str, work: impl FnOnce() + Send + 'static) {
        self.add_or_fail(name.to_owned(), Role::Daemon, Box::new(work));
    }

    fn add_or_fail(&self, name: String, role: Role, work: Box<dyn FnOnce() + Send>) {
        if let Err(error) = self.add(name, role, work) {
            self.lock().fail(Failure::NoThread(error));
        }
    }

    /// Sets a function that is called if the run fails, before any thread unwinds.
    pub(super) fn set_failure_hook(&self, failure_hook: impl FnOnce() + Send + 'static) {
        self.lock().set_failure_hook(Box::new(failure_hook));
    }

    /// Returns the message of the first spawned thread that panicked, in one line.
    pub(super) fn first_panic(&self) -> Option<String> {
        self.lock().first_panic()
    }

    /// Returns `true` if this rank was killed before its program returned.
    pub(super) fn is_killed(&self, rank: usize) -> bool {
        self.lock().is_killed(rank)
    }

    /// Ends the threads of a rank, each at its next scheduling point.
    pub(super) fn kill(&self, rank: usize) {
        self.lock().kill(rank);
    }

    /// Stops the threads of a rank, for a while or forever.
    pub(super) fn stall(&self, rank: usize, for_ever: bool) {
        self.lock().stall(rank, for_ever);
    }

    /// Lets the threads of a rank run again.
    pub(super) fn resume(&self, rank: usize) {
        self.lock().resume(rank);
    }

    /// Runs the threads until all have ended. Fails if one thread keeps the turn for `turn_max` by the system's
    /// clock.
    pub(super) fn run_to_end(&self, turn_max: Duration) -> Result<Statistics, Failure> {
        let first = self.lock().choose();
        self.hand_over(first);
        self.wait_for_end(turn_max)?;
        // Every thread has given up its last turn, and only has to return.
        let threads = std::mem::take(&mut *self.0.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            thread.join().expect("a panic of the work is caught in the thread");
        }
        let mut state = self.lock();
        match state.take_failure() {
            Some(failure) => Err(failure),
            None => Ok(state.statistics()),
        }
    }

    fn wait_for_end(&self, turn_max: Duration) -> Result<(), Failure> {
        let mut progress = (self.lock().steps(), Instant::now());
        loop {
            {
                let mut state = self.lock();
                if state.is_over() {
                    return state.abandoned().map_or(Ok(()), Err);
                }
                if state.steps() != progress.0 {
                    progress = (state.steps(), Instant::now());
                } else if progress.1.elapsed() >= turn_max {
                    return Err(Failure::Stalled { task: state.running_name(), limit: turn_max });
                }
            }
            thread::park_timeout(turn_max);
        }
    }

    fn lock(&self) -> MutexGuard<'_, SchedulerState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn address(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// Returns the calling thread's number, if it belongs to this run.
    fn me(&self) -> Option<usize> {
        CURRENT.get().filter(|(run, _)| *run == self.address()).map(|(_, me)| me)
    }

    fn expect_me(&self) -> usize {
        self.me().expect("only threads of a simulated run wait by its clock")
    }

    /// Creates a thread, which waits for its first turn.
    fn add(&self, name: String, role: Role, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        // Its number is the next one: only the thread with the turn, or the controller before the start,
        // creates threads.
        let me = self.lock().task_count();
        let run = self.clone();
        let body = move || {
            CURRENT.set(Some((run.address(), me)));
            run.wait_for_turn(me);
            let panic = catch_unwind(AssertUnwindSafe(work)).err();
            let message = panic.filter(|payload| !payload.is::<Unwound>()).map(|payload| message(&*payload));
            let turn = run.lock().end(me, message);
            run.hand_over(turn);
        };
        let handle = thread::Builder::new().name(name.clone()).spawn(body)?;
        self.lock().add(name, role, handle.thread().clone());
        self.0.threads.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
        Ok(())
    }

    /// Wakes the thread that has the turn now. Returns `true` if it is not the caller.
    fn hand_over(&self, turn: Handover) -> bool {
        match turn {
            Handover::Kept => return false,
            Handover::Given(thread) => thread.unpark(),
            Handover::Over => self.0.controller.unpark(),
        }
        true
    }

    fn wait_for_turn(&self, me: usize) {
        while !self.lock().has_turn(me) {
            thread::park();
        }
    }

    /// Passes a scheduling point: the calling thread continues when it is chosen again.
    fn switch(&self, me: usize, event: Event, phase: Phase) {
        let turn = {
            let mut state = self.lock();
            if thread::panicking() {
                state.record_panic(me);
            }
            state.switch(me, event, phase)
        };
        if self.hand_over(turn) {
            self.wait_for_turn(me);
        }
    }

    /// Passes a scheduling point. The calling thread unwinds if the run is ending.
    fn switch_or_unwind(&self, me: usize, event: Event, phase: Phase) {
        self.switch(me, event, phase);
        if !thread::panicking() && self.lock().unwinds(me) {
            resume_unwind(Box::new(Unwound));
        }
    }
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scheduler")
    }
}

impl Executor for Scheduler {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn now(&self) -> Duration {
        self.lock().now()
    }

    fn spawn(&self, name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        let me = self.me().ok_or_else(|| io::Error::other("not a thread of the simulated run"))?;
        let (name, role) = {
            let state = self.lock();
            (format!("{}/{name}", state.name(me)), state.role(me))
        };
        let role = match role {
            Role::Rank(rank) => Role::SimTask(rank),
            role => role,
        };
        self.add(name, role, work)?;
        self.switch_or_unwind(me, Event::Spawn, Phase::Ready);
        Ok(())
    }

    fn park(&self, until: Option<Duration>) {
        let me = self.expect_me();
        // Other threads may change what the caller has checked before it decided to wait.
        self.interleave();
        self.switch_or_unwind(me, Event::Park, Phase::Waiter { until });
    }

    fn current(&self) -> Arc<dyn Wake> {
        Arc::new(TaskWaker { run: self.clone(), task: self.expect_me() })
    }

    fn yield_now(&self) {
        self.switch_or_unwind(self.expect_me(), Event::Yield, Phase::Ready);
    }

    fn interleave(&self) {
        // A panic unwinds without interruption: other threads must not see its effects before it is known.
        if let Some(me) = self.me().filter(|_| !thread::panicking()) {
            self.switch_or_unwind(me, Event::Interleave, Phase::Ready);
        }
    }

    fn let_time_pass(&self) {
        let until = self.now() + Duration::from_nanos(1);
        while !thread::panicking() && self.me().is_some() && self.now() < until {
            self.park(Some(until));
        }
    }

    fn is_unwinding(&self, panic: &(dyn Any + Send)) -> bool {
        panic.is::<Unwound>()
    }

    fn panicked(&self, panic: &(dyn Any + Send)) {
        if let Some(me) = self.me().filter(|_| !panic.is::<Unwound>()) {
            self.lock().record_panic_of_task(me, message(panic));
        }
    }
}

struct TaskWaker {
    run: Scheduler,
    task: usize,
}

impl Wake for TaskWaker {
    fn wake(&self) {
        self.run.lock().wake(self.task);
        if let Some(me) = self.run.me().filter(|_| !thread::panicking()) {
            self.run.switch(me, Event::Wake, Phase::Ready);
        }
    }
}

/// Returns the message of a panic.
fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "(no message)".to_owned())
}

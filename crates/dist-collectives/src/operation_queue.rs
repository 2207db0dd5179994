//! The started operations of a communicator, and the engine that executes them.
//!
//! A communicator has one engine. It executes blocking calls and started operations in the order of the calls and
//! starts. The first start moves the engine from the communicator into the queue. From then on one thread at a time
//! takes the engine out of the queue, executes operations in their order, and puts it back:
//!
//! - the thread that waits for an operation executes it, after those that were started before it;
//! - the [worker](crate::worker) executes the operations that no thread waits for;
//! - the next blocking call executes all that are left, and moves the engine back into the communicator.

use std::collections::VecDeque;
use std::fmt;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use dist_transport::runtime::{Deadline, Unparker};
use dist_transport::{Cause, Runtime, StartedCount, Traffic, Transport};

use crate::engine::Engine;
use crate::pending::{Failed, OperationOutcome, OperationSource, RunningOperation};
use crate::worker::WorkerQueue;
use crate::{Error, Pending, Result};

/// The queue of started operations. Clones are the same queue.
#[derive(Clone)]
pub(crate) struct OperationQueue(Arc<QueueShared>);

struct QueueShared {
    state: Mutex<OperationQueueState>,
    /// [`IDLE`], [`READY`] or [`EXECUTING`], for threads that spin without the lock.
    activity: AtomicU8,
    /// The started operations of the communicator that have not ended.
    started_count: StartedCount,
    runtime: Runtime,
    /// The number of polls of a thread before it sleeps.
    spins: u32,
}

struct OperationQueueState {
    engine: EngineLocation,
    operations: VecDeque<QueuedOperation>,
    worker: WorkerSleep,
    /// The thread of the communicator, if it waits for the engine.
    engine_waiter: Option<Unparker>,
    /// The number of operations that were started.
    started: u64,
    /// The number of operations that have ended.
    ended: u64,
    /// The latest deadline of the operations that were started since all had ended.
    latest_deadline: Option<Deadline>,
    /// The traffic of the operations that have ended.
    traffic: Traffic,
    /// The other traffic of the engine when it was moved into the queue.
    traffic_of_calls: Traffic,
    /// `true` if the communicator was dropped.
    is_closed: bool,
}

/// The place of the engine.
pub(crate) enum EngineLocation {
    /// The communicator has it, and no operation is queued.
    Communicator,
    Queue(Box<Engine>),
    /// A thread executes operations with it.
    Executing,
}

/// The sleep of the worker.
pub(crate) enum WorkerSleep {
    Awake,
    /// It looks at the queue again after [`NAP`].
    Napping(Unparker),
    Asleep(Unparker),
}

struct QueuedOperation {
    /// The number of the operation among those that were started, counted from 1.
    number: u64,
    run: Box<dyn FnOnce(&mut Engine) + Send>,
}

/// The activity of a queue without operations.
const IDLE: u8 = 0;
/// An operation is queued, and no thread executes operations.
const READY: u8 = 1;
/// A thread executes operations.
const EXECUTING: u8 = 2;

/// The worker looks at the queue this long after it went to sleep if operations were started recently. A thread that
/// starts operations and waits for each need not wake it, which takes several microseconds.
pub(crate) const NAP: Duration = Duration::from_micros(30);

/// The number of naps without a start before the worker sleeps until it is woken. It does not nap on a runtime that wakes
/// threads at no cost.
///
/// After such naps the worker of a queue sleeps at once, until it is woken from a sleep that was shorter than they were.
/// A program that computes for longer between two starts would otherwise be interrupted by every nap.
pub(crate) const NAPS_MAX: u32 = 3;

/// The number of polls after which a spinning worker begins an operation, about 2 µs. A thread that waits for the
/// operation at once begins it earlier, and the engine stays in the caches of its core.
const GRACE_POLLS: u32 = 60;

impl OperationQueue {
    /// Creates an empty queue. The communicator has the engine.
    pub(crate) fn new(runtime: Runtime, spins: u32, started_count: StartedCount) -> Self {
        let state = OperationQueueState {
            engine: EngineLocation::Communicator,
            operations: VecDeque::new(),
            worker: WorkerSleep::Awake,
            engine_waiter: None,
            started: 0,
            ended: 0,
            latest_deadline: None,
            traffic: Traffic::default(),
            traffic_of_calls: Traffic::default(),
            is_closed: false,
        };
        let (state, activity) = (Mutex::new(state), AtomicU8::new(IDLE));
        Self(Arc::new(QueueShared { state, activity, started_count, runtime, spins }))
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        &self.0.runtime
    }

    /// Returns the number of polls of a thread before it sleeps.
    pub(crate) fn spins(&self) -> u32 {
        self.0.spins
    }

    /// Adds an operation to the queue, with its memory and its deadline. `engine` is the engine if the communicator
    /// has it. If the operation fails, the memory is returned as the operation left it.
    pub(crate) fn start<B: Send + 'static>(
        &self,
        engine: Option<Box<Engine>>,
        (mut buffer, deadline): (B, Deadline),
        abort_handle: AbortHandle,
        operation: impl FnOnce(&mut Engine, &mut B) -> Result<()> + Send + 'static,
    ) -> Pending<B> {
        let outcome = Arc::new(OperationOutcome::new());
        self.0.started_count.record_start();
        let mut state = self.lock();
        let claim = state.claim(deadline);
        let (own_claim, own_outcome, queue) = (claim.clone(), Arc::clone(&outcome), Arc::downgrade(&self.0));
        let run = move |engine: &mut Engine| {
            let before = engine.traffic();
            let work = || match own_claim {
                Some(claim) if !claim.take() => Err(claim.missed()),
                _ => operation(engine, &mut buffer),
            };
            let done = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
                if engine.transport.runtime().is_unwinding(&*panic) {
                    resume_unwind(panic);
                }
                engine.transport.abort(Cause::Panicked);
                Err(Error::Panicked)
            });
            if let Some(queue) = queue.upgrade() {
                queue.started_count.record_end();
                Self(queue).lock().record(before, engine.traffic());
            }
            own_outcome.complete(match done {
                Ok(()) => Ok(buffer),
                Err(error) => Err(Failed::new(buffer, error)),
            });
        };
        let number = state.started;
        state.push(number, Box::new(run), engine);
        let worker = state.worker.wake_from_sleep();
        self.unlock(state);
        wake(worker);
        let source = OperationSource::Queue(self.clone());
        Pending::running(RunningOperation { outcome, source, number, abort_handle, claim })
    }

    /// Executes a change of the engine's state after the operations that were started before. The queue has the engine.
    pub(crate) fn change_engine(&self, change: impl FnOnce(&mut Engine) + Send + 'static) {
        let mut state = self.lock();
        let number = state.started;
        state.push(number, Box::new(change), None);
        self.unlock(state);
    }

    /// Executes the operations up to this one, if the engine is in the queue. Returns at once if another thread
    /// executes operations.
    pub(crate) fn execute_until(&self, number: u64) {
        let state = self.lock();
        let is_queued = state.operations.front().is_some_and(|first| first.number <= number);
        if is_queued {
            self.execute(state, number);
        }
    }

    /// Moves the engine back into the communicator after it has executed all operations. The call that needs it has
    /// this timeout, which begins now. Returns the deadline of the call unless the engine had nothing to do.
    ///
    /// # Errors
    /// If an operation has a later deadline, and has not ended by that of the call.
    pub(crate) fn take_engine(&self, timeout: Duration) -> Result<(Box<Engine>, Option<Deadline>), Error> {
        let mut state = self.lock();
        if state.operations.is_empty()
            && let Some(engine) = state.take_engine(EngineLocation::Communicator)
        {
            return Ok((engine, None));
        }
        let deadline = self.runtime().deadline(timeout);
        // The call may have to end before an operation that was started before it.
        let latest = state.latest_deadline.filter(|latest| latest.earlier(deadline) != *latest);
        loop {
            if latest.is_none() {
                state = self.execute(state, u64::MAX).unwrap_or_else(|| self.lock());
            }
            if state.operations.is_empty()
                && let Some(engine) = state.take_engine(EngineLocation::Communicator)
            {
                return Ok((engine, Some(deadline)));
            }
            if latest.is_some() && self.runtime().expired(deadline) {
                return Err(Error::NotStarted { limit: timeout });
            }
            state.engine_waiter = Some(self.runtime().unparker());
            let worker = if latest.is_some() { state.worker.wake() } else { None };
            self.unlock(state);
            wake(worker);
            if !self.spin_while_executing() {
                self.runtime().park(latest.map(|_| deadline));
            }
            state = self.lock();
        }
    }

    /// Wakes the worker, even from a nap, if this operation has not begun.
    pub(crate) fn wake_worker_for(&self, number: u64) {
        let mut state = self.lock();
        let is_queued = state.operations.front().is_some_and(|first| first.number <= number);
        let worker = if is_queued { state.worker.wake() } else { None };
        drop(state);
        wake(worker);
    }

    /// Returns the traffic of the operations that have ended.
    pub(crate) fn traffic(&self) -> Traffic {
        self.lock().traffic
    }

    /// Returns the traffic of the blocking calls, if the queue has the engine.
    pub(crate) fn traffic_of_calls(&self) -> Traffic {
        self.lock().traffic_of_calls
    }

    /// Executes operations up to this number, and puts the engine back into the queue. Returns `None` if another thread
    /// has the engine.
    fn execute<'a>(
        &'a self,
        mut state: MutexGuard<'a, OperationQueueState>,
        last: u64,
    ) -> Option<MutexGuard<'a, OperationQueueState>> {
        let mut engine = state.take_engine(EngineLocation::Executing)?;
        while let Some(operation) = state.next_until(last) {
            self.unlock(state);
            (operation.run)(&mut engine);
            state = self.lock();
        }
        state.engine = EngineLocation::Queue(engine);
        let is_needed = !state.operations.is_empty() || state.is_closed;
        let worker = if is_needed { state.worker.wake_from_sleep() } else { None };
        let waiter = state.engine_waiter.take();
        self.publish(&state);
        if worker.is_none() && waiter.is_none() {
            return Some(state);
        }
        drop(state);
        wake(worker);
        wake(waiter);
        Some(self.lock())
    }

    /// Polls as long as a thread executes operations. Returns `false` if it still does at the end.
    fn spin_while_executing(&self) -> bool {
        (0..self.0.spins).any(|_| {
            std::hint::spin_loop();
            self.activity() != EXECUTING
        })
    }

    /// Polls until an operation can begin. Returns `false` if none can at the end.
    fn spin_for_operation(&self) -> bool {
        (0..self.0.spins).any(|_| {
            std::hint::spin_loop();
            self.activity() == READY && self.has_grace_passed()
        })
    }

    /// Waits a little for a thread that executes the first operation itself. Returns `false` if there is one.
    fn has_grace_passed(&self) -> bool {
        (0..GRACE_POLLS).all(|_| {
            std::hint::spin_loop();
            self.activity() == READY
        })
    }

    fn activity(&self) -> u8 {
        self.0.activity.load(Ordering::Relaxed)
    }

    fn publish(&self, state: &OperationQueueState) {
        let activity = match state.engine {
            EngineLocation::Executing => EXECUTING,
            _ if state.operations.is_empty() => IDLE,
            _ => READY,
        };
        self.0.activity.store(activity, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, OperationQueueState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unlock(&self, state: MutexGuard<'_, OperationQueueState>) {
        self.publish(&state);
    }
}

impl WorkerQueue for OperationQueue {
    /// If the queue has the engine, the worker drops it.
    fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        let worker = state.worker.wake();
        drop(state);
        wake(worker);
    }

    fn work(&self) {
        self.runtime().make_waits_exact();
        let unparker = self.runtime().unparker();
        let is_waking_slow = self.runtime().is_waking_slow();
        let (mut seen, mut naps, mut starts_follow) = (0, 0, is_waking_slow);
        loop {
            let mut state = self.lock();
            state.worker = WorkerSleep::Awake;
            if !state.operations.is_empty() {
                // Nothing is executed if another thread has the engine. It wakes this one if it leaves operations.
                drop(self.execute(state, u64::MAX));
                state = self.lock();
            }
            if state.is_closed && state.operations.is_empty() && !state.engine.is_executing() {
                let engine = mem::replace(&mut state.engine, EngineLocation::Communicator);
                drop(state);
                drop(engine);
                return;
            }
            if state.started != seen {
                (seen, naps) = (state.started, 0);
            }
            drop(state);
            if self.spin_for_operation() {
                continue;
            }
            let mut state = self.lock();
            if state.is_ready() || state.is_closed && !state.engine.is_executing() {
                continue;
            }
            if starts_follow && naps < NAPS_MAX {
                naps += 1;
                state.worker = WorkerSleep::Napping(unparker.clone());
                drop(state);
                self.runtime().park(Some(self.runtime().deadline(NAP)));
                continue;
            }
            state.worker = WorkerSleep::Asleep(unparker.clone());
            drop(state);
            let began = self.runtime().now();
            self.runtime().park(None);
            let slept = self.runtime().now().saturating_sub(began);
            starts_follow = is_waking_slow && slept < NAP * NAPS_MAX;
        }
    }
}

impl fmt::Debug for OperationQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OperationQueue")
    }
}

impl OperationQueueState {
    /// Counts an operation that is started now. Returns a claim for it if it might not begin before its deadline. No
    /// claim is needed if no earlier operation has a later deadline, because all of them end in time.
    fn claim(&mut self, deadline: Deadline) -> Option<StartClaim> {
        let all_have_ended = self.ended == self.started;
        self.started += 1;
        let before = self.latest_deadline.filter(|_| !all_have_ended);
        if before.is_some_and(|before| before.earlier(deadline) != before) {
            return Some(StartClaim::new(deadline));
        }
        self.latest_deadline = Some(deadline);
        None
    }

    fn push(&mut self, number: u64, run: Box<dyn FnOnce(&mut Engine) + Send>, engine: Option<Box<Engine>>) {
        if let Some(engine) = engine {
            self.traffic_of_calls = difference(engine.traffic(), self.traffic);
            self.engine = EngineLocation::Queue(engine);
        }
        self.operations.push_back(QueuedOperation { number, run });
    }

    /// Takes the engine out of the queue, if it is there.
    fn take_engine(&mut self, to: EngineLocation) -> Option<Box<Engine>> {
        self.engine.take(to)
    }

    /// Takes the next operation, if its number is not above this one.
    fn next_until(&mut self, last: u64) -> Option<QueuedOperation> {
        let is_next = self.operations.front().is_some_and(|first| first.number <= last);
        if is_next { self.operations.pop_front() } else { None }
    }

    /// Returns `true` if an operation can begin.
    fn is_ready(&self) -> bool {
        !self.operations.is_empty() && !self.engine.is_executing()
    }

    /// Records the end of an operation, and the traffic of the engine before and after it.
    fn record(&mut self, before: Traffic, after: Traffic) {
        self.ended += 1;
        self.traffic = self.traffic + difference(after, before);
    }
}

impl EngineLocation {
    /// Takes the engine out of the queue to another place, if it is there.
    pub(crate) fn take(&mut self, to: Self) -> Option<Box<Engine>> {
        match mem::replace(self, to) {
            Self::Queue(engine) => Some(engine),
            elsewhere => {
                *self = elsewhere;
                None
            }
        }
    }

    pub(crate) const fn is_executing(&self) -> bool {
        matches!(self, Self::Executing)
    }
}

impl WorkerSleep {
    /// Returns what wakes the worker, unless it looks at the queue soon.
    pub(crate) fn wake_from_sleep(&mut self) -> Option<Unparker> {
        if matches!(self, Self::Asleep(_)) { self.wake() } else { None }
    }

    /// Returns what wakes the worker, also from a nap.
    pub(crate) fn wake(&mut self) -> Option<Unparker> {
        match mem::replace(self, Self::Awake) {
            Self::Awake => None,
            Self::Napping(unparker) | Self::Asleep(unparker) => Some(unparker),
        }
    }
}

pub(crate) fn wake(sleeper: Option<Unparker>) {
    if let Some(unparker) = sleeper {
        unparker.unpark();
    }
}

/// Returns the traffic between two points in time.
pub(crate) fn difference(after: Traffic, before: Traffic) -> Traffic {
    Traffic {
        messages_sent: after.messages_sent - before.messages_sent,
        bytes_sent: after.bytes_sent - before.bytes_sent,
        messages_received: after.messages_received - before.messages_received,
        bytes_received: after.bytes_received - before.bytes_received,
    }
}

/// A handle that aborts the job without the engine, as long as the communicator lives.
#[derive(Clone, Debug)]
pub(crate) struct AbortHandle(Weak<Mutex<Box<dyn Transport>>>);

impl AbortHandle {
    /// Creates a handle that uses this transport.
    pub(crate) fn new(transport: &Arc<Mutex<Box<dyn Transport>>>) -> Self {
        Self(Arc::downgrade(transport))
    }

    pub(crate) fn abort(&self, cause: Cause) {
        if let Some(transport) = self.0.upgrade() {
            transport.lock().unwrap_or_else(PoisonError::into_inner).abort(cause);
        }
    }
}

/// The right to begin or to end a queued operation. Either the thread that reaches the operation takes it, or the
/// handle takes it after the deadline.
#[derive(Clone, Debug)]
pub(crate) struct StartClaim {
    pub(crate) deadline: Deadline,
    taken: Arc<AtomicBool>,
}

impl StartClaim {
    fn new(deadline: Deadline) -> Self {
        Self { deadline, taken: Arc::default() }
    }

    /// Takes the claim. Returns `false` if it was already taken.
    pub(crate) fn take(&self) -> bool {
        !self.taken.swap(true, Ordering::AcqRel)
    }

    /// Returns the error of an operation whose handle has taken the claim.
    pub(crate) fn missed(&self) -> Error {
        Error::NotStarted { limit: self.deadline.limit() }
    }
}

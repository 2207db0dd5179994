//! The started messages of a communicator, and the engine that moves them together with those of blocking calls.
//!
//! A communicator has one engine for messages. The first start moves it from the communicator into the stream. From then on
//! one thread at a time takes it and moves all messages: the thread that waits for one of them, a blocking call, or the
//! [worker](crate::worker) if no other thread does. A thread that has it pauses when another one starts or cancels a
//! message, and gives it to a blocking call at once. When all started messages have ended, the next blocking call moves
//! the engine back into the communicator.

use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dist_transport::runtime::{Deadline, Unparker};
use dist_transport::{Runtime, Traffic};

use crate::engine::{
    CancelAnswer, Cancellation, Engine, FinishMessages, MessageCommand, MessageCommands, NewMessage,
    NewOperation, StartedWork,
};
use crate::operation_queue::{EngineLocation, NAP, NAPS_MAX, WorkerSleep, difference, wake};
use crate::worker::WorkerQueue;

/// The started messages of a communicator. Clones are the same stream.
#[derive(Clone)]
pub(crate) struct MessageStream(Arc<StreamShared>);

struct StreamShared {
    state: Mutex<StreamState>,
    commands: Arc<MessageCommands>,
    runtime: Runtime,
    /// The number of polls of a thread before it sleeps.
    spins: u32,
}

struct StreamState {
    engine: EngineLocation,
    worker: WorkerSleep,
    /// Threads that wait for the engine, or for the answer to a command.
    waiters: Vec<Unparker>,
    /// The number of operations that were started.
    started: u64,
    /// The traffic of the started messages that have ended.
    traffic: Traffic,
    /// The other traffic of the engine when it was put into the stream.
    traffic_of_calls: Traffic,
    /// `true` if the communicator was dropped.
    is_closed: bool,
}

impl MessageStream {
    /// Creates the stream of this engine.
    pub(crate) fn new(mut engine: Box<Engine>, runtime: Runtime, spins: u32) -> Self {
        let commands = Arc::<MessageCommands>::default();
        engine.set_message_commands(&commands);
        let state = StreamState {
            traffic_of_calls: engine.traffic(),
            engine: EngineLocation::Queue(engine),
            worker: WorkerSleep::Awake,
            waiters: Vec::new(),
            started: 0,
            traffic: Traffic::default(),
            is_closed: false,
        };
        Self(Arc::new(StreamShared { state: Mutex::new(state), commands, runtime, spins }))
    }

    /// Returns `true` if this is the same stream.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        &self.0.runtime
    }

    /// Returns the number of polls of a thread before it sleeps.
    pub(crate) fn spins(&self) -> u32 {
        self.0.spins
    }

    /// Starts messages as one operation. `engine` is the engine if the communicator has it. Returns the number of the
    /// operation.
    pub(crate) fn start(
        &self,
        engine: Option<Box<Engine>>,
        messages: Vec<NewMessage>,
        deadline: Deadline,
        finish: FinishMessages,
    ) -> u64 {
        let mut state = self.lock();
        state.started += 1;
        let number = state.started;
        if let Some(engine) = engine {
            state.engine = EngineLocation::Queue(engine);
        }
        let operation = NewOperation { number, deadline, messages, finish };
        self.0.commands.push(MessageCommand::Start(operation));
        let is_taken = state.engine.is_executing();
        let worker = state.worker.wake_from_sleep();
        drop(state);
        if is_taken {
            self.0.commands.interrupt.request();
        }
        wake(worker);
        number
    }

    /// Takes the engine for a blocking call, which moves the started messages too. A thread that has the engine gives
    /// it back.
    pub(crate) fn take_engine(&self) -> Box<Engine> {
        loop {
            let mut state = self.lock();
            if let Some(engine) = state.engine.take(EngineLocation::Executing) {
                self.0.commands.set_wanted(false);
                return engine;
            }
            self.0.commands.set_wanted(true);
            self.wait_for_engine(state, None);
        }
    }

    /// Gives the engine back after a blocking call. Returns it if no started message is left.
    pub(crate) fn return_engine(&self, engine: Box<Engine>) -> Option<Box<Engine>> {
        let is_idle = matches!(engine.started_work(), StartedWork::Nothing);
        if !is_idle {
            self.put_back(engine);
            return None;
        }
        let mut state = self.lock();
        state.record(&engine);
        state.engine = EngineLocation::Communicator;
        let waiters = mem::take(&mut state.waiters);
        drop(state);
        waiters.into_iter().for_each(|waiter| waiter.unpark());
        Some(engine)
    }

    /// Moves messages until `is_over` returns `true`. Returns earlier if another thread has the engine or wants it.
    pub(crate) fn help_until(&self, is_over: &dyn Fn() -> bool) {
        if is_over() || self.0.commands.is_wanted() {
            return;
        }
        let engine = self.lock().engine.take(EngineLocation::Executing);
        if let Some(mut engine) = engine {
            engine.drive_started(is_over);
            self.put_back(engine);
        }
    }

    /// Wakes the worker, even from a nap, if nobody moves messages.
    pub(crate) fn wake_worker(&self) {
        let mut state = self.lock();
        let worker = if state.engine.is_executing() { None } else { state.worker.wake() };
        drop(state);
        wake(worker);
    }

    /// Cancels an operation if no message has matched one of its receives. Does not wait for the answer.
    pub(crate) fn detach(&self, number: u64) {
        self.request_cancel(number);
    }

    /// Cancels an operation like [`detach`](Self::detach). Returns `true` if it is cancelled.
    pub(crate) fn cancel(&self, number: u64, has_ended: &dyn Fn() -> bool) -> bool {
        let cancellation = self.request_cancel(number);
        loop {
            let state = self.lock();
            match cancellation.answer() {
                CancelAnswer::Open if has_ended() || matches!(state.engine, EngineLocation::Communicator) => {
                    return false;
                }
                CancelAnswer::Open if state.engine.is_executing() => self.wait_for_engine(state, Some(NAP)),
                CancelAnswer::Open => {
                    drop(state);
                    self.execute_commands();
                }
                answer => return answer == CancelAnswer::Cancelled,
            }
        }
    }

    fn request_cancel(&self, number: u64) -> Cancellation {
        let cancellation = Cancellation::new(number);
        self.0.commands.push(MessageCommand::Cancel(cancellation.clone()));
        self.0.commands.interrupt.request();
        self.execute_commands();
        cancellation
    }

    /// Executes commands on this thread, if no other one has the engine.
    fn execute_commands(&self) {
        let engine = self.lock().engine.take(EngineLocation::Executing);
        if let Some(mut engine) = engine {
            engine.execute_commands();
            self.put_back(engine);
        }
    }

    /// Returns the traffic of the started messages that have ended.
    pub(crate) fn traffic(&self) -> Traffic {
        self.lock().traffic
    }

    /// Returns the traffic of the blocking calls, if the stream has the engine.
    pub(crate) fn traffic_of_calls(&self) -> Traffic {
        self.lock().traffic_of_calls
    }

    /// Interrupts the thread that has the engine, and waits until it may be free.
    fn wait_for_engine(&self, mut state: MutexGuard<'_, StreamState>, limit: Option<Duration>) {
        state.waiters.push(self.runtime().unparker());
        drop(state);
        self.0.commands.interrupt.request();
        for _ in 0..self.0.spins {
            std::hint::spin_loop();
            if !self.lock().engine.is_executing() {
                return;
            }
        }
        self.runtime().park(limit.map(|limit| self.runtime().deadline(limit)));
    }

    /// Puts the engine back into the stream, and wakes the threads that may need it.
    fn put_back(&self, engine: Box<Engine>) {
        let mut state = self.lock();
        state.record(&engine);
        let has_work = !matches!(engine.started_work(), StartedWork::Nothing);
        state.engine = EngineLocation::Queue(engine);
        let worker = if has_work || state.is_closed { state.worker.wake_from_sleep() } else { None };
        let waiters = mem::take(&mut state.waiters);
        drop(state);
        waiters.into_iter().for_each(|waiter| waiter.unpark());
        wake(worker);
    }

    /// Returns the work for the worker. It has none while the communicator wants the engine.
    fn work_left(&self, state: &StreamState) -> StartedWork {
        match &state.engine {
            EngineLocation::Queue(engine) if !self.0.commands.is_wanted() => engine.started_work(),
            _ => StartedWork::Nothing,
        }
    }

    fn lock(&self) -> MutexGuard<'_, StreamState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WorkerQueue for MessageStream {
    /// A thread that starts a message and waits for it moves it itself, so the worker first waits a little.
    fn work(&self) {
        let runtime = self.runtime();
        runtime.make_waits_exact();
        let unparker = runtime.unparker();
        let is_waking_slow = runtime.is_waking_slow();
        let (mut naps, mut has_waited) = (0, false);
        loop {
            let mut state = self.lock();
            state.worker = WorkerSleep::Awake;
            let work = self.work_left(&state);
            if state.is_closed && matches!(work, StartedWork::Nothing) && !state.engine.is_executing() {
                let engine = mem::replace(&mut state.engine, EngineLocation::Communicator);
                drop(state);
                drop(engine);
                return;
            }
            let is_ready = matches!(work, StartedWork::Ready);
            if is_ready && (has_waited || state.is_closed || !is_waking_slow) {
                let engine = state.engine.take(EngineLocation::Executing);
                drop(state);
                if let Some(mut engine) = engine {
                    engine.drive_started(&|| false);
                    self.put_back(engine);
                }
                (naps, has_waited) = (0, false);
                continue;
            }
            has_waited = is_ready;
            let until = match work {
                StartedWork::Ready => Some(runtime.deadline(NAP)),
                StartedWork::Until(deadline) => Some(deadline),
                StartedWork::Nothing if is_waking_slow && naps < NAPS_MAX => Some(runtime.deadline(NAP)),
                StartedWork::Nothing => None,
            };
            naps = if is_ready { 0 } else { naps + 1 };
            let is_nap = is_ready || (until.is_some() && matches!(work, StartedWork::Nothing));
            let sleep = if is_nap { WorkerSleep::Napping } else { WorkerSleep::Asleep };
            state.worker = sleep(unparker.clone());
            drop(state);
            runtime.park(until);
        }
    }

    fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        let worker = state.worker.wake();
        drop(state);
        wake(worker);
    }
}

impl StreamState {
    /// Records the traffic of an engine that is put back.
    fn record(&mut self, engine: &Engine) {
        self.traffic = engine.started_traffic();
        self.traffic_of_calls = difference(engine.traffic(), self.traffic);
    }
}

impl fmt::Debug for MessageStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MessageStream")
    }
}

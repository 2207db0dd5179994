//! [`Stream`]: a communicator and the queue of the calls that are made on it, one after the other.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use dist_collectives::Communicator;
use dist_transport::Runtime;
use dist_transport::runtime::{Deadline, Task};
use pyo3::prelude::*;

use crate::call::Call;
use crate::error::Failure;
use crate::owned_by_process::OwnedByProcess;

/// A communicator and the queue of its calls.
///
/// A call is made by the first thread that comes: a thread that waits for it or for a later one, or the stream's own
/// thread. So a call for which the program waits at once needs no other thread.
pub(crate) struct Stream {
    communicator: Mutex<OwnedByProcess<Communicator>>,
    queue: Mutex<Queue>,
    /// Wakes the stream's own thread.
    queued: Condition,
    /// Wakes threads that wait for the end of a call.
    ended: Condition,
    runtime: Runtime,
}

#[derive(Default)]
struct Queue {
    operations: VecDeque<Arc<Operation>>,
    /// `true` while a thread makes the call that was taken from the queue last.
    is_running: bool,
    is_closed: bool,
    thread: Option<Task<()>>,
}

/// A call that was or will be made, and the Python objects that belong to it.
pub(crate) struct Operation {
    call: Mutex<Option<Call>>,
    deadline: Deadline,
    copy_out: Mutex<Option<Py<PyAny>>>,
    /// The functions that are called once the call is done.
    callbacks: Mutex<Vec<Py<PyAny>>>,
    outcome: OnceLock<Result<(), Failure>>,
}

#[expect(clippy::disallowed_types, reason = "threads of Python wait here, which the simulator cannot run")]
type Condition = std::sync::Condvar;

impl Stream {
    pub(crate) fn new(communicator: Communicator) -> Arc<Self> {
        let runtime = communicator.runtime().clone();
        let (queue, communicator) = (Mutex::default(), Mutex::new(OwnedByProcess::new(communicator)));
        Arc::new(Self { communicator, queue, queued: Condition::new(), ended: Condition::new(), runtime })
    }

    /// Appends a call, which ends by the timeout. `copy_out` copies results to where the program wants them, before
    /// the call counts as done.
    pub(crate) fn push(&self, call: Call, timeout: Duration, copy_out: Option<Py<PyAny>>) -> Arc<Operation> {
        let operation = Arc::new(Operation {
            call: Mutex::new(Some(call)),
            deadline: self.runtime.deadline(timeout),
            copy_out: Mutex::new(copy_out),
            callbacks: Mutex::default(),
            outcome: OnceLock::new(),
        });
        lock(&self.queue).operations.push_back(Arc::clone(&operation));
        operation
    }

    /// Lets the stream's own thread make the calls of the queue.
    pub(crate) fn wake(self: &Arc<Self>) -> Result<(), Failure> {
        let mut queue = lock(&self.queue);
        if queue.thread.is_none() && !queue.is_closed {
            let stream = Arc::clone(self);
            let thread = self.runtime.spawn("dist-torch", move || stream.work());
            queue.thread =
                Some(thread.map_err(|error| Failure::failed(format!("cannot start a thread: {error}")))?);
        }
        drop(queue);
        self.queued.notify_one();
        Ok(())
    }

    /// Makes calls until the stream is closed.
    fn work(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(operation) = queue.take() {
                drop(queue);
                self.run(&operation);
                queue = lock(&self.queue);
            } else if queue.is_closed {
                return;
            } else {
                queue = self.queued.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Brings the operation nearer to its end: makes the next call of the queue, or waits at most this long for the
    /// thread that makes one. Returns `true` if the operation is done.
    pub(crate) fn advance(&self, operation: &Operation, limit: Duration) -> bool {
        let mut queue = lock(&self.queue);
        if operation.outcome.get().is_some() {
            return true;
        }
        if let Some(next) = queue.take() {
            drop(queue);
            self.run(&next);
        } else {
            let waited = self.ended.wait_timeout(queue, limit).unwrap_or_else(PoisonError::into_inner);
            drop(waited);
        }
        operation.outcome.get().is_some()
    }

    /// Waits at most this long for other threads to make the call. Returns `true` if the operation is done.
    pub(crate) fn watch(&self, operation: &Operation, limit: Duration) -> bool {
        let queue = lock(&self.queue);
        if operation.outcome.get().is_none() {
            drop(self.ended.wait_timeout(queue, limit).unwrap_or_else(PoisonError::into_inner));
        }
        operation.outcome.get().is_some()
    }

    /// Makes the call of an operation that was taken from the queue.
    fn run(&self, operation: &Operation) {
        let made = self.make_call(operation);
        let outcome = made.and_then(|()| operation.copy_out());
        let is_first = operation.outcome.set(outcome).is_ok();
        debug_assert!(is_first, "one thread takes an operation");
        lock(&self.queue).is_running = false;
        self.ended.notify_all();
        self.queued.notify_one();
        operation.call_back();
    }

    fn make_call(&self, operation: &Operation) -> Result<(), Failure> {
        let mut communicator = lock(&self.communicator);
        let (Some(call), Some(communicator)) = (lock(&operation.call).take(), communicator.get()) else {
            return Err(Failure::destroyed());
        };
        communicator.set_timeout(self.runtime.remaining(operation.deadline));
        call.run(communicator)
    }

    /// Calls the function with the communicator, if no call of the stream is being made or waits in the queue.
    pub(crate) fn with_idle<R>(&self, function: impl FnOnce(&mut Communicator) -> R) -> Option<R> {
        let mut queue = lock(&self.queue);
        if queue.is_running || queue.is_closed || !queue.operations.is_empty() {
            return None;
        }
        queue.is_running = true;
        drop(queue);
        let result = lock(&self.communicator).get().map(function);
        let mut queue = lock(&self.queue);
        queue.is_running = false;
        let is_awaited = !queue.operations.is_empty();
        drop(queue);
        if is_awaited {
            self.ended.notify_all();
            self.queued.notify_one();
        }
        result
    }

    /// Returns `true` if the stream makes no more calls.
    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.queue).is_closed
    }

    /// Ends the stream's thread, and drops the communicator. Calls that nobody has begun fail.
    pub(crate) fn close(&self) {
        let mut queue = lock(&self.queue);
        queue.is_closed = true;
        let (operations, thread) = (std::mem::take(&mut queue.operations), queue.thread.take());
        drop(queue);
        self.queued.notify_all();
        for operation in operations {
            let _ = operation.outcome.set(Err(Failure::destroyed()));
            operation.call_back();
        }
        self.ended.notify_all();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
        drop(lock(&self.communicator).take());
    }
}

impl Queue {
    /// Takes the next operation, if no other call is being made.
    fn take(&mut self) -> Option<Arc<Operation>> {
        if self.is_running {
            return None;
        }
        let operation = self.operations.pop_front();
        self.is_running = operation.is_some();
        operation
    }
}

impl Operation {
    /// Returns the outcome, if the call was made.
    pub(crate) fn outcome(&self) -> Option<&Result<(), Failure>> {
        self.outcome.get()
    }

    /// Calls the function with no argument once the operation is done, which may be at once.
    pub(crate) fn on_done(&self, callback: Py<PyAny>) {
        lock(&self.callbacks).push(callback);
        if self.outcome.get().is_some() {
            self.call_back();
        }
    }

    /// Copies the results out, if that is needed.
    fn copy_out(&self) -> Result<(), Failure> {
        let Some(copy_out) = lock(&self.copy_out).take() else { return Ok(()) };
        Python::attach(|py| copy_out.call0(py).map(drop).map_err(|error| Failure::from_python(&error)))
    }

    /// Calls the callbacks.
    fn call_back(&self) {
        let callbacks = std::mem::take(&mut *lock(&self.callbacks));
        if callbacks.is_empty() {
            return;
        }
        Python::attach(|py| {
            for callback in callbacks {
                if let Err(error) = callback.call0(py) {
                    error.write_unraisable(py, Some(callback.bind(py)));
                }
            }
        });
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

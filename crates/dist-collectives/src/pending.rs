//! The handle of an operation that was started.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use dist_transport::runtime::{Deadline, Unparker};
use dist_transport::{Cause, Runtime};

use crate::Error;
use crate::message_stream::MessageStream;
use crate::operation_queue::{AbortHandle, OperationQueue, StartClaim};

/// A handle of an operation that was started and not yet waited for. It owns the memory `B` of the operation: a
/// [`Buffer`](crate::Buffer), several of them, or none.
///
/// Dropping the handle of a collective waits for it, until its deadline at most, and drops the memory. Dropping the handle
/// of messages does not wait: receives that no message has matched are cancelled, other messages go on in the background.
/// Dropping a handle during a panic aborts the job. If the deadline passes before a collective could begin, waiting for it,
/// polling it or dropping it aborts the job too ([`Error::NotStarted`]).
///
/// A thread that waits for a collective which has not begun executes it, after the collectives that were started before
/// it. A thread that waits for messages moves all started messages of the communicator. Operations that no thread waits for
/// are executed by threads of the communicator. On the simulated network, a thread that waits leaves them to those threads.
///
/// A handle is also a [`Future`], for any executor. Polling it never blocks.
#[doc(alias = "Work")]
#[doc(alias = "MPI_Request")]
#[must_use = "the result comes from wait; dropping cancels receives, and waits for collectives"]
pub struct Pending<B>(PendingState<B>);

enum PendingState<B> {
    Running(RunningOperation<B>),
    Done(OperationResult<B>),
    /// The result was returned.
    Taken,
}

pub(crate) type OperationResult<B> = Result<B, Failed<B>>;

pub(crate) struct RunningOperation<B> {
    pub(crate) outcome: Arc<OperationOutcome<B>>,
    pub(crate) source: OperationSource,
    /// The number of the operation in the queue or in the stream.
    pub(crate) number: u64,
    pub(crate) abort_handle: AbortHandle,
    /// The claim to begin the operation, if an earlier operation may last longer than its deadline.
    pub(crate) claim: Option<StartClaim>,
}

/// The place where an operation is executed.
#[derive(Clone, Debug)]
pub(crate) enum OperationSource {
    /// The queue of collectives.
    Queue(OperationQueue),
    /// The stream of messages.
    Messages(MessageStream),
}

/// The place where the thread that executes an operation puts its result.
pub(crate) struct OperationOutcome<B> {
    is_done: AtomicBool,
    state: Mutex<OutcomeState<B>>,
}

struct OutcomeState<B> {
    result: Option<OperationResult<B>>,
    /// Wakes the thread or the task that waits for the result.
    waker: Option<Waker>,
}

/// The deadline of a wait has passed.
struct TimedOut;

impl<B> Pending<B> {
    pub(crate) const fn running(running: RunningOperation<B>) -> Self {
        Self(PendingState::Running(running))
    }

    pub(crate) fn failed(buffer: B, error: Error) -> Self {
        Self(PendingState::Done(Err(Failed::new(buffer, error))))
    }

    /// Waits for the operation to end, at the latest at its deadline, and returns its memory.
    ///
    /// # Errors
    /// Those of the operation, together with its memory.
    #[doc(alias = "MPI_Wait")]
    pub fn wait(mut self) -> Result<B, Failed<B>> {
        match std::mem::replace(&mut self.0, PendingState::Taken) {
            PendingState::Done(done) => done,
            PendingState::Running(mut running) => running.wait(),
            PendingState::Taken => unreachable!("only methods that take the handle take the result"),
        }
    }

    /// Waits for the operation to end, at most this long. After that the operation continues, unless its own
    /// deadline passes.
    ///
    /// # Errors
    /// The handle, if the operation has not ended. Inside, those of [`wait`](Self::wait).
    pub fn wait_timeout(mut self, limit: Duration) -> Result<Result<B, Failed<B>>, Self> {
        if let PendingState::Running(running) = &mut self.0 {
            let deadline = running.source.runtime().deadline(limit);
            match running.wait_until(Some(deadline)) {
                Ok(done) => self.0 = PendingState::Done(done),
                Err(TimedOut) => return Err(self),
            }
        }
        Ok(self.wait())
    }

    /// Returns the memory if the operation has ended, otherwise the handle. It never blocks.
    ///
    /// ```
    /// use dist_collectives::{Communicator, ReduceOp};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let mut pending = comm.start_all_reduce(vec![1.0_f32], ReduceOp::Sum);
    ///     loop {
    ///         match pending.test() {
    ///             Ok(done) => return done.unwrap().into_vec(),
    ///             Err(running) => pending = running,
    ///         }
    ///         comm.runtime().sleep(std::time::Duration::from_micros(1)); // compute
    ///     }
    /// });
    /// assert_eq!(outcome.results, [[2.0]; 2]);
    /// ```
    ///
    /// # Errors
    /// The handle, if the operation has not ended. Inside, those of [`wait`](Self::wait).
    #[doc(alias = "MPI_Test")]
    pub fn test(mut self) -> Result<Result<B, Failed<B>>, Self> {
        if self.is_done() { Ok(self.wait()) } else { Err(self) }
    }

    /// Cancels the operation if it only receives messages and none of them has begun to arrive. Returns its memory. The
    /// message then goes to a later receive.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let pending = comm.start_recv(vec![0_u8; 4], 1 - comm.rank());
    ///     pending.cancel().unwrap().into_vec()
    /// });
    /// assert_eq!(outcome.results, [[0; 4]; 2]);
    /// ```
    ///
    /// # Errors
    /// The handle, if the operation is another one, has ended, or receives a message.
    #[doc(alias = "MPI_Cancel")]
    pub fn cancel(mut self) -> Result<B, Self> {
        let PendingState::Running(RunningOperation {
            outcome,
            source: OperationSource::Messages(stream),
            number,
            ..
        }) = &self.0
        else {
            return Err(self);
        };
        if !stream.cancel(*number, &|| outcome.is_done()) {
            return Err(self);
        }
        let outcome = Arc::clone(outcome);
        self.0 = PendingState::Taken;
        match outcome.take() {
            Some(Ok(buffer)) => Ok(buffer),
            Some(Err(failed)) => Err(Self(PendingState::Done(Err(failed)))),
            None => unreachable!("a cancelled operation has ended"),
        }
    }

    /// Returns `true` if the operation has ended, so that [`wait`](Self::wait) would not block. If the deadline has
    /// passed before the operation could begin, this call ends it and aborts the job.
    #[doc(alias = "MPI_Request_get_status")]
    #[doc(alias = "is_completed")]
    pub fn is_done(&mut self) -> bool {
        if let PendingState::Running(running) = &mut self.0 {
            match running.outcome.take() {
                Some(done) => self.0 = PendingState::Done(done),
                None => running.give_up_if_late(),
            }
        }
        !matches!(self.0, PendingState::Running(_))
    }
}

/// # Several operations
impl<B> Pending<B> {
    /// Waits for all operations, and returns their results in the same order.
    ///
    /// ```
    /// use dist_collectives::{Communicator, Pending, ReduceOp};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let pending = [1, 2, 3].map(|value| comm.start_all_reduce(vec![value], ReduceOp::Sum));
    ///     let sums: Result<Vec<_>, _> = Pending::wait_all(pending).into_iter().collect();
    ///     sums.unwrap().into_iter().map(|sum| sum[0]).collect::<Vec<i32>>()
    /// });
    /// assert_eq!(outcome.results, [[2, 4, 6]; 2]);
    /// ```
    #[doc(alias = "MPI_Waitall")]
    pub fn wait_all(pending: impl IntoIterator<Item = Self>) -> Vec<Result<B, Failed<B>>> {
        pending.into_iter().map(Self::wait).collect()
    }

    /// Waits until one of these operations has ended. Returns its index and its result, and leaves `None` in its place.
    /// Returns `None` if all places are `None`.
    ///
    /// Of messages it is the operation that ends first. Of collectives it is the one that was started first.
    ///
    /// ```
    /// use dist_collectives::{Communicator, Pending, ReduceOp};
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let mut pending = [1, 2, 3].map(|value| Some(comm.start_all_reduce(vec![value], ReduceOp::Sum)));
    ///     let mut sums = [0; 3];
    ///     while let Some((index, sum)) = Pending::wait_any(&mut pending) {
    ///         sums[index] = sum.unwrap()[0];
    ///     }
    ///     sums
    /// });
    /// assert_eq!(outcome.results, [[2, 4, 6]; 2]);
    /// ```
    #[doc(alias = "MPI_Waitany")]
    pub fn wait_any(pending: &mut [Option<Self>]) -> Option<(usize, Result<B, Failed<B>>)> {
        let mut polls = 0;
        loop {
            if let Some(done) = Self::test_any(pending) {
                return Some(done);
            }
            let source = pending.iter().flatten().find_map(Self::as_running)?.source.clone();
            Self::help_any(pending);
            if polls < source.spins() {
                polls += 1;
                std::hint::spin_loop();
                continue;
            }
            if let Some(done) = Self::test_any(pending) {
                return Some(done);
            }
            let waker = thread_waker(source.runtime());
            let mut until: Option<Deadline> = None;
            for running in pending.iter().flatten().filter_map(Self::as_running) {
                running.outcome.wake_when_done(&waker);
                running.source.wake_worker_for(running.number);
                if let Some(StartClaim { deadline, .. }) = running.claim {
                    until = Some(until.map_or(deadline, |until| until.earlier(deadline)));
                }
            }
            source.runtime().park(until);
        }
    }

    /// Moves messages until one of these operations has ended, if all of them are messages of one communicator.
    fn help_any(pending: &[Option<Self>]) {
        let mut running = pending.iter().flatten().filter_map(Self::as_running);
        let Some(OperationSource::Messages(stream)) = running.clone().next().map(|running| &running.source)
        else {
            return;
        };
        let is_of_stream = |running: &RunningOperation<B>| matches!(&running.source, OperationSource::Messages(other) if other.is(stream));
        if stream.runtime().is_waking_slow() && running.all(is_of_stream) {
            let is_over = || {
                let mut running = pending.iter().flatten().filter_map(Self::as_running);
                running.any(|running| running.outcome.is_done())
            };
            stream.help_until(&is_over);
        }
    }

    /// Waits until at least one of these operations has ended, and takes the results of all that have, as
    /// [`wait_any`](Self::wait_any) does. Returns nothing if all places are `None`.
    #[doc(alias = "MPI_Waitsome")]
    pub fn wait_some(pending: &mut [Option<Self>]) -> Vec<(usize, Result<B, Failed<B>>)> {
        let mut done = Vec::from_iter(Self::wait_any(pending));
        done.extend(std::iter::from_fn(|| Self::test_any(pending)));
        done
    }

    /// Returns the index and the result of an operation that has ended, and leaves `None` in its place. Returns `None` if
    /// none has ended. It never blocks.
    #[doc(alias = "MPI_Testany")]
    pub fn test_any(pending: &mut [Option<Self>]) -> Option<(usize, Result<B, Failed<B>>)> {
        let is_done = |place: &mut Option<Self>| place.as_mut().is_some_and(Self::is_done);
        let index = pending.iter_mut().position(is_done)?;
        Some((index, pending[index].take()?.wait()))
    }

    const fn as_running(&self) -> Option<&RunningOperation<B>> {
        match &self.0 {
            PendingState::Running(running) => Some(running),
            PendingState::Done(_) | PendingState::Taken => None,
        }
    }
}

impl<B> RunningOperation<B> {
    /// Waits for the operation, and executes it if it has not begun. The worker executes it if it is woken at no cost, or
    /// if an earlier operation may last longer than its deadline.
    fn wait(&mut self) -> OperationResult<B> {
        if self.claim.is_none() && self.source.runtime().is_waking_slow() {
            self.source.execute_until(self.number, &|| self.outcome.is_done());
        }
        match self.wait_until(None) {
            Ok(done) => done,
            Err(TimedOut) => unreachable!("a wait without a deadline ends with the operation"),
        }
    }

    /// Waits until a deadline for another thread to execute the operation. If the operation could not begin before its
    /// own deadline, the job is aborted, which also ends the operations before it.
    fn wait_until(&mut self, until: Option<Deadline>) -> Result<OperationResult<B>, TimedOut> {
        if let Some(done) = self.outcome.take() {
            return Ok(done);
        }
        self.source.wake_worker_for(self.number);
        if let Some(StartClaim { deadline, .. }) = self.claim {
            let first = until.map_or(deadline, |until| until.earlier(deadline));
            if let Ok(done) = self.outcome.wait(&self.source, Some(first)) {
                return Ok(done);
            }
            self.give_up_if_late();
        }
        self.outcome.wait(&self.source, until)
    }

    fn give_up_if_late(&mut self) {
        let Self { claim, source, .. } = self;
        if let Some(claim) = claim.take_if(|claim| source.runtime().expired(claim.deadline))
            && claim.take()
        {
            self.abort_handle.abort(Cause::gave_up(claim.missed()));
        }
    }
}

impl OperationSource {
    fn runtime(&self) -> &Runtime {
        match self {
            Self::Queue(queue) => queue.runtime(),
            Self::Messages(stream) => stream.runtime(),
        }
    }

    /// Returns the number of polls of a thread before it sleeps.
    fn spins(&self) -> u32 {
        match self {
            Self::Queue(queue) => queue.spins(),
            Self::Messages(stream) => stream.spins(),
        }
    }

    /// Executes the operation with this number on this thread, unless another thread does.
    fn execute_until(&self, number: u64, is_over: &dyn Fn() -> bool) {
        match self {
            Self::Queue(queue) => queue.execute_until(number),
            Self::Messages(stream) => stream.help_until(is_over),
        }
    }

    /// Wakes the worker, even from a nap, if nobody executes the operation with this number.
    fn wake_worker_for(&self, number: u64) {
        match self {
            Self::Queue(queue) => queue.wake_worker_for(number),
            Self::Messages(stream) => stream.wake_worker(),
        }
    }
}

impl<B> OperationOutcome<B> {
    pub(crate) const fn new() -> Self {
        let state = Mutex::new(OutcomeState { result: None, waker: None });
        Self { is_done: AtomicBool::new(false), state }
    }

    /// Stores the result, and wakes the thread or task that waits for it.
    pub(crate) fn complete(&self, result: OperationResult<B>) {
        let mut state = self.lock();
        state.result = Some(result);
        self.is_done.store(true, Ordering::Release);
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Acquire)
    }

    /// Takes the result, if the operation has ended.
    fn take(&self) -> Option<OperationResult<B>> {
        if self.is_done() { self.lock().result.take() } else { None }
    }

    /// Takes the result if the operation has ended. Otherwise stores a waker that is used when it ends.
    fn take_or_wake(&self, waker: &Waker) -> Option<OperationResult<B>> {
        let mut state = self.lock();
        let result = state.result.take();
        if result.is_none() {
            state.waker = Some(waker.clone());
        }
        result
    }

    /// Wakes this waker when the operation ends, or now if it has ended.
    fn wake_when_done(&self, waker: &Waker) {
        let mut state = self.lock();
        if state.result.is_none() {
            state.waker = Some(waker.clone());
        } else {
            drop(state);
            waker.wake_by_ref();
        }
    }

    fn wait(
        &self,
        source: &OperationSource,
        until: Option<Deadline>,
    ) -> Result<OperationResult<B>, TimedOut> {
        for _ in 0..source.spins() {
            if let Some(done) = self.take() {
                return Ok(done);
            }
            std::hint::spin_loop();
        }
        let waker = thread_waker(source.runtime());
        loop {
            if let Some(done) = self.take_or_wake(&waker) {
                return Ok(done);
            }
            if until.is_some_and(|until| source.runtime().expired(until)) {
                return Err(TimedOut);
            }
            source.runtime().park(until);
        }
    }

    fn lock(&self) -> MutexGuard<'_, OutcomeState<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes a thread that waits by the clock of a runtime.
struct UnparkWaker(Unparker);

impl Wake for UnparkWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Returns a waker of the calling thread.
fn thread_waker(runtime: &Runtime) -> Waker {
    Waker::from(Arc::new(UnparkWaker(runtime.unparker())))
}

/// Ends with the result of [`wait`](Pending::wait). The operation is executed by the thread of the communicator, which
/// wakes the task. An operation that could not begin before its deadline ends when the operations before it have ended.
///
/// # Panics
/// If it is polled again after it has returned the result.
impl<B: Unpin> Future for Pending<B> {
    type Output = Result<B, Failed<B>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let state = &mut self.get_mut().0;
        match std::mem::replace(state, PendingState::Taken) {
            PendingState::Done(done) => Poll::Ready(done),
            PendingState::Running(running) => match running.outcome.take_or_wake(context.waker()) {
                Some(done) => Poll::Ready(done),
                None => {
                    running.source.wake_worker_for(running.number);
                    *state = PendingState::Running(running);
                    Poll::Pending
                }
            },
            PendingState::Taken => panic!("a future was polled after it had returned its result"),
        }
    }
}

impl<B> Drop for Pending<B> {
    fn drop(&mut self) {
        if let PendingState::Running(running) = &mut self.0 {
            if std::thread::panicking() {
                running.abort_handle.abort(Cause::Panicked);
            } else if let OperationSource::Messages(stream) = &running.source {
                if !running.outcome.is_done() {
                    stream.detach(running.number);
                }
            } else {
                // The outcome of a dropped operation is ignored.
                let _done = running.wait();
            }
        }
    }
}

impl<B> fmt::Debug for Pending<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            PendingState::Running(_) => "Pending(running)",
            PendingState::Done(_) | PendingState::Taken => "Pending(done)",
        })
    }
}

/// An operation that failed, and the memory that it was given. Memory that the operation works on in place has
/// unspecified contents; memory that it only reads is unchanged.
///
/// As an error it has the message and the source of its [`error`](Self::error).
#[derive(Debug)]
pub struct Failed<B> {
    /// The memory of the operation.
    pub buffer: B,
    /// The error.
    pub error: Box<Error>,
}

impl<B> Failed<B> {
    pub(crate) fn new(buffer: B, error: Error) -> Self {
        Self { buffer, error: Box::new(error) }
    }
}

impl<B> fmt::Display for Failed<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B: fmt::Debug> std::error::Error for Failed<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<B> From<Failed<B>> for Error {
    fn from(failed: Failed<B>) -> Self {
        *failed.error
    }
}

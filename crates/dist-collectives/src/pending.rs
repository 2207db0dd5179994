//! The handle of an operation that was started.

use std::fmt;
use std::time::Duration;

use dist_transport::runtime::{Deadline, Receiver, Unavailable};
use dist_transport::{Cause, Runtime};

use crate::Error;
use crate::worker::{AbortHandle, StartClaim};

/// A handle of an operation that was started and not yet waited for. It owns the memory `B` of the operation: a
/// [`Buffer`](crate::Buffer), several of them, or none.
///
/// Dropping it waits for the operation, until its deadline at most, and drops the memory. Dropping it during a
/// panic aborts the job. If the deadline passes before the operation could begin, waiting for it, polling it or
/// dropping it aborts the job too ([`Error::NotStarted`]).
#[doc(alias = "Work")]
#[doc(alias = "MPI_Request")]
#[must_use = "the result comes from wait; dropping waits too"]
pub struct Pending<B>(PendingState<B>);

enum PendingState<B> {
    Running(RunningOperation<B>),
    Done(OperationResult<B>),
    /// The result was returned.
    Taken,
}

pub(crate) type OperationResult<B> = Result<B, Failed<B>>;

pub(crate) struct RunningOperation<B> {
    pub(crate) result: Receiver<OperationResult<B>>,
    /// The number of polls before sleeping.
    pub(crate) spins: u32,
    pub(crate) runtime: Runtime,
    pub(crate) abort_handle: AbortHandle,
    /// The claim to begin the operation, if an earlier operation may last longer than its deadline.
    pub(crate) claim: Option<StartClaim>,
}

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
            PendingState::Running(mut running) => running.receive(running.spins, None).expect(ANSWERED),
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
            let deadline = running.runtime.deadline(limit);
            match running.receive(0, Some(deadline)) {
                Ok(done) => self.0 = PendingState::Done(done),
                Err(Unavailable::TimedOut) => return Err(self),
                Err(Unavailable::Closed) => unreachable!("{ANSWERED}"),
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

    /// Returns `true` if the operation has ended, so that [`wait`](Self::wait) would not block. If the deadline has
    /// passed before the operation could begin, this call ends it and aborts the job.
    #[doc(alias = "MPI_Request_get_status")]
    #[doc(alias = "is_completed")]
    pub fn is_done(&mut self) -> bool {
        if let PendingState::Running(running) = &mut self.0 {
            match running.result.try_receive() {
                Some(done) => self.0 = PendingState::Done(done),
                None => running.give_up_if_late(),
            }
        }
        !matches!(self.0, PendingState::Running(_))
    }
}

impl<B> RunningOperation<B> {
    /// Waits for the outcome of the operation until a deadline. If the operation could not begin before its own
    /// deadline, the job is aborted, which also ends the operations before it.
    fn receive(&mut self, spins: u32, until: Option<Deadline>) -> Result<OperationResult<B>, Unavailable> {
        if let Some(StartClaim { deadline, .. }) = self.claim {
            let first = until.map_or(deadline, |until| until.earlier(deadline));
            let done = self.result.receive_after_looks(spins, Some(first));
            if !matches!(done, Err(Unavailable::TimedOut)) {
                return done;
            }
            self.give_up_if_late();
        }
        self.result.receive_after_looks(spins, until)
    }

    fn give_up_if_late(&mut self) {
        let Self { claim, runtime, .. } = self;
        if let Some(claim) = claim.take_if(|claim| runtime.expired(claim.deadline))
            && claim.take()
        {
            self.abort_handle.abort(Cause::gave_up(claim.missed()));
        }
    }
}

impl<B> Drop for Pending<B> {
    fn drop(&mut self) {
        if let PendingState::Running(running) = &mut self.0 {
            if std::thread::panicking() {
                running.abort_handle.abort(Cause::Panicked);
            } else {
                // The outcome of a dropped operation is ignored.
                let _done = running.receive(0, None);
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

const ANSWERED: &str = "the worker answers every operation before it ends";

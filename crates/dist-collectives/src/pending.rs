//! An operation that was started and not yet waited for.

use std::fmt;
use std::time::Duration;

use dist_transport::Runtime;
use dist_transport::runtime::{Receiver, Unavailable};

use crate::worker::Alarm;
use crate::{Buffer, Element, Error};

/// An operation that was started and not yet waited for.
///
/// Dropping it waits for the operation, until its deadline at most, and drops the buffer. Dropping it in a panic
/// aborts the job.
#[must_use = "the result comes from wait; dropping waits too"]
pub struct Pending<T: Element>(State<T>);

enum State<T: Element> {
    Running(Running<T>),
    Done(Done<T>),
    /// The result has been handed out.
    Taken,
}

type Done<T> = Result<Buffer<T>, Failed<T>>;

struct Running<T: Element> {
    result: Receiver<Done<T>>,
    runtime: Runtime,
    alarm: Alarm,
}

impl<T: Element> Pending<T> {
    pub(crate) fn running(result: Receiver<Done<T>>, runtime: Runtime, alarm: Alarm) -> Self {
        Self(State::Running(Running { result, runtime, alarm }))
    }

    pub(crate) fn failed(buffer: Buffer<T>, error: Error) -> Self {
        Self(State::Done(Err(Failed::new(buffer, error))))
    }

    /// Waits for the operation to end, which it does by its deadline, and gives the buffer back.
    ///
    /// # Errors
    /// Those of the operation, with the buffer, whose contents are then unspecified.
    pub fn wait(mut self) -> Result<Buffer<T>, Failed<T>> {
        match std::mem::replace(&mut self.0, State::Taken) {
            State::Done(done) => done,
            State::Running(mut running) => running.result.receive(None).expect(ANSWERED),
            State::Taken => unreachable!("only methods that take the handle take the result"),
        }
    }

    /// Waits for the operation to end, but not longer than this; the operation goes on.
    ///
    /// # Errors
    /// The handle, if the operation has not ended. Inside, those of [`wait`](Self::wait).
    pub fn wait_timeout(mut self, limit: Duration) -> Result<Result<Buffer<T>, Failed<T>>, Self> {
        if let State::Running(running) = &mut self.0 {
            let deadline = running.runtime.deadline(limit);
            match running.result.receive(Some(deadline)) {
                Ok(done) => self.0 = State::Done(done),
                Err(Unavailable::TimedOut) => return Err(self),
                Err(Unavailable::Closed) => unreachable!("{ANSWERED}"),
            }
        }
        Ok(self.wait())
    }

    /// Whether the operation has ended, so that [`wait`](Self::wait) does not wait.
    pub fn is_done(&mut self) -> bool {
        if let State::Running(running) = &mut self.0
            && let Some(done) = running.result.try_receive()
        {
            self.0 = State::Done(done);
        }
        !matches!(self.0, State::Running(_))
    }
}

impl<T: Element> Drop for Pending<T> {
    fn drop(&mut self) {
        if let State::Running(running) = &mut self.0 {
            if std::thread::panicking() {
                running.alarm.ring();
            } else {
                // Whoever drops the handle does not want to know how it ended.
                let _done = running.result.receive(None);
            }
        }
    }
}

impl<T: Element> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            State::Running(_) => "Pending(running)",
            State::Done(_) | State::Taken => "Pending(done)",
        })
    }
}

/// An operation that failed, and the buffer that it worked on, whose contents are unspecified.
///
/// As an error it says what its [`error`](Self::error) says, and leads to the same source.
#[derive(Debug)]
pub struct Failed<T: Element> {
    /// The buffer.
    pub buffer: Buffer<T>,
    /// What went wrong.
    pub error: Box<Error>,
}

impl<T: Element> Failed<T> {
    pub(crate) fn new(buffer: Buffer<T>, error: Error) -> Self {
        Self { buffer, error: Box::new(error) }
    }
}

impl<T: Element> fmt::Display for Failed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T: Element> std::error::Error for Failed<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<T: Element> From<Failed<T>> for Error {
    fn from(failed: Failed<T>) -> Self {
        *failed.error
    }
}

const ANSWERED: &str = "the worker answers every operation before it ends";

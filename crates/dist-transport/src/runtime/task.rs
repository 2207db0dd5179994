//! Threads whose result can be waited for.

use std::any::Any;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{Deadline, Receiver, Runtime, Unavailable};

/// A thread of a [`Runtime`]. Dropping it lets the thread continue.
pub struct Task<T> {
    result: Receiver<Result<T, Box<dyn Any + Send>>>,
}

pub(super) fn spawn<T: Send + 'static>(
    runtime: &Runtime,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Task<T>> {
    let (sender, result) = runtime.mailbox();
    let executor = runtime.0.clone();
    let body = move || {
        let result = catch_unwind(AssertUnwindSafe(work));
        if let Err(panic) = &result {
            executor.panicked(&**panic);
        }
        sender.send(result);
    };
    runtime.0.spawn(name, Box::new(body))?;
    Ok(Task { result })
}

impl<T> Task<T> {
    /// Waits for the thread to end.
    ///
    /// # Errors
    /// The payload, if the thread panicked.
    pub fn join(mut self) -> Result<T, Box<dyn Any + Send>> {
        self.result.receive(None).expect("a task sends its result before its mailbox closes")
    }

    /// Waits for the thread to end by a deadline.
    ///
    /// # Errors
    /// The task itself, if the deadline has passed.
    pub fn join_by(mut self, deadline: Deadline) -> Result<Result<T, Box<dyn Any + Send>>, Self> {
        match self.result.receive(Some(deadline)) {
            Ok(result) => Ok(result),
            Err(Unavailable::TimedOut) => Err(self),
            Err(Unavailable::Closed) => unreachable!("a task sends its result before its mailbox closes"),
        }
    }
}

impl<T> fmt::Debug for Task<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Task")
    }
}

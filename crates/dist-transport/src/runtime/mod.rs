//! The runtime seam: every clock, thread and wait of every crate goes through here.
//!
//! Code that takes its time and its threads from a [`Runtime`] runs unchanged on the system's clock
//! ([`Runtime::system`]) and on a simulated one (feature `sim`), where a minute's timeout takes microseconds.

mod mailbox;
mod system;
mod task;

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

pub use mailbox::{Mailbox, Receiver, Unavailable};
pub use task::Task;

/// A clock, threads, and a way to wait: a handle that is cheap to clone.
#[derive(Clone)]
pub struct Runtime(Arc<dyn Executor>);

/// A point in time by the clock of one [`Runtime`], and when the wait for it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline {
    started: Duration,
    expires: Duration,
}

impl Deadline {
    /// How long the deadline was when it was made.
    pub fn limit(&self) -> Duration {
        self.expires.saturating_sub(self.started)
    }

    /// Whether it has passed at this time by the same clock.
    pub(crate) fn has_passed(&self, now: Duration) -> bool {
        now >= self.expires
    }

    /// The one of two deadlines of the same clock that expires first.
    #[must_use]
    pub fn earlier(self, other: Self) -> Self {
        if other.expires < self.expires { other } else { self }
    }
}

/// A deadline that begins when it is first asked for: what ends before anybody has to wait needs no look at the clock,
/// which takes longer than some of it.
///
/// ```
/// use std::time::Duration;
///
/// use dist_transport::{LazyDeadline, Runtime};
///
/// let runtime = Runtime::system();
/// let due = LazyDeadline::within(&runtime, Duration::from_secs(60));
/// assert_eq!(due.deadline(), due.deadline());
/// ```
#[derive(Debug, Clone)]
pub struct LazyDeadline<'a> {
    begun: Cell<Option<Deadline>>,
    /// What it is made of when it begins; `None` if it has begun from the start. Not in the cell, where a borrowed runtime
    /// could not be lent on for a shorter time.
    within: Option<(&'a Runtime, Duration)>,
}

impl<'a> LazyDeadline<'a> {
    /// So long after it is first asked for.
    #[inline]
    pub const fn within(runtime: &'a Runtime, timeout: Duration) -> Self {
        Self { begun: Cell::new(None), within: Some((runtime, timeout)) }
    }

    /// The deadline, which has begun now at the latest.
    pub fn deadline(&self) -> Deadline {
        self.begun.get().unwrap_or_else(|| {
            let (runtime, timeout) = self.within.expect("what has not begun will begin");
            let deadline = runtime.deadline(timeout);
            self.begun.set(Some(deadline));
            deadline
        })
    }
}

impl From<Deadline> for LazyDeadline<'_> {
    fn from(deadline: Deadline) -> Self {
        Self { begun: Cell::new(Some(deadline)), within: None }
    }
}

impl Runtime {
    /// The system's clock and threads.
    pub fn system() -> Self {
        Self(Arc::new(system::System::new()))
    }

    /// A runtime with another clock and other threads.
    pub fn new(executor: Arc<dyn Executor>) -> Self {
        Self(executor)
    }

    /// Time since this runtime's clock began.
    pub fn now(&self) -> Duration {
        self.0.now()
    }

    /// The deadline `timeout` from now. A long one, of a second or more, may begin some milliseconds ago: what is done
    /// in less time than a look at the clock takes does not have to take one.
    pub fn deadline(&self, timeout: Duration) -> Deadline {
        let started = if timeout < LONG { self.now() } else { self.0.now_or_shortly_before() };
        Deadline { started, expires: started.saturating_add(timeout) }
    }

    /// How long until the deadline; zero when it has passed.
    pub fn remaining(&self, deadline: Deadline) -> Duration {
        deadline.expires.saturating_sub(self.now())
    }

    /// Whether the deadline has passed.
    pub fn expired(&self, deadline: Deadline) -> bool {
        deadline.has_passed(self.now())
    }

    /// How long ago the deadline was made.
    pub fn elapsed(&self, deadline: Deadline) -> Duration {
        self.now().saturating_sub(deadline.started)
    }

    /// Starts a thread.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn spawn<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<Task<T>> {
        task::spawn(self, name, work)
    }

    /// Waits until this thread's [`Unparker`] is used or the deadline passes. Like
    /// [`std::thread::park`], it may return early: the caller checks what it waits for in a loop.
    pub fn park(&self, deadline: Option<Deadline>) {
        self.0.park(deadline.map(|deadline| deadline.expires));
    }

    /// Waits for so long, whoever wakes the thread in between.
    pub fn sleep(&self, time: Duration) {
        let deadline = self.deadline(time);
        while !self.expired(deadline) {
            self.park(Some(deadline));
        }
    }

    /// What wakes the calling thread.
    pub fn unparker(&self) -> Unparker {
        Unparker(self.0.current())
    }

    /// Lets other threads run.
    pub fn yield_now(&self) {
        self.0.yield_now();
    }

    /// Marks a point between two effects that other threads can see: a simulated runtime may run others here.
    pub fn interleave(&self) {
        self.0.interleave();
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Runtime({})", self.0.name())
    }
}

/// From here on some milliseconds do not matter.
const LONG: Duration = Duration::from_secs(1);

/// Ends the wait of the thread that it was made by.
#[derive(Clone)]
pub struct Unparker(Arc<dyn Wake>);

impl Unparker {
    /// Wakes what does not wait in [`Runtime::park`].
    #[cfg(feature = "tcp")]
    pub(crate) fn of(wake: Arc<dyn Wake>) -> Self {
        Self(wake)
    }

    /// Wakes the thread from [`Runtime::park`], or keeps its next call from waiting.
    pub fn unpark(&self) {
        self.0.wake();
    }
}

impl fmt::Debug for Unparker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Unparker")
    }
}

/// What stands behind a [`Runtime`].
pub trait Executor: Send + Sync {
    /// For debugging.
    fn name(&self) -> &'static str;
    /// Time since the clock began.
    fn now(&self) -> Duration;
    /// The same, or what it was some milliseconds ago at most, if that takes less time to find out.
    fn now_or_shortly_before(&self) -> Duration {
        self.now()
    }
    /// Runs `work` on a thread of its own.
    ///
    /// # Errors
    /// If the system has no thread left.
    fn spawn(&self, name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()>;
    /// Waits until the calling thread is woken or the clock reaches `until`.
    fn park(&self, until: Option<Duration>);
    /// What wakes the calling thread.
    fn current(&self) -> Arc<dyn Wake>;
    /// Lets other threads run.
    fn yield_now(&self);
    /// Marks a point between two effects that other threads can see. Where threads really run at once there is
    /// nothing to do.
    fn interleave(&self) {}
    /// The calling thread's work has ended in this panic, which whoever joins it will be given.
    fn panicked(&self, _panic: &(dyn Any + Send)) {}
}

/// What stands behind an [`Unparker`].
pub trait Wake: Send + Sync {
    /// Wakes the thread, or keeps its next wait from beginning.
    fn wake(&self);
}

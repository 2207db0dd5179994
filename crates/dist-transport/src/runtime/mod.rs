//! The runtime seam: every clock, thread and wait of every crate goes through this module.
//!
//! Code that takes its time and its threads from a [`Runtime`] runs unchanged on the system's clock
//! ([`Runtime::system`]) and on a simulated one (feature `sim`). On the simulated clock, a timeout of a
//! minute takes microseconds.

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

/// A clock, threads, and a way to wait. The handle is cheap to clone.
#[derive(Clone)]
pub struct Runtime(Arc<dyn Executor>);

/// A point in time on the clock of one [`Runtime`], and the time at which the wait for it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline {
    started: Duration,
    expires: Duration,
}

impl Deadline {
    /// Returns the length of the deadline when it was made.
    pub fn limit(&self) -> Duration {
        self.expires.saturating_sub(self.started)
    }

    /// Returns `true` if the deadline has passed at this time on the same clock.
    pub(crate) fn has_passed(&self, now: Duration) -> bool {
        now >= self.expires
    }

    /// Returns the earlier of two deadlines of the same clock.
    #[must_use]
    pub fn earlier(self, other: Self) -> Self {
        if other.expires < self.expires { other } else { self }
    }
}

/// A deadline that begins when it is first read. A call that ends without waiting then never reads the clock,
/// which would take longer than some calls.
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
    /// The runtime and the timeout, or `None` if the deadline began at once. They are not in the cell, so
    /// that the borrowed runtime can have a shorter lifetime.
    within: Option<(&'a Runtime, Duration)>,
}

impl<'a> LazyDeadline<'a> {
    /// Creates a deadline `timeout` after it is first read.
    #[inline]
    pub const fn within(runtime: &'a Runtime, timeout: Duration) -> Self {
        Self { begun: Cell::new(None), within: Some((runtime, timeout)) }
    }

    /// Returns the deadline, and begins it if it has not begun.
    pub fn deadline(&self) -> Deadline {
        self.begun.get().unwrap_or_else(|| {
            let (runtime, timeout) = self.within.expect("a deadline that has not begun has a timeout");
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
    /// Returns the runtime of the operating system.
    pub fn system() -> Self {
        Self(Arc::new(system::System::new()))
    }

    /// Creates a runtime with another clock and other threads.
    pub fn new(executor: Arc<dyn Executor>) -> Self {
        Self(executor)
    }

    /// Returns the time since this runtime's clock began.
    pub fn now(&self) -> Duration {
        self.0.now()
    }

    /// Returns the deadline `timeout` from now. A deadline of a second or more may begin a few milliseconds
    /// in the past, because a coarse clock is faster to read.
    pub fn deadline(&self, timeout: Duration) -> Deadline {
        let started = if timeout < LONG { self.now() } else { self.0.now_or_shortly_before() };
        Deadline { started, expires: started.saturating_add(timeout) }
    }

    /// Returns the time until the deadline; zero if it has passed.
    pub fn remaining(&self, deadline: Deadline) -> Duration {
        deadline.expires.saturating_sub(self.now())
    }

    /// Returns `true` if the deadline has passed.
    pub fn expired(&self, deadline: Deadline) -> bool {
        deadline.has_passed(self.now())
    }

    /// Returns the time since the deadline was made.
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

    /// Waits until this thread's [`Unparker`] is used or the deadline passes. It may return early, like
    /// [`std::thread::park`], so the caller checks its condition in a loop.
    pub fn park(&self, deadline: Option<Deadline>) {
        self.0.park(deadline.map(|deadline| deadline.expires));
    }

    /// Sleeps for this time, even if the thread is unparked meanwhile.
    pub fn sleep(&self, time: Duration) {
        let deadline = self.deadline(time);
        while !self.expired(deadline) {
            self.park(Some(deadline));
        }
    }

    /// Returns `true` if it takes a thread several microseconds to wake another one. A thread may then
    /// look at intervals instead of waiting to be woken, or do the work of a sleeping thread itself.
    pub fn is_waking_slow(&self) -> bool {
        self.0.is_waking_slow()
    }

    /// Makes timed waits of the calling thread exact to a few microseconds. By default the system may prolong a wait by
    /// about 50 µs, to wake several threads at once.
    pub fn make_waits_exact(&self) {
        self.0.make_waits_exact();
    }

    /// Returns `true` if a simulated runtime unwinds the calling thread by this panic, because the run is over. A thread
    /// that has caught it must resume it.
    pub fn is_unwinding(&self, panic: &(dyn Any + Send)) -> bool {
        self.0.is_unwinding(panic)
    }

    /// Returns a handle that wakes the calling thread.
    pub fn unparker(&self) -> Unparker {
        Unparker(self.0.current())
    }

    /// Lets other threads run.
    pub fn yield_now(&self) {
        self.0.yield_now();
    }

    /// Lets a simulated runtime run other threads between two effects that other threads can see. A real
    /// runtime does nothing.
    pub fn interleave(&self) {
        self.0.interleave();
    }

    /// Lets a simulated runtime run other threads, and moves its clock, between two looks at memory that other threads
    /// change. Otherwise a thread that polls the memory would stop the clock. A real runtime does nothing.
    pub fn let_time_pass(&self) {
        self.0.let_time_pass();
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Runtime({})", self.0.name())
    }
}

/// Deadlines of at least this length may be a few milliseconds inexact.
const LONG: Duration = Duration::from_secs(1);

/// Wakes the thread that created it.
#[derive(Clone)]
pub struct Unparker(Arc<dyn Wake>);

impl Unparker {
    /// Creates an unparker for a thread that does not wait in [`Runtime::park`].
    #[cfg(feature = "tcp")]
    pub(crate) fn of(wake: Arc<dyn Wake>) -> Self {
        Self(wake)
    }

    /// Wakes the thread from [`Runtime::park`], or makes its next call return at once.
    pub fn unpark(&self) {
        self.0.wake();
    }
}

impl fmt::Debug for Unparker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Unparker")
    }
}

/// The implementation behind a [`Runtime`].
pub trait Executor: Send + Sync {
    /// Returns a name for debugging.
    fn name(&self) -> &'static str;
    /// Returns the time since the clock began.
    fn now(&self) -> Duration;
    /// Returns a time like [`now`](Self::now), which may be a few milliseconds old if that is faster to read.
    fn now_or_shortly_before(&self) -> Duration {
        self.now()
    }
    /// Runs `work` on a new thread.
    ///
    /// # Errors
    /// If the system has no thread left.
    fn spawn(&self, name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()>;
    /// Waits until the calling thread is woken or the clock reaches `until`.
    fn park(&self, until: Option<Duration>);
    /// Returns `true` if it takes a thread several microseconds to wake another one.
    fn is_waking_slow(&self) -> bool {
        false
    }
    /// Makes timed waits of the calling thread exact to a few microseconds, if the system can.
    fn make_waits_exact(&self) {}
    /// Returns a handle that wakes the calling thread.
    fn current(&self) -> Arc<dyn Wake>;
    /// Lets other threads run.
    fn yield_now(&self);
    /// Lets a simulated runtime switch threads between two effects that other threads can see. Real threads need
    /// nothing.
    fn interleave(&self) {}
    /// Moves the clock of a simulated runtime a little. Real clocks move by themselves.
    fn let_time_pass(&self) {}
    /// Returns `true` if the runtime unwinds the calling thread by this panic.
    fn is_unwinding(&self, _panic: &(dyn Any + Send)) -> bool {
        false
    }
    /// Reports that the calling thread's work ended in this panic, which the joining thread receives.
    fn panicked(&self, _panic: &(dyn Any + Send)) {}
}

/// The implementation behind an [`Unparker`].
pub trait Wake: Send + Sync {
    /// Wakes the thread, or makes its next wait return at once.
    fn wake(&self);
}

//! The abort state of the job, and the wake-up of waiting threads.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};

use rustix::event::{PollFd, PollFlags};

use crate::bootstrap::session::lock;
use crate::link::socket;
use crate::runtime::{Unparker, Wake};
use crate::{Abort, ChannelId, Deadline, Error, Result, Runtime};

/// The abort record of the job, once there is one. Every wait checks it.
#[derive(Debug)]
pub(crate) struct AbortState {
    reached: AtomicBool,
    /// `true` if the record is final: the coordinator has committed it, or no coordinator can be heard.
    is_final: AtomicBool,
    record: Mutex<Option<Abort>>,
    /// Notified once and never drained.
    waker: Waker,
    /// Threads that wait for more than the end of the job.
    waiting: Mutex<HashMap<ThreadId, Unparker>>,
    /// Wakers of ranks that sleep in shared memory, by channel.
    sleepers: Mutex<HashMap<ChannelId, Unparker>>,
}

impl AbortState {
    pub(crate) fn new() -> Result<Self> {
        let [reached, is_final] = [false; 2].map(AtomicBool::new);
        let (record, waiting) = (Mutex::default(), Mutex::default());
        Ok(Self { reached, is_final, record, waiting, sleepers: Mutex::default(), waker: Waker::new()? })
    }

    /// Adds a waker for a thread that sleeps outside this type. An abort wakes it, until it is removed.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(crate) fn add_sleeper(&self, channel: ChannelId, sleeper: Unparker) {
        lock(&self.sleepers).insert(channel, sleeper);
    }

    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(crate) fn remove_sleeper(&self, channel: ChannelId) {
        lock(&self.sleepers).remove(&channel);
    }

    #[inline]
    pub(crate) fn get(&self) -> Option<Abort> {
        // The flag avoids the lock on every wait of a healthy job.
        if self.is_reached() { lock(&self.record).clone() } else { None }
    }

    #[inline]
    pub(crate) fn is_reached(&self) -> bool {
        self.reached.load(Ordering::Acquire)
    }

    /// Returns `true` if the record will not change any more.
    pub(crate) fn is_final(&self) -> bool {
        self.is_final.load(Ordering::Acquire)
    }

    pub(crate) fn watch(&self) -> PollFd<'_> {
        self.waker.watch()
    }

    /// Proposes this process's abort record. It holds until the coordinator commits a record. Returns `false`
    /// if there is a record already.
    pub(crate) fn propose(&self, abort: &Abort) -> bool {
        let mut record = lock(&self.record);
        let first = record.is_none();
        record.get_or_insert_with(|| abort.clone());
        drop(record);
        self.announce();
        first
    }

    /// Commits the coordinator's record.
    pub(crate) fn commit(&self, abort: Abort) {
        *lock(&self.record) = Some(abort);
        self.is_final.store(true, Ordering::Release);
        self.announce();
    }

    /// Makes this process's record final. The caller knows that the coordinator will not commit another one.
    pub(crate) fn finalize(&self) {
        self.is_final.store(true, Ordering::Release);
        self.wake_waiters();
    }

    /// Waits for the final record. Returns `None` if there is none at the deadline.
    pub(crate) fn wait_committed(&self, runtime: &Runtime, deadline: Deadline) -> Option<Abort> {
        let is_final = || self.is_final().then(|| self.get());
        self.wait_until(runtime, deadline, is_final).flatten()
    }

    /// Waits until `look` returns a value, and calls it after every wake-up. Returns `None` at the deadline.
    pub(crate) fn wait_until<T>(
        &self,
        runtime: &Runtime,
        deadline: Deadline,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let _woken = self.wake(runtime.unparker());
        loop {
            let found = look();
            if found.is_some() || runtime.expired(deadline) {
                return found;
            }
            runtime.park(Some(deadline));
        }
    }

    fn announce(&self) {
        self.reached.store(true, Ordering::Release);
        self.waker.notify();
        lock(&self.sleepers).values().for_each(Unparker::unpark);
        self.wake_waiters();
    }

    /// Wakes threads that wait for more than the end of the job.
    pub(crate) fn wake_waiters(&self) {
        lock(&self.waiting).values().for_each(Unparker::unpark);
    }

    /// Registers this thread to be woken by every change, until the guard is dropped. A check after the
    /// registration cannot miss a change.
    pub(crate) fn wake(&self, sleeper: Unparker) -> WakeGuard<'_> {
        let thread = thread::current().id();
        lock(&self.waiting).insert(thread, sleeper);
        WakeGuard { abort_state: self, thread }
    }
}

/// A registration of a thread for wake-ups. Drop ends it.
#[derive(Debug)]
pub(crate) struct WakeGuard<'a> {
    abort_state: &'a AbortState,
    thread: ThreadId,
}

impl Drop for WakeGuard<'_> {
    fn drop(&mut self) {
        lock(&self.abort_state.waiting).remove(&self.thread);
    }
}

/// A descriptor that becomes readable when it is notified.
#[derive(Debug)]
pub(crate) struct Waker {
    sender: UnixStream,
    receiver: UnixStream,
}

impl Waker {
    pub(crate) fn new() -> Result<Self> {
        let make = || {
            let (sender, receiver) = UnixStream::pair()?;
            sender.set_nonblocking(true)?;
            receiver.set_nonblocking(true)?;
            Ok(Self { sender, receiver })
        };
        make().map_err(|source| Error::Resources { what: "socket pair", source })
    }

    pub(crate) fn notify(&self) {
        // A full buffer means that it is readable already.
        let _ = (&self.sender).write(&[1]);
    }

    pub(crate) fn watch(&self) -> PollFd<'_> {
        socket::watch(&self.receiver, PollFlags::IN)
    }

    /// Returns `true` if it was notified since the last call, and makes it unreadable again.
    pub(crate) fn drain(&self) -> bool {
        matches!((&self.receiver).read(&mut [0; 64]), Ok(1..))
    }
}

impl Wake for Waker {
    fn wake(&self) {
        self.notify();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn waits_that_were_not_woken_leave_nothing_behind() {
        let (runtime, abort_state) = (Runtime::system(), AbortState::new().unwrap());
        for _ in 0..3 {
            assert_eq!(
                abort_state.wait_committed(&runtime, runtime.deadline(Duration::from_millis(1))),
                None
            );
        }
        assert!(lock(&abort_state.waiting).is_empty());
    }
}

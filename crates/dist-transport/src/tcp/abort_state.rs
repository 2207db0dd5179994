//! Why the job ended, and what wakes those who wait when it does.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};

use rustix::event::{PollFd, PollFlags};

use crate::runtime::{Unparker, Wake};
use crate::tcp::session::lock;
use crate::tcp::socket;
use crate::{Abort, ChannelId, Deadline, Error, Result, Runtime};

/// Why the job ended, once it has: watched by every wait.
#[derive(Debug)]
pub(super) struct AbortState {
    reached: AtomicBool,
    /// Whether the record does not change any more: it is the coordinator's word, or there is no coordinator to be heard.
    is_final: AtomicBool,
    record: Mutex<Option<Abort>>,
    /// Rung once and never silenced.
    waker: Waker,
    /// Those who wait for more than the end of the job.
    waiting: Mutex<HashMap<ThreadId, Unparker>>,
    /// Those who sleep in memory that they share, time and again, by channel.
    sleepers: Mutex<HashMap<ChannelId, Unparker>>,
}

impl AbortState {
    pub(super) fn new() -> Result<Self> {
        let [reached, is_final] = [false; 2].map(AtomicBool::new);
        let (record, waiting) = (Mutex::default(), Mutex::default());
        Ok(Self { reached, is_final, record, waiting, sleepers: Mutex::default(), waker: Waker::new()? })
    }

    /// Wakes this one too when the abort_state is reached, until it is dismissed.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(super) fn add_sleeper(&self, channel: ChannelId, sleeper: Unparker) {
        lock(&self.sleepers).insert(channel, sleeper);
    }

    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(super) fn remove_sleeper(&self, channel: ChannelId) {
        lock(&self.sleepers).remove(&channel);
    }

    #[inline]
    pub(super) fn get(&self) -> Option<Abort> {
        // The flag spares the lock on every wait of a healthy job.
        if self.is_reached() { lock(&self.record).clone() } else { None }
    }

    #[inline]
    pub(super) fn is_reached(&self) -> bool {
        self.reached.load(Ordering::Acquire)
    }

    pub(super) fn watch(&self) -> PollFd<'_> {
        self.waker.watch()
    }

    /// This process's view, which holds until the coordinator's word comes. `false` if there is one already.
    pub(super) fn propose(&self, abort: &Abort) -> bool {
        let mut record = lock(&self.record);
        let first = record.is_none();
        record.get_or_insert_with(|| abort.clone());
        drop(record);
        self.announce();
        first
    }

    /// The coordinator's word.
    pub(super) fn commit(&self, abort: Abort) {
        *lock(&self.record) = Some(abort);
        self.is_final.store(true, Ordering::Release);
        self.announce();
    }

    /// This process's view, which nobody will change.
    pub(super) fn finalize(&self) {
        self.is_final.store(true, Ordering::Release);
        self.wake_waiters();
    }

    /// The record that does not change any more; `None` if it is not there by then.
    pub(super) fn wait_committed(&self, runtime: &Runtime, deadline: Deadline) -> Option<Abort> {
        let is_final = || self.is_final.load(Ordering::Acquire).then(|| self.get());
        self.wait_until(runtime, deadline, is_final).flatten()
    }

    /// Waits until there is something to be found, which is looked for whenever something is heard; `None` at the deadline.
    pub(super) fn wait_until<T>(
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

    /// Wakes those who wait for more than the end of the job.
    pub(super) fn wake_waiters(&self) {
        lock(&self.waiting).values().for_each(Unparker::unpark);
    }

    /// Wakes this thread too, by this, whenever there is reason to look again, until what this gives is dropped. Whoever looks
    /// after this misses nothing.
    pub(super) fn wake(&self, sleeper: Unparker) -> WakeGuard<'_> {
        let thread = thread::current().id();
        lock(&self.waiting).insert(thread, sleeper);
        WakeGuard { abort_state: self, thread }
    }
}

/// A thread that is woken whenever there is reason to look again.
#[derive(Debug)]
pub(super) struct WakeGuard<'a> {
    abort_state: &'a AbortState,
    thread: ThreadId,
}

impl Drop for WakeGuard<'_> {
    fn drop(&mut self) {
        lock(&self.abort_state.waiting).remove(&self.thread);
    }
}

/// A descriptor that becomes readable when it is rung.
#[derive(Debug)]
pub(super) struct Waker {
    sender: UnixStream,
    receiver: UnixStream,
}

impl Waker {
    pub(super) fn new() -> Result<Self> {
        let make = || {
            let (sender, receiver) = UnixStream::pair()?;
            sender.set_nonblocking(true)?;
            receiver.set_nonblocking(true)?;
            Ok(Self { sender, receiver })
        };
        make().map_err(|source| Error::Resources { what: "socket pair", source })
    }

    pub(super) fn notify(&self) {
        // A full buffer means that it rings already.
        let _ = (&self.sender).write(&[1]);
    }

    pub(super) fn watch(&self) -> PollFd<'_> {
        socket::watch(&self.receiver, PollFlags::IN)
    }

    /// Whether it was rung since the last time; it is silent afterwards.
    pub(super) fn drain(&self) -> bool {
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
    fn nothing_is_kept_of_waits_that_nobody_woke() {
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

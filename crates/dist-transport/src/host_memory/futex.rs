//! The futex protocol: how a rank sleeps until another one signals, without lost wake-ups.
//!
//! The sleeper stores the rank for which it sleeps, then checks its condition once more. The signaller
//! signals, then checks who sleeps. A full fence between the two steps on both sides makes one of them see
//! the other. Without it, both could read old values and the sleeper would sleep on (Dekker). The sleeper
//! waits on a wake count that it read before it announced its sleep, so a wake-up in between ends the sleep
//! at once.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::thread::futex;

/// A shared word. The trait lets loom test the protocol in every interleaving.
pub(super) trait FutexWord {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
    /// Sets the word to 0 if it was `from`, and returns `true` if it was.
    fn clear_if(&self, from: u32) -> bool;
    fn increment(&self);
    fn fence();
}

impl FutexWord for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }

    fn clear_if(&self, from: u32) -> bool {
        self.compare_exchange(from, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn increment(&self) {
        // Release: a rank that sees the wake-up sees everything before it.
        self.fetch_add(1, Ordering::Release);
    }

    fn fence() {
        fence(Ordering::SeqCst);
    }
}

/// Returns the word that a rank stores while it sleeps for a signal of `rank`: the number of `rank` plus 1.
/// The word is 0 while no rank sleeps.
#[inline]
pub(super) fn awaited_word(rank: usize) -> u32 {
    u32::try_from(rank + 1).expect("ranks travel as 32 bits")
}

/// Announces that a rank is about to sleep for another one, given as its [`awaited_word`]. The rank then checks its
/// condition once more, and sleeps while the wake count is the returned number.
pub(super) fn prepare_sleep<W: FutexWord>(sleeping: &W, wake_count: &W, awaited: u32) -> u32 {
    let before = wake_count.load(Ordering::Acquire);
    sleeping.store(awaited, Ordering::Relaxed);
    W::fence();
    before
}

/// Orders a signal before the checks for sleeping ranks.
pub(super) fn fence_after_signal<W: FutexWord>() {
    W::fence();
}

/// Returns `true` if a rank sleeps for this one.
#[inline]
pub(super) fn sleeps_for<W: FutexWord>(sleeping: &W, signaller: u32) -> bool {
    sleeping.load(Ordering::Relaxed) == signaller
}

/// Returns `true` if a rank slept for this one. The wake count was then raised, and the rank has to be woken.
pub(super) fn claim_wake<W: FutexWord>(sleeping: &W, wake_count: &W, signaller: u32) -> bool {
    let was_asleep = sleeps_for(sleeping, signaller) && sleeping.clear_if(signaller);
    if was_asleep {
        wake_count.increment();
    }
    was_asleep
}

/// Sleeps while the wake count is `before`, for at most `limit`. It may return early, so the caller checks its
/// condition again.
pub(super) fn sleep(wake_count: &AtomicU32, before: u32, limit: Duration) {
    let limit = Timespec::try_from(limit).ok();
    let _ = futex::wait(wake_count, futex::Flags::empty(), before, limit.as_ref());
}

/// Wakes the rank that sleeps on this wake count.
pub(super) fn wake(wake_count: &AtomicU32) {
    // It fails only for addresses that are no memory.
    let _ = futex::wake(wake_count, futex::Flags::empty(), 1);
}

#[cfg(test)]
#[path = "loom_tests.rs"]
mod tests;

//! How a rank sleeps_for until another one signals, and why no wake-up is lost.
//!
//! The sleeper says for whom it sleeps_for, then looks once more at what it waits for; the signaller signals, then looks who
//! sleeps_for. A full fence between the two on both sides makes one of them see the other: without it both could read what
//! was before, and the sleeper would sleep on (Dekker). What it sleeps_for by is a count of rings that it has read before
//! it said that it sleeps_for: a claim_wake in between ends the sleep before it begins.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::thread::futex;

/// A word that is shared, so that the protocol can be tried in every interleaving.
pub(super) trait FutexWord {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
    /// Whether it was `from`, and is zero now.
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
        // Whoever sees the claim_wake sees what was done before it.
        self.fetch_add(1, Ordering::Release);
    }

    fn fence() {
        fence(Ordering::SeqCst);
    }
}

/// Says that a rank is about to sleep for another, numbered from 1. It looks at what it waits for once more, and then
/// sleeps_for for as long as this number stands.
pub(super) fn prepare_sleep<W: FutexWord>(sleeping: &W, wake_count: &W, awaited: u32) -> u32 {
    let before = wake_count.load(Ordering::Acquire);
    sleeping.store(awaited, Ordering::Relaxed);
    W::fence();
    before
}

/// Between a signal and the looks at who sleeps_for.
pub(super) fn fence_after_signal<W: FutexWord>() {
    W::fence();
}

/// Whether a rank sleeps_for for this one, and so is to be wake_count at.
#[inline]
pub(super) fn sleeps_for<W: FutexWord>(sleeping: &W, signaller: u32) -> bool {
    sleeping.load(Ordering::Relaxed) == signaller
}

/// Whether a rank slept for this one, and so has been wake_count at and is to be woken.
pub(super) fn claim_wake<W: FutexWord>(sleeping: &W, wake_count: &W, signaller: u32) -> bool {
    let sleeps_for = sleeps_for(sleeping, signaller) && sleeping.clear_if(signaller);
    if sleeps_for {
        wake_count.increment();
    }
    sleeps_for
}

/// Sleeps while the word is what it was, for so long at most, or less: whoever sleeps_for looks again.
pub(super) fn sleep(wake_count: &AtomicU32, before: u32, limit: Duration) {
    let limit = Timespec::try_from(limit).ok();
    let _ = futex::wait(wake_count, futex::Flags::empty(), before, limit.as_ref());
}

/// Wakes the one that sleeps_for by this word.
pub(super) fn wake(wake_count: &AtomicU32) {
    // It fails for words that are no memory only.
    let _ = futex::wake(wake_count, futex::Flags::empty(), 1);
}

#[cfg(test)]
#[path = "loom_tests.rs"]
mod tests;

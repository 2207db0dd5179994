//! How a rank sleeps until another one posts, and why no wake-up is lost.
//!
//! The sleeper says for whom it sleeps, then looks once more at what it waits for; the poster posts, then looks who
//! sleeps. A full fence between the two on both sides makes one of them see the other: without it both could read what
//! was before, and the sleeper would sleep on (Dekker). What it sleeps by is a count of rings that it has read before
//! it said that it sleeps: a ring in between ends the sleep before it begins.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::thread::futex;

/// A word that is shared, so that the protocol can be tried in every interleaving.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
    /// Whether it was `from`, and is zero now.
    fn clear_if(&self, from: u32) -> bool;
    fn increment(&self);
    fn fence();
}

impl Word for AtomicU32 {
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
        // Whoever sees the ring sees what was done before it.
        self.fetch_add(1, Ordering::Release);
    }

    fn fence() {
        fence(Ordering::SeqCst);
    }
}

/// Says that a rank is about to sleep for another, numbered from 1. It looks at what it waits for once more, and then
/// sleeps for as long as this number stands.
pub(super) fn lie_down<W: Word>(sleeping: &W, rung: &W, awaited: u32) -> u32 {
    let before = rung.load(Ordering::Acquire);
    sleeping.store(awaited, Ordering::Relaxed);
    W::fence();
    before
}

/// Between a post and the looks at who sleeps.
pub(super) fn after_post<W: Word>() {
    W::fence();
}

/// Whether a rank sleeps for this one, and so is to be rung at.
#[inline]
pub(super) fn sleeps<W: Word>(sleeping: &W, poster: u32) -> bool {
    sleeping.load(Ordering::Relaxed) == poster
}

/// Whether a rank slept for this one, and so has been rung at and is to be woken.
pub(super) fn ring<W: Word>(sleeping: &W, rung: &W, poster: u32) -> bool {
    let sleeps = sleeps(sleeping, poster) && sleeping.clear_if(poster);
    if sleeps {
        rung.increment();
    }
    sleeps
}

/// Sleeps while the word is what it was, for so long at most, or less: whoever sleeps looks again.
pub(super) fn sleep(rung: &AtomicU32, before: u32, limit: Duration) {
    let limit = Timespec::try_from(limit).ok();
    let _ = futex::wait(rung, futex::Flags::empty(), before, limit.as_ref());
}

/// Wakes the one that sleeps by this word.
pub(super) fn wake(rung: &AtomicU32) {
    // It fails for words that are no memory only.
    let _ = futex::wake(rung, futex::Flags::empty(), 1);
}

#[cfg(test)]
#[path = "loom_tests.rs"]
mod tests;

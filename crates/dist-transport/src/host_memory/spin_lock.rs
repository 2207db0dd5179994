//! A lock in shared memory for sections of about a microsecond.
//!
//! A process may end while it holds the lock. So a wait for it ends too, and the caller goes on without it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::Runtime;

/// Polls before the first yield.
const SPINS: usize = 100;
/// The time after which the lock counts as lost. On an oversubscribed host its holder may have no core for a while.
const LOST_AFTER: Duration = Duration::from_millis(100);

/// A word that is locked. The trait lets loom test the lock.
pub(super) trait LockWord {
    /// Changes the word from 0 to 1, and returns `true` if it was 0.
    fn try_acquire(&self) -> bool;
    fn release(&self);
}

impl LockWord for AtomicU32 {
    fn try_acquire(&self) -> bool {
        self.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    fn release(&self) {
        self.store(0, Ordering::Release);
    }
}

/// Locks the word. Returns `false` if another process keeps it locked. With `may_wait` this takes a while.
pub(super) fn acquire(word: &AtomicU32, may_wait: bool) -> bool {
    let is_locked = (0..SPINS).any(|round| {
        if round > 0 {
            std::hint::spin_loop();
        }
        word.try_acquire()
    });
    is_locked || may_wait && acquire_in_time(word)
}

#[cold]
fn acquire_in_time(word: &AtomicU32) -> bool {
    let runtime = Runtime::system();
    let deadline = runtime.deadline(LOST_AFTER);
    while !word.try_acquire() {
        if runtime.expired(deadline) {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

pub(super) fn release(word: &AtomicU32) {
    word.release();
}

#[cfg(test)]
mod tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic;
    use loom::thread;

    use super::*;

    impl LockWord for atomic::AtomicU32 {
        fn try_acquire(&self) -> bool {
            self.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
        }

        fn release(&self) {
            self.store(0, Ordering::Release);
        }
    }

    /// Writes under the lock. Loom reports a race if the lock does not exclude the other thread.
    fn write(shared: &(atomic::AtomicU32, UnsafeCell<u32>)) {
        while !shared.0.try_acquire() {
            thread::yield_now();
        }
        shared.1.with_mut(drop);
        shared.0.release();
    }

    #[test]
    fn a_section_sees_what_earlier_sections_have_written() {
        loom::model(|| {
            let shared = Arc::new((atomic::AtomicU32::new(0), UnsafeCell::new(0)));
            let theirs = shared.clone();
            let other = thread::spawn(move || write(&theirs));
            write(&shared);
            other.join().unwrap();
            shared.1.with(drop);
        });
    }

    #[test]
    fn a_lock_that_is_never_released_ends_the_wait() {
        let word = AtomicU32::new(0);
        assert!(acquire(&word, true));
        assert!(!acquire(&word, true) && !acquire(&word, false));
        release(&word);
        assert!(acquire(&word, false));
    }
}

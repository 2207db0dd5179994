//! The count of started operations, by which a transport knows whether a rank that waits can still act.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of operations that a communicator has started on this rank and that have not ended. Clones are the same count.
///
/// Other threads than the caller's execute started operations. While the count is 0, a call that waits is the only open
/// operation of this rank in the communicator. The rank can then send nothing on any channel of the communicator.
#[derive(Clone, Debug, Default)]
pub struct StartedCount(Arc<AtomicUsize>);

impl StartedCount {
    /// Counts an operation that is about to be started.
    pub fn record_start(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the end of a started operation.
    pub fn record_end(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    /// Returns `true` if all started operations have ended.
    pub fn is_zero(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

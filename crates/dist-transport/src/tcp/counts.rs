//! How many messages a rank has exchanged with each rank of its group, so that nothing is taken for missing that is on its way.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of one channel, written by the thread that moves its messages. A connection counts as a message of the side that
/// opens it.
#[derive(Debug)]
pub(super) struct Counts(Vec<Pair>);

/// What was exchanged with one rank.
#[derive(Debug, Default)]
struct Pair {
    /// Messages that this rank has begun to send.
    sent: AtomicU64,
    /// Messages that this rank has received.
    received: AtomicU64,
}

impl Counts {
    /// Nothing, for a group of so many ranks.
    pub(super) fn new(ranks: usize) -> Self {
        Self((0..ranks).map(|_| Pair::default()).collect())
    }

    #[inline]
    pub(super) fn note_sent(&self, peer: usize) {
        increment(&self.0[peer].sent);
    }

    #[inline]
    pub(super) fn note_received(&self, peer: usize) {
        increment(&self.0[peer].received);
    }

    pub(super) fn sent(&self, peer: usize) -> u64 {
        self.0[peer].sent.load(Ordering::Relaxed)
    }

    pub(super) fn received(&self, peer: usize) -> u64 {
        self.0[peer].received.load(Ordering::Relaxed)
    }
}

/// Only one thread writes.
#[inline]
fn increment(count: &AtomicU64) {
    count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

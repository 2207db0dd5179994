//! Counts the messages that a rank has exchanged with each rank of its group, so that a message in flight is
//! not taken for missing.

use std::sync::atomic::{AtomicU64, Ordering};

/// The counts of one channel, written by the thread that moves its messages. A connection counts as a message
/// of the side that opens it.
#[derive(Debug)]
pub(crate) struct MessageCounts(Vec<PeerCounts>);

/// The counts of one peer.
#[derive(Debug, Default)]
struct PeerCounts {
    /// Messages that this rank has begun to send.
    sent: AtomicU64,
    /// Messages that this rank has received.
    received: AtomicU64,
}

impl MessageCounts {
    /// Creates zero counts for a group of this many ranks.
    pub(crate) fn new(ranks: usize) -> Self {
        Self((0..ranks).map(|_| PeerCounts::default()).collect())
    }

    /// Returns the number of ranks of the group.
    pub(crate) fn ranks(&self) -> usize {
        self.0.len()
    }

    #[inline]
    pub(crate) fn record_sent(&self, peer: usize) {
        increment(&self.0[peer].sent);
    }

    #[inline]
    pub(crate) fn record_received(&self, peer: usize) {
        increment(&self.0[peer].received);
    }

    pub(crate) fn sent(&self, peer: usize) -> u64 {
        self.0[peer].sent.load(Ordering::Relaxed)
    }

    pub(crate) fn received(&self, peer: usize) -> u64 {
        self.0[peer].received.load(Ordering::Relaxed)
    }
}

/// Adds to a counter. Only one thread writes it, so no atomic addition is needed.
#[inline]
fn increment(count: &AtomicU64) {
    count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

//! Counts the messages that a rank has exchanged with each rank of its group, and its signals, so that a message or signal
//! in flight is not taken for missing.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::StartedCount;

/// The counts of one channel, written by the thread that moves its messages. A connection counts as a message
/// of the side that opens it.
#[derive(Debug)]
pub(crate) struct MessageCounts {
    peers: Vec<PeerCounts>,
    /// Signals that this rank has given in the group's shared memory.
    signals: AtomicU64,
    /// The started operations of the communicator that the channel belongs to, if they are counted.
    started: OnceLock<StartedCount>,
}

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
        let peers = (0..ranks).map(|_| PeerCounts::default()).collect();
        Self { peers, signals: AtomicU64::new(0), started: OnceLock::new() }
    }

    /// Returns the number of ranks of the group.
    pub(crate) fn ranks(&self) -> usize {
        self.peers.len()
    }

    #[inline]
    pub(crate) fn record_sent(&self, peer: usize) {
        increment(&self.peers[peer].sent);
    }

    #[inline]
    pub(crate) fn record_received(&self, peer: usize) {
        increment(&self.peers[peer].received);
    }

    pub(crate) fn sent(&self, peer: usize) -> u64 {
        self.peers[peer].sent.load(Ordering::Relaxed)
    }

    pub(crate) fn received(&self, peer: usize) -> u64 {
        self.peers[peer].received.load(Ordering::Relaxed)
    }

    /// Stores the number of signals that this rank has given.
    #[inline]
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(crate) fn record_signals(&self, signals: u64) {
        self.signals.store(signals, Ordering::Relaxed);
    }

    pub(crate) fn signals(&self) -> u64 {
        self.signals.load(Ordering::Relaxed)
    }

    /// Sets the count of the started operations of the communicator. A second count is ignored.
    pub(crate) fn set_started(&self, started: &StartedCount) {
        let _ = self.started.set(started.clone());
    }

    /// Returns `true` if a call that waits is the only open operation of this rank in its communicator.
    pub(crate) fn is_only_call(&self) -> bool {
        self.started.get().is_some_and(StartedCount::is_zero)
    }
}

/// Adds to a counter. Only one thread writes it, so no atomic addition is needed.
#[inline]
fn increment(count: &AtomicU64) {
    count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

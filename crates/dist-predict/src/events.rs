//! A queue of events in the order of time.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// A queue of future events. Events of the same time are taken in the order in which they were added.
#[derive(Debug)]
pub(crate) struct EventQueue<W> {
    heap: BinaryHeap<Reverse<ScheduledEvent<W>>>,
    pushed: u64,
}

#[derive(Debug)]
struct ScheduledEvent<W> {
    time: f64,
    number: u64,
    what: W,
}

impl<W> EventQueue<W> {
    pub(crate) const fn new() -> Self {
        Self { heap: BinaryHeap::new(), pushed: 0 }
    }

    pub(crate) fn push(&mut self, time: f64, what: W) {
        self.pushed += 1;
        self.heap.push(Reverse(ScheduledEvent { time, number: self.pushed, what }));
    }

    /// Returns the next event and its time.
    pub(crate) fn next(&mut self) -> Option<(f64, W)> {
        self.heap.pop().map(|Reverse(event)| (event.time, event.what))
    }
}

impl<W> PartialEq for ScheduledEvent<W> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<W> Eq for ScheduledEvent<W> {}

impl<W> PartialOrd for ScheduledEvent<W> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<W> Ord for ScheduledEvent<W> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.time.total_cmp(&other.time).then(self.number.cmp(&other.number))
    }
}

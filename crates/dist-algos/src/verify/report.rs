//! The counts of the verifier.

use dist_transport::Traffic;

use crate::{Chunks, Cost, Messages, Order, Partition, Source};

/// The exact counts of correct schedules.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The length of the longest chain of messages, if every message takes the same time.
    pub rounds: usize,
    /// The length of the longest chain in chunks, if the time of a message is its number of chunks.
    pub path: usize,
    /// The longest chain of messages in which each must arrive before the next can leave, and their chunks.
    pub depth: Messages,
    /// The maximum number of steps of a rank, including combinations.
    pub steps_max: usize,
    /// The maximum number of slots of a rank.
    pub slots_max: usize,
    /// The maximum number of peers of a rank, which is the number of connections that it needs.
    pub peers_max: usize,
    /// The strictest class of the reduction order; `None` if nothing is reduced.
    pub order: Option<Order>,
    /// The counts of each rank.
    pub(super) ranks: Vec<RankReport>,
}

/// The counts of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RankReport {
    pub(super) sent: Vec<(Source, Chunks)>,
    pub(super) received: Vec<Chunks>,
    pub(super) peers: Vec<usize>,
    pub(super) steps: usize,
    pub(super) slots: usize,
    pub(super) reductions: usize,
}

impl Report {
    /// Returns the number of chunks that a rank sends.
    fn chunks_sent(&self, rank: usize) -> usize {
        self.ranks[rank].sent.iter().map(|(_, chunks)| chunks.len()).sum()
    }

    /// Returns the maximum number of chunks that a rank sends.
    pub fn chunks_sent_max(&self) -> usize {
        (0..self.ranks.len()).map(|rank| self.chunks_sent(rank)).max().unwrap_or(0)
    }

    /// Returns the number of messages of all ranks together.
    pub fn messages(&self) -> usize {
        self.ranks.iter().map(|rank| rank.sent.len()).sum()
    }

    /// Returns how many times a rank reduces a chunk.
    pub fn reductions(&self, rank: usize) -> usize {
        self.ranks[rank].reductions
    }

    /// Returns the cost.
    pub(super) fn cost(&self) -> Cost {
        let chunks = (0..self.ranks.len()).map(|rank| self.chunks_sent(rank)).sum();
        let reductions = self.ranks.iter().map(|rank| rank.reductions);
        Cost {
            rounds: self.rounds,
            path: self.path,
            sent_max: self.chunks_sent_max(),
            reduced_max: reductions.clone().max().unwrap_or(0),
            all: Messages::new(self.messages(), chunks),
            depth: self.depth,
            reduced: reductions.sum(),
        }
    }

    /// Returns the traffic that a transport counts on a rank with these partitions of its buffer and its input.
    pub fn traffic(&self, rank: usize, partition: &Partition<'_>, input: Option<&Partition<'_>>) -> Traffic {
        let RankReport { sent, received, .. } = &self.ranks[rank];
        let bytes = |partition: Option<&Partition<'_>>, chunks| {
            partition.map_or(0, |partition| partition.bytes_of(chunks) as u64)
        };
        let sends = sent.iter().map(|&(of, chunks)| match of {
            Source::Buffer => bytes(Some(partition), chunks),
            Source::Input => bytes(input, chunks),
        });
        Traffic {
            messages_sent: sent.len() as u64,
            bytes_sent: sends.sum(),
            messages_received: received.len() as u64,
            bytes_received: received.iter().map(|&chunks| bytes(Some(partition), chunks)).sum(),
        }
    }
}

//! What the verifier counted.

use dist_transport::Traffic;

use crate::{Chunks, Cost, Messages, Order, Partition, Source};

/// What correct schedules do, counted exactly.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Messages that follow one another when every message takes as long as every other.
    pub rounds: usize,
    /// Chunks that follow one another when a message takes as long as it has chunks.
    pub path: usize,
    /// Messages that follow one another because each had to arrive before the next could leave, and chunks of those.
    pub depth: Messages,
    /// Steps of the rank that has most of them, combinations included.
    pub steps_max: usize,
    /// Slots of the rank that uses most of them.
    pub slots_max: usize,
    /// Other ranks that the busiest rank talks to: how many connections it needs.
    pub peers_max: usize,
    /// The strictest class of orders that the reduction is in; none if nothing is reduced.
    pub order: Option<Order>,
    /// Of each rank.
    pub(super) ranks: Vec<RankReport>,
}

/// What one rank did.
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
    /// How many chunks a rank sends.
    fn chunks_sent(&self, rank: usize) -> usize {
        self.ranks[rank].sent.iter().map(|(_, chunks)| chunks.len()).sum()
    }

    /// How many chunks the rank sends that sends most.
    pub fn chunks_sent_max(&self) -> usize {
        (0..self.ranks.len()).map(|rank| self.chunks_sent(rank)).max().unwrap_or(0)
    }

    /// How many messages all ranks send together.
    pub fn messages(&self) -> usize {
        self.ranks.iter().map(|rank| rank.sent.len()).sum()
    }

    /// How often a rank reduces a chunk.
    pub fn reductions(&self, rank: usize) -> usize {
        self.ranks[rank].reductions
    }

    /// What it costs.
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

    /// What a transport counts on a rank if its buffer is cut like this, and its input like that.
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

//! The number of bytes that the steps of a direct schedule move.

use dist_transport::{Rank, Traffic};

use super::{DirectPlan, DirectStep, PartSet, PeerSet, SumTarget, cells};
use crate::{Partition, Source};

/// The sizes of the cells of a schedule.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartBytes<'a> {
    plan: DirectPlan,
    buffer: Partition<'a>,
    input: Partition<'a>,
}

/// The bytes that one step moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MovedBytes {
    /// Bytes written into a flag line, an eager buffer or slots.
    pub(super) published: usize,
    /// Bytes read from one contribution, and the number of contributions.
    pub(super) read: (usize, usize),
    /// Bytes written back to one contribution, and the number of contributions.
    pub(super) written: (usize, usize),
    /// Bytes copied from the rank's input into its buffer.
    pub(super) kept: usize,
}

impl<'a> PartBytes<'a> {
    pub(super) fn new(plan: DirectPlan, buffer: Partition<'a>, input: Option<Partition<'a>>) -> Self {
        Self { plan, buffer, input: input.unwrap_or(buffer) }
    }

    pub(super) const fn plan(&self) -> &DirectPlan {
        &self.plan
    }

    pub(super) fn moved(&self, step: DirectStep) -> MovedBytes {
        let others = self.plan.world_size() - 1;
        match step {
            DirectStep::Signal | DirectStep::Wait { .. } => MovedBytes::default(),
            DirectStep::Publish { parts, block, of, .. } => {
                MovedBytes { published: self.published(parts, block, of), ..MovedBytes::default() }
            }
            DirectStep::Take { block, into, .. } => {
                MovedBytes { read: (self.bytes(&self.buffer, into, block), 1), ..MovedBytes::default() }
            }
            DirectStep::Keep { part, block } => {
                MovedBytes { kept: self.bytes(&self.buffer, part, block), ..MovedBytes::default() }
            }
            DirectStep::Reduce { part, block, into, .. } => {
                let bytes = self.bytes(&self.buffer, part, block);
                let read = MovedBytes { read: (bytes, others), ..MovedBytes::default() };
                match into {
                    SumTarget::Buffer => read,
                    SumTarget::Back(PeerSet::One(_)) => MovedBytes { written: (bytes, 1), ..read },
                    SumTarget::Back(PeerSet::Others) => MovedBytes { written: (bytes, others), ..read },
                }
            }
        }
    }

    fn published(&self, parts: PartSet, block: usize, of: Source) -> usize {
        let partition = match of {
            Source::Buffer => &self.buffer,
            Source::Input => &self.input,
        };
        parts.indices(self.plan.parts()).map(|part| self.bytes(partition, part, block)).sum()
    }

    fn bytes(&self, partition: &Partition<'_>, part: usize, block: usize) -> usize {
        cells::range(partition, self.plan.blocks(), (part, block)).len()
    }
}

impl DirectPlan {
    /// Returns the traffic that a transport counts on a rank with these partitions of its buffer and its input.
    pub fn traffic(self, rank: Rank, partition: Partition<'_>, input: Option<Partition<'_>>) -> Traffic {
        let sizes = PartBytes::new(self, partition, input);
        let counted = |moved: MovedBytes| {
            let (read, written) = (moved.read.0 * moved.read.1, moved.written.0 * moved.written.1);
            let sent = moved.published + written;
            Traffic { bytes_sent: sent as u64, bytes_received: read as u64, ..Traffic::default() }
        };
        self.schedule(rank)
            .map(|step| counted(sizes.moved(step)))
            .fold(Traffic::default(), |sum, one| sum + one)
    }
}

//! One rank's view of a direct call, from which the record of an algorithm computes the rank's steps.

use dist_transport::Rank;
use dist_transport::shm_group::MemoryArea;

use super::collective::{BlockUse, Division};
use super::{DirectCollective, DirectStep, PartSet, PeerSet, SumTarget};

/// One rank's view of a direct call: the operation, the division of the memory, and the rank.
#[derive(Clone, Copy, Debug)]
pub struct StepContext {
    pub(super) collective: DirectCollective,
    pub(super) division: Division,
    pub(super) blocks: usize,
    pub(super) published: PublishPlace,
    pub(super) rank: Rank,
}

/// The place where data for other ranks is published, if it is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum PublishPlace {
    FlagLine,
    EagerBuffer,
    Slot,
}

/// The step at a position in a round.
#[derive(Clone, Copy, Debug)]
pub enum PhaseStep {
    /// A step.
    DirectStep(DirectStep),
    /// There is no step for this rank at this position; the next position may have one.
    Nothing,
    /// There are no more steps in this round.
    EndOfRound,
}

impl StepContext {
    /// Returns the operation.
    pub const fn collective(&self) -> DirectCollective {
        self.collective
    }

    /// Returns the number of blocks of every part.
    pub const fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns the rank whose steps are computed.
    pub const fn rank(&self) -> Rank {
        self.rank
    }

    /// Returns the parts that this rank publishes of each block.
    pub(super) fn publishes(&self) -> Option<PartSet> {
        self.collective.publishes(self.division, self.rank.index())
    }

    /// Returns the step that publishes a block of these parts.
    pub(super) fn publish(&self, parts: PartSet, block: usize) -> DirectStep {
        DirectStep::Publish { parts, block, of: self.collective.source(), place: self.published.area(block) }
    }

    /// Returns the step that copies this rank's own part of a block from its input. At this point the input is in the
    /// cache and no rank waits for this one.
    pub(super) fn keep(&self, block: usize) -> PhaseStep {
        PhaseStep::of(self.collective.keeps(self.rank.index()).map(|part| DirectStep::Keep { part, block }))
    }

    /// Returns the step at an index among those that use one block of the other ranks. The block can be used after
    /// this many signals.
    pub(super) fn use_block(&self, index: usize, block: usize, of: MemoryArea, signals: u32) -> PhaseStep {
        let rank = self.rank.index();
        let step = match (self.collective.uses(rank), index) {
            (BlockUse::Wait | BlockUse::Reduce(_), 0) => {
                Some(DirectStep::Wait { ranks: PeerSet::Others, signals })
            }
            (BlockUse::Reduce(part), 1) => {
                Some(DirectStep::Reduce { part, block, of, into: SumTarget::Buffer })
            }
            (BlockUse::Take(peers), _) => self.peer(peers, index / 2).map(|from| {
                let (part, into) = self.collective.taken(rank, from);
                match index % 2 {
                    0 => DirectStep::Wait { ranks: PeerSet::One(from), signals },
                    _ => DirectStep::Take { from, part, block, of, into },
                }
            }),
            _ => None,
        };
        step.map_or(PhaseStep::EndOfRound, PhaseStep::DirectStep)
    }

    /// Returns the step at an index among those that end a call: the last signal, then a wait until no other rank
    /// accesses this rank's memory any more.
    pub(super) fn leave(&self, index: usize, signals: u32) -> PhaseStep {
        match index {
            0 => PhaseStep::DirectStep(DirectStep::Signal),
            1 => {
                let users = self.collective.users(self.rank.index());
                PhaseStep::of(users.map(|ranks| DirectStep::Wait { ranks, signals }))
            }
            _ => PhaseStep::EndOfRound,
        }
    }

    /// Returns the ranks whose sums this rank copies.
    pub(super) fn takers(&self) -> Option<PeerSet> {
        let takes = self.collective.root().is_none_or(|root| root == self.rank.index());
        takes.then_some(PeerSet::Others)
    }

    /// Returns the rank at an index in a set, counted upwards from this rank.
    pub(super) fn peer(&self, peers: PeerSet, index: usize) -> Option<usize> {
        match peers {
            PeerSet::One(peer) => (index == 0).then_some(peer),
            PeerSet::Others => {
                (index + 1 < self.rank.world_size()).then(|| self.rank.plus(index + 1).index())
            }
        }
    }
}

impl PublishPlace {
    /// Returns the memory area where a block is published.
    #[inline]
    pub(super) const fn area(self, block: usize) -> MemoryArea {
        match self {
            Self::FlagLine => MemoryArea::FlagLine,
            Self::EagerBuffer => MemoryArea::EagerBuffer,
            Self::Slot => MemoryArea::Slot(block % SLOTS),
        }
    }
}

impl PhaseStep {
    /// Returns the step, if there is one.
    pub fn of(step: Option<DirectStep>) -> Self {
        step.map_or(Self::Nothing, Self::DirectStep)
    }
}

/// The number of slots in a pipeline: one for the block that is published, one for each block that others may still
/// use, and one more. Without the last one a rank would wait for others that wait for this rank.
pub(super) const SLOTS: usize = 4;

/// Returns a number of signals, as steps encode it.
pub(super) fn signals(count: usize) -> u32 {
    u32::try_from(count).expect("memory has fewer than 2^32 blocks")
}

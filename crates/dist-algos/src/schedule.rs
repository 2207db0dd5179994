//! The iterator over one rank's steps.

use dist_transport::Rank;

use crate::binary_blocks::BlockAssignment;
use crate::{
    Step, all_to_all, barrier, binomial, chain, circulant, halving_doubling, knomial, linear, neighbour,
    pairwise, recursive_doubling, ring, scan,
};

/// All steps of one rank, computed one at a time, in some tens of nanoseconds each.
///
/// [`Iterator::chain`] runs one schedule after another.
#[derive(Clone, Debug)]
pub struct Schedule {
    rank: Rank,
    next: usize,
    end: usize,
    kind: Kind,
}

/// The kinds of schedules; the functions of the algorithms' modules describe them.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Nothing,
    RingReduceScatter,
    RingAllGather,
    DoublingReduce,
    DoublingRelease,
    DoublingAllGather,
    HalvingReduceScatter,
    HalvingReduce,
    HalvingGather,
    CirculantReduceScatter,
    CirculantAllGather,
    CirculantScatter { root: usize },
    CirculantGather { root: usize },
    BruckAllGather,
    NeighbourAllGather,
    Pairwise(pairwise::Merge),
    BinomialReduce { root: usize },
    BinomialBroadcast { root: usize },
    KnomialBroadcast { root: usize },
    ChainBroadcast { root: usize },
    BinomialGather { root: usize },
    BinomialScatter { root: usize },
    LinearGather { root: usize },
    LinearScatter { root: usize },
    PairwiseAllToAll,
    WindowedAllToAll,
    BruckAllToAll,
    DoublingScan { extent: scan::Extent, rounds: usize },
    RingBarrier,
    DisseminationBarrier,
}

impl Schedule {
    /// Returns the empty schedule.
    pub const fn nothing(rank: Rank) -> Self {
        Self::new(rank, 0, Kind::Nothing)
    }

    /// Returns the schedule of the steps with indices below `end`.
    pub(crate) const fn new(rank: Rank, end: usize, kind: Kind) -> Self {
        Self { rank, next: 0, end, kind }
    }

    /// Returns the step with this index, if this rank takes part in it.
    fn step(&mut self, index: usize) -> Option<Step> {
        let rank = self.rank;
        match &mut self.kind {
            Kind::Nothing => None,
            Kind::RingReduceScatter => Some(ring::reduce_scatter_step(rank, index)),
            Kind::RingAllGather => Some(ring::all_gather_step(rank, index)),
            Kind::DoublingReduce => recursive_doubling::reduce_step(rank, index),
            Kind::DoublingRelease => recursive_doubling::release_step(rank),
            Kind::DoublingAllGather => Some(recursive_doubling::all_gather_step(rank, index)),
            Kind::HalvingReduceScatter => halving_doubling::reduce_scatter_step(rank, index),
            Kind::HalvingReduce => halving_doubling::reduce_step(rank, BlockAssignment::Runs, index),
            Kind::HalvingGather => halving_doubling::gather_step(rank, index),
            Kind::CirculantReduceScatter => Some(circulant::reduce_scatter_step(rank, index)),
            Kind::CirculantAllGather => Some(circulant::all_gather_step(rank, index)),
            Kind::CirculantScatter { root } => circulant::scatter_step(rank, *root, index),
            Kind::CirculantGather { root } => circulant::gather_step(rank, *root, index),
            Kind::BruckAllGather => Some(circulant::bruck_step(rank, index)),
            Kind::NeighbourAllGather => Some(neighbour::all_gather_step(rank, index)),
            Kind::Pairwise(merge) => Some(merge.receive(rank, index + 1)),
            Kind::BinomialReduce { root } => binomial::reduce_step(rank, *root, index),
            Kind::BinomialBroadcast { root } => binomial::broadcast_step(rank, *root, index),
            Kind::KnomialBroadcast { root } => knomial::broadcast_step(rank, *root, index),
            Kind::ChainBroadcast { root } => chain::broadcast_step(rank, *root, index),
            Kind::BinomialGather { root } => binomial::gather_step(rank, *root, index),
            Kind::BinomialScatter { root } => binomial::scatter_step(rank, *root, index),
            Kind::LinearGather { root } => linear::gather_step(rank, *root, index),
            Kind::LinearScatter { root } => linear::scatter_step(rank, *root, index),
            Kind::PairwiseAllToAll => Some(all_to_all::pairwise_step(rank, index)),
            Kind::WindowedAllToAll => Some(all_to_all::windowed_step(rank, index)),
            Kind::BruckAllToAll => Some(all_to_all::bruck_step(rank, index)),
            Kind::DoublingScan { extent, rounds } => scan::step(rank, *extent, *rounds, index),
            Kind::RingBarrier => Some(barrier::ring_step(rank, index)),
            Kind::DisseminationBarrier => Some(barrier::dissemination_step(rank, index)),
        }
    }
}

impl Iterator for Schedule {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        if let Kind::Pairwise(merge) = &mut self.kind
            && let Some(step) = merge.combine(self.rank)
        {
            return Some(step);
        }
        while self.next < self.end {
            let index = self.next;
            self.next += 1;
            if let Some(step) = self.step(index) {
                return Some(step);
            }
        }
        None
    }
}

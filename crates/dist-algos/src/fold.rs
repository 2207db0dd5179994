//! Folds a world of any size to a power of two.
//!
//! The first ranks form as many pairs as needed. The even member of a pair gives its data to the odd one, is
//! inactive, and gets the result at the end. Thakur, Rabenseifner, Gropp, "Optimization of collective communication
//! operations in MPICH", 2005.

use dist_transport::Rank;

use crate::{Chunks, Order, ReceiveHalf, Step};

/// A world folded to its core, the largest power of two in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fold {
    /// The number of ranks of the core.
    pub(crate) core: usize,
    /// The number of inactive ranks.
    pub(crate) spare: usize,
}

impl Fold {
    /// Folds a world. A world of no ranks is folded like one of a single rank.
    pub(crate) const fn new(world_size: usize) -> Self {
        let world_size = if world_size == 0 { 1 } else { world_size };
        let core = 1 << world_size.ilog2();
        Self { core, spare: world_size - core }
    }

    /// Returns log₂ of the core.
    pub(crate) const fn rounds(self) -> usize {
        self.core.ilog2() as usize
    }

    /// Returns the position of a rank in the core; `None` if it is inactive.
    pub(crate) const fn in_core(self, rank: Rank) -> Option<usize> {
        let index = rank.index();
        if index >= 2 * self.spare {
            Some(index - self.spare)
        } else if index % 2 == 1 {
            Some(index / 2)
        } else {
            None
        }
    }

    /// Returns the rank at a position of the core.
    pub(crate) const fn rank_at(self, place: usize) -> usize {
        if place < self.spare { 2 * place + 1 } else { place + self.spare }
    }

    /// Returns the step before the core begins.
    pub(crate) fn fold_in(self, rank: Rank, chunks: Chunks) -> Option<Step> {
        let index = rank.index();
        match self.in_core(rank) {
            None => Some(Step::send(index + 1, chunks)),
            Some(_) if index < 2 * self.spare => Some(Step::receive(ReceiveHalf::reduce(index - 1, chunks))),
            Some(_) => None,
        }
    }

    /// Returns the step after the core is done.
    pub(crate) fn release(self, rank: Rank, chunks: Chunks) -> Option<Step> {
        let index = rank.index();
        match self.in_core(rank) {
            None => Some(Step::receive(ReceiveHalf::replace(index + 1, chunks))),
            Some(_) if index < 2 * self.spare => Some(Step::send(index - 1, chunks)),
            Some(_) => None,
        }
    }

    /// Returns the order. If the world size is 2^a − 2^b, pairs are whole subtrees of T(p); otherwise they are not.
    pub(crate) const fn order(self) -> Order {
        let world_size = self.core + self.spare;
        let lowest_bit = 1 << world_size.trailing_zeros();
        if (world_size + lowest_bit).is_power_of_two() || world_size.is_power_of_two() {
            Order::Canonical
        } else {
            Order::Uniform
        }
    }
}

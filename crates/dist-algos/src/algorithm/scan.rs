//! Algorithms of scan.

use dist_transport::Rank;

use super::named;
use crate::scan::{self, Extent};
use crate::{Cost, Order, Schedule};

/// An algorithm of scan. Rank `r` ends with the sum of the buffers of the ranks up to it, with its own or without;
/// see [`Extent`].
#[doc(alias = "MPI_Scan")]
#[doc(alias = "MPI_Exscan")]
#[doc(alias = "prefix_sum")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scan {
    /// Sends the sums of blocks to ranks at distance 1, 2, 4, …; see [`scan::recursive_doubling`].
    RecursiveDoubling,
}

named!("scan", Scan {
    RecursiveDoubling => "recursive_doubling",
});

impl Scan {
    /// Returns `true` if there is a schedule for a world of this size.
    pub const fn supports(self, world_size: usize) -> bool {
        world_size > 0
    }

    /// Returns the number of chunks of the buffer.
    pub const fn chunks(self, _world_size: usize) -> usize {
        1
    }

    /// Returns the order in which it reduces. Canonical means T(r + 1) on rank `r`, or T(r) without its own
    /// contribution.
    pub const fn order(self, _world_size: usize) -> Order {
        match self {
            Self::RecursiveDoubling => Order::Canonical,
        }
    }

    /// Returns the cost.
    pub const fn cost(self, world_size: usize, extent: Extent) -> Cost {
        scan::cost(world_size, extent)
    }

    /// Returns the schedule of a rank.
    pub const fn schedule(self, rank: Rank, extent: Extent) -> Schedule {
        match self {
            Self::RecursiveDoubling => scan::recursive_doubling(rank, extent),
        }
    }
}

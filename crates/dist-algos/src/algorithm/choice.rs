//! The trait that the algorithms of all operations implement.

use std::fmt;

use dist_transport::Rank;

use super::{
    AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, Reduce, ReduceScatter, Scan, Scatter,
};
use crate::scan::Extent;
use crate::{Cost, CostModel, Order, Placement, Step};

/// An algorithm of an operation.
///
/// ```
/// use dist_algos::{AllGather, AllReduce, Choice};
///
/// fn rounds<A: Choice>(world_size: usize) -> Vec<(&'static str, usize)> {
///     let all = A::ALL.iter().filter(|algorithm| algorithm.supports(world_size));
///     all.map(|algorithm| (algorithm.name(), algorithm.cost(world_size).rounds)).collect()
/// }
/// assert!(rounds::<AllReduce>(8).contains(&("ring", 14)));
/// assert!(rounds::<AllGather>(8).contains(&("ring", 7)));
/// ```
pub trait Choice: Copy + Eq + fmt::Debug + fmt::Display + 'static {
    /// The operation.
    const OPERATION: &'static str;
    /// All algorithms of the operation.
    const ALL: &'static [Self];
    /// `true` if the operation has a root.
    const ROOTED: bool;

    /// Returns the name, which is unique among the algorithms of the operation.
    fn name(self) -> &'static str;
    /// Returns `true` if there is a schedule for a world of this size.
    fn supports(self, world_size: usize) -> bool;
    /// Returns the number of chunks of the memory; a barrier has one empty chunk.
    fn chunks(self, world_size: usize) -> usize;
    /// Returns the order in which it reduces, if it does.
    fn order(self, world_size: usize) -> Option<Order>;
    /// Returns the cost in a supported world, for the most expensive root. A scan is inclusive.
    fn cost(self, world_size: usize) -> Cost;
    /// Returns how many chunks a rank copies beside its steps: chunks of its input if the steps change their
    /// memory, and chunks of the result.
    fn copied(self, _world_size: usize) -> usize {
        0
    }
    /// Returns the steps of a rank; none if the world is not supported. The root is ignored if the operation has
    /// none.
    fn steps(self, rank: Rank, root: usize) -> impl Iterator<Item = Step> + Clone;

    /// Returns `true` if it reduces in this order or a stricter one, or does not reduce.
    fn keeps(self, order: Order, world_size: usize) -> bool {
        self.order(world_size).is_none_or(|own| own >= order)
    }

    /// Returns the time on memory of this many bytes.
    fn picoseconds(self, placement: Placement, bytes: usize, model: &CostModel) -> u128 {
        let (cost, chunks) = (self.cost(placement.ranks), self.chunks(placement.ranks));
        let copied =
            (self.copied(placement.ranks) as u128).saturating_mul(bytes as u128) / chunks.max(1) as u128;
        let time = match placement.is_oversubscribed() {
            true => model.picoseconds_on(placement, Self::ROOTED, cost, (bytes, chunks)),
            false => model.picoseconds(cost, bytes, chunks),
        };
        time.saturating_add(copied.saturating_mul(COPIED_BYTE_PS))
    }

    /// Returns the cheapest algorithm that keeps an order, if every rank has its own core. `bytes` is the size of
    /// the memory that the schedules work on. Among algorithms of equal cost, the first is chosen.
    fn suggest(world_size: usize, bytes: usize, order: Order, model: &CostModel) -> Self {
        Self::suggest_for(Placement::dedicated(world_size), bytes, order, model)
    }

    /// Returns the cheapest algorithm for ranks that may share cores.
    fn suggest_for(placement: Placement, bytes: usize, order: Order, model: &CostModel) -> Self {
        let world_size = placement.ranks;
        let fits = |algorithm: &Self| algorithm.supports(world_size) && algorithm.keeps(order, world_size);
        let price = |algorithm: &Self| algorithm.picoseconds(placement, bytes, model);
        // Every operation has a canonical algorithm for every world that has ranks.
        Self::ALL.iter().copied().filter(fits).min_by_key(price).unwrap_or(Self::ALL[0])
    }
}

/// The time to copy a byte, on any machine: less than the time to send it. With this value, pairwise is chosen for
/// a reduce_scatter of 4 ranks from 256 KiB on, and of 8 ranks from 1 MiB on. Over loopback it was measured to be
/// up to 1.6 times faster than the others there.
const COPIED_BYTE_PS: u128 = 50;

macro_rules! choices {
    ($($choice:ident {
        rooted: $rooted:literal,
        order: $order:expr,
        cost: $cost:expr,
        $(copied: $copied:expr,)?
        steps: |$algorithm:ident, $rank:ident, $root:pat_param| $steps:expr,
    })*) => {$(
        impl Choice for $choice {
            const OPERATION: &'static str = Self::OPERATION;
            const ALL: &'static [Self] = Self::ALL;
            const ROOTED: bool = $rooted;

            fn name(self) -> &'static str {
                self.name()
            }

            fn supports(self, world_size: usize) -> bool {
                self.supports(world_size)
            }

            fn chunks(self, world_size: usize) -> usize {
                self.chunks(world_size)
            }

            fn order(self, world_size: usize) -> Option<Order> {
                let order: fn(Self, usize) -> Option<Order> = $order;
                order(self, world_size)
            }

            fn cost(self, world_size: usize) -> Cost {
                let cost: fn(Self, usize) -> Cost = $cost;
                cost(self, world_size)
            }

            $(fn copied(self, world_size: usize) -> usize {
                let copied: fn(Self, usize) -> usize = $copied;
                copied(self, world_size)
            })?

            fn steps(self, $rank: Rank, $root: usize) -> impl Iterator<Item = Step> + Clone {
                let $algorithm = self;
                $steps
            }
        }
    )*};
}

choices! {
    AllReduce {
        rooted: false,
        order: |a, n| Some(a.order(n)),
        cost: Self::cost,
        steps: |a, rank, _| {
            let phases = a.phases(rank);
            phases.reduce.chain(phases.gather)
        },
    }
    ReduceScatter {
        rooted: false,
        order: |a, n| Some(a.order(n)),
        cost: Self::cost,
        copied: |a, n| if a.sends_no_sums(n) { 0 } else { a.chunks(n) },
        steps: |a, rank, _| a.schedule(rank).into_iter().flatten(),
    }
    AllGather {
        rooted: false,
        order: |_, _| None,
        cost: Self::cost,
        steps: |a, rank, _| a.schedule(rank).into_iter().flatten(),
    }
    Broadcast {
        rooted: true,
        order: |_, _| None,
        cost: Self::cost,
        steps: |a, rank, root| a.schedule(rank, root),
    }
    Reduce {
        rooted: true,
        order: |a, n| Some(a.order(n)),
        cost: Self::cost,
        steps: |a, rank, root| a.schedule(rank, root),
    }
    Gather {
        rooted: true,
        order: |_, _| None,
        cost: Self::cost,
        steps: |a, rank, root| a.schedule(rank, root),
    }
    Scatter {
        rooted: true,
        order: |_, _| None,
        cost: Self::cost,
        steps: |a, rank, root| a.schedule(rank, root),
    }
    AllToAll {
        rooted: false,
        order: |_, _| None,
        cost: Self::cost,
        copied: |a, n| if matches!(a, AllToAll::Bruck) { 2 * a.chunks(n) } else { 0 },
        steps: |a, rank, _| a.schedule(rank),
    }
    Scan {
        rooted: false,
        order: |a, n| Some(a.order(n)),
        cost: |a, n| a.cost(n, Extent::Inclusive),
        steps: |a, rank, _| a.schedule(rank, Extent::Inclusive),
    }
    Barrier {
        rooted: false,
        order: |_, _| None,
        cost: Self::cost,
        steps: |a, rank, _| a.schedule(rank),
    }
}

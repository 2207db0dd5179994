//! What the algorithms of one operation have in common with those of every other, as far as predictions go.

use dist_algos::scan::Extent;
use dist_algos::{
    AllGather, AllReduce, AllToAll, Barrier, Broadcast, Cost, CostModel, Gather, Order, Reduce,
    ReduceScatter, Scan, Scatter, Step,
};
use dist_transport::Rank;

/// What the choice among algorithms depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wish<'a> {
    pub(super) ranks: usize,
    /// Of the buffer that the schedules work on.
    pub(super) bytes: usize,
    pub(super) order: Order,
    pub(super) costs: &'a CostModel,
}

/// An algorithm of some operation.
pub(super) trait Kind: Copy + PartialEq + 'static {
    const ALL: &[Self];
    fn name(self) -> &'static str;
    fn supports(self, ranks: usize) -> bool;
    fn chunks(self, ranks: usize) -> usize;
    /// In which order it reduces, if it does.
    fn order(self, ranks: usize) -> Option<Order>;
    fn cost(self, ranks: usize) -> Cost;
    fn suggest(wish: Wish<'_>) -> Self;
    /// In a world that it supports.
    fn schedule(self, rank: Rank, root: usize) -> impl Iterator<Item = Step>;
}

macro_rules! kinds {
    ($($kind:ident {
        chunks: $chunks:expr,
        order: $order:expr,
        cost: $cost:expr,
        suggest: $suggest:expr,
        schedule: |$algorithm:ident, $rank:pat_param, $root:pat_param| $schedule:expr,
    })*) => {$(
        impl Kind for $kind {
            const ALL: &[Self] = Self::ALL;

            fn name(self) -> &'static str {
                self.name()
            }

            fn supports(self, ranks: usize) -> bool {
                self.supports(ranks)
            }

            fn chunks(self, ranks: usize) -> usize {
                let chunks: fn(Self, usize) -> usize = $chunks;
                chunks(self, ranks)
            }

            fn order(self, ranks: usize) -> Option<Order> {
                let order: fn(Self, usize) -> Option<Order> = $order;
                order(self, ranks)
            }

            fn cost(self, ranks: usize) -> Cost {
                let cost: fn(Self, usize) -> Cost = $cost;
                cost(self, ranks)
            }

            fn suggest(wish: Wish<'_>) -> Self {
                let suggest: fn(Wish<'_>) -> Self = $suggest;
                suggest(wish)
            }

            fn schedule(self, $rank: Rank, $root: usize) -> impl Iterator<Item = Step> {
                let $algorithm = self;
                $schedule
            }
        }
    )*};
}

const SUPPORTED: &str = "the algorithm supports this number of ranks";

kinds! {
    AllReduce {
        chunks: Self::chunks,
        order: |a, n| Some(a.order(n)),
        cost: Self::cost,
        suggest: |wish| Self::suggest(wish.ranks, wish.bytes, wish.order, wish.costs),
        schedule: |a, rank, _| {
            let phases = a.phases(rank);
            phases.reduce.chain(phases.gather)
        },
    }
    ReduceScatter {
        chunks: Self::chunks,
        order: |a, n| Some(a.order(n)),
        cost: Self::cost,
        suggest: |wish| Self::suggest(wish.ranks, wish.bytes, wish.order, wish.costs),
        schedule: |a, rank, _| a.schedule(rank).expect(SUPPORTED),
    }
    AllGather {
        chunks: Self::chunks,
        order: |_, _| None,
        cost: Self::cost,
        suggest: |wish| Self::suggest(wish.ranks, wish.bytes, wish.costs),
        schedule: |a, rank, _| a.schedule(rank).expect(SUPPORTED),
    }
    Broadcast {
        chunks: Self::chunks,
        order: |_, _| None,
        cost: Self::cost,
        suggest: |wish| Self::suggest(wish.ranks, wish.bytes, wish.costs),
        schedule: |a, rank, root| a.schedule(rank, root),
    }
    Reduce {
        chunks: Self::chunks,
        order: |a, n| Some(a.order(n)),
        cost: Self::cost,
        suggest: |wish| Self::suggest(wish.ranks, wish.bytes, wish.order, wish.costs),
        schedule: |a, rank, root| a.schedule(rank, root),
    }
    AllToAll {
        chunks: Self::chunks,
        order: |_, _| None,
        cost: Self::cost,
        suggest: |wish| Self::suggest(wish.ranks, wish.bytes, wish.costs),
        schedule: |a, rank, _| a.schedule(rank),
    }
    Gather {
        chunks: Self::chunks,
        order: |_, _| None,
        cost: Self::cost,
        suggest: |wish| Self::suggest(wish.ranks, wish.bytes, wish.costs),
        schedule: |a, rank, root| a.schedule(rank, root),
    }
    Scatter {
        chunks: Self::chunks,
        order: |_, _| None,
        cost: Self::cost,
        suggest: |wish| Self::suggest(wish.ranks, wish.bytes, wish.costs),
        schedule: |a, rank, root| a.schedule(rank, root),
    }
    Scan {
        chunks: Self::chunks,
        order: |a, n| Some(a.order(n)),
        cost: |a, n| a.cost(n, Extent::Inclusive),
        suggest: |wish| Self::suggest(wish.ranks),
        schedule: |a, rank, _| a.schedule(rank, Extent::Inclusive),
    }
    Barrier {
        chunks: |_, _| 1,
        order: |_, _| None,
        cost: Self::cost,
        suggest: |wish| Self::suggest(wish.ranks),
        schedule: |a, rank, _| a.schedule(rank),
    }
}

//! An algorithm of any operation, as one value.

use std::fmt;
use std::sync::Arc;

use dist_algos::scan::Extent;
pub use dist_algos::{
    AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, Reduce, ReduceScatter, Scan, Scatter,
};
use dist_algos::{Cost, CostModel, Order};

use crate::settings::Settings;
use crate::two_level::{Levels, TwoLevel};
use crate::{Operation, Result};

/// What the algorithms of one operation have in common with those of every other.
pub(crate) trait Choice: Copy + Into<Algorithm> + 'static {
    const OPERATION: Operation;
    /// The algorithm, if it is one of this operation.
    fn of(algorithm: Algorithm) -> Option<Self>;
    fn supports(self, world_size: usize) -> bool;
    /// In which order it reduces; canonical if it does not.
    fn order(self, world_size: usize) -> Order;
    /// The cheapest that reduces in this order or a stricter one.
    fn suggest(world_size: usize, bytes: usize, order: Order, model: &CostModel) -> Self;
    /// How long it takes on a buffer of so many bytes.
    fn picoseconds(self, world_size: usize, bytes: usize, model: &CostModel) -> u128;
}

macro_rules! algorithms {
    ($($(#[$doc:meta])* $operation:ident {
        order: $order:expr,
        suggest: $suggest:expr,
        cost: $cost:expr,
    })*) => {
        /// An algorithm and the operation that it is for.
        ///
        /// ```
        /// use dist_collectives::{Algorithm, AllReduce, Operation};
        ///
        /// let algorithm = Algorithm::from(AllReduce::Ring);
        /// assert_eq!((algorithm.operation(), algorithm.name()), (Operation::AllReduce, "ring"));
        /// assert_eq!(Algorithm::of(Operation::AllReduce).find(|a| a.name() == "ring"), Some(algorithm));
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Algorithm {
            $($(#[$doc])* $operation($operation),)*
            /// Of two levels: among the ranks of each host, and across hosts.
            TwoLevel(TwoLevel),
        }

        impl Algorithm {
            /// The operation that this is an algorithm of.
            pub const fn operation(self) -> Operation {
                match self {
                    $(Self::$operation(_) => Operation::$operation,)*
                    Self::TwoLevel(two) => two.operation(),
                }
            }

            /// The name, unique among the algorithms of its operation.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$operation(algorithm) => algorithm.name(),)*
                    Self::TwoLevel(two) => two.name(),
                }
            }

            /// The algorithm with this index among those of the operation for which all ranks are alike.
            fn flat(operation: Operation, index: usize) -> Option<Self> {
                match operation {
                    Operation::ExclusiveScan => Self::flat(Operation::Scan, index),
                    $(Operation::$operation => $operation::ALL.get(index).copied().map(Self::$operation),)*
                    _ => None,
                }
            }

            /// The algorithm that an operation is done with; `None` if it is done in one way.
            pub(crate) fn chosen(
                operation: Operation,
                settings: &Settings,
                world_size: usize,
                bytes: usize,
                levels: Option<&Arc<Levels>>,
            ) -> Result<Option<Self>> {
                Ok(match operation {
                    Operation::ExclusiveScan => {
                        return Self::chosen(Operation::Scan, settings, world_size, bytes, levels);
                    }
                    $(Operation::$operation => {
                        Some(settings.choose::<$operation>(world_size, bytes, levels)?.algorithm())
                    })*
                    _ => None,
                })
            }
        }

        $(
            impl From<$operation> for Algorithm {
                fn from(algorithm: $operation) -> Self {
                    Self::$operation(algorithm)
                }
            }

            impl Choice for $operation {
                const OPERATION: Operation = Operation::$operation;

                fn of(algorithm: Algorithm) -> Option<Self> {
                    match algorithm {
                        Algorithm::$operation(algorithm) => Some(algorithm),
                        _ => None,
                    }
                }

                fn supports(self, world_size: usize) -> bool {
                    Self::supports(self, world_size)
                }

                fn order(self, world_size: usize) -> Order {
                    let order: fn(Self, usize) -> Order = $order;
                    order(self, world_size)
                }

                fn suggest(world_size: usize, bytes: usize, order: Order, model: &CostModel) -> Self {
                    let suggest: fn(usize, usize, Order, &CostModel) -> Self = $suggest;
                    suggest(world_size, bytes, order, model)
                }

                fn picoseconds(self, world_size: usize, bytes: usize, model: &CostModel) -> u128 {
                    let cost: fn(Self, usize) -> (Cost, usize) = $cost;
                    let (cost, chunks) = cost(self, world_size);
                    model.picoseconds(cost, bytes, chunks)
                }
            }
        )*
    };
}

algorithms! {
    /// Of all_reduce.
    AllReduce {
        order: Self::order,
        suggest: Self::suggest,
        cost: |algorithm, n| (algorithm.cost(n), algorithm.chunks(n)),
    }
    /// Of reduce_scatter.
    ReduceScatter {
        order: Self::order,
        suggest: Self::suggest,
        cost: |algorithm, n| (algorithm.cost(n), algorithm.chunks(n)),
    }
    /// Of all_gather.
    AllGather {
        order: |_, _| Order::Canonical,
        suggest: |world_size, bytes, _, model| Self::suggest(world_size, bytes, model),
        cost: |algorithm, n| (algorithm.cost(n), algorithm.chunks(n)),
    }
    /// Of broadcast.
    Broadcast {
        order: |_, _| Order::Canonical,
        suggest: |world_size, bytes, _, model| Self::suggest(world_size, bytes, model),
        cost: |algorithm, n| (algorithm.cost(n), algorithm.chunks(n)),
    }
    /// Of reduce.
    Reduce {
        order: Self::order,
        suggest: Self::suggest,
        cost: |algorithm, n| (algorithm.cost(n), algorithm.chunks(n)),
    }
    /// Of gather.
    Gather {
        order: |_, _| Order::Canonical,
        suggest: |world_size, bytes, _, model| Self::suggest(world_size, bytes, model),
        cost: |algorithm, n| (algorithm.cost(n), algorithm.chunks(n)),
    }
    /// Of scatter.
    Scatter {
        order: |_, _| Order::Canonical,
        suggest: |world_size, bytes, _, model| Self::suggest(world_size, bytes, model),
        cost: |algorithm, n| (algorithm.cost(n), algorithm.chunks(n)),
    }
    /// Of all_to_all.
    AllToAll {
        order: |_, _| Order::Canonical,
        suggest: |world_size, bytes, _, model| Self::suggest(world_size, bytes, model),
        cost: |algorithm, n| (algorithm.cost(n), algorithm.chunks(n)),
    }
    /// Of scan, and of exclusive_scan.
    Scan {
        order: Self::order,
        suggest: |world_size, _, _, _| Self::suggest(world_size),
        cost: |algorithm, n| (algorithm.cost(n, Extent::Inclusive), 1),
    }
    /// Of barrier.
    Barrier {
        order: |_, _| Order::Canonical,
        suggest: |world_size, _, _, _| Self::suggest(world_size),
        cost: |algorithm, n| (algorithm.cost(n), 1),
    }
}

impl Algorithm {
    /// Every algorithm of an operation for which all ranks are alike; none for operations that are done in one way. Those
    /// that know of hosts are [`TwoLevel::of`].
    pub fn of(operation: Operation) -> impl Iterator<Item = Self> {
        (0..).map_while(move |index| Self::flat(operation, index))
    }

    /// The algorithm with this index among all of the operation.
    pub(crate) fn nth(operation: Operation, index: usize) -> Option<Self> {
        Self::of(operation).chain(TwoLevel::of(operation).map(Self::TwoLevel)).nth(index)
    }

    /// The algorithm's index among those of its operation.
    pub(crate) fn index(self) -> usize {
        Self::of(self.operation())
            .chain(TwoLevel::of(self.operation()).map(Self::TwoLevel))
            .position(|other| other == self)
            .expect("every algorithm is in its own list")
    }
}

impl From<TwoLevel> for Algorithm {
    fn from(two: TwoLevel) -> Self {
        Self::TwoLevel(two)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

//! An algorithm of any operation, as one value.

use std::fmt;
use std::sync::Arc;

pub use dist_algos::{
    AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, Reduce, ReduceScatter, Scan, Scatter,
};
use dist_algos::{Choice, Placement};

use crate::settings::Settings;
use crate::two_level::HostLevels;
use crate::{Direct, Operation, ReductionOrder, Result, TwoLevel};

/// An algorithm of one operation, beside those of all.
pub(crate) trait OneOf: Choice + Into<Algorithm> {
    const SERVES: Operation;
    /// The algorithm, if it is one of this operation.
    fn of(algorithm: Algorithm) -> Option<Self>;
}

macro_rules! algorithms {
    ($($(#[$doc:meta])* $operation:ident)*) => {
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
            /// Of ranks that share memory.
            Direct(Direct),
        }

        impl Algorithm {
            /// The operation that this is an algorithm of.
            pub fn operation(self) -> Operation {
                match self {
                    $(Self::$operation(_) => Operation::$operation,)*
                    Self::TwoLevel(two) => Operation::parse(two.operation()).expect("its operation is one of these"),
                    Self::Direct(direct) => direct.operation(),
                }
            }

            /// The name, unique among the algorithms of its operation.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$operation(algorithm) => algorithm.name(),)*
                    Self::TwoLevel(two) => two.name(),
                    Self::Direct(direct) => direct.name(),
                }
            }

            /// Whether it serves a world of this size, whose ranks are all alike.
            pub fn supports(self, world_size: usize) -> bool {
                match self {
                    $(Self::$operation(algorithm) => algorithm.supports(world_size),)*
                    Self::TwoLevel(_) => false,
                    Self::Direct(_) => world_size > 1,
                }
            }

            /// Whether it reduces in this order or a stricter one in a world whose ranks are all alike, if it reduces.
            pub fn keeps(self, order: ReductionOrder, world_size: usize) -> bool {
                match self {
                    $(Self::$operation(algorithm) => algorithm.keeps(order.least(), world_size),)*
                    Self::TwoLevel(_) => false,
                    Self::Direct(_) => true,
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
                placement: Placement,
                bytes: usize,
                levels: Option<&Arc<HostLevels>>,
            ) -> Result<Option<Self>> {
                Ok(match operation {
                    Operation::ExclusiveScan => {
                        return Self::chosen(Operation::Scan, settings, placement, bytes, levels);
                    }
                    $(Operation::$operation => {
                        Some(settings.choose::<$operation>(placement, bytes, levels)?.algorithm())
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

            impl OneOf for $operation {
                const SERVES: Operation = Operation::$operation;

                fn of(algorithm: Algorithm) -> Option<Self> {
                    match algorithm {
                        Algorithm::$operation(algorithm) => Some(algorithm),
                        _ => None,
                    }
                }
            }
        )*
    };
}

algorithms! {
    /// Of all_reduce.
    AllReduce
    /// Of reduce_scatter.
    ReduceScatter
    /// Of all_gather.
    AllGather
    /// Of broadcast.
    Broadcast
    /// Of reduce.
    Reduce
    /// Of gather.
    Gather
    /// Of scatter.
    Scatter
    /// Of all_to_all.
    AllToAll
    /// Of scan, and of exclusive_scan.
    Scan
    /// Of barrier.
    Barrier
}

impl Algorithm {
    /// Every algorithm of an operation for which all ranks are alike; none for operations that are done in one way. Those
    /// that know of hosts are [`TwoLevel::of`], those of ranks that share memory [`Direct::of`].
    pub fn of(operation: Operation) -> impl Iterator<Item = Self> {
        (0..).map_while(move |index| Self::flat(operation, index))
    }

    /// Every algorithm of an operation, whatever it needs to know.
    pub(crate) fn every(operation: Operation) -> impl Iterator<Item = Self> {
        let two_levels = TwoLevel::of(operation.name()).map(Self::TwoLevel);
        Self::of(operation).chain(two_levels).chain(Direct::of(operation).map(Self::Direct))
    }

    /// The algorithm with this index among all of the operation.
    pub(crate) fn nth(operation: Operation, index: usize) -> Option<Self> {
        Self::every(operation).nth(index)
    }

    /// The algorithm's index among those of its operation.
    pub(crate) fn index(self) -> usize {
        Self::every(self.operation())
            .position(|other| other == self)
            .expect("every algorithm is in its own list")
    }
}

impl From<TwoLevel> for Algorithm {
    fn from(two: TwoLevel) -> Self {
        Self::TwoLevel(two)
    }
}

impl From<Direct> for Algorithm {
    fn from(direct: Direct) -> Self {
        Self::Direct(direct)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

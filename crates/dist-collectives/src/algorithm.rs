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

/// An algorithm of one operation that converts to and from [`Algorithm`].
pub(crate) trait OneOf: Choice + Into<Algorithm> {
    const SERVES: Operation;
    /// Returns the algorithm, if it belongs to this operation.
    fn of(algorithm: Algorithm) -> Option<Self>;
}

macro_rules! algorithms {
    ($($(#[$doc:meta])* $operation:ident)*) => {
        /// An algorithm together with its operation.
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
            /// A two-level algorithm: inside each host and between hosts.
            TwoLevel(TwoLevel),
            /// An algorithm for ranks that share memory.
            Direct(Direct),
        }

        impl Algorithm {
            /// Returns the operation.
            pub fn operation(self) -> Operation {
                match self {
                    $(Self::$operation(_) => Operation::$operation,)*
                    Self::TwoLevel(two) => Operation::parse(two.operation()).expect("its operation is one of these"),
                    Self::Direct(direct) => direct.operation(),
                }
            }

            /// Returns the name, which is unique among the algorithms of the operation.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$operation(algorithm) => algorithm.name(),)*
                    Self::TwoLevel(two) => two.name(),
                    Self::Direct(direct) => direct.name(),
                }
            }

            /// Returns `true` if it supports a world of this size without hosts or shared memory.
            pub fn supports(self, world_size: usize) -> bool {
                match self {
                    $(Self::$operation(algorithm) => algorithm.supports(world_size),)*
                    Self::TwoLevel(_) => false,
                    Self::Direct(_) => world_size > 1,
                }
            }

            /// Returns `true` if it reduces in this order or a stricter one, or does not reduce. The hosts of ranks
            /// are not considered.
            pub fn keeps(self, order: ReductionOrder, world_size: usize) -> bool {
                match self {
                    $(Self::$operation(algorithm) => algorithm.keeps(order.least(), world_size),)*
                    Self::TwoLevel(_) => false,
                    Self::Direct(_) => true,
                }
            }

            /// Returns the algorithm with this index among the flat algorithms of the operation.
            fn flat(operation: Operation, index: usize) -> Option<Self> {
                match operation {
                    Operation::ExclusiveScan => Self::flat(Operation::Scan, index),
                    $(Operation::$operation => $operation::ALL.get(index).copied().map(Self::$operation),)*
                    _ => None,
                }
            }

            /// Returns the algorithm for an operation; `None` if the operation has only one.
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
    /// An algorithm of all_reduce.
    AllReduce
    /// An algorithm of reduce_scatter.
    ReduceScatter
    /// An algorithm of all_gather.
    AllGather
    /// An algorithm of broadcast.
    Broadcast
    /// An algorithm of reduce.
    Reduce
    /// An algorithm of gather.
    Gather
    /// An algorithm of scatter.
    Scatter
    /// An algorithm of all_to_all.
    AllToAll
    /// An algorithm of scan and of exclusive_scan.
    Scan
    /// An algorithm of barrier.
    Barrier
}

impl Algorithm {
    /// Returns all flat algorithms of an operation, which treat all ranks alike; none for operations with only one
    /// algorithm. [`TwoLevel::of`] returns the two-level algorithms, and [`Direct::of`] those for ranks that share
    /// memory.
    pub fn of(operation: Operation) -> impl Iterator<Item = Self> {
        (0..).map_while(move |index| Self::flat(operation, index))
    }

    /// Returns all algorithms of an operation.
    pub(crate) fn every(operation: Operation) -> impl Iterator<Item = Self> {
        let two_levels = TwoLevel::of(operation.name()).map(Self::TwoLevel);
        Self::of(operation).chain(two_levels).chain(Direct::of(operation).map(Self::Direct))
    }

    /// Returns the algorithm with this index among all algorithms of the operation.
    pub(crate) fn nth(operation: Operation, index: usize) -> Option<Self> {
        Self::every(operation).nth(index)
    }

    /// Returns the index among the algorithms of the operation.
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

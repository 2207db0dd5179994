//! An algorithm of any operation, as one value.

use std::fmt;

pub use dist_algos::{AllGather, AllReduce, Barrier, Broadcast, Reduce, ReduceScatter};

use crate::Operation;

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
    /// Of all_reduce.
    AllReduce(AllReduce),
    /// Of reduce_scatter.
    ReduceScatter(ReduceScatter),
    /// Of all_gather.
    AllGather(AllGather),
    /// Of broadcast.
    Broadcast(Broadcast),
    /// Of reduce.
    Reduce(Reduce),
    /// Of barrier.
    Barrier(Barrier),
}

impl Algorithm {
    /// Every algorithm of an operation; none for a message between two ranks.
    pub fn of(operation: Operation) -> impl Iterator<Item = Self> {
        (0..).map_while(move |index| Self::nth(operation, index))
    }

    /// The operation that this is an algorithm of.
    pub const fn operation(self) -> Operation {
        match self {
            Self::AllReduce(_) => Operation::AllReduce,
            Self::ReduceScatter(_) => Operation::ReduceScatter,
            Self::AllGather(_) => Operation::AllGather,
            Self::Broadcast(_) => Operation::Broadcast,
            Self::Reduce(_) => Operation::Reduce,
            Self::Barrier(_) => Operation::Barrier,
        }
    }

    /// The name, unique among the algorithms of its operation.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce(algorithm) => algorithm.name(),
            Self::ReduceScatter(algorithm) => algorithm.name(),
            Self::AllGather(algorithm) => algorithm.name(),
            Self::Broadcast(algorithm) => algorithm.name(),
            Self::Reduce(algorithm) => algorithm.name(),
            Self::Barrier(algorithm) => algorithm.name(),
        }
    }

    /// The algorithm with this index among those of the operation.
    pub(crate) fn nth(operation: Operation, index: usize) -> Option<Self> {
        match operation {
            Operation::AllReduce => AllReduce::ALL.get(index).copied().map(Self::AllReduce),
            Operation::ReduceScatter => ReduceScatter::ALL.get(index).copied().map(Self::ReduceScatter),
            Operation::AllGather => AllGather::ALL.get(index).copied().map(Self::AllGather),
            Operation::Broadcast => Broadcast::ALL.get(index).copied().map(Self::Broadcast),
            Operation::Reduce => Reduce::ALL.get(index).copied().map(Self::Reduce),
            Operation::Barrier => Barrier::ALL.get(index).copied().map(Self::Barrier),
            Operation::Message => None,
        }
    }

    /// The algorithm's index among those of its operation.
    pub(crate) fn index(self) -> usize {
        Self::of(self.operation())
            .position(|other| other == self)
            .expect("every algorithm is in its own list")
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

macro_rules! from {
    ($($algorithm:ident)*) => {$(
        impl From<$algorithm> for Algorithm {
            fn from(algorithm: $algorithm) -> Self {
                Self::$algorithm(algorithm)
            }
        }
    )*};
}

from! { AllReduce ReduceScatter AllGather Broadcast Reduce Barrier }

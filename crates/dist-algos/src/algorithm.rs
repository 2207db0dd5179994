//! A reference to the record of an algorithm of any kind.

use std::fmt;
use std::hash::{Hash, Hasher};

use crate::direct::DirectAlgorithm;
use crate::hierarchical::TwoLevelAlgorithm;
use crate::{CollectiveKind, MessageAlgorithm, Order};

/// A reference to the record of an algorithm of any kind.
///
/// Two references are equal if the operation and the name are equal.
///
/// ```
/// use dist_algos::{Algorithm, ALGORITHMS, CollectiveKind, ring};
///
/// let algorithm = ALGORITHMS.find(CollectiveKind::AllReduce, "ring")?;
/// assert_eq!(algorithm, Algorithm::from(&ring::ALL_REDUCE));
/// assert_eq!((algorithm.collective(), algorithm.name()), (CollectiveKind::AllReduce, "ring"));
/// # Ok::<(), dist_algos::Error>(())
/// ```
#[derive(Clone, Copy)]
pub enum Algorithm {
    /// An algorithm that sends messages and treats all ranks alike.
    Messages(&'static MessageAlgorithm),
    /// An algorithm that sends messages inside hosts and between hosts.
    TwoLevel(&'static TwoLevelAlgorithm),
    /// An algorithm for ranks that share memory.
    Direct(&'static DirectAlgorithm),
}

impl Algorithm {
    /// Returns the operation.
    pub const fn collective(self) -> CollectiveKind {
        match self {
            Self::Messages(algorithm) => algorithm.collective,
            Self::TwoLevel(algorithm) => algorithm.collective,
            Self::Direct(algorithm) => algorithm.collective,
        }
    }

    /// Returns the name, which is unique among the algorithms of the operation.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Messages(algorithm) => algorithm.name,
            Self::TwoLevel(algorithm) => algorithm.name,
            Self::Direct(algorithm) => algorithm.name,
        }
    }

    /// Returns `true` if the algorithm supports a world of this size without hosts or, if ranks share memory, with
    /// it.
    pub fn supports(self, world_size: usize) -> bool {
        match self {
            Self::Messages(algorithm) => algorithm.supports(world_size),
            Self::TwoLevel(_) => false,
            Self::Direct(_) => world_size > 1,
        }
    }

    /// Returns `true` if the algorithm reduces in this order or a stricter one, or does not reduce. The hosts of
    /// ranks are not considered.
    pub fn keeps(self, order: Order, world_size: usize) -> bool {
        match self {
            Self::Messages(algorithm) => algorithm.keeps(order, world_size),
            Self::TwoLevel(_) => false,
            Self::Direct(_) => true,
        }
    }
}

impl PartialEq for Algorithm {
    fn eq(&self, other: &Self) -> bool {
        (self.collective(), self.name()) == (other.collective(), other.name())
    }
}

impl Eq for Algorithm {}

impl Hash for Algorithm {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.collective(), self.name()).hash(state);
    }
}

impl fmt::Debug for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.collective(), self.name())
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl From<&'static MessageAlgorithm> for Algorithm {
    fn from(algorithm: &'static MessageAlgorithm) -> Self {
        Self::Messages(algorithm)
    }
}

impl From<&'static TwoLevelAlgorithm> for Algorithm {
    fn from(algorithm: &'static TwoLevelAlgorithm) -> Self {
        Self::TwoLevel(algorithm)
    }
}

impl From<&'static DirectAlgorithm> for Algorithm {
    fn from(algorithm: &'static DirectAlgorithm) -> Self {
        Self::Direct(algorithm)
    }
}

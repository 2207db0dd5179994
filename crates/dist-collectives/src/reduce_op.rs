//! What a reduction does with two elements, and in which order it meets them.

use std::fmt;

/// How elements of different ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum. Integers wrap; half types are added in `f32` and rounded to nearest even at every addition.
    Sum,
    /// The sum, divided once by the number of ranks (in `f32` for half types). Integers have no mean.
    Mean,
    /// The product, rounded as sums are.
    Product,
    /// The smallest element. A NaN anywhere gives NaN, and −0 is less than +0.
    Min,
    /// The largest element. A NaN anywhere gives NaN, and −0 is less than +0.
    Max,
}

impl ReduceOp {
    /// Every reduce operation.
    pub const ALL: [Self; 5] = [Self::Sum, Self::Mean, Self::Product, Self::Min, Self::Max];

    /// The name, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Product => "product",
            Self::Min => "min",
            Self::Max => "max",
        }
    }

    /// The operation of this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|op| op.name() == name)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Which orders of reduction a call may use. It decides the last bits of a floating-point sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReductionOrder {
    /// Every element is reduced as the tree T(n) = T(largest power of two below n) + T(rest) over the ranks in
    /// order: the same bits for every size, algorithm and transport.
    #[default]
    Canonical,
    /// Any order that is the same in every run with the same number of ranks, size and algorithm.
    Any,
}

impl ReductionOrder {
    /// Every order.
    pub const ALL: [Self; 2] = [Self::Canonical, Self::Any];

    /// The name, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Canonical => "canonical",
            Self::Any => "any",
        }
    }

    /// The order of this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|order| order.name() == name)
    }
}

impl fmt::Display for ReductionOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

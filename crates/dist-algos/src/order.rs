//! In which order a reduction adds.

use std::fmt;

/// How much a schedule promises about the order in which contributions are reduced; every class includes those
/// before it. Operands may swap sides: reductions are commutative, but not associative.
///
/// A class is not declared but proven: see [`verify`](crate::verify).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Order {
    /// The same on every run and on every rank, but it may depend on where in the buffer an element lies.
    Any,
    /// Every chunk is reduced by one and the same tree, so the cut into chunks changes no bit.
    Uniform,
    /// That tree is T(p), the tree of all canonical schedules: `T(n) = T(largest power of two below n) + T(rest)`
    /// over the ranks in order. Two canonical algorithms give the same bits.
    Canonical,
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Any => "any",
            Self::Uniform => "uniform",
            Self::Canonical => "canonical",
        })
    }
}

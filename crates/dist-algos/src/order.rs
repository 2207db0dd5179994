//! Classes of reduction orders.

use std::fmt;

/// The promise of a schedule about the order in which contributions are reduced. Every class includes the classes
/// before it.
///
/// A class is not only declared but proven: see [`verify`](crate::verify).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Order {
    /// The order is the same on every run and on every rank. It may depend on the position of an element in the
    /// buffer.
    Any,
    /// Every chunk is reduced by the same tree, so the partition into chunks changes no bit. Operands may swap sides,
    /// which changes no bit if the operation is commutative.
    Uniform,
    /// The tree is T(p), the tree of all canonical schedules: `T(n) = T(largest power of two below n) + T(rest)`
    /// over the ranks in order. Two canonical algorithms give the same bits.
    ///
    /// Operands are in the order of the ranks, so that reductions need not be commutative. A runner knows the sides by
    /// one rule: of two operands, the left one came from the lower rank. The content of the buffer came from the rank
    /// itself, and the content of a slot from the rank whose message was first stored in it.
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

//! What a reduction does with two elements, and in which order it meets them.

use std::fmt;

use dist_algos::Order;

use crate::DType;

/// How elements of different ranks become one.
///
/// All ranks of a call name the same kind; the number that some kinds take is each rank's own.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum. Integers wrap; half types are added in `f32` and rounded to nearest even at every addition.
    Sum,
    /// The sum, divided once by the number of ranks (in `f32` for half types). Integers have no mean.
    ///
    /// Partial sums of `f16` are carried as `f32`, in memory and on the wire, and the quotient is rounded to `f16` once: a
    /// mean of values that `f16` holds is never infinite. It takes twice the bytes of [`Sum`](Self::Sum), as many as
    /// for `f32`. Partial sums of the other types, `bf16` among them, are of that type.
    Mean,
    /// The product, rounded as sums are.
    Product,
    /// The smallest element. A NaN anywhere gives NaN, and −0 is less than +0.
    Min,
    /// The largest element. A NaN anywhere gives NaN, and −0 is less than +0.
    Max,
    /// The bits that all elements have. Integers only.
    And,
    /// The bits that any element has. Integers only.
    Or,
    /// The bits that an odd number of elements has. Integers only.
    Xor,
    /// The sum, after this rank has multiplied each of its elements by its factor, rounded once (the factor to
    /// `f32` and the product in it, but for `f64`). Floating-point numbers only.
    ///
    /// The products are elements of the type again before they are added: one that the type cannot hold is infinite,
    /// which in half types a large factor soon makes it. A factor of 0 makes a NaN or an infinity NaN, and does not hide
    /// it.
    #[doc(alias = "ncclRedOpCreatePreMulSum")]
    PreMulSum(f64),
    /// The mean in which this rank's elements count with its weight: Σ wᵣ·xᵣ / Σ wᵣ over the ranks r. Each rank
    /// multiplies its elements by its weight as in [`PreMulSum`](Self::PreMulSum), the sum is divided once by the sum
    /// of the weights. Floating-point numbers only.
    ///
    /// Products and partial sums of `f16` are carried as `f32`, as by [`Mean`](Self::Mean), at twice the bytes. Those of
    /// `bf16` are rounded to `bf16`. Only the ratios of the weights count. Choose them near 1 where products could leave
    /// the range of the type they are carried in. A weight of 0 hides no NaN and no infinity. With 1 on every rank it gives
    /// the bits of [`Mean`](Self::Mean).
    ///
    /// A weight is finite and not negative. The weights are added in `f64` in canonical order; if they add up to zero
    /// or to what is not finite in the arithmetic (`f32`, but for `f64`), every rank gets the same error.
    WeightedMean(f64),
}

impl ReduceOp {
    /// Every reduce operation that takes no number.
    pub const PLAIN: [Self; 8] =
        [Self::Sum, Self::Mean, Self::Product, Self::Min, Self::Max, Self::And, Self::Or, Self::Xor];

    /// What it does, without this rank's number.
    pub const fn kind(self) -> ReduceKind {
        match self {
            Self::Sum => ReduceKind::Sum,
            Self::Mean => ReduceKind::Mean,
            Self::Product => ReduceKind::Product,
            Self::Min => ReduceKind::Min,
            Self::Max => ReduceKind::Max,
            Self::And => ReduceKind::And,
            Self::Or => ReduceKind::Or,
            Self::Xor => ReduceKind::Xor,
            Self::PreMulSum(_) => ReduceKind::PreMulSum,
            Self::WeightedMean(_) => ReduceKind::WeightedMean,
        }
    }

    /// The name of the kind, in lower case.
    pub const fn name(self) -> &'static str {
        self.kind().name()
    }

    /// The operation of this name that takes no number.
    pub fn parse(name: &str) -> Option<Self> {
        Self::PLAIN.into_iter().find(|op| op.name() == name)
    }

    /// Whether elements of this type can be reduced like this.
    pub const fn supports(self, dtype: DType) -> bool {
        self.kind().supports(dtype)
    }

    /// The type in which elements of this type are carried while they are reduced, in memory and on the wire: `f32` for
    /// means of `f16`, else their own.
    ///
    /// ```
    /// use dist_collectives::{DType, ReduceOp};
    ///
    /// assert_eq!(ReduceOp::Mean.partial_dtype(DType::F16), DType::F32);
    /// assert_eq!(ReduceOp::Sum.partial_dtype(DType::F16), DType::F16);
    /// assert_eq!(ReduceOp::Mean.partial_dtype(DType::Bf16), DType::Bf16);
    /// ```
    pub const fn partial_dtype(self, dtype: DType) -> DType {
        self.kind().partial_dtype(dtype)
    }
}

impl fmt::Display for ReduceOp {
    /// The name, and the number that there may be: `sum`, `pre_mul_sum(0.5)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PreMulSum(number) | Self::WeightedMean(number) => write!(f, "{}({number})", self.name()),
            _ => f.pad(self.name()),
        }
    }
}

/// What a [`ReduceOp`] does, without this rank's number: what all ranks of a call have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceKind {
    /// [`ReduceOp::Sum`].
    Sum,
    /// [`ReduceOp::Mean`].
    Mean,
    /// [`ReduceOp::Product`].
    Product,
    /// [`ReduceOp::Min`].
    Min,
    /// [`ReduceOp::Max`].
    Max,
    /// [`ReduceOp::And`].
    And,
    /// [`ReduceOp::Or`].
    Or,
    /// [`ReduceOp::Xor`].
    Xor,
    /// [`ReduceOp::PreMulSum`].
    PreMulSum,
    /// [`ReduceOp::WeightedMean`].
    WeightedMean,
}

impl ReduceKind {
    /// Every kind.
    pub const ALL: [Self; 10] = [
        Self::Sum,
        Self::Mean,
        Self::Product,
        Self::Min,
        Self::Max,
        Self::And,
        Self::Or,
        Self::Xor,
        Self::PreMulSum,
        Self::WeightedMean,
    ];

    /// The name, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Product => "product",
            Self::Min => "min",
            Self::Max => "max",
            Self::And => "and",
            Self::Or => "or",
            Self::Xor => "xor",
            Self::PreMulSum => "pre_mul_sum",
            Self::WeightedMean => "weighted_mean",
        }
    }

    /// Whether elements of this type can be reduced like this.
    pub const fn supports(self, dtype: DType) -> bool {
        match self {
            Self::Sum | Self::Product | Self::Min | Self::Max => true,
            Self::And | Self::Or | Self::Xor => !dtype.is_float(),
            Self::Mean | Self::PreMulSum | Self::WeightedMean => dtype.is_float(),
        }
    }

    /// The type in which elements of this type are carried while they are reduced, as
    /// [`ReduceOp::partial_dtype`] says.
    pub const fn partial_dtype(self, dtype: DType) -> DType {
        match (self, dtype) {
            (Self::Mean | Self::WeightedMean, DType::F16) => DType::F32,
            _ => dtype,
        }
    }
}

impl fmt::Display for ReduceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Which orders of reduction a call may use. It decides the last bits of a floating-point sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReductionOrder {
    /// Every element is reduced as the tree T(n) = T(largest power of two below n) + T(rest) over the ranks in
    /// order: the same bits for every size, algorithm and transport. Only which one of several different NaN comes out is not
    /// decided by it, and may differ from rank to rank.
    #[default]
    Canonical,
    /// Any order that is the same in every run with the same number of ranks, size, algorithm and placement: which ranks
    /// share a host.
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

    /// The least that algorithms have to promise.
    pub const fn least(self) -> Order {
        match self {
            Self::Canonical => Order::Canonical,
            Self::Any => Order::Any,
        }
    }
}

impl fmt::Display for ReductionOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

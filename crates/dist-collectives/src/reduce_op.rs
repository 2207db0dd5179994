//! Reduction operations and orders of reduction.

use std::fmt;

use dist_algos::Order;

use crate::DType;

/// The operation that combines elements of different ranks.
///
/// All ranks of a call use the same kind. The number of some kinds may differ between ranks.
#[doc(alias = "MPI_Op")]
#[doc(alias = "ncclRedOp_t")]
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum. Integers wrap. Half types are added in `f32` and rounded to nearest even at every addition.
    #[doc(alias = "MPI_SUM")]
    #[doc(alias = "SUM")]
    #[doc(alias = "ncclSum")]
    Sum,
    /// The sum, divided once by the number of ranks (in `f32` for half types). Floating-point and complex numbers only.
    ///
    /// Partial sums of `f16` are computed as `f32`, in memory and on the wire, and the quotient is rounded to `f16`
    /// once. So a mean of finite values is never infinite. It moves twice the bytes of [`Sum`](Self::Sum), as many
    /// as for `f32`. Partial sums of all other types, including `bf16`, have that type.
    #[doc(alias = "AVG")]
    #[doc(alias = "average")]
    #[doc(alias = "ncclAvg")]
    Mean,
    /// The product, rounded like sums. The parts of complex products are `ac - bd` and `ad + bc`.
    #[doc(alias = "MPI_PROD")]
    #[doc(alias = "PRODUCT")]
    #[doc(alias = "ncclProd")]
    Product,
    /// The smallest element. A NaN anywhere gives NaN, and −0 is less than +0. Complex numbers have none.
    #[doc(alias = "MPI_MIN")]
    #[doc(alias = "MIN")]
    Min,
    /// The largest element. A NaN anywhere gives NaN, and −0 is less than +0. Complex numbers have none.
    #[doc(alias = "MPI_MAX")]
    #[doc(alias = "MAX")]
    Max,
    /// The bits that are set in all elements. Integers only.
    #[doc(alias = "MPI_BAND")]
    #[doc(alias = "BAND")]
    And,
    /// The bits that are set in any element. Integers only.
    #[doc(alias = "MPI_BOR")]
    #[doc(alias = "BOR")]
    Or,
    /// The bits that are set in an odd number of elements. Integers only.
    #[doc(alias = "MPI_BXOR")]
    #[doc(alias = "BXOR")]
    Xor,
    /// The sum, after this rank has multiplied each of its elements by its factor, rounded once. The factor is
    /// converted to `f32` and multiplied in `f32`, except for `f64`. Floating-point numbers only.
    ///
    /// The products have the element type before they are added. A product that is too large for the type is
    /// infinite, which happens soon for half types and large factors. A factor of 0 turns a NaN or an infinity into
    /// NaN and does not hide it.
    #[doc(alias = "ncclRedOpCreatePreMulSum")]
    #[doc(alias = "PREMUL_SUM")]
    PreMulSum(f64),
    /// The weighted mean: Σ wᵣ·xᵣ / Σ wᵣ over the ranks r. Each rank multiplies its elements by its weight as in
    /// [`PreMulSum`](Self::PreMulSum). The sum is divided once by the sum of the weights. Floating-point numbers
    /// only.
    ///
    /// Products and partial sums of `f16` are computed as `f32`, as for [`Mean`](Self::Mean), with twice the bytes.
    /// Those of `bf16` are rounded to `bf16`. Only the ratios of the weights matter: choose weights near 1 if
    /// products could leave the range of their type. A weight of 0 hides no NaN and no infinity. With weight 1 on
    /// every rank the result has the bits of [`Mean`](Self::Mean).
    ///
    /// A weight is finite and not negative. The weights are added in `f64` in canonical order. If the sum is zero,
    /// or not finite in the arithmetic (`f32`, except for `f64`), every rank gets the same error.
    #[doc(alias = "weighted average")]
    WeightedMean(f64),
}

impl ReduceOp {
    /// All reduction operations that take no number.
    pub const PLAIN: [Self; 8] =
        [Self::Sum, Self::Mean, Self::Product, Self::Min, Self::Max, Self::And, Self::Or, Self::Xor];

    /// Returns the kind, without this rank's number.
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

    /// Returns the name of the kind in lower case.
    pub const fn name(self) -> &'static str {
        self.kind().name()
    }

    /// Returns the operation with this name that takes no number.
    pub fn parse(name: &str) -> Option<Self> {
        Self::PLAIN.into_iter().find(|op| op.name() == name)
    }

    /// Returns `true` if elements of this type support the operation.
    #[inline]
    pub const fn supports(self, dtype: DType) -> bool {
        self.kind().supports(dtype)
    }

    /// Returns the type in which elements of this type are stored during the reduction, in memory and on the wire.
    /// It is `f32` for means of `f16`, otherwise the type itself.
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
    /// Writes the name and the number, if there is one: `sum`, `pre_mul_sum(0.5)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PreMulSum(number) | Self::WeightedMean(number) => write!(f, "{}({number})", self.name()),
            _ => f.pad(self.name()),
        }
    }
}

/// The kind of a [`ReduceOp`], without this rank's number. All ranks of a call have the same kind.
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
    /// An operation of the user's own; see [`CustomOp`](crate::CustomOp).
    Custom,
}

impl ReduceKind {
    /// All kinds.
    pub const ALL: [Self; 11] = [
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
        Self::Custom,
    ];

    /// Returns the name in lower case.
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
            Self::Custom => "custom",
        }
    }

    /// Returns `true` if elements of this type support the operation. An operation of the user's own knows its own type
    /// of elements.
    pub const fn supports(self, dtype: DType) -> bool {
        match self {
            Self::Sum | Self::Product | Self::Custom => true,
            Self::Min | Self::Max => !dtype.is_complex(),
            Self::And | Self::Or | Self::Xor => !dtype.is_float() && !dtype.is_complex(),
            Self::Mean => dtype.is_float() || dtype.is_complex(),
            Self::PreMulSum | Self::WeightedMean => dtype.is_float(),
        }
    }

    /// Returns the elements that support the operation, for errors.
    pub(crate) const fn needs(self) -> &'static str {
        match self {
            Self::Min | Self::Max => "numbers that have an order",
            Self::And | Self::Or | Self::Xor => "integers",
            Self::Mean => "floating-point or complex numbers",
            Self::PreMulSum | Self::WeightedMean => "floating-point numbers",
            Self::Sum | Self::Product | Self::Custom => "other elements",
        }
    }

    /// Returns the type in which elements of this type are stored during the reduction, as
    /// [`ReduceOp::partial_dtype`] does.
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

/// The orders of reduction that a call may use. The order determines the last bits of a floating-point sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReductionOrder {
    /// Every element is reduced by the tree T(n) = T(largest power of two below n) + T(rest) over the ranks in
    /// order. The bits are the same for every size, algorithm and transport. Only if several different NaN are
    /// combined, the resulting NaN is not determined and may differ between ranks.
    #[default]
    Canonical,
    /// Any order that is the same in every run with the same number of ranks, size, algorithm and hosts of the
    /// ranks.
    Any,
}

impl ReductionOrder {
    /// All orders.
    pub const ALL: [Self; 2] = [Self::Canonical, Self::Any];

    /// Returns the name in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Canonical => "canonical",
            Self::Any => "any",
        }
    }

    /// Returns the order with this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|order| order.name() == name)
    }

    /// Returns the minimum promise of an algorithm for this order.
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

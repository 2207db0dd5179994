//! Losses of micro-batches and their weights.

/// The loss of one micro-batch.
///
/// | loss | reported gradients | divisor, applied once |
/// |---|---|---|
/// | `f32` | of this loss | the number of micro-batches of the step |
/// | `(f32, u64)` | of the sum of the losses of some tokens or samples | the sum of the weights: the number of all these tokens or samples |
///
/// Use the second form for micro-batches of different weight, for example texts of different lengths: means are then
/// over tokens. All micro-batches of a step have a loss of one type. The result of a rank's own computation counts
/// like a micro-batch, for example in a step of [`LocalSgd`](crate::local_sgd::LocalSgd). The divisor is rounded to the
/// type of the computation, so it is exact up to 2²⁴ for `f32`. The weights of one rank's micro-batches in a step are
/// capped at 2⁴⁶ together.
#[doc(alias = "token-normalised loss")]
pub trait Loss {
    /// `true` if micro-batches have a weight.
    const WEIGHTED: bool;

    /// Returns the loss and its weight.
    fn weighted(self) -> (f32, u64);
}

/// A loss and its weight.
pub(crate) type WeightedLoss = (f32, u64);

/// Returns a weight for a sum over ranks: at most 2⁴⁶, so that 2¹⁷ of them can be added.
pub(crate) fn to_be_summed(count: u64) -> i64 {
    i64::try_from(count.min(1 << 46)).expect("2⁴⁶ is an i64")
}

impl Loss for f32 {
    const WEIGHTED: bool = false;

    fn weighted(self) -> (f32, u64) {
        (self, 1)
    }
}

impl Loss for (f32, u64) {
    const WEIGHTED: bool = true;

    fn weighted(self) -> (f32, u64) {
        self
    }
}

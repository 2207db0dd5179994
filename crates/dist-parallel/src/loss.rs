//! What a micro-batch's loss is, and how much the micro-batch counts.

/// The loss of one micro-batch.
///
/// | loss | the gradients that are reported are those of | what is divided by, once |
/// |---|---|---|
/// | `f32` | this loss | the number of micro-batches of the step |
/// | `(f32, u64)` | the sum of the losses of some tokens or samples, and how many they are | the number of all of them |
///
/// The second is for micro-batches that count differently, as those of texts of different lengths: the means are then over
/// tokens. All micro-batches of a step are of one kind. What a rank computes by itself, as a step of
/// [`LocalSgd`](crate::LocalSgd) or of [`train_step`](crate::train_step), counts as a micro-batch does. Sums are divided by
/// their count as rounded to the type that is calculated in: exactly up to 2²⁴ for `f32`. A rank's micro-batches of a step
/// count at most 2⁴⁶ together; more is taken for that.
#[doc(alias = "token-normalised loss")]
pub trait Loss {
    /// Whether micro-batches say how much they count.
    const WEIGHTED: bool;

    /// The loss, and how much it counts.
    fn weighted(self) -> (f32, u64);
}

/// A loss, and how much it counts.
pub(crate) type WeightedLoss = (f32, u64);

/// A count as ranks add it up: no more than 2⁴⁶, so that 2¹⁷ of them have a sum.
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

//! Losses as candle computes them: tensors of one number, with or without a weight.

use candle_core::{DType, Tensor};
use dist_parallel::model::Ready;
use dist_parallel::{BoxError, Loss};

use crate::{CandleError, Variables};

/// The loss of one micro-batch, as candle computes it.
///
/// | loss | the gradients of a step are those of |
/// |---|---|
/// | `&loss` | the mean of the losses of all micro-batches of all ranks |
/// | `(&loss, weight)` | Σ weight · loss / Σ weight over all micro-batches of all ranks |
///
/// The weight is the number of samples or tokens that `loss` is the mean of, so that a short micro-batch counts less than a
/// full one. A micro-batch of weight 0 counts for nothing, even if its loss is NaN. The loss is multiplied by its weight
/// before the backward pass: for a loss of `f16`, the product must stay below 65,504.
///
/// All micro-batches of a step, on all ranks, either have a weight or have none. A rank's micro-batches of one step weigh at
/// most 2⁴⁶ together. The tensor has one element, of any shape and float type. It may be owned, too.
pub trait TensorLoss: sealed::Sealed {
    /// The form of this loss that training adds up.
    type Counted: Loss;

    /// The loss.
    #[doc(hidden)]
    fn tensor(&self) -> &Tensor;

    /// Returns the weight; `None` for a loss without one.
    #[doc(hidden)]
    fn weight(&self) -> Option<u64>;

    /// The value that gradients were computed of, and its weight.
    #[doc(hidden)]
    fn weighted(value: f32, weight: u64) -> Self::Counted;
}

mod sealed {
    #[allow(unnameable_types, reason = "that it cannot be named is what seals the trait")]
    pub trait Sealed {}
}

macro_rules! tensor_loss {
    ($($tensor:ty),*) => {$(
        impl sealed::Sealed for $tensor {}
        impl TensorLoss for $tensor {
            type Counted = f32;
            fn tensor(&self) -> &Tensor {
                self
            }
            fn weight(&self) -> Option<u64> {
                None
            }
            fn weighted(value: f32, _: u64) -> f32 {
                value
            }
        }
        impl sealed::Sealed for ($tensor, u64) {}
        impl TensorLoss for ($tensor, u64) {
            type Counted = (f32, u64);
            fn tensor(&self) -> &Tensor {
                &self.0
            }
            fn weight(&self) -> Option<u64> {
                Some(self.1)
            }
            fn weighted(value: f32, weight: u64) -> (f32, u64) {
                (value, weight)
            }
        }
    )*};
}

tensor_loss!(Tensor, &Tensor);

/// Computes the gradients of one micro-batch and gives them to `ready`. Returns the value of the loss times its weight, and
/// the weight.
pub(crate) fn backward<L: TensorLoss>(
    variables: &Variables,
    loss: &L,
    ready: &mut Ready<'_>,
) -> Result<L::Counted, BoxError> {
    let (tensor, weight) = (loss.tensor(), loss.weight());
    if tensor.elem_count() != 1 {
        return Err(CandleError::Loss { shape: tensor.shape().clone() }.into());
    }
    if weight == Some(0) {
        // Its gradients times zero would be NaN if it is: the mean over no tokens is.
        return Ok(L::weighted(0.0, 0));
    }
    let failed = |source| CandleError::Candle { place: "the loss".to_owned(), source };
    let weighted = match weight {
        None | Some(1) => tensor.clone(),
        Some(weight) => tensor.affine(weight as f64, 0.0).map_err(failed)?,
    };
    let mut gradients = weighted.backward().map_err(failed)?;
    variables.check_listed(&weighted, &gradients, std::iter::empty())?;
    variables.check_found(&gradients)?;
    let value = weighted.flatten_all().and_then(|loss| loss.get(0)?.to_dtype(DType::F32)?.to_scalar());
    let value = value.map_err(failed)?;
    drop(weighted);
    variables.report(&mut gradients, ready)?;
    Ok(L::weighted(value, weight.unwrap_or(1)))
}

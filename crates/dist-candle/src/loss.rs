//! Losses as tensors of one element, with or without a weight.

use candle_core::{DType, Tensor};
use dist_parallel::model::Ready;
use dist_parallel::{BoxError, Loss};

use crate::{CandleError, Variables};

/// The loss of one micro-batch: a tensor of one element, with or without a weight.
///
/// | loss | the gradients of a step are those of |
/// |---|---|
/// | `&loss` | the mean of the losses of all micro-batches of all ranks |
/// | `(&loss, weight)` | Σ weight · loss / Σ weight over all micro-batches of all ranks |
///
/// The weight is the number of samples or tokens over which `loss` is the mean. So a short micro-batch counts
/// less than a full one. A micro-batch of weight 0 is ignored, even if its loss is NaN. The loss is
/// multiplied by its weight before the backward pass: for a loss of `f16`, the product must stay below
/// 65,504.
///
/// In one step, either all micro-batches of all ranks have a weight or none has one. The weights of a rank's
/// micro-batches in one step sum to at most 2⁴⁶. The tensor has one element, in any shape and float type, and
/// can be passed by value or by reference.
pub trait TensorLoss: sealed::Sealed {
    /// The value that training sums over micro-batches.
    type Counted: Loss;

    /// Returns the loss tensor.
    #[doc(hidden)]
    fn tensor(&self) -> &Tensor;

    /// Returns the weight; `None` for a loss without one.
    #[doc(hidden)]
    fn weight(&self) -> Option<u64>;

    /// Returns the value and its weight in the form that training sums.
    #[doc(hidden)]
    fn weighted(value: f32, weight: u64) -> Self::Counted;
}

mod sealed {
    #[allow(unnameable_types, reason = "the trait is sealed because this type cannot be named")]
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

/// Computes the gradients of one micro-batch and passes them to `ready`. Returns the loss times its weight,
/// and the weight.
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
        // The mean over no tokens is NaN, and so would be its gradients times 0.
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

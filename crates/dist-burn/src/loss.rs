//! Losses as tensors of one element, with or without a weight.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use dist_parallel::{BoxError, Loss};

use crate::BurnError;

/// The loss of one micro-batch: a tensor of one element, with or without a weight.
///
/// | loss | the gradients of a step are those of |
/// |---|---|
/// | `loss` | the mean of the losses of all micro-batches of all ranks |
/// | `(loss, weight)` | Σ weight · loss / Σ weight over all micro-batches of all ranks |
///
/// The weight is the number of samples or tokens over which `loss` is the mean. So a short micro-batch counts less
/// than a full one. A micro-batch of weight 0 is ignored, even if its loss is NaN. The loss is multiplied by its
/// weight before the backward pass: for a loss of `f16`, the product must stay below 65,504.
///
/// In one step, either all micro-batches of all ranks have a weight or none has one. The weights of a rank's
/// micro-batches in one step sum to at most 2⁴⁶. The tensor has one element.
pub trait TensorLoss: sealed::Sealed {
    /// The value that training sums over micro-batches.
    type Counted: Loss;

    /// Returns the loss tensor.
    #[doc(hidden)]
    fn tensor(&self) -> &Tensor<1>;

    /// Returns the weight; `None` for a loss without one.
    #[doc(hidden)]
    fn weight(&self) -> Option<u64>;

    /// Returns the value and its weight in the form that training sums.
    #[doc(hidden)]
    fn weighted(value: f32, weight: u64) -> Self::Counted;
}

#[expect(unnameable_types, reason = "it seals the trait against other implementations")]
mod sealed {
    pub trait Sealed {}
}

impl sealed::Sealed for Tensor<1> {}
impl TensorLoss for Tensor<1> {
    type Counted = f32;

    fn tensor(&self) -> &Tensor<1> {
        self
    }

    fn weight(&self) -> Option<u64> {
        None
    }

    fn weighted(value: f32, _: u64) -> f32 {
        value
    }
}

impl sealed::Sealed for (Tensor<1>, u64) {}
impl TensorLoss for (Tensor<1>, u64) {
    type Counted = (f32, u64);

    fn tensor(&self) -> &Tensor<1> {
        &self.0
    }

    fn weight(&self) -> Option<u64> {
        Some(self.1)
    }

    fn weighted(value: f32, weight: u64) -> (f32, u64) {
        (value, weight)
    }
}

/// Computes the backward pass of a loss. Returns the loss times its weight, the weight, and the gradients of the
/// model's parameters.
pub(crate) fn backward<M: Module, L: TensorLoss>(
    loss: &L,
    model: &M,
) -> Result<(L::Counted, GradientsParams), BoxError> {
    let (tensor, weight) = (loss.tensor(), loss.weight());
    if tensor.dims() != [1] {
        return Err(BurnError::Loss { shape: tensor.dims().to_vec() }.into());
    }
    if weight == Some(0) {
        // The mean over no tokens is NaN, and so would be its gradients times 0.
        return Ok((L::weighted(0.0, 0), GradientsParams::new()));
    }
    if !tensor.is_tracked() {
        return Err(BurnError::Untracked.into());
    }
    let weighted = match weight {
        None | Some(1) => tensor.clone(),
        Some(weight) => tensor.clone() * weight,
    };
    let gradients = GradientsParams::from_grads(weighted.backward(), model);
    let value = weighted.inner().try_into_vec_as::<f32>()?;
    let value = value.first().copied().unwrap_or(f32::NAN);
    Ok((L::weighted(value, weight.unwrap_or(1)), gradients))
}

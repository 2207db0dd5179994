//! Losses as burn computes them: tensors of one number, with or without a weight.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use dist_parallel::{BoxError, Loss};

use crate::BurnError;

/// The loss of one micro-batch, as burn computes it.
///
/// | loss | the gradients of a step are those of |
/// |---|---|
/// | `loss` | the mean of the losses of all micro-batches of all ranks |
/// | `(loss, weight)` | Σ weight · loss / Σ weight over all micro-batches of all ranks |
///
/// The weight is the number of samples or tokens that `loss` is the mean of, so that a short micro-batch counts less than a
/// full one. A micro-batch of weight 0 counts for nothing, even if its loss is NaN. The loss is multiplied by its weight
/// before the backward pass: for a loss of `f16`, the product must stay below 65,504.
///
/// All micro-batches of a step, on all ranks, either have a weight or have none. A rank's micro-batches of one step weigh at
/// most 2⁴⁶ together. The tensor has one element.
pub trait TensorLoss: sealed::Sealed {
    /// The form of this loss that training adds up.
    type Counted: Loss;

    /// The loss.
    #[doc(hidden)]
    fn tensor(&self) -> &Tensor<1>;

    /// Returns the weight; `None` for a loss without one.
    #[doc(hidden)]
    fn weight(&self) -> Option<u64>;

    /// The value that gradients were computed of, and its weight.
    #[doc(hidden)]
    fn weighted(value: f32, weight: u64) -> Self::Counted;
}

#[expect(unnameable_types, reason = "it seals the trait: nobody else implements it")]
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

/// Goes backward from a loss. Returns its value times its weight, its weight, and the gradients of the model's parameters.
pub(crate) fn backward<M: Module, L: TensorLoss>(
    loss: &L,
    model: &M,
) -> Result<(L::Counted, GradientsParams), BoxError> {
    let (tensor, weight) = (loss.tensor(), loss.weight());
    if tensor.dims() != [1] {
        return Err(BurnError::Loss { shape: tensor.dims().to_vec() }.into());
    }
    if weight == Some(0) {
        // Its gradients times zero would be NaN if it is: the mean over no tokens is.
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

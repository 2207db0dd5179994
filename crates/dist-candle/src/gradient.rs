//! Backward passes that start from a given output gradient instead of a loss.

use std::collections::HashSet;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, TensorId, Var};

use crate::activations::Given;
use crate::{Activation, CandleError};

/// Computes the gradients of all tensors that `output` depends on, given the gradient of `output`, which has
/// its shape and type.
///
/// If `gradient` comes from the backward pass of a loss, the result has the bits of one backward pass from
/// that loss.
///
/// # Errors
/// If candle cannot compute the backward pass of an operation.
pub fn backward_from(output: &Tensor, gradient: Tensor) -> candle_core::Result<GradStore> {
    output.apply_op1(Seed(gradient))?.backward()
}

/// Returns a tensor whose backward pass starts at these tensors with these gradients. The pairs are (tensor,
/// gradient).
pub(crate) fn root(seeds: Vec<(Tensor, Tensor)>) -> candle_core::Result<Tensor> {
    let mut roots = seeds.into_iter().map(|(output, gradient)| output.apply_op1(Seed(gradient)));
    let first = roots.next().unwrap_or_else(|| Tensor::zeros((), DType::F32, &Device::Cpu))?;
    roots.try_fold(first, |sum, root| sum + root?)
}

/// Returns the value of `loss` for a model's output, and the gradient with respect to that output.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let output = Tensor::new(&[1f32, 2.0], &Device::Cpu)?;
/// let (loss, gradient) = dist_candle::loss_and_gradient(&output, |output| output.sqr()?.sum_all())?;
/// assert_eq!(loss, 5.0);
/// assert_eq!(gradient.to_vec1::<f32>()?, [2.0, 4.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The output may be a tuple or list of tensors: see [`Activation`].
///
/// # Errors
/// If `loss` fails, does not return a single number, or has no gradient. If it uses a variable, whose
/// gradient would be lost: parameters belong in blocks.
pub fn loss_and_gradient<A: Activation>(
    output: &A,
    loss: impl FnOnce(&A) -> candle_core::Result<Tensor>,
) -> Result<(f32, A), CandleError> {
    let failed = |source| CandleError::Candle { place: "the loss".to_owned(), source };
    let given = Given::all(output.clone()).map_err(failed)?;
    let loss = loss(&given.activation()?).map_err(failed)?;
    if loss.elem_count() != 1 {
        return Err(CandleError::Loss { shape: loss.shape().clone() });
    }
    let mut gradients = loss.backward().map_err(failed)?;
    if let Some(shape) = stray_variable(&loss, &gradients, given.vars()) {
        return Err(CandleError::UnlistedVariable { place: "the loss".to_owned(), shape });
    }
    let gradient = given.take_gradients("the loss", &mut gradients)?;
    let gradient = gradient.ok_or_else(|| CandleError::NoInputGradient { place: "the loss".to_owned() })?;
    let value = loss.flatten_all().and_then(|loss| loss.get(0)?.to_dtype(DType::F32)?.to_scalar());
    Ok((value.map_err(failed)?, gradient))
}

/// Returns the shape of a variable that is not in `own` and has a gradient after a backward pass from `from`,
/// if there is one.
///
/// The store of gradients alone cannot tell, because candle also leaves the gradients of constant operands in
/// it.
pub(crate) fn stray_variable<'a>(
    from: &Tensor,
    gradients: &GradStore,
    own: impl IntoIterator<Item = &'a Var>,
) -> Option<Shape> {
    let own: HashSet<TensorId> = own.into_iter().map(|var| var.id()).collect();
    let is_stray =
        |node: &&Tensor| node.is_variable() && !own.contains(&node.id()) && gradients.get(node).is_some();
    from.sorted_nodes().into_iter().find(is_stray).map(|stray| stray.shape().clone())
}

/// An operation from a tensor to the number 0 whose backward pass returns a given gradient. It is cheaper and
/// more exact than a backward pass from `(tensor * gradient).sum_all()`, which has the same purpose.
struct Seed(Tensor);

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

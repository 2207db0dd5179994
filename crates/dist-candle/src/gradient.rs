//! Backward passes that begin at a given gradient instead of at a loss.

use std::collections::HashSet;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, TensorId, Var};

use crate::activations::Given;
use crate::{Activation, CandleError};

/// The gradients of everything that `output` depends on, given the gradient of `output`.
///
/// The bits are those that a backward pass from the final loss gives, if that is where `gradient` comes from.
///
/// # Errors
/// If candle cannot go backward through an operation.
pub fn backward_from(output: &Tensor, gradient: Tensor) -> candle_core::Result<GradStore> {
    output.apply_op1(Seed(gradient))?.backward()
}

/// Returns a number whose backward pass begins at these tensors with these gradients.
pub(crate) fn root(seeds: Vec<(Tensor, Tensor)>) -> candle_core::Result<Tensor> {
    let mut roots = seeds.into_iter().map(|(output, gradient)| output.apply_op1(Seed(gradient)));
    let first = roots.next().unwrap_or_else(|| Tensor::zeros((), DType::F32, &Device::Cpu))?;
    roots.try_fold(first, |sum, root| sum + root?)
}

/// The value of `loss` for a model's output, and its gradient with respect to that output.
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
/// The output may be a tuple or list of tensors, as [`Activation`] says.
///
/// # Errors
/// If `loss` fails, does not give a single number, or has no gradient; or if it uses a variable, whose gradient
/// would be lost: parameters belong into blocks.
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

/// The shape of a variable that is not among `own` and has a gradient from a backward pass that began at `from`.
///
/// The store of gradients alone does not tell: candle also leaves those of constant operands in it.
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

/// A number that depends on a tensor with a given gradient: what a backward pass can begin from. Cheaper and more
/// exact than the sum of the products of tensor and gradient, which is another such number.
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

//! The computations that a [`Trainer`](super::Trainer) is given, without the types of the caller's closures.
//!
//! Methods of a trait object cannot be generic. The methods that users call are generic functions of
//! `dyn Trainer<A>`, which put closures and losses into these types.

use std::fmt;

use crate::{BoxError, Loss, Ready};

/// The micro-batches of a step: for each number, an input and the function that computes the loss and its gradient.
pub struct Batches<'a, A> {
    /// `true` if the losses have [weights](Loss). Otherwise each has weight 1.
    pub weighted: bool,
    /// Returns the micro-batch of a number.
    pub next: &'a mut BatchFn<'a, A>,
}

/// A function that returns the micro-batch with a number.
pub type BatchFn<'a, A> = dyn FnMut(usize) -> Result<(A, LossFn<'a, A>), BoxError> + 'a;

/// A function that computes the loss, its weight and its gradient from the model's output.
pub type LossFn<'a, A> = Box<dyn FnOnce(A) -> Result<((f32, u64), A), BoxError> + 'a>;

/// Calls `f` with micro-batches whose losses are boxed.
pub(crate) fn with_batches<A, C: Loss, L, T>(
    mut batch: impl FnMut(usize) -> Result<(A, L), BoxError>,
    f: impl FnOnce(Batches<'_, A>) -> T,
) -> T
where
    L: FnOnce(A) -> Result<(C, A), BoxError>,
{
    let mut next = |index| {
        let (input, loss) = batch(index)?;
        let weighted = move |output| loss(output).map(|(loss, gradient)| (loss.weighted(), gradient));
        Ok((input, Box::new(weighted) as LossFn<'_, A>))
    };
    f(Batches { weighted: C::WEIGHTED, next: &mut next })
}

/// The micro-batches of an evaluation.
pub struct Evaluation<'a, A> {
    /// `true` if the losses have [weights](Loss). Otherwise each has weight 1.
    pub weighted: bool,
    /// Returns the input of a micro-batch.
    pub input: &'a mut (dyn FnMut(usize) -> Result<A, BoxError> + 'a),
    /// Computes the loss of a micro-batch and its weight from the model's output.
    pub loss: &'a mut (dyn FnMut(usize, A) -> Result<(f32, u64), BoxError> + 'a),
}

/// A computation of gradients by the user's own code.
pub struct Computation<'a, M> {
    /// `true` if the losses have [weights](Loss). Otherwise each has weight 1.
    pub weighted: bool,
    /// Computes a micro-batch, reports its gradients, and returns the loss and its weight.
    pub compute: &'a mut ComputeFn<'a, M>,
}

/// A function that computes a micro-batch with the model, reports its gradients, and returns the loss and its
/// weight.
pub type ComputeFn<'a, M> = dyn FnMut(&mut M, usize, &mut Ready<'_>) -> Result<(f32, u64), BoxError> + 'a;

/// Calls `f` with an evaluation whose losses have their weights.
pub(crate) fn with_evaluation<A, C: Loss, T>(
    mut input: impl FnMut(usize) -> Result<A, BoxError>,
    mut loss: impl FnMut(usize, A) -> Result<C, BoxError>,
    f: impl FnOnce(Evaluation<'_, A>) -> T,
) -> T {
    let mut loss = |index, output| Ok(loss(index, output)?.weighted());
    f(Evaluation { weighted: C::WEIGHTED, input: &mut input, loss: &mut loss })
}

/// Calls `f` with a computation whose losses have their weights.
pub(crate) fn with_computation<M, C: Loss, T>(
    mut compute: impl FnMut(&mut M, usize, &mut Ready<'_>) -> Result<C, BoxError>,
    f: impl FnOnce(Computation<'_, M>) -> T,
) -> T {
    let mut compute =
        |model: &mut M, index, ready: &mut Ready<'_>| Ok(compute(model, index, ready)?.weighted());
    f(Computation { weighted: C::WEIGHTED, compute: &mut compute })
}

impl<A> fmt::Debug for Batches<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Batches(weighted: {})", self.weighted)
    }
}

impl<A> fmt::Debug for Evaluation<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Evaluation(weighted: {})", self.weighted)
    }
}

impl<M> fmt::Debug for Computation<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Computation(weighted: {})", self.weighted)
    }
}

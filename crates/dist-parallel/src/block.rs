//! Models as blocks that go forward and backward.

use std::any::Any;
use std::fmt;

use crate::{BoxError, Error, Params, Values};

/// Takes a parameter's gradient, by the parameter's index in [`Params::infos`].
pub type Ready<'a> = dyn FnMut(usize, Values<'_>) -> Result<(), BoxError> + 'a;

/// A part of a model, or all of it: forward from an activation to an activation, and backward.
///
/// A block must not change its parameters. State that a forward changes is declared as a
/// [buffer](crate::ParamInfo::buffer), and then it is kept, saved and synchronised under every strategy.
///
/// Several forwards may come before their backwards, in any order: what a backward needs is in its [`Saved`].
pub trait Block<A>: Params {
    /// The output for `input`, and what [`backward`](Block::backward) will need.
    ///
    /// # Errors
    /// If the computation fails.
    fn forward(&mut self, input: A) -> Result<(A, Saved), BoxError>;

    /// Computes the gradients for one forward, given the gradient of its output.
    ///
    /// Each parameter's gradient goes to `ready` at most once, as soon as it is final: from then on it can
    /// travel while the rest is computed. A parameter that the forward did not use need not be reported, and
    /// neither need one that is not trainable, whose gradient is ignored.
    ///
    /// Returns the gradient of the input, or `None` if the input has none, as token numbers have none.
    ///
    /// # Errors
    /// If the computation fails, or `ready` does.
    fn backward(
        &mut self,
        saved: Saved,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<Option<A>, BoxError>;

    /// The first half of a backward: the gradient of the input, and what [`weight_gradient`](Self::weight_gradient)
    /// needs to compute the gradients of the parameters later. Both halves report to their `ready`, each parameter's
    /// gradient once.
    ///
    /// Zero-bubble pipeline schedules fill bubbles with second halves. By default everything is computed in the first,
    /// which is correct and fills nothing.
    ///
    /// # Errors
    /// If the computation fails, or `ready` does.
    fn input_gradient(
        &mut self,
        saved: Saved,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<(Option<A>, Saved), BoxError> {
        Ok((self.backward(saved, output_gradient, ready)?, Saved::new(())))
    }

    /// The second half of a backward.
    ///
    /// # Errors
    /// As for [`input_gradient`](Self::input_gradient).
    fn weight_gradient(&mut self, saved: Saved, ready: &mut Ready<'_>) -> Result<(), BoxError> {
        let _ = ready;
        Ok(saved.take::<()>()?)
    }
}

impl<A, B: Block<A> + ?Sized> Block<A> for Box<B> {
    fn forward(&mut self, input: A) -> Result<(A, Saved), BoxError> {
        (**self).forward(input)
    }

    fn backward(
        &mut self,
        saved: Saved,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<Option<A>, BoxError> {
        (**self).backward(saved, output_gradient, ready)
    }

    fn input_gradient(
        &mut self,
        saved: Saved,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<(Option<A>, Saved), BoxError> {
        (**self).input_gradient(saved, output_gradient, ready)
    }

    fn weight_gradient(&mut self, saved: Saved, ready: &mut Ready<'_>) -> Result<(), BoxError> {
        (**self).weight_gradient(saved, ready)
    }
}

/// What one forward keeps for its backward; only the block that made it knows what it is.
pub struct Saved(Box<dyn Any + Send>);

impl Saved {
    /// Keeps `value`.
    pub fn new<T: Any + Send>(value: T) -> Self {
        Self(Box::new(value))
    }

    /// Gives back what was kept.
    ///
    /// # Errors
    /// If something of another type was kept: this comes from another block.
    pub fn take<T: Any + Send>(self) -> Result<T, Error> {
        self.0.downcast().map(|value| *value).map_err(|_| Error::ForeignSaved)
    }
}

impl fmt::Debug for Saved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Saved")
    }
}

//! Models as blocks with a forward and a backward.

use std::any::Any;
use std::fmt;

use crate::{BoxError, Error, Params, Values};

/// A callback for the gradient of a parameter, by the parameter's index in [`Params::infos`].
pub type Ready<'a> = dyn FnMut(usize, Values<'_>) -> Result<(), BoxError> + 'a;

/// A model or a part of it, with a forward and a backward between activations.
///
/// A block must not change its parameters. Declare state that a forward changes as a
/// [buffer](crate::ParamInfo::buffer). It is then stored, saved and synchronised under every strategy.
///
/// Several forwards can run before their backwards, in any order. The data that a backward needs is in its [`Saved`].
pub trait Block<A>: Params {
    /// Returns the output for `input`, and the data that [`backward`](Block::backward) needs.
    ///
    /// # Errors
    /// The computation fails.
    fn forward(&mut self, input: A) -> Result<(A, Saved), BoxError>;

    /// Computes the gradients of one forward, given the gradient of its output.
    ///
    /// Reports each parameter's gradient to `ready` at most once, as soon as it is final. Its reduction can then
    /// overlap with the rest of the backward. A parameter that the forward did not use need not be reported. The
    /// gradient of a frozen parameter is ignored.
    ///
    /// Returns the gradient of the input, or `None` if the input has none, for example token numbers.
    ///
    /// # Errors
    /// The computation or `ready` fails.
    fn backward(
        &mut self,
        saved: Saved,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<Option<A>, BoxError>;

    /// Computes the first half of a backward: the gradient of the input. Also returns the data that
    /// [`weight_gradient`](Self::weight_gradient) needs to compute the gradients of the parameters later. Both halves
    /// can report to `ready`, each parameter once.
    ///
    /// Zero-bubble pipeline schedules run second halves in bubbles. The provided method computes everything in the
    /// first half, which is correct and fills no bubble.
    ///
    /// # Errors
    /// The computation or `ready` fails.
    fn input_gradient(
        &mut self,
        saved: Saved,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<(Option<A>, Saved), BoxError> {
        Ok((self.backward(saved, output_gradient, ready)?, Saved::new(())))
    }

    /// Computes the second half of a backward: the gradients of the parameters.
    ///
    /// # Errors
    /// The errors of [`input_gradient`](Self::input_gradient).
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

/// The data that one forward saves for its backward. Only its block knows the type.
pub struct Saved(Box<dyn Any + Send>);

impl Saved {
    /// Saves `value`.
    pub fn new<T: Any + Send>(value: T) -> Self {
        Self(Box::new(value))
    }

    /// Returns the saved value.
    ///
    /// # Errors
    /// The value has another type: another block has saved it.
    pub fn take<T: Any + Send>(self) -> Result<T, Error> {
        self.0.downcast().map(|value| *value).map_err(|_| Error::ForeignSaved)
    }
}

impl fmt::Debug for Saved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Saved")
    }
}

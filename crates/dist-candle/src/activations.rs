//! Tensors that travel between the stages of a pipeline.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use dist_parallel::pipeline::Activations;
use dist_parallel::{BoxError, FloatType, Values};

use crate::array::Array;
use crate::{CandleError, packed, slices};

/// The activation between two blocks: one tensor, a tuple of two to four, or a list.
///
/// A tensor of integers, such as token numbers, positions or a mask, has no gradient. In the gradient of a
/// tuple or list, an empty tensor of the same type stands in its place. If the loss does not depend on a
/// tensor of floats in a tuple or list, the gradient of that tensor is zeros.
pub trait Activation: sealed::Sealed + Sized + Send + 'static {
    /// Returns the tensors, in order.
    fn into_tensors(self) -> Vec<Tensor>;

    /// Returns the activation of these tensors.
    ///
    /// # Errors
    /// [`TensorCount`](CandleError::TensorCount) if there are too few or too many.
    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self, CandleError>;
}

mod sealed {
    #[allow(unnameable_types, reason = "the trait is sealed because this type cannot be named")]
    pub trait Sealed: Clone {}
}

impl sealed::Sealed for Vec<Tensor> {}

impl Activation for Vec<Tensor> {
    fn into_tensors(self) -> Vec<Tensor> {
        self
    }

    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self, CandleError> {
        Ok(tensors)
    }
}

macro_rules! activations {
    ($($count:literal: $tuple:ty),*) => {$(
        impl sealed::Sealed for $tuple {}

        impl Activation for $tuple {
            fn into_tensors(self) -> Vec<Tensor> {
                <[Tensor; $count]>::from(self).into()
            }

            fn from_tensors(tensors: Vec<Tensor>) -> Result<Self, CandleError> {
                let wrong = |tensors: Vec<Tensor>| CandleError::TensorCount { expected: $count, got: tensors.len() };
                Ok(<[Tensor; $count]>::try_from(tensors).map_err(wrong)?.into())
            }
        }
    )*};
}

impl sealed::Sealed for Tensor {}

impl Activation for Tensor {
    fn into_tensors(self) -> Vec<Tensor> {
        vec![self]
    }

    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self, CandleError> {
        let wrong = |tensors: Vec<Self>| CandleError::TensorCount { expected: 1, got: tensors.len() };
        <[Self; 1]>::try_from(tensors).map(|[tensor]| tensor).map_err(wrong)
    }
}

/// Implements [`Activations`] for activations of several tensors, which travel as one [packed](packed::pack)
/// message.
macro_rules! packed {
    ($($activation:ty),*) => {$(
        impl Activations<$activation> for Tensors {
            fn to_flat(
                &self,
                activation: &$activation,
                f: &mut dyn FnMut(&[usize], Values<'_>),
            ) -> Result<(), BoxError> {
                let words = packed::pack(&activation.clone().into_tensors())?;
                f(&[words.len()], Values::F32(&words));
                Ok(())
            }

            fn unflatten(&self, _: &[usize], values: Values<'_>) -> Result<$activation, BoxError> {
                let Values::F32(words) = values else { return Err(CandleError::Message.into()) };
                Ok(<$activation>::from_tensors(packed::unpack(words)?)?)
            }

            fn gradients_have_the_same_shape(&self) -> bool {
                false
            }

            fn to_flat_as(
                &self,
                activation: &$activation,
                dtype: FloatType,
                f: &mut dyn FnMut(&[usize], Values<'_>),
            ) -> Result<(), BoxError> {
                self.to_flat(&self.cast(activation.clone(), dtype)?, f)
            }

            fn cast(&self, activation: $activation, dtype: FloatType) -> Result<$activation, BoxError> {
                cast(activation, dtype)
            }
        }
    )*};
}

packed!(Vec<Tensor>, (Tensor, Tensor), (Tensor, Tensor, Tensor), (Tensor, Tensor, Tensor, Tensor));

activations!(2: (Tensor, Tensor), 3: (Tensor, Tensor, Tensor), 4: (Tensor, Tensor, Tensor, Tensor));

/// The input tensors of a forward pass. Tensors of floats are wrapped in variables, because candle computes
/// gradients only for variables.
pub(crate) struct Given(Vec<GivenTensor>);

enum GivenTensor {
    Float(Var),
    Integer(Tensor),
}

impl Given {
    pub(crate) fn all(activation: impl Activation) -> candle_core::Result<Self> {
        activation.into_tensors().into_iter().map(GivenTensor::new).collect::<Result<_, _>>().map(Self)
    }

    pub(crate) fn activation<A: Activation>(&self) -> Result<A, CandleError> {
        let tensors = self.0.iter().map(|given| match given {
            GivenTensor::Float(var) => var.as_tensor().clone(),
            GivenTensor::Integer(tensor) => tensor.clone(),
        });
        A::from_tensors(tensors.collect())
    }

    pub(crate) fn vars(&self) -> impl Iterator<Item = &Var> {
        self.0.iter().filter_map(|given| match given {
            GivenTensor::Float(var) => Some(var),
            GivenTensor::Integer(_) => None,
        })
    }

    /// Removes the gradients of all tensors from `gradients` and returns them. Returns `None` if no tensor is
    /// of floats.
    ///
    /// # Errors
    /// [`NoInputGradient`](CandleError::NoInputGradient) if there are tensors of floats and none of them has
    /// a gradient.
    pub(crate) fn take_gradients<A: Activation>(
        &self,
        place: &str,
        gradients: &mut GradStore,
    ) -> Result<Option<A>, CandleError> {
        if self.vars().next().is_none() {
            return Ok(None);
        }
        if self.vars().all(|var| gradients.get(var).is_none()) {
            return Err(CandleError::NoInputGradient { place: place.to_owned() });
        }
        let take = |given: &GivenTensor| match given {
            GivenTensor::Float(var) => gradients.remove(var).map_or_else(|| var.zeros_like(), Ok),
            GivenTensor::Integer(tensor) => Tensor::zeros(0, tensor.dtype(), tensor.device()),
        };
        let taken = self.0.iter().map(take).collect::<candle_core::Result<Vec<_>>>();
        let failed = |source| CandleError::Candle { place: place.to_owned(), source };
        A::from_tensors(taken.map_err(failed)?).map(Some)
    }
}

impl GivenTensor {
    fn new(tensor: Tensor) -> candle_core::Result<Self> {
        if tensor.dtype().is_float() {
            return Ok(Self::Float(Var::from_tensor(&tensor.detach())?));
        }
        Ok(Self::Integer(tensor))
    }
}

/// A codec that sends activations from stage to stage of a pipeline: tensors of floats of any shape, or
/// tuples and lists of tensors.
///
/// A tuple or list is one message. Its tensors can have different types, integers too. The gradient's message
/// has no values for integer tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tensors;

impl Activations<Tensor> for Tensors {
    fn to_flat(&self, activation: &Tensor, f: &mut dyn FnMut(&[usize], Values<'_>)) -> Result<(), BoxError> {
        let contiguous = activation.contiguous()?;
        Ok(slices::read("an activation", &contiguous, |values| f(activation.dims(), values))?)
    }

    fn unflatten(&self, shape: &[usize], values: Values<'_>) -> Result<Tensor, BoxError> {
        Ok(Array::copy_of(values).into_tensor(shape)?)
    }

    fn cast(&self, activation: Tensor, dtype: FloatType) -> Result<Tensor, BoxError> {
        cast(activation, dtype)
    }
}

/// Returns an activation whose tensors of floats have a type.
fn cast<A: Activation>(activation: A, dtype: FloatType) -> Result<A, BoxError> {
    let dtype = slices::candle_type(dtype);
    let tensors = activation.into_tensors().into_iter();
    let cast = |tensor: Tensor| if tensor.dtype().is_float() { tensor.to_dtype(dtype) } else { Ok(tensor) };
    Ok(A::from_tensors(tensors.map(cast).collect::<Result<_, _>>()?)?)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn a_tensor_is_put_together_as_it_was() {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let tensor = Tensor::arange(0_f32, 6.0, &Device::Cpu).unwrap().reshape((1, 2, 3)).unwrap();
            // Not contiguous.
            let tensor = tensor.transpose(1, 2).unwrap().to_dtype(dtype).unwrap();
            let mut again: Option<Tensor> = None;
            let mut unflatten = |shape: &[usize], values: Values<'_>| {
                again = Some(Tensors.unflatten(shape, values).unwrap());
            };
            Tensors.to_flat(&tensor, &mut unflatten).unwrap();
            let (again, numbers) = (again.unwrap(), |tensor: &Tensor| {
                tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
            });
            assert_eq!((again.dims(), again.dtype()), (tensor.dims(), dtype));
            assert_eq!(numbers(&again), numbers(&tensor));
        }
    }

    #[test]
    fn token_numbers_are_no_activations() {
        let tokens = Tensor::zeros(2, DType::U32, &Device::Cpu).unwrap();
        assert!(Tensors.to_flat(&tokens, &mut |_, _| panic!("these are no floats")).is_err());
    }
}

//! Tensors that travel between the stages of a pipeline.

use candle_core::Tensor;
use dist_parallel::pipeline::Activations;
use dist_parallel::{BoxError, Values};

use crate::array::Array;
use crate::slices;

/// Sends tensors of floats, of any shape, from stage to stage.
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
            let mut again = None;
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

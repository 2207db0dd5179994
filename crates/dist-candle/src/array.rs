//! An owned array of floats of any type.

use candle_core::{Device, Tensor};
use dist_parallel::half::{bf16, f16};
use dist_parallel::{Values, ValuesMut};

/// An owned array of floats of a type that parameters can have.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Array {
    F32(Vec<f32>),
    F64(Vec<f64>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Array {
    pub(crate) fn copy_of(values: Values<'_>) -> Self {
        match values {
            Values::F32(values) => Self::F32(values.to_vec()),
            Values::F64(values) => Self::F64(values.to_vec()),
            Values::F16(values) => Self::F16(values.to_vec()),
            Values::Bf16(values) => Self::Bf16(values.to_vec()),
        }
    }

    pub(crate) fn values_mut(&mut self) -> ValuesMut<'_> {
        match self {
            Self::F32(values) => ValuesMut::F32(values),
            Self::F64(values) => ValuesMut::F64(values),
            Self::F16(values) => ValuesMut::F16(values),
            Self::Bf16(values) => ValuesMut::Bf16(values),
        }
    }

    /// Returns a tensor of this shape that takes over this memory.
    pub(crate) fn into_tensor(self, shape: &[usize]) -> candle_core::Result<Tensor> {
        let device = &Device::Cpu;
        match self {
            Self::F32(values) => Tensor::from_vec(values, shape, device),
            Self::F64(values) => Tensor::from_vec(values, shape, device),
            Self::F16(values) => Tensor::from_vec(values, shape, device),
            Self::Bf16(values) => Tensor::from_vec(values, shape, device),
        }
    }
}

//! The conversion of activations to messages.

use std::fmt;
use std::sync::Arc;

use half::{bf16, f16};

use crate::{BoxError, FloatType, Values, ValuesMut, cast};

/// A codec that converts activations to flat values and back, to send them between stages.
///
/// Gradients of activations have the same type `A` and are sent in the same way.
pub trait Activations<A>: Send + Sync {
    /// Calls `f` once with the shape of an activation and its values in row-major order.
    ///
    /// # Errors
    /// The values are not accessible.
    fn to_flat(&self, activation: &A, f: &mut dyn FnMut(&[usize], Values<'_>)) -> Result<(), BoxError>;

    /// Returns the activation with this shape and these values.
    ///
    /// # Errors
    /// There is no such activation.
    fn unflatten(&self, shape: &[usize], values: Values<'_>) -> Result<A, BoxError>;

    /// Returns `true` if the gradient of an activation has the activation's shape and type, as it has by default. If
    /// `false`, the shape and type of a link's gradients are sent once, before the first of them.
    fn gradients_have_the_same_shape(&self) -> bool {
        true
    }

    /// Calls `f` like [`to_flat`](Self::to_flat), with values that are rounded to a type, for a training with
    /// [activations of that type](crate::Sequence::with_activations). The provided method rounds all values. A codec whose
    /// values are not the activation's numbers, or that has several tensors, has another.
    ///
    /// # Errors
    /// The values are not accessible.
    fn to_flat_as(
        &self,
        activation: &A,
        dtype: FloatType,
        f: &mut dyn FnMut(&[usize], Values<'_>),
    ) -> Result<(), BoxError> {
        self.to_flat(activation, &mut |shape, values| {
            cast::with_type(values, dtype, |values| f(shape, values))
        })
    }

    /// Returns an activation, or the gradient of one, whose values are rounded to a type. It has that type, unless `A` has
    /// one of its own. The provided method calls [`to_flat_as`](Self::to_flat_as) and [`unflatten`](Self::unflatten).
    ///
    /// # Errors
    /// The values are not accessible, or `A` has no such values.
    fn cast(&self, activation: A, dtype: FloatType) -> Result<A, BoxError> {
        let mut cast = None;
        self.to_flat_as(&activation, dtype, &mut |shape, values| cast = Some(self.unflatten(shape, values)))?;
        cast.unwrap_or(Ok(activation))
    }
}

impl<A, C: Activations<A> + ?Sized> Activations<A> for Arc<C> {
    fn to_flat(&self, activation: &A, f: &mut dyn FnMut(&[usize], Values<'_>)) -> Result<(), BoxError> {
        (**self).to_flat(activation, f)
    }

    fn unflatten(&self, shape: &[usize], values: Values<'_>) -> Result<A, BoxError> {
        (**self).unflatten(shape, values)
    }

    fn gradients_have_the_same_shape(&self) -> bool {
        (**self).gradients_have_the_same_shape()
    }

    fn to_flat_as(
        &self,
        activation: &A,
        dtype: FloatType,
        f: &mut dyn FnMut(&[usize], Values<'_>),
    ) -> Result<(), BoxError> {
        (**self).to_flat_as(activation, dtype, f)
    }

    fn cast(&self, activation: A, dtype: FloatType) -> Result<A, BoxError> {
        (**self).cast(activation, dtype)
    }
}

/// Activations that are vectors of one type of number. Values of another type are converted to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PlainVectors;

macro_rules! plain_vector {
    ($($variant:ident: $element:ty),*) => {$(
        impl Activations<Vec<$element>> for PlainVectors {
            fn to_flat(
                &self,
                activation: &Vec<$element>,
                f: &mut dyn FnMut(&[usize], Values<'_>),
            ) -> Result<(), BoxError> {
                f(&[activation.len()], Values::$variant(activation));
                Ok(())
            }

            fn unflatten(&self, _: &[usize], values: Values<'_>) -> Result<Vec<$element>, BoxError> {
                let mut converted = vec![<$element as Default>::default(); values.len()];
                ValuesMut::$variant(&mut converted).convert_from(values);
                Ok(converted)
            }

            fn cast(&self, mut activation: Vec<$element>, dtype: FloatType) -> Result<Vec<$element>, BoxError> {
                ValuesMut::$variant(&mut activation).round_to(dtype);
                Ok(activation)
            }
        }
    )*};
}

plain_vector!(F32: f32, F64: f64, F16: f16, Bf16: bf16);

/// The shape and type of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TensorMeta {
    /// The type of its values.
    pub dtype: FloatType,
    /// Its shape.
    pub shape: Vec<usize>,
}

impl TensorMeta {
    /// Returns the number of values. `None` if they would not fit into memory.
    pub(super) fn len(&self) -> Option<usize> {
        let len = self.shape.iter().try_fold(1_usize, |len, &dim| len.checked_mul(dim))?;
        len.checked_mul(self.dtype.size()).filter(|&bytes| bytes <= isize::MAX.unsigned_abs())?;
        Some(len)
    }

    /// Encodes the metadata in a fixed number of integers. `None` if there are too many dims.
    pub(super) fn encode(&self) -> Option<Vec<u64>> {
        let mut header = vec![0; HEADER_LEN];
        header[0] = DTYPES.iter().position(|dtype| *dtype == self.dtype)? as u64;
        header[1] = self.shape.len() as u64;
        header
            .get_mut(2..2 + self.shape.len())?
            .iter_mut()
            .zip(&self.shape)
            .for_each(|(to, &dim)| *to = dim as u64);
        Some(header)
    }

    /// Decodes the result of [`encode`](Self::encode).
    pub(super) fn decode(header: &[u64]) -> Option<Self> {
        let number = |index: usize| usize::try_from(*header.get(index)?).ok();
        let dtype = *DTYPES.get(number(0)?)?;
        let dims = 0..number(1)?.min(header.len());
        let meta = Self { dtype, shape: dims.map(|dim| number(2 + dim)).collect::<Option<_>>()? };
        meta.len().map(|_| meta)
    }
}

impl fmt::Display for TensorMeta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}", self.shape, self.dtype)
    }
}

const DTYPES: [FloatType; 4] = [FloatType::F32, FloatType::F64, FloatType::F16, FloatType::Bf16];

/// The largest number of dims of an activation that is sent.
pub(super) const DIMS_MAX: usize = 8;
/// The length of an encoding: the type, the number of dims, and the dims.
pub(super) const HEADER_LEN: usize = 2 + DIMS_MAX;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_metadata_is_decoded_and_nonsense_is_refused() {
        for dtype in DTYPES {
            for dims in 0..=DIMS_MAX {
                let meta = TensorMeta { dtype, shape: (0..dims).map(|dim| 3 * dim).collect() };
                assert_eq!(TensorMeta::decode(&meta.encode().unwrap()), Some(meta));
            }
        }
        assert_eq!(TensorMeta { dtype: FloatType::F32, shape: vec![1; 9] }.encode(), None);
        for nonsense in [&[4_u64, 0][..], &[0, 9], &[0, 2, u64::MAX, 2], &[0], &[]] {
            assert_eq!(TensorMeta::decode(nonsense), None, "{nonsense:?}");
        }
    }
}

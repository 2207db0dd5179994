//! Conversions between burn's tensor data and slices.

use std::ops::RangeInclusive;

use burn::tensor::{DType, DataError, TensorData};
use dist_parallel::half::{bf16, f16};
use dist_parallel::{FloatType, Values, ValuesMut};

use crate::BurnError;

/// Returns the type of a float tensor, if it can be trained.
pub(crate) fn float_type(name: &str, dtype: DType) -> Result<FloatType, BurnError> {
    match dtype {
        DType::F32 => Ok(FloatType::F32),
        DType::F64 => Ok(FloatType::F64),
        DType::F16 => Ok(FloatType::F16),
        DType::BF16 => Ok(FloatType::Bf16),
        _ => Err(BurnError::Type { name: name.to_owned(), dtype }),
    }
}

/// Returns the values of a float tensor.
pub(crate) fn values<'a>(name: &str, data: &'a TensorData) -> Result<Values<'a>, BurnError> {
    let failed = unread(name);
    Ok(match float_type(name, data.dtype())? {
        FloatType::F32 => Values::F32(data.as_slice().map_err(failed)?),
        FloatType::F64 => Values::F64(data.as_slice().map_err(failed)?),
        FloatType::F16 => Values::F16(data.as_slice().map_err(failed)?),
        FloatType::Bf16 => Values::Bf16(data.as_slice().map_err(failed)?),
    })
}

/// Returns the values of a float tensor, to be changed.
pub(crate) fn values_mut<'a>(name: &str, data: &'a mut TensorData) -> Result<ValuesMut<'a>, BurnError> {
    let failed = unread(name);
    Ok(match float_type(name, data.dtype())? {
        FloatType::F32 => ValuesMut::F32(data.as_mut_slice().map_err(failed)?),
        FloatType::F64 => ValuesMut::F64(data.as_mut_slice().map_err(failed)?),
        FloatType::F16 => ValuesMut::F16(data.as_mut_slice().map_err(failed)?),
        FloatType::Bf16 => ValuesMut::Bf16(data.as_mut_slice().map_err(failed)?),
    })
}

/// Copies values into burn's tensor data.
pub(crate) fn data(values: Values<'_>, shape: &[usize]) -> TensorData {
    match values {
        Values::F32(values) => TensorData::new::<f32, _>(values.to_vec(), shape),
        Values::F64(values) => TensorData::new::<f64, _>(values.to_vec(), shape),
        Values::F16(values) => TensorData::new::<f16, _>(values.to_vec(), shape),
        Values::Bf16(values) => TensorData::new::<bf16, _>(values.to_vec(), shape),
    }
}

/// Converts integers or booleans to `f64`, if that is exact.
pub(crate) fn exact(name: &str, data: &TensorData) -> Result<TensorData, BurnError> {
    let floats = data.clone().try_cast_as::<f64>().map_err(unread(name))?;
    let again = back(name, &floats, data.dtype())?;
    if again == *data { Ok(floats) } else { Err(BurnError::Inexact { name: name.to_owned() }) }
}

/// Converts `f64` back to integers or booleans of this type.
pub(crate) fn back(name: &str, floats: &TensorData, dtype: DType) -> Result<TensorData, BurnError> {
    let values = floats.as_slice::<f64>().map_err(unread(name))?;
    let range = range(dtype);
    // burn would panic if a number did not fit.
    if !values.iter().all(|value| value.fract() == 0.0 && range.contains(value)) {
        return Err(BurnError::Inexact { name: name.to_owned() });
    }
    floats.clone().try_cast(dtype).map_err(unread(name))
}

/// Returns the range of values of an integer or boolean type, limited to integers that `f64` represents exactly.
fn range(dtype: DType) -> RangeInclusive<f64> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match dtype {
        DType::Bool(_) => 0.0..=1.0,
        DType::I8 => i8::MIN.into()..=i8::MAX.into(),
        DType::I16 => i16::MIN.into()..=i16::MAX.into(),
        DType::I32 => i32::MIN.into()..=i32::MAX.into(),
        DType::U8 => 0.0..=u8::MAX.into(),
        DType::U16 => 0.0..=u16::MAX.into(),
        DType::U32 => 0.0..=u32::MAX.into(),
        DType::U64 => 0.0..=EXACT,
        _ => -EXACT..=EXACT,
    }
}

fn unread(name: &str) -> impl Fn(DataError) -> BurnError + Copy {
    move |source| BurnError::Unread { name: name.to_owned(), source: source.into() }
}

//! Integer variables, which are sent between ranks and saved as `f64`.

use std::cell::RefCell;

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Storage, Tensor, Var};
use dist_parallel::FloatType;

use crate::CandleError;
use crate::slices::{NOT_IN_MEMORY, SCATTERED, no_slice};

/// The type as which integers are sent and saved.
pub(crate) const CARRIED: FloatType = FloatType::F64;

/// Returns `true` for integer types that buffers can have.
pub(crate) const fn are_carried(dtype: DType) -> bool {
    matches!(dtype, DType::U8 | DType::U32 | DType::I16 | DType::I32 | DType::I64)
}

/// Returns the values of an integer variable.
///
/// # Errors
/// If a value is outside ±2⁵³, where `f64` does not represent every integer.
pub(crate) fn read(name: &str, tensor: &Tensor) -> Result<Vec<f64>, CandleError> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { return Err(no_slice(name, NOT_IN_MEMORY)) };
    let (start, end) = layout.contiguous_offsets().ok_or_else(|| no_slice(name, SCATTERED))?;
    match storage {
        CpuStorage::U8(all) => Ok(all[start..end].iter().map(|&value| value.into()).collect()),
        CpuStorage::U32(all) => Ok(all[start..end].iter().map(|&value| value.into()).collect()),
        CpuStorage::I16(all) => Ok(all[start..end].iter().map(|&value| value.into()).collect()),
        CpuStorage::I32(all) => Ok(all[start..end].iter().map(|&value| value.into()).collect()),
        CpuStorage::I64(all) => all[start..end].iter().map(|&value| exact(name, value)).collect(),
        _ => Err(CandleError::Type { name: name.to_owned(), dtype: tensor.dtype() }),
    }
}

fn exact(name: &str, value: i64) -> Result<f64, CandleError> {
    if value.unsigned_abs() <= 1 << f64::MANTISSA_DIGITS {
        return Ok(value as f64);
    }
    Err(CandleError::Integer { name: name.to_owned(), value: value as f64, dtype: DType::I64 })
}

/// Overwrites an integer variable with these values, each rounded to the nearest integer, ties to even.
///
/// # Errors
/// If a value does not fit the variable's type. Then nothing is changed.
pub(crate) fn write(name: &str, var: &Var, values: &[f64]) -> Result<(), CandleError> {
    let write = WriteIntegers { name, dtype: var.dtype(), values, refused: RefCell::new(None) };
    let result = var.inplace_op1(&write);
    if let Some(refused) = write.refused.into_inner() {
        return Err(refused);
    }
    let place = || format!("writing {name}");
    result.map_err(|source| CandleError::Candle { place: place(), source })
}

struct WriteIntegers<'a> {
    name: &'a str,
    dtype: DType,
    values: &'a [f64],
    /// The error of `write`, because an operation of candle can only return candle's own errors.
    refused: RefCell<Option<CandleError>>,
}

impl WriteIntegers<'_> {
    fn values<T: TryFrom<i64>>(&self) -> Result<Vec<T>, CandleError> {
        let converted = |&value: &f64| {
            let rounded = value.round_ties_even();
            let is_exact = rounded.abs() <= (1_u64 << f64::MANTISSA_DIGITS) as f64;
            #[expect(clippy::cast_possible_truncation, reason = "an integer of at most 53 bits fits")]
            let integer = is_exact.then_some(rounded as i64);
            integer.and_then(|integer| T::try_from(integer).ok()).ok_or_else(|| CandleError::Integer {
                name: self.name.to_owned(),
                value,
                dtype: self.dtype,
            })
        };
        self.values.iter().map(converted).collect()
    }

    fn write(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<(), CandleError> {
        let (start, end) = layout.contiguous_offsets().ok_or_else(|| no_slice(self.name, SCATTERED))?;
        match storage {
            CpuStorage::U8(all) => all[start..end].copy_from_slice(&self.values()?),
            CpuStorage::U32(all) => all[start..end].copy_from_slice(&self.values()?),
            CpuStorage::I16(all) => all[start..end].copy_from_slice(&self.values()?),
            CpuStorage::I32(all) => all[start..end].copy_from_slice(&self.values()?),
            CpuStorage::I64(all) => all[start..end].copy_from_slice(&self.values()?),
            _ => return Err(CandleError::Type { name: self.name.to_owned(), dtype: self.dtype }),
        }
        Ok(())
    }
}

impl InplaceOp1 for WriteIntegers<'_> {
    fn name(&self) -> &'static str {
        "write integers"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        if let Err(error) = self.write(storage, layout) {
            *self.refused.borrow_mut() = Some(error);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn variable(dtype: DType, values: &[i64]) -> Var {
        let values = Tensor::new(values, &Device::Cpu).unwrap();
        Var::from_tensor(&values.to_dtype(dtype).unwrap()).unwrap()
    }

    #[test]
    fn integers_of_every_type_are_read_and_written_exactly() {
        for dtype in [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64] {
            let var = variable(dtype, &[0, 1, 127]);
            assert_eq!(read("n", &var).unwrap(), [0.0, 1.0, 127.0], "{dtype:?}");
            write("n", &var, &[2.5, 1.6, 0.0]).unwrap();
            assert_eq!(read("n", &var).unwrap(), [2.0, 2.0, 0.0], "{dtype:?}");
        }
    }

    #[test]
    fn an_integer_that_does_not_fit_is_an_error_with_its_name() {
        let far = (1 << 53) + 1;
        let error = read("n", &variable(DType::I64, &[far])).unwrap_err();
        assert!(error.to_string().starts_with("n: 9007199254740992 cannot be carried"), "{error}");
        assert_eq!(read("n", &variable(DType::I64, &[1 << 53])).unwrap(), [9_007_199_254_740_992.0]);
        for (dtype, value) in
            [(DType::U8, 256.0), (DType::U32, -1.0), (DType::I64, 1e300), (DType::I64, f64::NAN)]
        {
            let var = variable(dtype, &[7]);
            let error = write("n", &var, &[value]).unwrap_err();
            assert!(matches!(error, CandleError::Integer { .. }), "{error}");
            assert_eq!(read("n", &var).unwrap(), [7.0], "nothing is changed");
        }
    }
}

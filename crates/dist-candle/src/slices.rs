//! Access to the memory of candle's tensors as slices, without copies.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Storage, StorageRef, Tensor, Var};
use dist_parallel::model::Resharded;
use dist_parallel::{BoxError, FloatType, ParamInfo, Values, ValuesMut};

use crate::CandleError;
use crate::array::Array;
use crate::spare::BufferPool;

pub(crate) fn float_type(name: &str, dtype: DType) -> Result<FloatType, CandleError> {
    match dtype {
        DType::F32 => Ok(FloatType::F32),
        DType::F64 => Ok(FloatType::F64),
        DType::F16 => Ok(FloatType::F16),
        DType::BF16 => Ok(FloatType::Bf16),
        _ => Err(CandleError::Type { name: name.to_owned(), dtype }),
    }
}

/// Returns candle's name of a type.
pub(crate) const fn candle_type(dtype: FloatType) -> DType {
    match dtype {
        FloatType::F32 => DType::F32,
        FloatType::F64 => DType::F64,
        FloatType::F16 => DType::F16,
        FloatType::Bf16 => DType::BF16,
    }
}

/// A read lock on a tensor of floats that is one slice in this process's memory.
pub(crate) struct Locked<'t> {
    storage: StorageRef<'t>,
    range: Range<usize>,
}

impl<'t> Locked<'t> {
    /// Locks `tensor`. Errors name it `name`.
    pub(crate) fn new(name: &str, tensor: &'t Tensor) -> Result<Self, CandleError> {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cpu(memory) = &*storage else {
            return Err(no_slice(name, NOT_IN_MEMORY));
        };
        let (start, end) = layout.contiguous_offsets().ok_or_else(|| no_slice(name, SCATTERED))?;
        if is_freed(memory, layout) {
            return Err(no_slice(name, FREED));
        }
        float_type(name, memory.dtype())?;
        Ok(Self { storage, range: start..end })
    }

    pub(crate) fn values(&self) -> Values<'_> {
        let range = self.range.clone();
        match &*self.storage {
            Storage::Cpu(CpuStorage::F32(all)) => Values::F32(&all[range]),
            Storage::Cpu(CpuStorage::F64(all)) => Values::F64(&all[range]),
            Storage::Cpu(CpuStorage::F16(all)) => Values::F16(&all[range]),
            Storage::Cpu(CpuStorage::BF16(all)) => Values::Bf16(&all[range]),
            _ => unreachable!("the type was looked at when the tensor was locked"),
        }
    }
}

/// Returns `true` if two tensors share one storage. Then one cannot be written while the other is read.
pub(crate) fn share_memory(one: &Tensor, other: &Tensor) -> bool {
    let (one, other) = (one.storage_and_layout().0, other.storage_and_layout().0);
    std::ptr::eq(&raw const *one, &raw const *other)
}

/// Calls `f` with the values of `tensor` under a read lock.
pub(crate) fn read<T>(
    name: &str,
    tensor: &Tensor,
    f: impl FnOnce(Values<'_>) -> T,
) -> Result<T, CandleError> {
    Ok(f(Locked::new(name, tensor)?.values()))
}

/// Makes a tensor of this shape from the gradient of parameter `name`, without a copy.
pub(crate) fn gradient(name: &str, shape: &[usize], values: Array) -> Result<Tensor, CandleError> {
    let place = || format!("the gradient of {name}");
    values.into_tensor(shape).map_err(|source| CandleError::Candle { place: place(), source })
}

/// Calls `f` with the memory of `var`. All tensors that share the memory see the change. If it was freed, `f`
/// gets zeros. `f` must not use `var`, which is locked.
pub(crate) fn write(name: &str, var: &Var, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
    let write = Write { name, dtype: var.dtype(), f: RefCell::new(f), refused: RefCell::new(None) };
    let result = var.inplace_op1(&write);
    if let Some(refused) = write.refused.into_inner() {
        return Err(refused.into());
    }
    let place = || format!("writing {name}");
    result.map_err(|source| CandleError::Candle { place: place(), source }.into())
}

/// Frees the memory of `var`, and so of every tensor that shares it, until the next write. If the variable is
/// only a part of its storage, nothing is freed.
pub(crate) fn free(name: &str, var: &Var, spare: &BufferPool) -> Result<Resharded, CandleError> {
    let free = Free { spare, freed: Cell::new(false) };
    let place = || format!("freeing {name}");
    var.inplace_op1(&free).map_err(|source| CandleError::Candle { place: place(), source })?;
    Ok(if free.freed.get() { Resharded::Freed } else { Resharded::Kept })
}

/// Writes these values to `var`. If its memory was freed, it first gets spare or new memory.
pub(crate) fn materialise(
    info: &ParamInfo,
    var: &Var,
    values: Values<'_>,
    spare: &BufferPool,
) -> Result<(), BoxError> {
    if (values.dtype(), values.len()) != (info.dtype, info.len()) {
        let (got_len, got) = (values.len(), values.dtype());
        let (expected_len, expected) = (info.len(), info.dtype);
        return Err(dist_parallel::Error::ValuesDiffer { expected_len, expected, got_len, got }.into());
    }
    let mut copied = Ok(());
    fill(info, var, &mut |mut own| copied = own.copy_from(values), spare)?;
    Ok(copied?)
}

/// Calls `f` with the memory of `var`, all of which `f` overwrites. If it was freed, it first gets spare or
/// new memory with unspecified values.
pub(crate) fn fill(
    info: &ParamInfo,
    var: &Var,
    f: &mut dyn FnMut(ValuesMut<'_>),
    spare: &BufferPool,
) -> Result<(), BoxError> {
    let renew = Renew { spare, dtype: var.dtype(), len: info.len() };
    let place = || format!("filling {}", info.name);
    var.inplace_op1(&renew).map_err(|source| CandleError::Candle { place: place(), source })?;
    write(&info.name, var, f)
}

/// An operation that gives a freed variable spare memory of its old length, if there is any. Otherwise the
/// next write allocates zeros.
struct Renew<'a> {
    spare: &'a BufferPool,
    dtype: DType,
    len: usize,
}

impl InplaceOp1 for Renew<'_> {
    fn name(&self) -> &'static str {
        "renew"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let whole = layout.contiguous_offsets() == Some((0, self.len));
        if whole
            && is_freed(storage, layout)
            && let Some(memory) = self.spare.take(self.dtype, self.len)
        {
            *storage = memory;
        }
        Ok(())
    }
}

struct Free<'a> {
    spare: &'a BufferPool,
    freed: Cell<bool>,
}

impl InplaceOp1 for Free<'_> {
    fn name(&self) -> &'static str {
        "free"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let whole = layout.contiguous_offsets() == Some((0, storage_len(storage)));
        if whole && storage_len(storage) > 0 {
            self.spare.give(std::mem::replace(storage, NOTHING));
        }
        self.freed.set(whole || is_freed(storage, layout));
        Ok(())
    }
}

/// The placeholder for freed memory. No parameter has its type, so candle rejects it as an operand beside a
/// parameter. With the parameter's own type, candle's matrix product would read beyond the end of the empty
/// storage.
const NOTHING: CpuStorage = CpuStorage::U8(Vec::new());

/// Returns `true` if the storage that this layout describes was freed.
fn is_freed(storage: &CpuStorage, layout: &Layout) -> bool {
    storage_len(storage) == 0 && layout.shape().elem_count() > 0
}

pub(crate) fn storage_len(storage: &CpuStorage) -> usize {
    match storage {
        CpuStorage::F32(all) => all.len(),
        CpuStorage::F64(all) => all.len(),
        CpuStorage::F16(all) => all.len(),
        CpuStorage::BF16(all) => all.len(),
        CpuStorage::U8(all) if all.is_empty() => 0,
        // Storage of other types belongs to no parameter and is never freed.
        _ => usize::MAX,
    }
}

/// Returns `len` zeros of this type, or `None` if parameters cannot have it.
fn zeros(dtype: DType, len: usize) -> Option<CpuStorage> {
    Some(match dtype {
        DType::F32 => CpuStorage::F32(vec![0.0; len]),
        DType::F64 => CpuStorage::F64(vec![0.0; len]),
        DType::F16 => CpuStorage::F16(vec![Default::default(); len]),
        DType::BF16 => CpuStorage::BF16(vec![Default::default(); len]),
        _ => return None,
    })
}

/// An in-place operation that calls `f` with the tensor's memory: candle's only way to overwrite a tensor.
struct Write<'a> {
    name: &'a str,
    dtype: DType,
    f: RefCell<&'a mut dyn FnMut(ValuesMut<'_>)>,
    /// The error of `values`, because an operation of candle can only return candle's own errors.
    refused: RefCell<Option<CandleError>>,
}

impl Write<'_> {
    fn values<'s>(&self, storage: &'s mut CpuStorage, layout: &Layout) -> Result<ValuesMut<'s>, CandleError> {
        let (start, end) = layout.contiguous_offsets().ok_or_else(|| no_slice(self.name, SCATTERED))?;
        if is_freed(storage, layout)
            && let Some(zeros) = zeros(self.dtype, end)
        {
            *storage = zeros;
        }
        Ok(match storage {
            CpuStorage::F32(all) => ValuesMut::F32(&mut all[start..end]),
            CpuStorage::F64(all) => ValuesMut::F64(&mut all[start..end]),
            CpuStorage::F16(all) => ValuesMut::F16(&mut all[start..end]),
            CpuStorage::BF16(all) => ValuesMut::Bf16(&mut all[start..end]),
            _ => return Err(CandleError::Type { name: self.name.to_owned(), dtype: storage.dtype() }),
        })
    }
}

impl InplaceOp1 for Write<'_> {
    fn name(&self) -> &'static str {
        "write"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        match self.values(storage, layout) {
            Ok(values) => (self.f.borrow_mut())(values),
            Err(error) => *self.refused.borrow_mut() = Some(error),
        }
        Ok(())
    }
}

pub(crate) fn no_slice(name: &str, reason: &'static str) -> CandleError {
    CandleError::NoSlice { name: name.to_owned(), reason }
}

pub(crate) const NOT_IN_MEMORY: &str = "it lives on a device";
const FREED: &str = "its memory is freed between its uses";
pub(crate) const SCATTERED: &str = "its values are not contiguous";

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn what_was_freed_is_multiplied_by_nothing_and_comes_back_as_it_was_typed() {
        let spare = BufferPool::default();
        for dtype in [DType::F32, DType::F64] {
            let var = Var::ones((64, 64), dtype, &Device::Cpu).unwrap();
            assert!(matches!(free("w", &var, &spare), Ok(Resharded::Freed)));
            let whole = Tensor::ones((64, 64), dtype, &Device::Cpu).unwrap();
            assert!(whole.matmul(&var.t().unwrap()).is_err());
            assert!(var.matmul(&whole).is_err());
            assert!(var.matmul(&var.t().unwrap()).is_err());
            write("w", &var, &mut |values| assert_eq!(values.len(), 64 * 64)).unwrap();
            let sum = var.matmul(&whole).and_then(|product| product.sum_all()?.to_dtype(DType::F64));
            assert_eq!(sum.unwrap().to_scalar::<f64>().unwrap(), 0.0);
        }
    }
}

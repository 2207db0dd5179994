//! [`TensorMemory`]: the memory of a tensor, which Python owns.
#![expect(unsafe_code, reason = "PyTorch gives the memory of a tensor as an address and a length")]

use std::ops::Range;
use std::slice;

use bytemuck::Pod;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;

/// The memory of a contiguous tensor on the CPU, or of a part of it, and a reference that keeps the tensor alive.
#[derive(Debug)]
pub(crate) struct TensorMemory {
    address: usize,
    bytes: usize,
    element_size: usize,
    _tensor: Py<PyAny>,
}

impl<'py> FromPyObject<'_, 'py> for TensorMemory {
    type Error = PyErr;

    fn extract(tensor: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = tensor.py();
        let is_contiguous: bool = tensor.call_method0(intern!(py, "is_contiguous"))?.extract()?;
        let is_cpu: bool = tensor.getattr(intern!(py, "is_cpu"))?.extract()?;
        if !is_contiguous || !is_cpu {
            return Err(PyValueError::new_err("the tensor is not contiguous memory of the CPU"));
        }
        Ok(Self {
            address: tensor.call_method0(intern!(py, "data_ptr"))?.extract()?,
            bytes: tensor.getattr(intern!(py, "nbytes"))?.extract()?,
            element_size: tensor.call_method0(intern!(py, "element_size"))?.extract()?,
            _tensor: tensor.to_owned().unbind(),
        })
    }
}

impl TensorMemory {
    /// Returns the number of bytes of one element of the tensor.
    pub(crate) fn element_size(&self) -> usize {
        self.element_size
    }

    /// Returns `true` if this is part `index` of equally many bytes as `parts` of the other memory.
    pub(crate) fn is_part(&self, index: usize, parts: usize, whole: &Self) -> bool {
        self.bytes * parts == whole.bytes && self.address == whole.address + index * self.bytes
    }

    /// Returns `true` if the two share a byte.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let (own, other) = (self.range(), other.range());
        !own.is_empty() && !other.is_empty() && own.start < other.end && other.start < own.end
    }

    fn range(&self) -> Range<usize> {
        self.address..self.address + self.bytes
    }

    /// Returns the elements for reading.
    ///
    /// PyTorch does not lock tensors: a program that writes to a tensor while a call of torch.distributed reads it has
    /// a data race, with any backend.
    ///
    /// # Panics
    /// If `T` has another size than the tensor's elements.
    pub(crate) fn read<T: Pod>(&self) -> &[T] {
        let Some(first) = self.first::<T>() else { return &[] };
        // SAFETY: `extract` got this address and length of a contiguous tensor, which `_tensor` keeps alive and which
        // cannot be resized while a call uses it. `first` has checked the alignment, and every bit pattern is a `T`.
        unsafe { slice::from_raw_parts(first, self.bytes / size_of::<T>()) }
    }

    /// Returns the elements for writing. The caller reads and writes no memory that [overlaps](Self::overlaps) it.
    ///
    /// # Panics
    /// As [`read`](Self::read).
    pub(crate) fn write<T: Pod>(&mut self) -> &mut [T] {
        let Some(first) = self.first::<T>() else { return &mut [] };
        // SAFETY: As in `read`. The callers in `call` borrow no other memory that overlaps this one.
        unsafe { slice::from_raw_parts_mut(first, self.bytes / size_of::<T>()) }
    }

    /// Returns the first element, if there is one.
    fn first<T: Pod>(&self) -> Option<*mut T> {
        assert_eq!(self.element_size, size_of::<T>(), "the elements of the tensor have another size");
        let first = self.address as *mut T;
        assert!(self.bytes == 0 || first.is_aligned(), "the elements of the tensor are not aligned");
        (self.bytes > 0).then_some(first)
    }
}

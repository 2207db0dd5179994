//! [`TensorMemory`]: the memory of a tensor, which Python owns.
#![expect(unsafe_code, reason = "PyTorch gives the memory of a tensor as an address and a length")]

use std::ops::Range;
use std::slice;

use bytemuck::Pod;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;

/// The memory of a contiguous tensor on the CPU, or of a part of it, and a reference that keeps it alive.
///
/// PyTorch does not lock tensors, and PyTorch code can free memory that a reference keeps alive. A program must not do
/// the following with a tensor, from the start of a call on it to the end of `wait`, whatever the backend:
/// - write to it, or read it if the call writes to it, also in another call;
/// - resize its storage (`resize_`, `untyped_storage().resize_`).
///
/// It may drop the tensor, or give it other memory (`set_`, `data =`): a call that was started holds the storage.
#[derive(Debug)]
pub(crate) struct TensorMemory {
    address: usize,
    bytes: usize,
    element_size: usize,
    /// The tensor, or its storage.
    owner: Py<PyAny>,
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
        let memory = Self {
            address: tensor.call_method0(intern!(py, "data_ptr"))?.extract()?,
            bytes: tensor.getattr(intern!(py, "nbytes"))?.extract()?,
            element_size: tensor.call_method0(intern!(py, "element_size"))?.extract()?,
            owner: tensor.to_owned().unbind(),
        };
        if memory.bytes > 0 && (memory.address == 0 || !memory.address.is_multiple_of(memory.element_size)) {
            return Err(PyValueError::new_err(
                "the tensor has no memory, or its elements are not aligned: pass the local tensor of a DTensor, \
                 restore a storage that was resized to nothing, or clone the tensor",
            ));
        }
        Ok(memory)
    }
}

impl TensorMemory {
    /// Holds the storage instead of the tensor, because the program can give the tensor other memory before a call that
    /// it started has ended.
    pub(crate) fn hold_storage(&mut self, py: Python<'_>) -> PyResult<()> {
        let storage = self.owner.call_method0(py, intern!(py, "untyped_storage"))?;
        self.owner = storage;
        Ok(())
    }

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

    /// Returns the addresses of the bytes.
    pub(crate) fn range(&self) -> Range<usize> {
        self.address..self.address + self.bytes
    }

    /// Returns the elements for reading.
    ///
    /// # Panics
    /// If `T` has another size than the tensor's elements.
    pub(crate) fn read<T: Pod>(&self) -> &[T] {
        let Some(first) = self.first::<T>() else { return &[] };
        // SAFETY: `extract` got this address and length of a contiguous tensor, and has checked that the address is
        // aligned and not null. `owner` keeps the memory alive, except if the program breaks the rules of
        // `TensorMemory`. Every bit pattern is a `T`.
        unsafe { slice::from_raw_parts(first, self.bytes / size_of::<T>()) }
    }

    /// Returns the elements for writing. The caller reads and writes no memory that [overlaps](Self::overlaps) it.
    ///
    /// # Panics
    /// As [`read`](Self::read).
    pub(crate) fn write<T: Pod>(&mut self) -> &mut [T] {
        let Some(first) = self.first::<T>() else { return &mut [] };
        // SAFETY: As in `read`. `Call::check` refuses buffers that overlap, and the functions in `call` copy an input
        // that overlaps the output.
        unsafe { slice::from_raw_parts_mut(first, self.bytes / size_of::<T>()) }
    }

    /// Returns the first element, if there is one.
    fn first<T: Pod>(&self) -> Option<*mut T> {
        assert_eq!(self.element_size, size_of::<T>(), "the elements of the tensor have another size");
        (self.bytes > 0).then_some(self.address as *mut T)
    }
}

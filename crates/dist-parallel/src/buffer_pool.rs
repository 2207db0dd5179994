//! A pool of one buffer, which the next flat parameter of the same size reuses. Fresh memory must be cleared and
//! costs page faults.

use crate::flat::Flat;
use crate::{FloatType, Result};

/// A pool of at most one buffer. A buffer of another size is freed before the next is allocated.
#[derive(Debug, Default)]
pub(crate) struct BufferPool(Option<Flat>);

impl BufferPool {
    pub(crate) const fn new() -> Self {
        Self(None)
    }

    /// Returns a buffer of `padded_len` values. `allocate` allocates it, unless the pooled one fits. Its contents are
    /// unspecified, except that the padding behind the first `len` values is zero.
    pub(crate) fn take(
        &mut self,
        dtype: FloatType,
        (len, padded_len): (usize, usize),
        allocate: impl FnOnce(FloatType, usize) -> Result<Flat>,
    ) -> Result<Flat> {
        let fits = |flat: &Flat| (flat.dtype(), flat.len()) == (dtype, padded_len);
        let Some(mut flat) = self.0.take().filter(fits) else { return allocate(dtype, padded_len) };
        flat.slice_mut(len, padded_len - len).clear();
        Ok(flat)
    }

    /// Puts a buffer into the pool, in place of the pooled one.
    pub(crate) fn give(&mut self, flat: Flat) {
        self.0 = Some(flat);
    }

    /// Frees the pooled buffer.
    pub(crate) fn clear(&mut self) {
        self.0 = None;
    }
}

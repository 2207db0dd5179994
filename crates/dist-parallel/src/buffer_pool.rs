//! A pool of one buffer, which the next flat parameter of the same size reuses. Fresh memory must be cleared and
//! costs page faults.

use dist_collectives::Communicator;

use crate::flat::Flat;
use crate::{FloatType, Result};

/// A pool of at most one buffer. A buffer of another size is freed before the next is allocated.
#[derive(Debug, Default)]
pub(crate) struct BufferPool(Option<Flat>);

impl BufferPool {
    pub(crate) const fn new() -> Self {
        Self(None)
    }

    /// Returns memory for `padded_len` values, shared by the ranks of a host if possible. Its contents are unspecified,
    /// except that the padding behind the first `len` values is zero.
    pub(crate) fn take(
        &mut self,
        comm: Option<&mut Communicator>,
        dtype: FloatType,
        (len, padded_len): (usize, usize),
    ) -> Result<Flat> {
        let fits = |flat: &Flat| (flat.dtype(), flat.len()) == (dtype, padded_len);
        let Some(mut flat) = self.0.take().filter(fits) else {
            return match comm {
                Some(comm) => Flat::allocated(comm, dtype, padded_len),
                None => Ok(Flat::zeros(dtype, padded_len)),
            };
        };
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

//! A pool of one buffer, which the next flat parameter of the same size reuses. Fresh memory must be cleared and
//! costs page faults.

use dist_collectives::Communicator;

use super::layout::FlatParameter;
use crate::flat::Flat;
use crate::{FloatType, Result};

/// At most one buffer. A buffer of another size is freed before the next is allocated.
#[derive(Debug, Default)]
pub(crate) struct BufferPool(Option<Flat>);

impl BufferPool {
    /// Returns memory for a whole flat parameter, shared by the ranks of a host if possible. Its contents are
    /// unspecified, except that padding is zero.
    pub(crate) fn take(
        &mut self,
        comm: &mut Communicator,
        flat_param: &FlatParameter,
        dtype: FloatType,
        shards: usize,
    ) -> Result<Flat> {
        let len = flat_param.padded(shards);
        let Some(mut flat) = self.0.take().filter(|flat| (flat.dtype(), flat.len()) == (dtype, len)) else {
            return Flat::allocated(comm, dtype, len);
        };
        flat.slice_mut(flat_param.len(), len - flat_param.len()).clear();
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

//! Memory of one strip that is free and used for the next of its size: fresh memory has to be cleared, and its pages
//! have to be found.

use dist_collectives::Communicator;

use super::layout::FlatParameter;
use crate::flat::Flat;
use crate::{FloatType, Result};

/// At most one buffer, and never beside another that is wanted: what does not fit is freed first.
#[derive(Debug, Default)]
pub(crate) struct BufferPool(Option<Flat>);

impl BufferPool {
    /// Memory for a whole strip, which the ranks of a host share if they can. It holds anything, but for padding, which
    /// is zero.
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

    /// Keeps a buffer instead of the one that there may be.
    pub(crate) fn give(&mut self, flat: Flat) {
        self.0 = Some(flat);
    }

    /// Frees it.
    pub(crate) fn clear(&mut self) {
        self.0 = None;
    }
}

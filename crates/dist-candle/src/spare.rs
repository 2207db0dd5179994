//! A pool of the memory of freed parameters, for parameters that are materialised next. New memory would be
//! slow: the system maps and clears each page of a large allocation.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType};

use crate::slices::storage_len;

/// A pool of freed memory, shared by the blocks of one model. It keeps at most as many bytes as the largest
/// block has. A block without a builder has an empty pool.
///
/// If a request finds no piece of its type and length, the pool is emptied before new memory is allocated. So
/// the pool never adds to the peak of memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct BufferPool(Arc<Mutex<Pieces>>);

#[derive(Debug, Default)]
struct Pieces {
    freed: VecDeque<CpuStorage>,
    bytes_max: usize,
}

impl BufferPool {
    /// Raises the pool's limit to the bytes of a block that uses it.
    pub(crate) fn serve(&self, block_bytes: usize) {
        let mut pieces = self.pieces();
        pieces.bytes_max = pieces.bytes_max.max(block_bytes);
    }

    /// Removes and returns memory for `len` values, whose contents are unspecified.
    pub(crate) fn take(&self, dtype: DType, len: usize) -> Option<CpuStorage> {
        let mut pieces = self.pieces();
        let fits = |piece: &CpuStorage| (piece.dtype(), storage_len(piece)) == (dtype, len);
        let found = pieces.freed.iter().position(fits).and_then(|index| pieces.freed.remove(index));
        if found.is_none() {
            pieces.freed.clear();
        }
        found
    }

    /// Adds a piece, and drops the oldest pieces while the pool is above its limit.
    pub(crate) fn give(&self, piece: CpuStorage) {
        let mut pieces = self.pieces();
        // An empty piece is never requested.
        pieces.freed.extend(Some(piece).filter(|piece| bytes(piece) > 0));
        while pieces.freed.iter().map(bytes).sum::<usize>() > pieces.bytes_max {
            pieces.freed.pop_front();
        }
    }

    fn pieces(&self) -> MutexGuard<'_, Pieces> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn bytes(piece: &CpuStorage) -> usize {
    storage_len(piece) * piece.dtype().size_in_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(len: usize) -> CpuStorage {
        CpuStorage::F32(vec![0.0; len])
    }

    #[test]
    fn what_was_freed_is_taken_again() {
        let spare = BufferPool::default();
        spare.serve(12);
        spare.give(piece(2));
        spare.give(piece(1));
        assert_eq!(spare.take(DType::F32, 2).map(|piece| storage_len(&piece)), Some(2));
        assert_eq!(spare.take(DType::F32, 1).map(|piece| storage_len(&piece)), Some(1));
        assert!(spare.take(DType::F32, 1).is_none());
    }

    #[test]
    fn what_does_not_fit_is_freed() {
        let spare = BufferPool::default();
        spare.serve(12);
        spare.give(piece(2));
        assert!(spare.take(DType::F64, 2).is_none());
        assert!(spare.pieces().freed.is_empty());
    }

    #[test]
    fn no_more_is_kept_than_the_largest_block_has() {
        let spare = BufferPool::default();
        spare.give(piece(1));
        assert!(spare.pieces().freed.is_empty(), "a block by itself keeps nothing");
        spare.serve(12);
        spare.serve(4);
        for len in [1, 2, 1, 1] {
            spare.give(piece(len));
        }
        let kept: Vec<usize> = spare.pieces().freed.iter().map(storage_len).collect();
        assert_eq!(kept, [1, 1]);
    }
}

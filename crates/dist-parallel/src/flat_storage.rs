//! The storage of flat buffers: memory, or a count of bytes that predicts how much memory a training needs.
//!
//! The engine computes with buffers of either kind. A counted buffer has a length and no values: slices of it are empty,
//! and communication with it ends at once.

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dist_collectives::{Buffer, Communicator, Pending};

use crate::flat::{self, Flat};
use crate::{FloatType, Result};

/// The source of the storage of flat buffers.
#[derive(Debug, Clone, Default)]
pub(crate) enum Allocator {
    #[default]
    Memory,
    Counter(Arc<ByteCounter>),
}

/// The bytes of all counted buffers that exist, and their maximum.
#[derive(Debug, Default)]
pub(crate) struct ByteCounter {
    live: AtomicUsize,
    peak: AtomicUsize,
}

/// The elements of a flat buffer.
#[derive(Debug)]
pub(crate) enum FlatStorage<T> {
    Memory(Buffer<T>),
    Counted(CountedBuffer),
}

/// An operation in flight with a flat buffer.
#[derive(Debug)]
pub(crate) enum PendingStorage<T> {
    Memory(Pending<Buffer<T>>),
    Counted(CountedBuffer),
}

/// A buffer without memory. Its bytes are counted until it is dropped.
#[derive(Debug)]
pub(crate) struct CountedBuffer {
    len: usize,
    bytes: usize,
    counter: Arc<ByteCounter>,
}

impl Allocator {
    /// Allocates zeros.
    pub(crate) fn zeros(&self, dtype: FloatType, len: usize) -> Flat {
        match self {
            Self::Memory => Flat::zeros(dtype, len),
            Self::Counter(counter) => Flat::counted(dtype, CountedBuffer::new(counter, dtype, len)),
        }
    }

    /// Allocates zeros in memory that the ranks of this host share, if there is any.
    pub(crate) fn shared_zeros(&self, comm: &mut Communicator, dtype: FloatType, len: usize) -> Result<Flat> {
        match self {
            Self::Memory => Flat::allocated(comm, dtype, len),
            Self::Counter(_) => Ok(self.zeros(dtype, len)),
        }
    }
}

impl ByteCounter {
    /// Returns the bytes of all buffers that exist.
    pub(crate) fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// Returns the maximum of [`live`](Self::live) since the last call.
    pub(crate) fn take_peak(&self) -> usize {
        self.peak.swap(self.live(), Ordering::Relaxed)
    }
}

impl CountedBuffer {
    fn new(counter: &Arc<ByteCounter>, dtype: FloatType, len: usize) -> Self {
        let bytes = len * dtype.size();
        let live = counter.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        counter.peak.fetch_max(live, Ordering::Relaxed);
        Self { len, bytes, counter: Arc::clone(counter) }
    }
}

impl Drop for CountedBuffer {
    fn drop(&mut self) {
        self.counter.live.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl<T: bytemuck::Pod> FlatStorage<T> {
    /// Returns the number of elements, which a counted buffer does not have.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Memory(buffer) => buffer.len(),
            Self::Counted(counted) => counted.len,
        }
    }

    /// Returns some elements, or none of a counted buffer.
    pub(crate) fn part(&self, range: Range<usize>) -> &[T] {
        match self {
            Self::Memory(buffer) => &buffer[range],
            Self::Counted(_) => &[],
        }
    }

    /// Returns the same elements, to change them.
    pub(crate) fn part_mut(&mut self, range: Range<usize>) -> &mut [T] {
        match self {
            Self::Memory(buffer) => &mut buffer[range],
            Self::Counted(_) => &mut [],
        }
    }

    /// Returns the allocator of this storage.
    pub(crate) fn allocator(&self) -> Allocator {
        match self {
            Self::Memory(_) => Allocator::Memory,
            Self::Counted(counted) => Allocator::Counter(Arc::clone(&counted.counter)),
        }
    }

    /// Starts an operation with the elements.
    pub(crate) fn start(self, operation: impl FnOnce(Buffer<T>) -> Pending<Buffer<T>>) -> PendingStorage<T> {
        match self {
            Self::Memory(buffer) => PendingStorage::Memory(operation(buffer)),
            Self::Counted(counted) => PendingStorage::Counted(counted),
        }
    }

    /// Returns the elements.
    pub(crate) fn into_buffer(self) -> Buffer<T> {
        match self {
            Self::Memory(buffer) => buffer,
            Self::Counted(_) => Vec::new().into(),
        }
    }
}

impl<T> PendingStorage<T> {
    /// Returns `true` if `wait` would not block.
    pub(crate) fn is_done(&mut self) -> bool {
        match self {
            Self::Memory(pending) => pending.is_done(),
            Self::Counted(_) => true,
        }
    }

    /// Waits for the operation and drops the buffer if it failed.
    pub(crate) fn wait(self) -> Result<FlatStorage<T>> {
        Ok(match self {
            Self::Memory(pending) => FlatStorage::Memory(flat::wait(pending)?),
            Self::Counted(counted) => FlatStorage::Counted(counted),
        })
    }
}

impl<T: bytemuck::Pod> Deref for FlatStorage<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Memory(buffer) => buffer,
            Self::Counted(_) => &[],
        }
    }
}

impl<T: bytemuck::Pod> DerefMut for FlatStorage<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Memory(buffer) => buffer,
            Self::Counted(_) => &mut [],
        }
    }
}

impl<T> From<Buffer<T>> for FlatStorage<T> {
    fn from(buffer: Buffer<T>) -> Self {
        Self::Memory(buffer)
    }
}

impl<T> From<Vec<T>> for FlatStorage<T> {
    fn from(elements: Vec<T>) -> Self {
        Self::Memory(elements.into())
    }
}

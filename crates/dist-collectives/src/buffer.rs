//! Memory that an operation owns while it runs.

use std::fmt;
use std::ops::{Deref, DerefMut};

use bytemuck::Pod;
use dist_algos::direct::Ownership;
use dist_transport::shm_group::Lent;
use dist_transport::{Allocation, Owned};

use crate::{Error, Result};

/// A buffer of elements that an operation owns while it runs and returns when it ends. At other times it is
/// used as a slice.
///
/// ```
/// use dist_collectives::Buffer;
///
/// let mut buffer = Buffer::from(vec![1.0_f32, 2.0]);
/// buffer[0] = 3.0;
/// assert_eq!(buffer.into_vec(), [3.0, 2.0]);
/// ```
///
/// Ranks of one host may write directly into each other's buffers. If such an operation fails, a rank that still
/// runs could write much later. Therefore the buffer is empty after a failure, and its memory is never used again,
/// unless every rank is known to have finished.
pub struct Buffer<T> {
    elements: Owned<T>,
    /// The number of elements; allocated memory can be longer.
    len: usize,
    ownership: Ownership,
}

impl<T: Pod> Buffer<T> {
    /// Returns the elements, without a copy unless they were [allocated](crate::Communicator::alloc).
    pub fn into_vec(self) -> Vec<T> {
        let len = self.len;
        self.elements.into_vec().unwrap_or_else(|allocated| allocated[..len].to_vec())
    }

    /// Allocates memory for an operation's output.
    pub(crate) fn zeroed(len: usize) -> Result<Self> {
        let mut elements = Vec::new();
        elements.try_reserve_exact(len).map_err(|source| Error::Memory { elements: len, source })?;
        elements.resize(len, T::zeroed());
        Ok(Self::from(elements))
    }

    /// Returns the same memory for another number of elements; `None` if it is too short.
    pub(crate) fn with_len(self, len: usize) -> Option<Self> {
        (self.elements.len() >= len).then_some(Self { len, ..self })
    }

    /// Allocates ordinary memory as a [substitute](Ownership::Substitute) for shared memory that this rank could not
    /// get.
    pub(crate) fn standing_in(len: usize) -> Result<Self> {
        Ok(Self { ownership: Ownership::Substitute, ..Self::zeroed(len)? })
    }

    /// Uses the first elements of memory from a transport. Returns `None` if the memory is too short.
    pub(crate) fn allocated(memory: Allocation, len: usize) -> Option<Self> {
        let elements = Owned::allocated(memory)?;
        (elements.len() >= len).then_some(Self { elements, len, ownership: Ownership::Allocated })
    }

    /// Returns the ownership of the memory.
    #[inline(always)]
    pub(crate) const fn ownership(&self) -> Ownership {
        self.ownership
    }

    /// Lends the elements to other ranks, which may write into them, and leaves this buffer empty. The first result
    /// is for [`take_back`](Self::take_back).
    pub(crate) fn lend(&mut self) -> (LentBuffer, Lent)
    where
        T: Send,
    {
        let Self { elements, len, ownership } = std::mem::replace(self, Self::from(Vec::new()));
        (LentBuffer { len, ownership }, elements.lend_first(len))
    }

    /// Restores the buffer from before the loan, with the elements that other ranks have written.
    pub(crate) fn take_back(&mut self, LentBuffer { len, ownership }: LentBuffer, lent: Lent)
    where
        T: Send,
    {
        if let Ok(elements) = lent.into_owned() {
            *self = Self { elements, len, ownership };
        }
    }
}

/// A lent buffer without its memory.
#[derive(Debug)]
pub(crate) struct LentBuffer {
    len: usize,
    ownership: Ownership,
}

impl<T: Pod> Clone for Buffer<T> {
    /// Copies the elements into memory of this process.
    fn clone(&self) -> Self {
        Self::from(self.to_vec())
    }
}

impl<T: Pod + PartialEq> PartialEq for Buffer<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T> From<Vec<T>> for Buffer<T> {
    fn from(elements: Vec<T>) -> Self {
        let len = elements.len();
        Self { elements: Owned::from(elements), len, ownership: Ownership::Owned }
    }
}

impl<T: Pod> From<Buffer<T>> for Vec<T> {
    fn from(buffer: Buffer<T>) -> Self {
        buffer.into_vec()
    }
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.elements[..self.len]
    }
}

impl<T: Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.elements[..self.len]
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} elements)", self.len)
    }
}

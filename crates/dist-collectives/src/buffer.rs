//! Memory that an operation owns while it runs.

use std::fmt;
use std::ops::{Deref, DerefMut};

use crate::{Element, Error, Result};

/// Elements that an operation owns while it runs, and gives back when it is waited for. A slice for all else.
///
/// ```
/// use dist_collectives::Buffer;
///
/// let mut buffer = Buffer::from(vec![1.0_f32, 2.0]);
/// buffer[0] = 3.0;
/// assert_eq!(buffer.into_vec(), [3.0, 2.0]);
/// ```
#[derive(Clone, PartialEq)]
pub struct Buffer<T>(Vec<T>);

impl<T> Buffer<T> {
    /// The elements, without a copy.
    pub fn into_vec(self) -> Vec<T> {
        self.0
    }
}

impl<T: Element> Buffer<T> {
    /// Memory for an operation's output.
    pub(crate) fn zeroed(len: usize) -> Result<Self> {
        let mut elements = Vec::new();
        elements.try_reserve_exact(len).map_err(|source| Error::Memory { elements: len, source })?;
        elements.resize(len, T::zeroed());
        Ok(Self(elements))
    }
}

impl<T> From<Vec<T>> for Buffer<T> {
    fn from(elements: Vec<T>) -> Self {
        Self(elements)
    }
}

impl<T> From<Buffer<T>> for Vec<T> {
    fn from(buffer: Buffer<T>) -> Self {
        buffer.0
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} elements)", self.0.len())
    }
}

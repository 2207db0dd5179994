//! The memory that a call works on, with the [`Ownership`] that decides how other ranks may access it.

use bytemuck::Pod;
use dist_algos::direct::Ownership;

use super::rank_layout::RankLayout;
use crate::Buffer;

/// The memory that a call works on.
#[derive(Debug)]
pub(super) struct CallOperands<'a, T> {
    /// The memory that the call changes.
    pub(super) buffer: CallBuffer<'a, T>,
    /// The parts of the buffer. Without a layout, the algorithm divides the buffer into equal chunks.
    pub(super) layout: Option<&'a RankLayout>,
    /// The memory that the call only reads, and its parts.
    pub(super) input: Option<(&'a [T], &'a RankLayout)>,
    /// The number of `T` in an element of the layouts and of the call: 1, or the size of an element if `T` is a byte.
    pub(super) unit: usize,
}

/// The memory that a call changes.
#[derive(Debug)]
pub(crate) enum CallBuffer<'a, T> {
    Borrowed(&'a mut [T]),
    Owned(&'a mut Buffer<T>),
}

/// The memory that a call only reads. Other ranks may read it too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallInput<'a, T> {
    pub(crate) elements: &'a [T],
    pub(super) ownership: Ownership,
}

impl<'a, T: Pod> CallOperands<'a, T> {
    /// Returns the memory of a call on one buffer.
    #[inline(always)]
    pub(super) fn of(buffer: impl Into<CallBuffer<'a, T>>) -> Self {
        Self { buffer: buffer.into(), layout: None, input: None, unit: 1 }
    }

    /// Returns the memory of a call on a buffer with these parts.
    pub(super) fn in_parts(buffer: impl Into<CallBuffer<'a, T>>, layout: &'a RankLayout) -> Self {
        Self { layout: Some(layout), ..Self::of(buffer) }
    }

    /// Adds an input with these parts.
    pub(super) fn with_input(self, input: &'a [T], layout: &'a RankLayout) -> Self {
        Self { input: Some((input, layout)), ..self }
    }

    /// Returns the memory as bytes, so that what only moves elements is compiled once for all their types.
    #[inline(always)]
    pub(super) fn into_bytes(self) -> CallOperands<'a, u8> {
        CallOperands {
            buffer: CallBuffer::Borrowed(bytemuck::cast_slice_mut(self.buffer.into_elements())),
            layout: self.layout,
            input: self.input.map(|(input, layout)| (bytemuck::cast_slice(input), layout)),
            unit: self.unit * size_of::<T>(),
        }
    }
}

impl<'a, T: Pod> CallBuffer<'a, T> {
    #[inline(always)]
    pub(super) fn ownership(&self) -> Ownership {
        match self {
            Self::Borrowed(_) => Ownership::Borrowed,
            Self::Owned(buffer) => buffer.ownership(),
        }
    }

    #[inline(always)]
    pub(super) fn elements(&mut self) -> &mut [T] {
        match self {
            Self::Borrowed(elements) => elements,
            Self::Owned(buffer) => buffer,
        }
    }

    #[inline(always)]
    pub(super) fn into_elements(self) -> &'a mut [T] {
        match self {
            Self::Borrowed(elements) => elements,
            Self::Owned(buffer) => buffer,
        }
    }
}

impl<'a, T> From<&'a [T]> for CallInput<'a, T> {
    fn from(elements: &'a [T]) -> Self {
        Self { elements, ownership: Ownership::Borrowed }
    }
}

impl<'a, T: Pod> From<&'a Buffer<T>> for CallInput<'a, T> {
    fn from(buffer: &'a Buffer<T>) -> Self {
        Self { elements: buffer, ownership: buffer.ownership() }
    }
}

impl<'a, T> From<&'a mut [T]> for CallBuffer<'a, T> {
    fn from(elements: &'a mut [T]) -> Self {
        Self::Borrowed(elements)
    }
}

impl<'a, T> From<&'a mut Buffer<T>> for CallBuffer<'a, T> {
    fn from(buffer: &'a mut Buffer<T>) -> Self {
        Self::Owned(buffer)
    }
}

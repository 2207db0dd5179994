//! Means of `f16`, whose partial sums are computed as `f32`.
//!
//! The elements are converted to `f32`, in memory that the engine keeps. The operation runs on them like on any `f32`,
//! and its result is rounded to `f16` once. Algorithms and transports see only `f32`. The call that the ranks compare
//! still names `f16`.

use bytemuck::Pod;
use dist_algos::direct::Ownership;
use dist_transport::{Cause, Chain, Transport};

use super::memory::CallBuffer;
use super::{CallOptions, Engine};
use crate::kernel::Widening;
use crate::{Buffer, Element, ReduceOp, Result};

/// Returns the conversion of the operation's elements, if their partial sums are computed as `f32`.
#[inline(always)]
pub(super) fn widening<T: Element>(op: ReduceOp) -> Option<Widening<T>> {
    T::WIDENING.filter(|_| op.partial_dtype(T::DTYPE) != T::DTYPE)
}

/// The `f32` memory that is kept between calls: ordinary memory, and memory that the ranks of a host share.
#[derive(Debug, Default)]
pub(super) struct WidenedBuffers {
    ordinary: Option<Buffer<f32>>,
    allocated: Option<Buffer<f32>>,
}

/// The elements of a call as `f32`.
#[derive(Debug)]
pub(super) struct WidenedElements {
    elements: Buffer<f32>,
    /// The ownership of the memory of the caller's elements.
    ownership: Ownership,
}

impl WidenedElements {
    /// Returns the elements, in memory of the same kind as the caller's elements.
    pub(super) fn buffer(&mut self) -> CallBuffer<'_, f32> {
        match self.ownership {
            Ownership::Borrowed => CallBuffer::Borrowed(&mut self.elements),
            _ => CallBuffer::Owned(&mut self.elements),
        }
    }

    pub(super) fn elements(&mut self) -> &mut [f32] {
        &mut self.elements
    }
}

impl WidenedBuffers {
    fn of_kind(&mut self, ownership: Ownership) -> &mut Option<Buffer<f32>> {
        match ownership {
            Ownership::Allocated => &mut self.allocated,
            _ => &mut self.ordinary,
        }
    }

    /// Keeps the memory for the next call.
    fn keep(&mut self, wide: WidenedElements) {
        *self.of_kind(wide.ownership) = Some(wide.elements);
    }
}

impl Engine {
    /// Converts elements to `f32`, in memory of the same ownership. If there is not enough memory, the job is aborted,
    /// because other ranks wait.
    pub(super) fn widened<T: Element>(
        &mut self,
        widening: Widening<T>,
        elements: &[T],
        ownership: Ownership,
    ) -> Result<WidenedElements> {
        let ownership = ownership.expected();
        let kept = self.wide.of_kind(ownership).take().and_then(|kept| kept.with_len(elements.len()));
        let memory = match kept {
            Some(kept) => Ok(kept),
            None if ownership == Ownership::Allocated => alloc(&mut *self.transport, elements.len()),
            None => Buffer::zeroed(elements.len()),
        };
        let mut memory = memory.inspect_err(|error| self.transport.abort(Cause::gave_up(Chain(error))))?;
        (widening.widen)(elements, &mut memory);
        Ok(WidenedElements { elements: memory, ownership })
    }

    /// Ends an operation on widened elements. If it succeeded, rounds the result to the caller's type: as many elements
    /// as `into` has, from the index on that `done` holds.
    pub(super) fn narrowed<T: Element>(
        &mut self,
        widening: Widening<T>,
        wide: WidenedElements,
        done: Result<usize>,
        into: &mut [T],
    ) -> Result<()> {
        let done = done.map(|start| (widening.narrow)(&wide.elements[start..][..into.len()], into));
        self.wide.keep(wide);
        done
    }
}

impl<'a> CallOptions<'a> {
    /// Returns the options of a call that works on `f32` for a caller with elements of `T`.
    pub(super) fn in_place_of<T: Element>(&self) -> Self {
        Self { element: Some(T::DTYPE.into()), ..self.clone() }
    }
}

/// Allocates zeroed elements in memory that the ranks of this host share, or in ordinary memory if there is none.
pub(crate) fn alloc<T: Pod>(transport: &mut dyn Transport, len: usize) -> Result<Buffer<T>> {
    let shared = len
        .checked_mul(size_of::<T>())
        .and_then(|bytes| transport.allocate(bytes))
        .and_then(|memory| Buffer::allocated(memory, len));
    shared.map_or_else(|| Buffer::standing_in(len), Ok)
}

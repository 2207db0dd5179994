//! One operation on many buffers.

use std::ops::DerefMut;

use bytemuck::Pod;

use super::{CallOptions, Engine, copy, reserve};
use crate::Result;
use crate::digest::digest;

impl Engine {
    /// Runs `operation` once on all buffers. They are copied into contiguous memory that is kept between calls, and
    /// back. A single buffer is not copied.
    pub(crate) fn coalesced<T: Pod, B: DerefMut<Target = [T]>>(
        &mut self,
        buffers: &mut [B],
        options: &CallOptions<'_>,
        operation: impl FnOnce(&mut Self, &mut [T], &CallOptions<'_>) -> Result<()>,
    ) -> Result<()> {
        let options = &options.with_sizes(digest(buffers.iter().map(|buffer| buffer.len() as u64)));
        if let [alone] = buffers {
            return operation(self, alone, options);
        }
        let mut memory = std::mem::take(&mut self.copy);
        let len = buffers.iter().map(|buffer| buffer.len()).sum();
        let packed = reserve(&mut memory, len, &mut *self.transport)?;
        each(buffers, packed, |buffer, place| copy(buffer, place));
        let done = operation(self, packed, options);
        if done.is_ok() {
            each(buffers, packed, |buffer, place| copy(place, buffer));
        }
        self.copy = memory;
        done
    }
}

/// Calls `function` with each buffer and its place in `packed`.
fn each<T, B: DerefMut<Target = [T]>>(
    buffers: &mut [B],
    mut packed: &mut [T],
    mut function: impl FnMut(&mut [T], &mut [T]),
) {
    for buffer in buffers {
        let (place, rest) = packed.split_at_mut(buffer.len());
        function(buffer, place);
        packed = rest;
    }
}

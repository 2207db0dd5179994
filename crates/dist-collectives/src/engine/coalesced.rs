//! Many buffers as one operation.

use std::ops::DerefMut;

use super::{CallOptions, Engine, copy, room};
use crate::digest::digest;
use crate::{Element, Result};

impl Engine {
    /// Runs `operation` on all buffers together. They are copied one after the other into memory that is kept
    /// between calls. A single buffer is used where it is.
    pub(crate) fn coalesced<T: Element, B: DerefMut<Target = [T]>>(
        &mut self,
        buffers: &mut [B],
        options: &CallOptions<'_>,
        operation: impl FnOnce(&mut Self, &mut [T], &CallOptions<'_>) -> Result<()>,
    ) -> Result<()> {
        let options = &options.clone().with_sizes(digest(buffers.iter().map(|buffer| buffer.len() as u64)));
        if let [alone] = buffers {
            return operation(self, alone, options);
        }
        let mut memory = std::mem::take(&mut self.copy);
        let len = buffers.iter().map(|buffer| buffer.len()).sum();
        let packed = room(&mut memory, len, &mut *self.transport)?;
        each(buffers, packed, |buffer, place| copy(buffer, place));
        let done = operation(self, packed, options);
        if done.is_ok() {
            each(buffers, packed, |buffer, place| copy(place, buffer));
        }
        self.copy = memory;
        done
    }
}

/// Calls the function with every buffer and its range.
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

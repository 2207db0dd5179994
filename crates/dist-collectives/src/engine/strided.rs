//! Messages from and into memory with gaps, which pass through memory of the engine.

use std::mem;

use bytemuck::Pod;

use super::{CallOptions, Engine, reserve};
use crate::Result;
use crate::strided::{Strided, StridedMut};

impl Engine {
    pub(crate) fn send_strided<T: Pod>(
        &mut self,
        view: Strided<'_, T>,
        to: usize,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        match view.as_slice() {
            Some(elements) => self.send(elements, to, options),
            None => self.with_packed(view.len(), |engine, packed| {
                view.pack(packed);
                engine.send(packed, to, options)
            }),
        }
    }

    pub(crate) fn receive_strided<T: Pod>(
        &mut self,
        view: &mut StridedMut<'_, T>,
        from: usize,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        if let Some(elements) = view.as_mut_slice() {
            return self.receive(elements, from, options);
        }
        self.with_packed(view.len(), |engine, packed| {
            engine.receive(packed, from, options)?;
            view.unpack(packed);
            Ok(())
        })
    }

    pub(crate) fn send_receive_strided<T: Pod>(
        &mut self,
        (sent, to): (Strided<'_, T>, usize),
        (received, from): (&mut StridedMut<'_, T>, usize),
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let sent_len = if sent.as_slice().is_some() { 0 } else { sent.len() };
        let received_len = if received.as_mut_slice().is_some() { 0 } else { received.len() };
        self.with_packed(sent_len.saturating_add(received_len), |engine, packed| {
            let (packed, unpacked) = packed.split_at_mut(sent_len);
            let sent = match sent.as_slice() {
                Some(elements) => elements,
                None => {
                    sent.pack(packed);
                    &*packed
                }
            };
            if let Some(elements) = received.as_mut_slice() {
                return engine.send_receive(sent, to, elements, from, options);
            }
            engine.send_receive(sent, to, unpacked, from, options)?;
            received.unpack(unpacked);
            Ok(())
        })
    }

    /// Calls `work` with memory for this many elements, which is kept between calls.
    pub(crate) fn with_packed<T: Pod>(
        &mut self,
        len: usize,
        work: impl FnOnce(&mut Self, &mut [T]) -> Result<()>,
    ) -> Result<()> {
        let mut memory = mem::take(&mut self.copy);
        let done = reserve(&mut memory, len, &mut *self.transport).and_then(|packed| work(self, packed));
        self.copy = memory;
        done
    }
}

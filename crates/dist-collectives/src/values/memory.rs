//! Memory for encoded values, which is kept between calls.

/// The most bytes that are kept of each kind.
const KEPT_BYTES_MAX: usize = 64 << 20;

/// Memory for the encoding of this rank's value and for the encodings that it receives. The pages of fresh memory can take
/// longer than all other parts of a call.
#[derive(Debug, Default)]
pub(crate) struct ValueMemory {
    encoded: Vec<u8>,
    received: Vec<u8>,
}

impl ValueMemory {
    /// Takes empty memory for an encoding.
    pub(super) fn take_for_encoding(&mut self) -> Vec<u8> {
        let mut memory = std::mem::take(&mut self.encoded);
        memory.clear();
        memory
    }

    /// Takes this many bytes, which hold anything, to receive into.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub(super) fn take_for_receiving(
        &mut self,
        len: usize,
    ) -> Result<Vec<u8>, std::collections::TryReserveError> {
        let mut memory = std::mem::take(&mut self.received);
        memory.try_reserve_exact(len.saturating_sub(memory.len()))?;
        memory.resize(len, 0);
        Ok(memory)
    }

    /// Keeps memory that was taken for an encoding.
    pub(super) fn keep_encoded(&mut self, memory: Vec<u8>) {
        if memory.capacity() <= KEPT_BYTES_MAX {
            self.encoded = memory;
        }
    }

    /// Keeps memory that was taken to receive into.
    pub(super) fn keep_received(&mut self, memory: Vec<u8>) {
        if memory.capacity() <= KEPT_BYTES_MAX {
            self.received = memory;
        }
    }
}

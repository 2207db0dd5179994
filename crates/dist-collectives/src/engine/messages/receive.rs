//! A receive of a call, and the memory that its message is written to.

use bytemuck::Pod;
use dist_transport::{Fingerprint, Refusal};

use crate::Call;
use crate::engine::MessageMemory;

/// A receive of the current call.
pub(in crate::engine) struct Receive<'a> {
    /// The sender; `None` for any rank.
    pub(super) from: Option<usize>,
    pub(super) call: Call,
    pub(super) encoded: Fingerprint,
    pub(super) destination: Destination<'a>,
    pub(super) is_open: bool,
    pub(super) is_complete: bool,
    /// The sender of the message and its length in bytes.
    pub(super) received: (usize, usize),
}

/// The destination of a received message.
pub(super) enum Destination<'a> {
    /// Memory of the length of the message.
    Exact(&'a mut [u8]),
    /// Memory of the length of the message or more.
    UpTo(&'a mut [u8]),
    /// A vector that takes the length of the message.
    Vector(&'a mut dyn ByteVector),
    /// The memory of a started receive.
    Started(&'a mut dyn MessageMemory),
}

impl Destination<'_> {
    /// Prepares the destination for a message of this rank with this length in bytes.
    pub(super) fn accept(&mut self, from: usize, len: usize) -> Result<(), Refusal> {
        match self {
            Self::Exact(memory) if memory.len() == len => Ok(()),
            Self::UpTo(memory) if memory.len() >= len => Ok(()),
            Self::Exact(memory) | Self::UpTo(memory) => Err(Refusal::Length(memory.len())),
            Self::Vector(vector) => vector.resize_bytes(len),
            Self::Started(memory) => memory.accept(from, len),
        }
    }

    /// Returns the memory of an accepted message with this length in bytes.
    pub(super) fn memory(&mut self, len: usize) -> &mut [u8] {
        match self {
            Self::Exact(memory) | Self::UpTo(memory) => &mut memory[..len],
            Self::Vector(vector) => vector.bytes(),
            Self::Started(memory) => memory.bytes_mut(),
        }
    }
}

impl<'a> Receive<'a> {
    pub(super) const fn new(
        from: Option<usize>,
        call: Call,
        encoded: Fingerprint,
        destination: Destination<'a>,
    ) -> Self {
        Self { from, call, encoded, destination, is_open: true, is_complete: false, received: (0, 0) }
    }

    /// Creates a receive into the memory of a started one.
    pub(in crate::engine) fn started(
        from: Option<usize>,
        call: Call,
        encoded: Fingerprint,
        memory: &'a mut dyn MessageMemory,
    ) -> Self {
        Self::new(from, call, encoded, Destination::Started(memory))
    }

    /// Returns `true` if the receive takes messages of this rank with this tag.
    pub(super) fn takes(&self, from: usize, tag: Option<u32>) -> bool {
        self.from.is_none_or(|wanted| wanted == from) && self.call.tag() == tag
    }

    /// Prepares the receive for a message of this rank with this length in bytes.
    pub(super) fn accept(&mut self, from: usize, len: usize) -> Result<(), Refusal> {
        self.destination.accept(from, len)?;
        self.received = (from, len);
        Ok(())
    }

    pub(super) fn memory(&mut self) -> &mut [u8] {
        self.destination.memory(self.received.1)
    }

    /// Completes the receive with the bytes of a message that were kept.
    pub(super) fn fill(&mut self, bytes: &[u8]) {
        self.memory().copy_from_slice(bytes);
        self.is_open = false;
        self.is_complete = true;
    }
}

/// A vector of any elements, as bytes.
pub(in crate::engine) trait ByteVector {
    /// Resizes the vector to this number of bytes.
    fn resize_bytes(&mut self, len: usize) -> Result<(), Refusal>;

    fn bytes(&mut self) -> &mut [u8];
}

impl<T: Pod> ByteVector for Vec<T> {
    fn resize_bytes(&mut self, len: usize) -> Result<(), Refusal> {
        let elements = len.checked_div(size_of::<T>()).unwrap_or(0);
        if elements * size_of::<T>() != len {
            return Err(Refusal::Length(elements * size_of::<T>()));
        }
        self.try_reserve_exact(elements.saturating_sub(self.len())).map_err(|_| Refusal::NoMemory)?;
        self.resize(elements, T::zeroed());
        Ok(())
    }

    fn bytes(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self)
    }
}

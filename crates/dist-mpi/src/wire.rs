//! The packets that processes send to each other, and the interface of the library that moves them.

use std::ffi::c_int;
use std::io;

use bytemuck::cast_slice;
use dist_transport::cpu::CacheLine;
use dist_transport::native::NativeOperation;

use crate::library::{CreateCommunicator, NativeComm};

/// The memory of a packet. It belongs to the wire from the moment it is sent until the library has finished
/// with it.
pub(crate) type Buffer = Vec<CacheLine>;

/// Payload bytes of one packet. Longer messages are cut into packets of this size, so that a copy stays in the
/// cache of the core that makes it.
pub(crate) const SEGMENT: usize = 128 * 1024;

/// A message of at most this size leaves without further work of its sender, in every MPI library.
pub(crate) const SHORT: usize = 1024;

/// Bytes of the header of a packet. The payload begins behind it and is aligned to 64 bytes.
pub(crate) const HEADER: usize = CacheLine::BYTES;

/// Cache lines of a packet of full size.
pub(crate) const FULL: usize = (HEADER + SEGMENT) / CacheLine::BYTES;

/// Packets that may be on their way to one peer at the same time.
pub(crate) const IN_FLIGHT_MAX: usize = 4;

/// The purpose of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The first part of a message: fingerprint, length or frame, channel; then bytes.
    First,
    /// A further part of the message whose first part came last on the same channel.
    Next,
    /// The receiver of a channel has taken this many bytes, or clears an announced message.
    Credit,
    /// The sender has left a channel.
    Goodbye,
    /// The sender has waited long, or waits no longer. Only rank 0 receives it.
    WaitReport,
    /// The sender proposes an abort. Only rank 0 receives it.
    Proposal,
    /// The abort that stands.
    Decision,
    /// A piece of a request to the store. Only rank 0 receives it.
    StoreRequest,
    /// A piece of the reply to a request. Only rank 0 sends it.
    StoreReply,
    /// The sender no longer waits for the reply to a request. Only rank 0 receives it.
    CancelRequest,
    /// The last packet of a process.
    Leave,
}

impl Kind {
    const ALL: [Self; 11] = [
        Self::First,
        Self::Next,
        Self::Credit,
        Self::Goodbye,
        Self::WaitReport,
        Self::Proposal,
        Self::Decision,
        Self::StoreRequest,
        Self::StoreReply,
        Self::CancelRequest,
        Self::Leave,
    ];
}

/// The kind of a packet and its number among the packets of its sender to its receiver, modulo [`Tag::NUMBERS`].
///
/// The library delivers packets in order, but a long packet may be complete after a short one that was sent
/// later. The number restores the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tag {
    pub(crate) kind: Kind,
    pub(crate) number: u16,
}

impl Tag {
    /// Numbers are counted modulo this. Every MPI library allows tags up to 32767, which are 4 bits of the kind
    /// and 11 of the number. Fewer packets than that wait for an earlier one, since few receives are open.
    pub(crate) const NUMBERS: u16 = 1 << 11;
    const KIND_BITS: u32 = 4;

    /// Returns the tag as the library sends it.
    pub(crate) const fn encode(self) -> i32 {
        ((self.number % Self::NUMBERS) as i32) << Self::KIND_BITS | self.kind as i32
    }

    /// Returns the tag that was received, or `None` if this crate has not sent it.
    pub(crate) fn decode(tag: i32) -> Option<Self> {
        let bits = u32::try_from(tag).ok()?;
        let kind = *Kind::ALL.get((bits & ((1 << Self::KIND_BITS) - 1)) as usize)?;
        let number = u16::try_from(bits >> Self::KIND_BITS).ok()?;
        (number < Self::NUMBERS).then_some(Self { kind, number })
    }

    /// Returns the number that follows this one.
    pub(crate) const fn after(number: u16) -> u16 {
        (number + 1) % Self::NUMBERS
    }
}

/// A packet that has arrived.
#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) kind: Kind,
    pub(crate) buffer: Buffer,
    /// The bytes of header and payload.
    pub(crate) bytes: usize,
}

impl Packet {
    /// Returns the 8 bytes of the header that begin here, as a number.
    pub(crate) fn header_number(&self, offset: usize) -> u64 {
        let bytes = &cast_slice::<_, u8>(&self.buffer)[offset..offset + 8];
        u64::from_le_bytes(bytes.try_into().expect("8 bytes"))
    }

    /// Returns the bytes behind the header.
    pub(crate) fn payload(&self) -> &[u8] {
        &cast_slice(&self.buffer)[HEADER..self.bytes]
    }
}

/// A part of a collective that the library executes.
#[derive(Debug, Clone)]
pub(crate) struct NativeSegment {
    pub(crate) operation: NativeOperation,
    /// The bytes of each part that the library reads. They lie one after the other.
    pub(crate) sent: Vec<usize>,
    /// The bytes of each part that the library writes, likewise.
    pub(crate) received: Vec<usize>,
    /// A number that no other segment of this process has.
    pub(crate) number: u64,
}

/// The memory of a segment that is complete.
#[derive(Debug)]
pub(crate) struct FinishedNative {
    pub(crate) number: u64,
    pub(crate) send: Buffer,
    pub(crate) receive: Buffer,
    /// The counts and places that the library reads while the segment is open.
    pub(crate) layout: NativeLayout,
}

/// The counts of the parts of a segment and their places, in elements, if their sizes differ. Otherwise all are empty.
#[derive(Debug, Default)]
pub(crate) struct NativeLayout {
    pub(crate) send_counts: Vec<c_int>,
    pub(crate) send_places: Vec<c_int>,
    pub(crate) receive_counts: Vec<c_int>,
    pub(crate) receive_places: Vec<c_int>,
}

/// The packets that have arrived since the last look, and free buffers.
#[derive(Debug, Default)]
pub(crate) struct Completions {
    /// Packets, with their senders and tags.
    pub(crate) arrived: Vec<(usize, Tag, Packet)>,
    /// Segments of collectives.
    pub(crate) natives: Vec<FinishedNative>,
    /// Buffers of full size that are free: those whose packets have been sent, and those that were taken. The
    /// wire uses them for further packets.
    pub(crate) spare: Vec<Buffer>,
}

/// Buffers of full size that are kept for reuse.
const SPARE_MAX: usize = 64;

impl Completions {
    /// Keeps a buffer for reuse if it has full size.
    pub(crate) fn recycle(&mut self, buffer: Buffer) {
        if buffer.len() == FULL && self.spare.len() < SPARE_MAX {
            self.spare.push(buffer);
        }
    }

    /// Returns a buffer of full size with unspecified contents.
    pub(crate) fn full_buffer(&mut self) -> Buffer {
        self.spare.pop().unwrap_or_else(|| vec![CacheLine::ZERO; FULL])
    }
}

/// A library that moves packets between the processes of the world. It is used by one thread at a time.
pub(crate) trait Wire: Send {
    /// Begins to send the first `bytes` of a buffer to a process.
    fn send(&mut self, to: usize, tag: Tag, buffer: Buffer, bytes: usize) -> io::Result<()>;

    /// Lets the library work, and adds what has completed. Does not wait.
    fn poll(&mut self, completions: &mut Completions) -> io::Result<()>;

    /// Returns how many packets are on their way to this process.
    fn in_flight_to(&self, to: usize) -> usize;

    /// Returns how many packets are on their way to all processes, and how many segments of collectives are open.
    fn in_flight(&self) -> usize;

    /// Returns a function that creates the communicator of these processes. It blocks until all of them have called it,
    /// and is called without a lock. The count is that of the communicators which the first of them has created.
    fn create_communicator(&self, _members: &[usize], _count: u64) -> io::Result<CreateCommunicator> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Begins to execute a segment of a collective. The wire owns the memory until the segment is complete.
    fn begin_native(
        &mut self,
        _comm: NativeComm,
        _segment: NativeSegment,
        _send: Buffer,
        _receive: Buffer,
    ) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Ends the use of the library. All processes have sent their last packet, and it has arrived.
    fn close(&mut self) -> io::Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tag_survives_the_library_and_fits_its_smallest_limit() {
        for kind in Kind::ALL {
            for number in [0, 1, 77, Tag::NUMBERS - 1] {
                let tag = Tag { kind, number };
                assert_eq!(Tag::decode(tag.encode()), Some(tag));
                assert!((0..=32767).contains(&tag.encode()));
            }
        }
        assert_eq!(Tag::after(Tag::NUMBERS - 1), 0);
        for tag in [-1, 15, 32768] {
            assert_eq!(Tag::decode(tag), None);
        }
    }
}

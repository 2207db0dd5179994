//! Replacement for shared memory on systems without it: its types cannot be constructed.

use std::convert::Infallible;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use socket2::Socket;

use crate::bootstrap::control::UnixSocketName;
use crate::host_memory::Heap;

pub(crate) const ACCEPTED: u8 = 1;

#[derive(Debug)]
pub(crate) struct ShmLink(Infallible);

#[derive(Debug)]
pub(crate) struct SharedSegment(Infallible);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "nothing can end that cannot begin")]
pub(crate) enum StreamEnd {
    Goodbye,
    Closed,
    Broken,
    NoMemory,
}

#[derive(Debug)]
#[allow(dead_code, reason = "nothing comes where nothing can be shared")]
pub(crate) enum NextMessage<'a> {
    InRing(&'a [u8]),
    InFastbox(&'a [u8]),
}

fn unsupported<T>() -> io::Result<T> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "built without shared memory"))
}

pub(crate) fn listen(_name: UnixSocketName) -> io::Result<Socket> {
    unsupported()
}

pub(crate) fn connect(_name: UnixSocketName) -> io::Result<Socket> {
    unsupported()
}

pub(crate) fn is_ours(_socket: &Socket) -> io::Result<bool> {
    unsupported()
}

pub(crate) fn offer(_socket: &Socket, _nonce: &[u8; 32]) -> io::Result<SharedSegment> {
    unsupported()
}

pub(crate) fn take(_socket: &Socket) -> io::Result<Option<SharedSegment>> {
    unsupported()
}

pub(crate) fn give_arena(_socket: &Socket, _heap: &Heap, _number: u32) -> io::Result<()> {
    unsupported()
}

impl ShmLink {
    pub(crate) fn new(_socket: Socket, share: SharedSegment, _lends: bool) -> Self {
        match share.0 {}
    }

    pub(crate) fn room(&mut self, _wanted: usize) -> Result<usize, StreamEnd> {
        match self.0 {}
    }

    pub(crate) fn write(&mut self, _ahead: usize, _bytes: &[u8]) {
        match self.0 {}
    }

    pub(crate) fn publish(&mut self, _bytes: usize) {
        match self.0 {}
    }

    pub(crate) fn put_in_fastbox(
        &mut self,
        _about: &[u8],
        _parts: &[&[u8]],
        _bytes: usize,
    ) -> Result<bool, StreamEnd> {
        match self.0 {}
    }

    pub(crate) fn receive_fastbox(&mut self, _bytes: usize) -> Result<(), StreamEnd> {
        match self.0 {}
    }

    pub(crate) fn fastbox_bytes(&self, _range: Range<usize>) -> &[u8] {
        match self.0 {}
    }

    pub(crate) fn clear_fastbox(&mut self) {
        match self.0 {}
    }

    pub(crate) fn offer_message(&mut self, _header: &[u8], _message: &[u8]) -> Result<bool, StreamEnd> {
        match self.0 {}
    }

    pub(crate) fn acked(&mut self, _bytes: usize) -> Result<Option<usize>, StreamEnd> {
        match self.0 {}
    }

    pub(crate) fn cancel_offer(&mut self) {
        match self.0 {}
    }

    pub(crate) fn receive_offer(&mut self) -> Result<u64, StreamEnd> {
        match self.0 {}
    }

    pub(crate) fn get_message(&mut self, _address: u64, _into: &mut [u8]) -> bool {
        match self.0 {}
    }

    pub(crate) fn ack_offer(&mut self, _taken: usize) -> Result<bool, StreamEnd> {
        match self.0 {}
    }

    pub(crate) fn next(&mut self, _header: usize) -> Result<Option<NextMessage<'_>>, StreamEnd> {
        match self.0 {}
    }

    pub(crate) fn has_arrived(&mut self) -> Result<bool, StreamEnd> {
        match self.0 {}
    }

    pub(crate) fn peek(&mut self, _max: usize) -> Result<&[u8], StreamEnd> {
        match self.0 {}
    }

    pub(crate) fn advance(&mut self, _bytes: usize) {
        match self.0 {}
    }

    pub(crate) fn shares_core(&self) -> bool {
        match self.0 {}
    }

    pub(crate) fn prepare_sleep(&mut self, _to_receive: bool) -> bool {
        match self.0 {}
    }

    pub(crate) fn end_sleep(&mut self) {
        match self.0 {}
    }

    pub(crate) fn say_goodbye(&self) {
        match self.0 {}
    }
}

impl AsFd for ShmLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self.0 {}
    }
}

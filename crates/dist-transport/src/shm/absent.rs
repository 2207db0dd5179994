//! What stands where memory cannot be shared: nothing can be made, so nothing can be done with it.

use std::convert::Infallible;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use socket2::Socket;

use crate::tcp::DoorName;

pub(crate) const ACCEPTED: u8 = 1;

#[derive(Debug)]
pub(crate) struct Memory(Infallible);

#[derive(Debug)]
pub(crate) struct Share(Infallible);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "nothing can end that cannot begin")]
pub(crate) enum End {
    Goodbye,
    Closed,
    Broken,
}

#[derive(Debug)]
#[allow(dead_code, reason = "nothing comes where nothing can be shared")]
pub(crate) enum Next<'a> {
    Following(&'a [u8]),
    Laid(&'a [u8]),
}

fn unsupported<T>() -> io::Result<T> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "built without shared memory"))
}

pub(crate) fn listen(_name: DoorName) -> io::Result<Socket> {
    unsupported()
}

pub(crate) fn connect(_name: DoorName) -> io::Result<Socket> {
    unsupported()
}

pub(crate) fn is_ours(_socket: &Socket) -> io::Result<bool> {
    unsupported()
}

pub(crate) fn offer(_socket: &Socket, _nonce: &[u8; 32]) -> io::Result<Share> {
    unsupported()
}

pub(crate) fn take(_socket: &Socket) -> io::Result<Option<Share>> {
    unsupported()
}

#[derive(Debug, Default)]
pub(crate) struct Heap;

impl Heap {
    pub(crate) fn age(&self) {}

    pub(crate) fn return_some(&self) -> bool {
        false
    }
}

pub(crate) fn give_arena(_socket: &Socket, _heap: &Heap, _number: u32) -> io::Result<()> {
    unsupported()
}

impl Memory {
    pub(crate) fn new(_socket: Socket, share: Share, _lends: bool) -> Self {
        match share.0 {}
    }

    pub(crate) fn room(&mut self, _wanted: usize) -> Result<usize, End> {
        match self.0 {}
    }

    pub(crate) fn write(&mut self, _ahead: usize, _bytes: &[u8]) {
        match self.0 {}
    }

    pub(crate) fn publish(&mut self, _bytes: usize) {
        match self.0 {}
    }

    pub(crate) fn lay_down(&mut self, _about: &[u8], _parts: &[&[u8]], _bytes: usize) -> Result<bool, End> {
        match self.0 {}
    }

    pub(crate) fn receive_tray(&mut self, _bytes: usize) -> Result<(), End> {
        match self.0 {}
    }

    pub(crate) fn on_tray(&self, _range: Range<usize>) -> &[u8] {
        match self.0 {}
    }

    pub(crate) fn clear_tray(&mut self) {
        match self.0 {}
    }

    pub(crate) fn lend(&mut self, _header: &[u8], _message: &[u8]) -> Result<bool, End> {
        match self.0 {}
    }

    pub(crate) fn taken(&mut self, _bytes: usize) -> Result<Option<usize>, End> {
        match self.0 {}
    }

    pub(crate) fn call_back(&mut self) {
        match self.0 {}
    }

    pub(crate) fn receive_loan(&mut self) -> Result<u64, End> {
        match self.0 {}
    }

    pub(crate) fn borrow(&mut self, _address: u64, _into: &mut [u8]) -> bool {
        match self.0 {}
    }

    pub(crate) fn give_back(&mut self, _taken: usize) -> Result<bool, End> {
        match self.0 {}
    }

    pub(crate) fn next(&mut self, _header: usize) -> Result<Option<Next<'_>>, End> {
        match self.0 {}
    }

    pub(crate) fn has_come(&mut self) -> Result<bool, End> {
        match self.0 {}
    }

    pub(crate) fn peek(&mut self, _max: usize) -> Result<&[u8], End> {
        match self.0 {}
    }

    pub(crate) fn advance(&mut self, _bytes: usize) {
        match self.0 {}
    }

    pub(crate) fn shares_core(&self) -> bool {
        match self.0 {}
    }

    pub(crate) fn lie_down(&mut self, _to_receive: bool) -> bool {
        match self.0 {}
    }

    pub(crate) fn get_up(&mut self) {
        match self.0 {}
    }

    pub(crate) fn say_goodbye(&self) {
        match self.0 {}
    }
}

impl AsFd for Memory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self.0 {}
    }
}

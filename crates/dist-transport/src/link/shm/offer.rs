//! Offers and takes shared memory on a Unix socket between two ranks of a host, and sends bytes there.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use socket2::Socket;

use super::segment::{self, Ends, Nonce};
use crate::host_memory::{Heap, Mapping};

/// The bytes that are sent on the socket, one at a time.
const REFUSED: u8 = 0;
pub(crate) const ACCEPTED: u8 = 1;
pub(super) const WAKE: u8 = 2;
pub(super) const GOODBYE: u8 = 3;
/// Sent with a descriptor.
pub(super) const FILE: u8 = 4;

/// A shared segment that was created or taken, before any bytes have moved.
#[derive(Debug)]
pub(crate) struct SharedSegment(pub(super) Ends);

/// Creates shared memory and offers it to the authenticated peer. The peer answers with [`ACCEPTED`] or
/// [`REFUSED`].
///
/// # Errors
/// If the system has no memory left, or the peer is gone.
pub(crate) fn offer(socket: &Socket, nonce: &Nonce) -> io::Result<SharedSegment> {
    let (file, ends) = segment::create(nonce)?;
    send_file(socket, nonce, file.as_fd())?;
    Ok(SharedSegment(ends))
}

/// Takes the shared memory that the authenticated peer offers, and answers. Returns `None` if this process
/// cannot map the memory.
///
/// # Errors
/// `WouldBlock` if nothing is offered yet; `EMFILE` if this process may open no more files; otherwise if the
/// peer is gone.
pub(crate) fn take(socket: &Socket) -> io::Result<Option<SharedSegment>> {
    let mut nonce = Nonce::default();
    let (count, file) = take_file(socket, &mut nonce)?;
    let ends = match file {
        Some(file) if count == nonce.len() => segment::open(&file, &nonce).unwrap_or_else(|error| {
            tracing::debug!(%error, "memory that was offered cannot be mapped");
            None
        }),
        _ => None,
    };
    send_byte(socket, if ends.is_some() { ACCEPTED } else { REFUSED })?;
    Ok(ends.map(SharedSegment))
}

/// Sends the descriptor of an arena of this process's heap to the authenticated peer. Does nothing if no arena
/// has this number.
///
/// # Errors
/// If the peer is gone.
pub(crate) fn give_arena(socket: &Socket, heap: &Heap, number: u32) -> io::Result<()> {
    match heap.file(number) {
        Some((file, len)) => send_file(socket, &(len as u64).to_le_bytes(), file.as_fd()),
        None => Ok(()),
    }
}

/// Takes the arena that the authenticated peer passes.
///
/// # Errors
/// `WouldBlock` if it has not arrived yet; `ConnectionReset` if the peer passes none; otherwise if it cannot
/// be mapped.
pub(crate) fn take_arena(socket: &Socket) -> io::Result<Mapping> {
    let mut len = [0; 8];
    let (count, file) = take_file(socket, &mut len)?;
    if count == 0 {
        return Err(ErrorKind::ConnectionReset.into());
    }
    let len = usize::try_from(u64::from_le_bytes(len)).ok().filter(|_| count == 8);
    let mapping = file.zip(len).map(|(file, len)| Mapping::open(&file, len)).transpose()?;
    mapping.flatten().ok_or_else(|| ErrorKind::InvalidData.into())
}

/// Sends bytes and passes a descriptor with them.
pub(super) fn send_file(socket: &Socket, words: &[u8], file: BorrowedFd<'_>) -> io::Result<()> {
    let files = [file];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut attached = SendAncillaryBuffer::new(&mut space);
    attached.push(SendAncillaryMessage::ScmRights(&files));
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(words)], &mut attached, SendFlags::NOSIGNAL)?;
    // A connection's buffer takes these few bytes at once.
    if sent == words.len() { Ok(()) } else { Err(ErrorKind::WriteZero.into()) }
}

/// Receives bytes, and the last descriptor that was passed with them.
pub(super) fn receive_with_file(socket: &Socket, words: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    match receive_any(socket, words)? {
        (count, Passed::File(file)) => Ok((count, Some(file))),
        (count, Passed::Nothing | Passed::Lost) => Ok((count, None)),
    }
}

/// The descriptor that was passed with bytes.
enum Passed {
    Nothing,
    File(OwnedFd),
    /// A descriptor that the system dropped, because this process may open no more files.
    Lost,
}

fn receive_any(socket: &Socket, words: &mut [u8]) -> io::Result<(usize, Passed)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut attached = RecvAncillaryBuffer::new(&mut space);
    let message =
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(words)], &mut attached, RecvFlags::CMSG_CLOEXEC)?;
    let files = attached.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let passed = match files.flatten().last() {
        Some(file) => Passed::File(file),
        None if message.flags.contains(ReturnFlags::CTRUNC) => Passed::Lost,
        None => Passed::Nothing,
    };
    Ok((message.bytes, passed))
}

/// Receives bytes that come with a file descriptor, like [`receive_with_file`].
///
/// # Errors
/// `EMFILE` if this process may open no more files; `WouldBlock` if nothing has arrived yet.
fn take_file(socket: &Socket, words: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    match receive_any(socket, words)? {
        (_, Passed::Lost) => Err(Errno::MFILE.into()),
        (count, Passed::File(file)) => Ok((count, Some(file))),
        (count, Passed::Nothing) => Ok((count, None)),
    }
}

/// Sends a byte.
pub(super) fn send_byte(socket: &Socket, word: u8) -> io::Result<()> {
    let sent = rustix::net::send(socket, &[word], SendFlags::NOSIGNAL)?;
    if sent == 1 { Ok(()) } else { Err(ErrorKind::WriteZero.into()) }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Read;

    use socket2::{Domain, Type};

    use super::*;

    pub(in super::super) fn sockets() -> (Socket, Socket) {
        let (one, other) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        one.set_nonblocking(true).unwrap();
        other.set_nonblocking(true).unwrap();
        (one, other)
    }

    pub(in super::super) fn answer(socket: &Socket) -> u8 {
        let mut word = [9];
        let mut socket = socket;
        socket.read_exact(&mut word).unwrap();
        word[0]
    }

    #[test]
    fn a_message_that_is_no_offer_is_refused_with_an_answer() {
        let (one, other) = sockets();
        rustix::net::send(&one, &[5; 32], SendFlags::NOSIGNAL).unwrap();
        assert!(take(&other).unwrap().is_none());
        assert_eq!(answer(&one), REFUSED);
    }

    #[test]
    fn an_offer_of_another_segment_is_refused_with_an_answer() {
        let (one, other) = sockets();
        let (file, _ends) = segment::create(&[5; 32]).unwrap();
        let files = [file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut attached = SendAncillaryBuffer::new(&mut space);
        attached.push(SendAncillaryMessage::ScmRights(&files));
        let nonce = [6; 32];
        rustix::net::sendmsg(&one, &[IoSlice::new(&nonce)], &mut attached, SendFlags::NOSIGNAL).unwrap();
        assert!(take(&other).unwrap().is_none());
        assert_eq!(answer(&one), REFUSED);
    }

    #[test]
    fn an_arena_is_given_by_its_number() {
        let heap = std::sync::Arc::new(Heap::default());
        let mut memory = heap.allocate(100).unwrap();
        memory.bytes_mut().fill(7);
        let (one, other) = sockets();
        assert_eq!(take_arena(&other).unwrap_err().kind(), ErrorKind::WouldBlock);
        give_arena(&one, &heap, 0).unwrap();
        let arena = take_arena(&other).unwrap();
        assert_eq!(arena.first_bytes(), [7; 16]);
        give_arena(&one, &heap, 1).unwrap();
        drop(one);
        assert_eq!(take_arena(&other).unwrap_err().kind(), ErrorKind::ConnectionReset, "it has none");
    }

    #[test]
    fn a_lost_descriptor_of_an_arena_is_not_an_error_of_the_peer() {
        let (one, other) = sockets();
        rustix::net::send(&one, &8u64.to_le_bytes(), SendFlags::NOSIGNAL).unwrap();
        assert_eq!(take_arena(&other).unwrap_err().kind(), ErrorKind::InvalidData);
    }
}

//! The Unix socket by which the other processes of a host reach this one.
//!
//! Its name is in no directory, so nothing has to be removed, and it means something only in the network namespace of the
//! process. The name is random, so that no other user can take it first, and is told to the other ranks with the address.
//! Anyone of this namespace may connect: both sides insist on the same user, which the system tells, and on the handshake.

use std::io;

use socket2::{Domain, SockAddr, Socket, Type};

use super::process::peer_of;
use crate::tcp::UnixSocketName;

const BACKLOG: i32 = 1024;

/// Listens by this name.
pub(crate) fn listen(name: UnixSocketName) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address(name)?)?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}

/// Connects to the process that listens by this name, if it is of this user. The error is `WouldBlock` if too many connect.
pub(crate) fn connect(name: UnixSocketName) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&address(name)?)?;
    match is_ours(&socket)? {
        true => Ok(socket),
        false => Err(io::Error::new(io::ErrorKind::PermissionDenied, "another user listens there")),
    }
}

/// Whether the process on the other side belongs to this process's user.
pub(crate) fn is_ours(socket: &Socket) -> io::Result<bool> {
    let (_, user) = peer_of(socket)?;
    Ok(user == rustix::process::geteuid().as_raw())
}

fn address(name: UnixSocketName) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0dist-transport/{:016x}", name.get()))
}

//! The Unix socket for connections from other processes of the host.
//!
//! It is in the abstract namespace: no file has to be removed, and its name is valid only in the network
//! namespace of the process. The name is random, so that no other user can take it first, and is sent to the
//! other ranks with the address. Anyone in the namespace may connect. Both sides insist on the same user,
//! which the system reports, and on the handshake.

use std::io;

use socket2::{Domain, SockAddr, Socket, Type};

use crate::bootstrap::control::UnixSocketName;
use crate::host_memory::peer_of;

const BACKLOG: i32 = 1024;

/// Listens on the socket with this name.
pub(crate) fn listen(name: UnixSocketName) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address(name)?)?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}

/// Connects to the process that listens on this socket, if it belongs to this user. The error is `WouldBlock`
/// if its queue of connections is full.
pub(crate) fn connect(name: UnixSocketName) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&address(name)?)?;
    match is_ours(&socket)? {
        true => Ok(socket),
        false => Err(io::Error::new(io::ErrorKind::PermissionDenied, "another user listens there")),
    }
}

/// Returns `true` if the process at the other end belongs to the user of this process.
pub(crate) fn is_ours(socket: &Socket) -> io::Result<bool> {
    let (_, user) = peer_of(socket)?;
    Ok(user == rustix::process::geteuid().as_raw())
}

fn address(name: UnixSocketName) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0dist-transport/{:016x}", name.get()))
}

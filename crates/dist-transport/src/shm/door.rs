//! Where the processes of a host meet: a Unix socket beside each process's listener.
//!
//! Its name is in no directory, so nothing has to be removed, and it means something only in the network namespace
//! that the listener's address belongs to. Anyone there may connect, and anyone may take the name before us: both
//! sides therefore insist on the same user, which the system tells, and on the handshake.

use std::io;
use std::net::SocketAddr;

use socket2::{Domain, SockAddr, Socket, Type};

use super::map::peer_of;

const BACKLOG: i32 = 1024;

/// Listens beside the listener at this address.
pub(crate) fn listen(beside: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.bind(&name(beside)?)?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}

/// Connects to the process that listens at this address, if it is of this user: `WouldBlock` when too many knock.
pub(crate) fn connect(beside: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&name(beside)?)?;
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

fn name(beside: SocketAddr) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0dist-transport/{beside}"))
}

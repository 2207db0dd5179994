//! Socket options, listening, and connecting by a deadline.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};

use crate::bootstrap::address;
use crate::bootstrap::auth::Secret;
use crate::{Activity, Deadline, Error, Result, Runtime};

/// The most connections that wait to be accepted.
pub(crate) const BACKLOG: i32 = 1024;

/// Resolves `host:port` to addresses, if the system answers in time. A name that can never be resolved is an
/// error of the kind `InvalidInput`.
pub(crate) fn resolve(address: &str, runtime: &Runtime, deadline: Deadline) -> Result<Vec<SocketAddr>> {
    if let Ok(literal) = address.parse() {
        return Ok(vec![literal]);
    }
    let Some((host, port)) = address::split(address) else {
        return Err(Error::InvalidAddress { address: address.to_owned() });
    };
    let failed = |source| Error::Address {
        activity: Activity::Rendezvous,
        action: "resolve",
        address: address.to_owned(),
        source,
    };
    // The system may ask servers for any time, so a thread asks the system.
    let name = host.to_owned();
    let asked = runtime
        .spawn("dist-resolve", move || (&*name, port).to_socket_addrs().map(Vec::from_iter))
        .map_err(|source| Error::Resources { what: "thread", source })?;
    let answer = match asked.join_by(deadline) {
        Ok(answer) => answer.unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        Err(_unanswered) => Err(io::ErrorKind::TimedOut.into()),
    };
    let found = answer.map_err(|source| {
        // An address does not become known later, as a name may.
        failed(if address::is_ipv6(host) {
            io::Error::new(io::ErrorKind::InvalidInput, source)
        } else {
            source
        })
    })?;
    if found.is_empty() {
        return Err(failed(io::ErrorKind::NotFound.into()));
    }
    Ok(found)
}

/// Listens on this address without blocking. Beyond loopback a secret is needed.
pub(crate) fn listen(address: SocketAddr, secret: Option<&Secret>) -> Result<TcpListener> {
    if !address.ip().to_canonical().is_loopback() && secret.is_none() {
        return Err(Error::SecretNeeded { address: address.to_string() });
    }
    let open = || {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        choose_congestion_control(&socket, address.ip());
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        Ok(socket.into())
    };
    open().map_err(|source| cannot_listen(address, source))
}

/// Listens on the first of a name's addresses that this machine has. Returns that address with its port.
pub(crate) fn listen_on_any(
    addresses: &[SocketAddr],
    secret: Option<&Secret>,
) -> Result<(TcpListener, SocketAddr)> {
    let (first, others) = addresses.split_first().expect("a name has addresses");
    let listener = others.iter().fold(listen(*first, secret), |listener, &other| match listener {
        Err(error) if is_elsewhere(&error) => match listen(other, secret) {
            Err(too) if is_elsewhere(&too) => Err(error),
            listener => listener,
        },
        listener => listener,
    })?;
    let address = listener.local_addr().map_err(|source| cannot_listen(*first, source))?;
    Ok((listener, address))
}

/// Returns `true` if a socket could not be opened because its address belongs to another machine, or to an address
/// family that this machine does not support.
fn is_elsewhere(error: &Error) -> bool {
    let Error::Address { source, .. } = error else { return false };
    source.kind() == io::ErrorKind::AddrNotAvailable
        || Errno::from_io_error(source) == Some(Errno::AFNOSUPPORT)
}

fn cannot_listen(address: SocketAddr, source: io::Error) -> Error {
    let (activity, action) = (Activity::Rendezvous, "listen on");
    Error::Address { activity, action, address: address.to_string(), source }
}

/// Begins to connect. The socket becomes writable when it is connected.
pub(crate) fn begin_connect(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    choose_congestion_control(&socket, address.ip());
    match socket.connect(&address.into()) {
        Ok(()) => {}
        Err(e) if e.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => {}
        Err(e) => return Err(e),
    }
    prepare(&socket)?;
    Ok(socket)
}

/// Sets the options of every connection: non-blocking, and without delay for small messages.
pub(crate) fn prepare(stream: &Socket) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_tcp_nodelay(true)
}

/// Returns `true` if both ends of a connection are certainly on one host.
pub(crate) fn is_within_host(stream: &Socket) -> bool {
    let ip = |end: io::Result<SockAddr>| end.ok()?.as_socket().map(|address| address.ip());
    match (ip(stream.local_addr()), ip(stream.peer_addr())) {
        (Some(ours), Some(theirs)) => are_of_one_host(ours, theirs),
        _ => false,
    }
}

/// Returns `true` if two connected addresses are certainly on one host: both are loopback, or they are equal.
pub(crate) fn are_of_one_host(ours: IpAddr, theirs: IpAddr) -> bool {
    let (ours, theirs) = (ours.to_canonical(), theirs.to_canonical());
    ours == theirs || ours.is_loopback() && theirs.is_loopback()
}

/// Chooses a congestion control for loopback. One that paces, which may be the system's default, halves the
/// speed of large messages. If the system does not allow the choice, its default stays.
fn choose_congestion_control(socket: &Socket, ip: IpAddr) {
    #[cfg(any(target_os = "linux", target_os = "android", target_os = "freebsd"))]
    if ip.to_canonical().is_loopback() {
        let _ = SockRef::from(socket).set_tcp_congestion(b"reno");
    }
    #[cfg(not(any(target_os = "linux", target_os = "android", target_os = "freebsd")))]
    let _ = (socket, ip);
}

#[cfg(not(target_vendor = "apple"))]
const SEND_FLAGS: SendFlags = SendFlags::NOSIGNAL;
#[cfg(target_vendor = "apple")]
const SEND_FLAGS: SendFlags = SendFlags::empty();

/// Sends a few bytes. A new connection takes them at once, or is of no use.
pub(crate) fn send_all(stream: &Socket, bytes: &[u8]) -> io::Result<()> {
    if send(stream, bytes)? == Some(bytes.len()) { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Sends as many bytes as the connection accepts without waiting. Returns `None` if it accepts none now.
pub(crate) fn send(stream: &Socket, bytes: &[u8]) -> io::Result<Option<usize>> {
    would_block(rustix::net::send(stream, bytes, SEND_FLAGS))
}

/// Sends several pieces as [`send`] does.
pub(crate) fn send_pieces(stream: &Socket, pieces: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
    would_block(rustix::net::sendmsg(stream, pieces, &mut SendAncillaryBuffer::default(), SEND_FLAGS))
}

/// Receives the bytes that have arrived, without waiting. Returns `None` if there are none, and 0 at the end of
/// the connection.
pub(crate) fn receive(stream: &Socket, room: &mut [u8]) -> io::Result<Option<usize>> {
    would_block(rustix::net::recv(stream, room, RecvFlags::empty()).map(|(count, _)| count))
}

/// Receives into several pieces of memory as [`receive`] does.
pub(crate) fn receive_pieces(stream: &Socket, rooms: &mut [IoSliceMut<'_>]) -> io::Result<Option<usize>> {
    would_block(rustix::io::readv(stream, rooms))
}

/// Returns `Some(1)` if a byte has arrived, `Some(0)` at the end of the connection, and `None` otherwise.
pub(crate) fn peek(stream: &Socket) -> io::Result<Option<usize>> {
    peek_into(stream, &mut [0; 1])
}

/// Copies the next bytes without consuming them. The result is as for [`receive`].
pub(crate) fn peek_into(stream: &Socket, bytes: &mut [u8]) -> io::Result<Option<usize>> {
    let peeked = rustix::net::recv(stream, bytes, RecvFlags::PEEK);
    would_block(peeked.map(|(count, _)| count))
}

/// Returns `true` if a call failed because this process or the system may open no more files.
pub(crate) fn is_out_of_files(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

fn would_block(moved: rustix::io::Result<usize>) -> io::Result<Option<usize>> {
    match moved {
        Ok(count) => Ok(Some(count)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Waits until one of these sockets is ready. Returns `false` if `limit` passes first. After an interruption it
/// returns `true`, so the caller tries again.
pub(crate) fn poll(watched: &mut [PollFd<'_>], limit: Duration) -> io::Result<bool> {
    let limit = Timespec::try_from(limit).ok();
    match rustix::event::poll(watched, limit.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(true),
        Err(e) => Err(e.into()),
    }
}

/// Builds a poll entry for a descriptor and these events.
pub(crate) fn watch<'a>(descriptor: &'a impl AsFd, events: PollFlags) -> PollFd<'a> {
    PollFd::new(descriptor, events)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn an_interface_can_be_named_in_an_address() {
        let runtime = Runtime::system();
        let resolve = |address| resolve(address, &runtime, runtime.deadline(Duration::from_secs(60)));
        let found = resolve("[fe80::1%lo]:29500").unwrap();
        let [SocketAddr::V6(found)] = found[..] else { panic!("{found:?}") };
        assert!(found.port() == 29500 && found.scope_id() > 0, "{found:?}");
        let unknown = resolve("[fe80::1%nowhere]:29500").unwrap_err();
        assert!(
            matches!(&unknown, Error::Address { source, .. } if source.kind() == io::ErrorKind::InvalidInput),
            "no use in trying again: {unknown:?}"
        );
    }

    #[test]
    fn a_listener_uses_the_first_address_of_this_machine() {
        // These addresses are reserved and not assigned to a host.
        let secret = Secret::from_bytes(&[7; 32]).unwrap();
        let elsewhere = |last| SocketAddr::from(([240, 0, 0, last], 0));
        let here = SocketAddr::from(([127, 0, 0, 1], 0));
        let (_, address) = listen_on_any(&[elsewhere(1), here], Some(&secret)).unwrap();
        assert!(address.ip() == here.ip() && address.port() != 0);
        let refused = listen_on_any(&[elsewhere(1), elsewhere(2)], Some(&secret)).unwrap_err();
        assert!(refused.to_string().contains("240.0.0.1:0"), "{refused}");
        let taken = TcpListener::bind(here).unwrap();
        let addresses = [elsewhere(1), taken.local_addr().unwrap(), here];
        let in_use = listen_on_any(&addresses, Some(&secret)).unwrap_err();
        assert!(in_use.to_string().contains(&addresses[1].to_string()), "{in_use}");
        let unsafe_first = listen_on_any(&[elsewhere(1), here], None).unwrap_err();
        assert!(matches!(unsafe_first, Error::SecretNeeded { .. }), "{unsafe_first}");
    }
}

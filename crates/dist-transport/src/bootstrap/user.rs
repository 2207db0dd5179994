//! Asks the kernel which user owns the other end of a TCP connection on this machine.
//!
//! A job without a secret runs on one machine, and the job's name, which its processes prove to know, is no
//! secret. A connection is then trusted if its other end belongs to this process's user. The kernel is asked
//! for the socket with exactly this pair of addresses. The socket must be established, since a listener or a
//! closing socket may belong to another user.

use std::io;

use socket2::Socket;

/// Returns the user id at the other end.
///
/// # Errors
/// If the kernel does not say, as on systems other than Linux.
pub(crate) fn of_peer(stream: &Socket) -> io::Result<u32> {
    #[cfg(target_os = "linux")]
    return linux::of_peer(stream);
    #[cfg(not(target_os = "linux"))]
    {
        let _ = stream;
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::io;
    use std::net::{IpAddr, SocketAddr};

    use rustix::net::netlink::{self, SocketAddrNetlink};
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
    use socket2::Socket;

    use crate::link::socket;

    /// The kernel's number for the established state.
    const ESTABLISHED: u8 = 1;
    /// Bytes of the kernel's header, of a request and of an answer.
    const HEADER_BYTES: usize = 16;
    const REQUEST_BYTES: usize = HEADER_BYTES + 56;
    const ANSWER_BYTES: usize = HEADER_BYTES + 72;
    /// Offsets of a socket's addresses in a request and in an answer, behind the header.
    const ADDRESSES_IN_REQUEST: usize = HEADER_BYTES + 8;
    const ADDRESSES_IN_ANSWER: usize = HEADER_BYTES + 4;
    /// Both ports, and 16 bytes for each address.
    const ADDRESSES_BYTES: usize = 36;
    const USER_IN_ANSWER: usize = HEADER_BYTES + 64;

    pub(crate) fn of_peer(stream: &Socket) -> io::Result<u32> {
        // The addresses as the other end sees them.
        let local = address_of(stream.peer_addr()?)?;
        let remote = address_of(stream.local_addr()?)?;
        match ask(local, remote) {
            Ok(user) => Ok(user),
            Err(error) if socket::is_out_of_files(&error) => Err(error),
            // The kernel may have been built without netlink diagnostics, or a sandbox may forbid them.
            Err(error) => in_list(local, remote)?.ok_or(error),
        }
    }

    fn address_of(address: socket2::SockAddr) -> io::Result<SocketAddr> {
        let address = address.as_socket().ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(SocketAddr::new(address.ip().to_canonical(), address.port()))
    }

    /// Asks the kernel for one socket by netlink.
    fn ask(local: SocketAddr, remote: SocketAddr) -> io::Result<u32> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(netlink::SOCK_DIAG),
        )?;
        let kernel = SocketAddrNetlink::new(0, 0);
        rustix::net::sendto(&socket, &request(local, remote), SendFlags::empty(), &kernel)?;
        let mut answer = [0; 512];
        // The kernel has queued the answer before `sendto` returned.
        let (count, _) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::DONTWAIT)?;
        user_in(&answer[..count], local, remote)
    }

    /// Returns the request for the socket with these addresses, as in the kernel's `linux/inet_diag.h`.
    fn request(local: SocketAddr, remote: SocketAddr) -> [u8; REQUEST_BYTES] {
        const SOCK_DIAG_BY_FAMILY: u16 = 20;
        const IS_REQUEST: u16 = 1;
        const TCP: u8 = 6;
        let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&u32::try_from(REQUEST_BYTES).expect("a few bytes").to_ne_bytes());
        bytes[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        bytes[6..8].copy_from_slice(&IS_REQUEST.to_ne_bytes());
        bytes[HEADER_BYTES] = family.as_raw().to_le_bytes()[0];
        bytes[HEADER_BYTES + 1] = TCP;
        bytes[HEADER_BYTES + 4..][..4].copy_from_slice(&(1_u32 << ESTABLISHED).to_ne_bytes());
        bytes[ADDRESSES_IN_REQUEST..][..ADDRESSES_BYTES].copy_from_slice(&addresses(local, remote));
        // Any socket: the kernel's cookie is not known.
        bytes[REQUEST_BYTES - 8..].fill(0xff);
        bytes
    }

    fn addresses(local: SocketAddr, remote: SocketAddr) -> [u8; ADDRESSES_BYTES] {
        let mut bytes = [0; ADDRESSES_BYTES];
        bytes[..2].copy_from_slice(&local.port().to_be_bytes());
        bytes[2..4].copy_from_slice(&remote.port().to_be_bytes());
        for (at, address) in [(4, local), (20, remote)] {
            match address.ip() {
                IpAddr::V4(ip) => bytes[at..][..4].copy_from_slice(&ip.octets()),
                IpAddr::V6(ip) => bytes[at..][..16].copy_from_slice(&ip.octets()),
            }
        }
        bytes
    }

    /// Returns the user in the kernel's answer, if the answer is about this socket.
    fn user_in(answer: &[u8], local: SocketAddr, remote: SocketAddr) -> io::Result<u32> {
        const ERROR: u16 = 2;
        let word = |at: usize| {
            answer.get(at..at + 4).map(|word| i32::from_ne_bytes([word[0], word[1], word[2], word[3]]))
        };
        let kind = answer.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
        if kind == Some(ERROR) {
            return Err(io::Error::from_raw_os_error(word(HEADER_BYTES).unwrap_or_default().wrapping_neg()));
        }
        let is_complete = answer.len() >= ANSWER_BYTES;
        if is_complete
            && answer[HEADER_BYTES + 1] == ESTABLISHED
            && answer[ADDRESSES_IN_ANSWER..][..ADDRESSES_BYTES] == addresses(local, remote)
        {
            return word(USER_IN_ANSWER).map(i32::cast_unsigned).ok_or(io::ErrorKind::InvalidData.into());
        }
        Err(io::ErrorKind::NotFound.into())
    }

    /// Searches the system's list of all sockets for a socket.
    fn in_list(local: SocketAddr, remote: SocketAddr) -> io::Result<Option<u32>> {
        // The socket of the other end may be an IPv6 socket although its addresses are IPv4.
        let lists: &[&str] =
            if local.is_ipv4() { &["/proc/net/tcp", "/proc/net/tcp6"] } else { &["/proc/net/tcp6"] };
        for list in lists {
            match std::fs::read_to_string(list) {
                Ok(list) => {
                    if let Some(user) = list.lines().skip(1).find_map(|line| user_of(line, local, remote)) {
                        return Ok(Some(user));
                    }
                }
                Err(error) if socket::is_out_of_files(&error) => return Err(error),
                Err(_) => {}
            }
        }
        Ok(None)
    }

    /// Returns the user in a line of the list, if the line is about this socket.
    fn user_of(line: &str, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
        let fields: Vec<_> = line.split_whitespace().take(8).collect();
        let [_, ours, theirs, state, _, _, _, user] = fields[..] else { return None };
        let is_meant = listed(ours)? == local && listed(theirs)? == remote;
        let is_established = u8::from_str_radix(state, 16).ok()? == ESTABLISHED;
        user.parse().ok().filter(|_| is_meant && is_established)
    }

    /// Parses an address of the list: 32-bit words in this machine's byte order, and the port.
    fn listed(text: &str) -> Option<SocketAddr> {
        let (ip, port) = text.split_once(':')?;
        let word = |at| Some(u32::from_str_radix(ip.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
        let ip = match ip.len() {
            8 => IpAddr::from(word(0)?),
            32 => {
                let mut octets = [0; 16];
                for (index, bytes) in octets.chunks_exact_mut(4).enumerate() {
                    bytes.copy_from_slice(&word(8 * index)?);
                }
                IpAddr::from(octets).to_canonical()
            }
            _ => return None,
        };
        Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
    }

    #[cfg(test)]
    mod tests {
        use std::net::{TcpListener, TcpStream};

        use rstest::rstest;

        use super::*;

        /// Returns both ends of a connection.
        fn connection(listen: &str) -> [Socket; 2] {
            let listener = TcpListener::bind(listen).unwrap();
            let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (other, _) = listener.accept().unwrap();
            [one.into(), other.into()]
        }

        fn ends(stream: &Socket) -> [SocketAddr; 2] {
            [stream.peer_addr(), stream.local_addr()].map(|address| address_of(address.unwrap()).unwrap())
        }

        #[rstest]
        #[case("127.0.0.1:0")]
        #[case("127.0.0.2:0")]
        #[case("[::1]:0")]
        fn both_ends_of_a_connection_belong_to_this_user(#[case] listen: &str) {
            let ours = rustix::process::geteuid().as_raw();
            for stream in &connection(listen) {
                let [local, remote] = ends(stream);
                assert_eq!(of_peer(stream).unwrap(), ours);
                assert_eq!(in_list(local, remote).unwrap(), Some(ours), "the list says the same");
            }
        }

        #[test]
        fn a_listener_is_not_taken_for_a_connection() {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let (local, remote) = (listener.local_addr().unwrap(), "127.0.0.1:1".parse().unwrap());
            assert_eq!(ask(local, remote).unwrap_err().kind(), io::ErrorKind::NotFound);
            assert_eq!(in_list(local, remote).unwrap(), None);
        }

        #[test]
        fn a_closed_end_has_no_user() {
            let [one, other] = connection("127.0.0.1:0");
            drop(one);
            let error = of_peer(&other).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error:?}");
        }

        #[test]
        fn lines_of_the_list_are_read_as_the_kernel_writes_them() {
            let [local, remote] = ["127.0.0.1:29500", "127.0.0.1:4711"].map(|end| end.parse().unwrap());
            let word = u32::from_ne_bytes([127, 0, 0, 1]);
            let line = |state: &str| {
                format!(
                    "   1: {word:08X}:733C {word:08X}:1267 {state} 00000000:00000000 00:00000000 00000000  1000        0 7 1"
                )
            };
            assert_eq!(user_of(&line("01"), local, remote), Some(1000));
            assert_eq!(user_of(&line("06"), local, remote), None, "it waits for late segments");
            assert_eq!(user_of(&line("01"), remote, local), None, "it is the other end");
            assert_eq!(user_of("nonsense", local, remote), None);
        }
    }
}

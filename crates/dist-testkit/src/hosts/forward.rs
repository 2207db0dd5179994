//! A switch whose links are long: Ethernet frames that come in UDP packets go on after a while.
//!
//! Some kernels cannot delay packets (netem is a module of its own), but most have VXLAN. Hosts whose VXLAN devices
//! have this switch as their only remote see each other as far away as it keeps their frames. It learns who is where
//! from the frames, as switches do. It can also lose frames at random.
#![allow(clippy::disallowed_methods, reason = "this thread is a network, and runs in real time only")]

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The thread that forwards frames. It ends when this value is dropped.
#[derive(Debug)]
pub(super) struct Forwarder {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Forwarder {
    /// Starts to forward between hosts at these addresses. Packets are recognised by the address alone, from any port.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub(super) fn start(
        socket: UdpSocket,
        (delay, lost_per_million): (Duration, u32),
        ports: Vec<SocketAddr>,
    ) -> io::Result<Self> {
        // Root may have this much. With less, bursts of packets are lost.
        #[cfg(target_os = "linux")]
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER);
        socket.set_nonblocking(true)?;
        let is_over = Arc::new(AtomicBool::new(false));
        let switch = Switch {
            socket,
            delay,
            lost_per_million,
            random: fastrand::Rng::with_seed(u64::from(lost_per_million)),
            ports,
            homes: HashMap::new(),
            kept: VecDeque::new(),
        };
        let ends = is_over.clone();
        let thread = thread::Builder::new().name("forwarder".to_owned()).spawn(move || switch.run(&ends))?;
        Ok(Self { is_over, thread: Some(thread) })
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(Ok(Err(error))) = self.thread.take().map(JoinHandle::join) {
            eprintln!("the forwarder of packets failed: {error}");
        }
    }
}

/// A network switch that delays frames.
#[derive(Debug)]
struct Switch {
    socket: UdpSocket,
    delay: Duration,
    /// The number of frames in a million that are lost.
    lost_per_million: u32,
    random: fastrand::Rng,
    ports: Vec<SocketAddr>,
    /// The port at which each Ethernet address was last seen.
    homes: HashMap<[u8; 6], SocketAddr>,
    kept: VecDeque<Kept>,
}

#[derive(Debug)]
struct Kept {
    due: Instant,
    packet: Vec<u8>,
    from: SocketAddr,
}

/// The positions of the receiver's and the sender's address. A VXLAN header of eight bytes precedes the frame.
const RECEIVER: std::ops::Range<usize> = 8..14;
const SENDER: std::ops::Range<usize> = 14..20;

/// The longest packet that UDP can carry.
const PACKET_MAX: usize = 65_536;

/// The maximum number of delayed packets. Further packets are lost, as in any switch.
const KEPT_MAX: usize = 65_536;

/// The bytes of packets that the system keeps until they are read: 30 ms at 1 Gbit/s from each of 8 hosts.
const RECEIVE_BUFFER: usize = 32 << 20;

/// The time between two looks whether the switch is to end.
const LOOK: Duration = Duration::from_millis(50);

impl Switch {
    /// Forwards until it is to end, or the socket fails.
    fn run(mut self, is_over: &AtomicBool) -> io::Result<()> {
        let mut packet = vec![0; PACKET_MAX];
        while !is_over.load(Ordering::Relaxed) {
            self.wait()?;
            while let Some((len, from)) = unless_blocked(self.socket.recv_from(&mut packet))? {
                let is_lost = self.random.u32(..1_000_000) < self.lost_per_million;
                if !is_lost && self.kept.len() < KEPT_MAX {
                    let due = Instant::now() + self.delay;
                    let mut packet = packet[..len].to_vec();
                    fill_in_checksum(&mut packet);
                    self.kept.push_back(Kept { due, packet, from });
                }
                self.forward_due()?;
            }
            self.forward_due()?;
        }
        Ok(())
    }

    fn forward_due(&mut self) -> io::Result<()> {
        while self.kept.front().is_some_and(|kept| kept.due <= Instant::now()) {
            self.kept.pop_front().map_or(Ok(()), |kept| self.forward(&kept))?;
        }
        Ok(())
    }

    /// Waits until a packet arrives, or a delayed packet is due.
    fn wait(&self) -> io::Result<()> {
        let left = self.kept.front().map(|kept| kept.due.saturating_duration_since(Instant::now()));
        let left = Timespec { tv_sec: 0, tv_nsec: left.unwrap_or(LOOK).min(LOOK).subsec_nanos().into() };
        poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&left))?;
        Ok(())
    }

    fn forward(&mut self, kept: &Kept) -> io::Result<()> {
        let Some(from) = self.ports.iter().copied().find(|port| port.ip() == kept.from.ip()) else {
            return Ok(());
        };
        let address = |range| kept.packet.get(range).and_then(|bytes| <[u8; 6]>::try_from(bytes).ok());
        let (Some(receiver), Some(sender)) = (address(RECEIVER), address(SENDER)) else { return Ok(()) };
        self.homes.insert(sender, from);
        let home = self.homes.get(&receiver).copied();
        for &port in self.ports.iter().filter(|&&port| port != from && home.is_none_or(|home| home == port)) {
            // A full queue loses packets, as on any network.
            unless_blocked(self.socket.send_to(&kept.packet, port))?;
        }
        Ok(())
    }
}

/// Computes the checksum of a TCP segment in an IPv4 packet. The system leaves that to the network device, but the devices
/// between namespaces do not do it.
fn fill_in_checksum(packet: &mut [u8]) {
    const IPV4: [u8; 2] = [0x08, 0x00];
    const TCP: u8 = 6;
    /// The position of the checksum in a segment.
    const PLACE: usize = 16;
    let Some((frame, ip)) = packet.split_at_mut_checked(RECEIVER.start + 14) else { return };
    if !frame.ends_with(&IPV4) || ip.len() < 20 || ip[9] != TCP {
        return;
    }
    let (header, total) = (usize::from(ip[0] & 0xf) * 4, usize::from(u16::from_be_bytes([ip[2], ip[3]])));
    let addresses = sum(&ip[12..20]);
    let Some(segment) = ip.get_mut(header..total).filter(|segment| segment.len() >= PLACE + 2) else {
        return;
    };
    segment[PLACE..PLACE + 2].fill(0);
    let mut total = addresses + u64::from(TCP) + segment.len() as u64 + sum(segment);
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    let checksum = !u16::try_from(total).expect("what was above 16 bits has been folded in");
    segment[PLACE..PLACE + 2].copy_from_slice(&checksum.to_be_bytes());
}

/// Returns a number that is equal to the sum of 16-bit words, modulo 65,535. An odd last byte counts as a word with a
/// zero.
fn sum(bytes: &[u8]) -> u64 {
    // A word of 32 bits stands for its two words of 16 bits, since 2^16 is 1 in this arithmetic. Builds without
    // optimisation forward four times as fast with words of 64 bits as with words of 16 bits.
    let (words, rest) = bytes.as_chunks::<8>();
    let mut total = 0;
    for &word in words {
        let word = u64::from_be_bytes(word);
        total += (word >> 32) + (word & 0xffff_ffff);
    }
    let word = |pair: &[u8]| u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    total + rest.chunks(2).map(word).sum::<u64>()
}

/// Returns `None` if the call would block.
fn unless_blocked<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        // A host whose device is not there yet refuses; it will be.
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionRefused) => {
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Option<Duration> = Some(Duration::from_secs(20));

    /// Returns a packet that contains a frame with one byte of content.
    fn packet(receiver: u8, sender: u8, content: u8) -> Vec<u8> {
        [[0; 8].as_slice(), &[receiver; 6], &[sender; 6], &[content]].concat()
    }

    #[test]
    fn the_checksum_of_a_segment_is_that_of_rfc_1071() {
        // From 192.0.2.1 to 192.0.2.2: a header of 20 bytes with its flags and window, and three bytes of data.
        let ip = [0x45, 0, 0, 43, 0, 0, 0, 0, 64, 6, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2];
        let tcp =
            [0x12, 0x34, 0x00, 0x50, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x18, 1, 0, 0xde, 0xad, 0, 0, 1, 2, 3];
        let mut packet = [packet(1, 2, 8), vec![0], ip.to_vec(), tcp.to_vec()].concat();
        fill_in_checksum(&mut packet);
        let segment = &packet[42..];
        let whole = sum(&ip[12..20]) + 6 + segment.len() as u64 + sum(segment);
        assert_eq!(whole % 0xffff, 0, "with a right checksum, the words add up to ones");
        assert_ne!(segment[16..18], [0xde, 0xad]);
        let mut short = packet[..30].to_vec();
        fill_in_checksum(&mut short);
        assert_eq!(short, packet[..30]);
    }

    #[test]
    fn frames_go_to_where_their_receiver_was_seen_and_else_everywhere() {
        // Hosts are told apart by their addresses, of which a loopback has many.
        let bind = |host: u8| UdpSocket::bind(SocketAddr::from(([127, 0, 0, host], 0))).unwrap();
        let [a, b, c] = [2, 3, 4].map(bind);
        let ports = [&a, &b, &c].map(|host| host.local_addr().unwrap());
        let socket = bind(1);
        let switch = socket.local_addr().unwrap();
        let delay = Duration::from_millis(5);
        let _forwarder = Forwarder::start(socket, (delay, 0), ports.to_vec()).unwrap();
        let content = |host: &UdpSocket| {
            host.set_read_timeout(TIMEOUT).unwrap();
            let mut bytes = [0; 64];
            let len = host.recv(&mut bytes).unwrap();
            bytes[len - 1]
        };
        let start = Instant::now();
        a.send_to(&packet(0xff, 0xa, 1), switch).unwrap();
        assert_eq!([content(&b), content(&c)], [1, 1]);
        assert!(start.elapsed() >= delay);
        b.send_to(&packet(0xa, 0xb, 2), switch).unwrap();
        assert_eq!(content(&a), 2);
        c.send_to(&packet(0xb, 0xc, 3), switch).unwrap();
        a.send_to(&packet(0xc, 0xa, 4), switch).unwrap();
        // Neither the second nor the fourth went to b, nor the second to c.
        assert_eq!([content(&b), content(&c)], [3, 4]);
    }
}

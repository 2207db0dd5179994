//! The control protocol between ranks and the coordinator: frames of one fixed size.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use socket2::Socket;

use crate::bootstrap::auth;
use crate::bootstrap::channels::{DEPTH_MAX, Fork, ForkPath};
use crate::bootstrap::host;
use crate::error::NAMED_MAX;
use crate::link::socket;
use crate::shm_group::CALLS_MAX;
use crate::{Abort, Cause, ChannelId, CircularWait, Fingerprint, Result};

pub(crate) const FRAME_BYTES: usize = 256;

/// The most members of a group that a frame can name.
pub(crate) const MEMBERS_MAX: usize = (FRAME_BYTES - 20) / size_of::<u32>();

/// One message of the control protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame {
    /// A rank joins. It listens at this address, expects an answer within `timeout_ms`, and counts as dead after
    /// `liveness_ms` without a heartbeat.
    Join { world_size: u32, timeout_ms: u32, liveness_ms: u32, peer_info: PeerInfo },
    /// The addresses of consecutive ranks. A rank that has received those of all ranks has joined.
    Peers { first: u32, peer_infos: Vec<PeerInfo> },
    /// A rank has not joined in time, or not yet.
    Missing { rank: u32, refused: u64 },
    /// The list of missing ranks is complete, and the rank waits no longer.
    NotAll,
    /// The list of missing ranks is complete, or names the first ones of this many. The rank goes on waiting.
    NotYet { missing: u32 },
    /// Another process has joined as this rank.
    Duplicate,
    /// The world at this coordinator had this rank, which has left or is gone. The next world can begin when
    /// this one has ended. The ranks that are still in it were named before, as missing.
    Over,
    /// The job has another world size.
    WorldSize { expected: u32 },
    /// A rank has joined that expects this other world size.
    OtherWorldSize { rank: u32, size: u32 },
    /// A heartbeat.
    Beat,
    /// The rank's process has ended, as its launcher or a rank of its host has seen. The rank may have left
    /// in order before.
    Ended { rank: u32 },
    /// The job is aborted, or a rank proposes that.
    Abort(Abort),
    /// The rank leaves in order.
    Goodbye,
    /// A rank has left in order.
    Left { rank: u32 },
    /// Asks the rank whether it has left a channel; it answers only if it has. The coordinator forwards the
    /// question with the number of the asking rank.
    Ask { rank: u32, origin: ForkPath },
    /// Tells the rank that the sender has left the channel. The coordinator forwards it with the number of
    /// the sender.
    LeftChannel { rank: u32, channel: ChannelId },
    /// Tells the rank that the sender has named these members for the fork that made the channel, or the
    /// first of them. The coordinator forwards it with the number of the sender.
    OtherMembers { rank: u32, channel: ChannelId, members: Vec<u32> },
    /// The rank has been waiting for a while on this channel, or waits no longer. `calls` are its last calls
    /// there, the current one first.
    Waiting { channel: ChannelId, wait: WaitReport, calls: [Fingerprint; CALLS_MAX] },
    /// Asks the rank how many messages it has begun to send on this channel to the member with this number, and how many
    /// signals it has given in the memory of the channel's group.
    AskSent { channel: ChannelId, to: u32 },
    /// Answers that question.
    Sent { channel: ChannelId, to: u32, messages: u64, signals: u64 },
    /// A wait of the circle that the next abort lists.
    Circle(CircularWait),
    /// A piece of a request to the store, or of its reply, which has the same number. The pieces of a message
    /// follow each other, with no piece of another message between them.
    Store { number: u64, is_last: bool, piece: Vec<u8> },
    /// The rank does not wait for the reply to this request any more.
    CancelStore { number: u64 },
}

/// The most ranks in one frame. The description of a rank takes 72 bytes.
pub(crate) const PEERS_MAX: usize = (FRAME_BYTES - 12) / 72;

/// Returns the frames that describe all ranks of a world.
pub(crate) fn peer_frames(peer_infos: &[PeerInfo]) -> Vec<[u8; FRAME_BYTES]> {
    let frame = |(number, peer_infos): (usize, &[PeerInfo])| {
        let first = u32::try_from(number * PEERS_MAX).expect("a world has fewer than 2^32 ranks");
        Frame::Peers { first, peer_infos: peer_infos.to_vec() }.encode()
    };
    peer_infos.chunks(PEERS_MAX).enumerate().map(frame).collect()
}

/// The most bytes of a store message in one frame.
const PIECE_BYTES_MAX: usize = FRAME_BYTES - 20;

/// Splits a message to or from the store into frames.
pub(crate) fn store_frames(number: u64, message: &[u8]) -> impl Iterator<Item = Frame> {
    let pieces = message.chunks(PIECE_BYTES_MAX);
    let last = pieces.len() - 1;
    pieces.enumerate().map(move |(index, piece)| Frame::Store {
        number,
        is_last: index == last,
        piece: piece.to_vec(),
    })
}

/// A report of what a rank waits for on a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WaitReport {
    /// The rank that it waits for, or itself if it waits no longer.
    pub(crate) on: u32,
    /// The number of the waiting rank in the group of the channel.
    pub(crate) index: u32,
    /// The message or signal that is missing from that rank, and the number of earlier ones that have arrived.
    pub(crate) missing: Missing,
    /// The number of messages that it has begun to send to that rank.
    pub(crate) messages: u64,
    /// The number of signals that it has given in the group's shared memory.
    pub(crate) signals: u64,
    /// `true` if the waiting call is the only open operation of this rank in its communicator.
    pub(crate) is_only_call: bool,
}

/// The message or signal for which a rank waits, and the number of earlier ones that have arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Missing {
    /// A message of any of several ranks, or anything that another thread of this rank may end. Such waits are not
    /// compared.
    Anything,
    /// A message.
    Message(u64),
    /// A signal in the group's shared memory.
    Signal(u64),
    /// Room for a message.
    Room,
}

impl WaitReport {
    /// Returns `true` if the other rank has not sent the awaited message or signal.
    fn is_for_something_to_come_from(&self, other: &Self) -> bool {
        match self.missing {
            Missing::Anything | Missing::Room => false,
            Missing::Message(received) => received == other.messages,
            Missing::Signal(seen) => seen == other.signals,
        }
    }

    /// Returns `true` if two ranks that wait for each other would wait forever.
    pub(crate) fn is_forever_with(&self, other: &Self) -> bool {
        self.is_for_something_to_come_from(other) && other.is_for_something_to_come_from(self)
    }
}

/// The address and the host of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerInfo {
    /// The address to connect to.
    pub(crate) address: SocketAddr,
    /// The number of its host.
    pub(crate) host: u64,
    /// The number of its process; equal for ranks that are threads of one process.
    pub(crate) process: u64,
    /// The name of its Unix socket, if it may share memory with ranks of its host.
    pub(crate) unix_socket: Option<UnixSocketName>,
    /// The cores that it may run on.
    pub(crate) cores: Cores,
    /// The id of its process.
    pub(crate) pid: ProcessId,
    /// The number of sockets that it uses for each peer.
    pub(crate) sockets_per_peer: u16,
}

/// The identity of a process for other processes of its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProcessId {
    /// A number of the process's PID namespace, or 0 if unknown. Two processes with equal numbers see each
    /// other by their ids.
    pub(crate) namespace: u64,
    pub(crate) id: u32,
}

/// The name of a process's Unix socket. It is random, so that no other user can take it first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UnixSocketName(NonZeroU64);

impl UnixSocketName {
    /// Returns a random name.
    ///
    /// Returns a random name.
    ///
    /// # Errors
    /// If the system has no randomness to give.
    pub(crate) fn random() -> Result<Self> {
        loop {
            let [first, ..] = bytemuck::cast::<_, [u64; 4]>(auth::random_bytes()?);
            if let Some(name) = Self::new(first) {
                return Ok(name);
            }
        }
    }

    fn new(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self)
    }

    pub(crate) fn get(self) -> u64 {
        self.0.get()
    }
}

impl PeerInfo {
    /// Describes a rank of this process.
    pub(crate) fn here(address: SocketAddr, host: u64, unix_socket: Option<UnixSocketName>) -> Self {
        let (process, cores, pid) = (host::process(), host::cores(), host::pid());
        Self { address, host, process, unix_socket, cores, pid, sockets_per_peer: 1 }
    }

    /// Returns `true` if the rank may share memory with others of its host.
    pub(crate) fn shares(&self) -> bool {
        self.unix_socket.is_some()
    }

    /// Adapts the address for a process that listens at `own`. The number of a network interface is valid on
    /// its own host only. All ranks reach each other through the interface by which they reached the
    /// coordinator.
    pub(crate) fn reach_from(&mut self, own: SocketAddr) {
        if let (SocketAddr::V6(theirs), SocketAddr::V6(own)) = (&mut self.address, own)
            && theirs.scope_id() != 0
        {
            theirs.set_scope_id(own.scope_id());
        }
    }
}

/// The cores that a process may run on. Two sets are taken to be equal if they have the same first core, and
/// disjoint otherwise, as where a launcher binds each rank to a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cores {
    /// The system's number of the first core.
    pub(crate) first: u32,
    pub(crate) count: u32,
}

impl Cores {
    /// Returns the number of cores that several processes have together.
    pub(crate) fn total(sets: impl Iterator<Item = Self>) -> usize {
        let counts: BTreeMap<_, _> = sets.map(|cores| (cores.first, cores.count)).collect();
        counts.values().map(|&count| count as usize).sum()
    }
}

impl Frame {
    pub(crate) fn encode(&self) -> [u8; FRAME_BYTES] {
        let mut frame = Encoder { bytes: [0; FRAME_BYTES], at: 0 };
        match *self {
            Self::Join { world_size, timeout_ms, liveness_ms, peer_info } => frame
                .number(0_u32)
                .number(world_size)
                .number(timeout_ms)
                .number(liveness_ms)
                .peer_info(peer_info),
            Self::Peers { first, ref peer_infos } => frame.number(1_u32).number(first).peer_infos(peer_infos),
            Self::Missing { rank, refused } => frame.number(2_u32).number(rank).long(refused),
            Self::NotAll => frame.number(3_u32),
            Self::Duplicate => frame.number(4_u32),
            Self::WorldSize { expected } => frame.number(5_u32).number(expected),
            Self::Beat => frame.number(6_u32),
            Self::Abort(ref abort) => frame.number(7_u32).abort(abort),
            Self::Goodbye => frame.number(8_u32),
            Self::Waiting { channel, wait, calls } => {
                frame.number(9_u32).long(channel.get()).wait(wait, calls)
            }
            Self::Left { rank } => frame.number(10_u32).number(rank),
            Self::Ask { rank, origin } => frame.number(11_u32).number(rank).origin(&origin),
            Self::LeftChannel { rank, channel } => frame.number(12_u32).number(rank).long(channel.get()),
            Self::OtherWorldSize { rank, size } => frame.number(13_u32).number(rank).number(size),
            Self::Over => frame.number(14_u32),
            Self::Ended { rank } => frame.number(15_u32).number(rank),
            Self::NotYet { missing } => frame.number(16_u32).number(missing),
            Self::OtherMembers { rank, channel, ref members } => {
                frame.number(20_u32).number(rank).long(channel.get()).members(members)
            }
            Self::Store { number, is_last, ref piece } => {
                frame.number(21_u32).long(number).number(is_last.into()).piece(piece)
            }
            Self::CancelStore { number } => frame.number(22_u32).long(number),
            Self::AskSent { channel, to } => frame.number(23_u32).long(channel.get()).number(to),
            Self::Sent { channel, to, messages, signals } => {
                frame.number(24_u32).long(channel.get()).number(to).long(messages).long(signals)
            }
            Self::Circle(wait) => frame.number(25_u32).rank(wait.rank).rank(wait.on).bytes(&wait.call.0),
        };
        frame.bytes
    }

    fn decode(bytes: &[u8; FRAME_BYTES]) -> Option<Self> {
        let mut frame = Decoder { bytes };
        Some(match frame.number() {
            0 => {
                let (world_size, timeout_ms, liveness_ms) = (frame.number(), frame.number(), frame.number());
                Self::Join { world_size, timeout_ms, liveness_ms, peer_info: frame.peer_info() }
            }
            1 => Self::Peers { first: frame.number(), peer_infos: frame.peer_infos()? },
            2 => Self::Missing { rank: frame.number(), refused: frame.long() },
            3 => Self::NotAll,
            4 => Self::Duplicate,
            5 => Self::WorldSize { expected: frame.number() },
            6 => Self::Beat,
            7 => Self::Abort(frame.abort()?),
            8 => Self::Goodbye,
            9 => {
                let (channel, (wait, calls)) = (frame.channel(), frame.wait()?);
                Self::Waiting { channel, wait, calls }
            }
            10 => Self::Left { rank: frame.number() },
            11 => Self::Ask { rank: frame.number(), origin: frame.origin()? },
            12 => Self::LeftChannel { rank: frame.number(), channel: frame.channel() },
            13 => Self::OtherWorldSize { rank: frame.number(), size: frame.number() },
            14 => Self::Over,
            15 => Self::Ended { rank: frame.number() },
            16 => Self::NotYet { missing: frame.number() },
            20 => Self::OtherMembers {
                rank: frame.number(),
                channel: frame.channel(),
                members: frame.members(),
            },
            21 => {
                let (number, is_last) = (frame.long(), frame.number() != 0);
                Self::Store { number, is_last, piece: frame.piece()? }
            }
            22 => Self::CancelStore { number: frame.long() },
            23 => Self::AskSent { channel: frame.channel(), to: frame.number() },
            24 => Self::Sent {
                channel: frame.channel(),
                to: frame.number(),
                messages: frame.long(),
                signals: frame.long(),
            },
            25 => Self::Circle(CircularWait {
                rank: frame.number() as usize,
                on: frame.number() as usize,
                call: Fingerprint(frame.bytes()),
            }),
            _ => return None,
        })
    }
}

/// Returns the number of a cause, and the details of causes that have some.
fn encode_cause(cause: &Cause) -> (u32, [u8; Cause::WHY_BYTES]) {
    let mut details = [0; Cause::WHY_BYTES];
    let kind = match cause {
        Cause::Died => 0,
        Cause::Silent => 1,
        Cause::Left => 2,
        Cause::TimedOut { count, .. } => {
            details[..8].copy_from_slice(&(*count as u64).to_le_bytes());
            3
        }
        Cause::Mismatch { theirs } => {
            details[..Fingerprint::SIZE].copy_from_slice(&theirs.0);
            4
        }
        Cause::Protocol => 5,
        Cause::GaveUp { why } => {
            let why = &why[..why.floor_char_boundary(Cause::WHY_BYTES)];
            details[..why.len()].copy_from_slice(why.as_bytes());
            6
        }
        Cause::Panicked => 10,
        Cause::CoordinatorLost => 7,
        Cause::LauncherLost => 8,
        Cause::NotJoined => 12,
        Cause::NotInTime { missing, count, limit } => {
            let words =
                [u64::try_from(limit.as_millis()).unwrap_or(u64::MAX), *count as u64, missing.len() as u64];
            let words = words.into_iter().chain(missing.iter().map(|&rank| rank as u64));
            for (bytes, word) in details.chunks_exact_mut(8).zip(words) {
                bytes.copy_from_slice(&word.to_le_bytes());
            }
            13
        }
        Cause::HostLost { host, hosts, ranks } => {
            details[..16].copy_from_slice(&to_v6(*host).octets());
            let numbers = [*hosts as u64, *ranks as u64].map(u64::to_le_bytes);
            details[16..32].copy_from_slice(numbers.as_flattened());
            14
        }
        Cause::CircularWait { count, .. } => {
            details[..8].copy_from_slice(&(*count as u64).to_le_bytes());
            15
        }
        Cause::Unreachable { hosts } => {
            if let Some(hosts) = hosts {
                details[0] = 1;
                details[1..33].copy_from_slice(hosts.map(|host| to_v6(host).octets()).as_flattened());
            }
            11
        }
        Cause::Length { expected, got } => {
            details[..16].copy_from_slice([expected.to_le_bytes(), got.to_le_bytes()].as_flattened());
            9
        }
    };
    (kind, details)
}

fn decode_cause(kind: u32, details: [u8; Cause::WHY_BYTES]) -> Option<Cause> {
    let mut fields = Decoder { bytes: &details };
    Some(match kind {
        0 => Cause::Died,
        1 => Cause::Silent,
        2 => Cause::Left,
        // The waits are in frames of their own.
        3 => Cause::TimedOut { waits: Vec::new(), count: fields.size() },
        4 => Cause::Mismatch { theirs: Fingerprint(fields.bytes()) },
        5 => Cause::Protocol,
        6 => {
            let why = details.split(|&byte| byte == 0).next().unwrap_or_default();
            Cause::gave_up(String::from_utf8_lossy(why))
        }
        7 => Cause::CoordinatorLost,
        8 => Cause::LauncherLost,
        9 => Cause::Length { expected: fields.long(), got: fields.long() },
        10 => Cause::Panicked,
        12 => Cause::NotJoined,
        13 => {
            let limit = Duration::from_millis(fields.long());
            let (count, named) = (fields.size(), fields.size());
            let missing = (0..named.min(NAMED_MAX)).map(|_| fields.size()).collect();
            Cause::NotInTime { missing, count, limit }
        }
        14 => {
            let host = IpAddr::from(Ipv6Addr::from(fields.bytes::<16>())).to_canonical();
            Cause::HostLost { host, hosts: fields.size(), ranks: fields.size() }
        }
        15 => Cause::CircularWait { waits: Vec::new(), count: fields.size() },
        11 => {
            let is_known = fields.bytes::<1>() == [1];
            let hosts = [(); 2].map(|()| IpAddr::from(Ipv6Addr::from(fields.bytes::<16>())).to_canonical());
            Cause::Unreachable { hosts: is_known.then_some(hosts) }
        }
        _ => return None,
    })
}

struct Encoder {
    bytes: [u8; FRAME_BYTES],
    at: usize,
}

impl Encoder {
    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes[self.at..][..bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
        self
    }

    fn number(&mut self, number: u32) -> &mut Self {
        self.bytes(&number.to_le_bytes())
    }

    fn long(&mut self, number: u64) -> &mut Self {
        self.bytes(&number.to_le_bytes())
    }

    fn abort(&mut self, abort: &Abort) -> &mut Self {
        let (kind, details) = encode_cause(&abort.cause);
        self.number(kind).rank(abort.rank).rank(abort.reporter).bytes(&abort.call.0).bytes(&details)
    }

    fn rank(&mut self, rank: usize) -> &mut Self {
        self.number(u32::try_from(rank).unwrap_or(u32::MAX))
    }

    fn wait(&mut self, wait: WaitReport, calls: [Fingerprint; CALLS_MAX]) -> &mut Self {
        let (kind, count) = match wait.missing {
            Missing::Anything => (0, 0),
            Missing::Message(received) => (1, received),
            Missing::Signal(seen) => (2, seen),
            Missing::Room => (3, 0),
        };
        self.number(wait.on)
            .number(wait.index)
            .bytes(bytemuck::cast_slice(&calls.map(|call| call.0)))
            .number(kind);
        self.long(count).long(wait.messages).long(wait.signals).number(wait.is_only_call.into())
    }

    /// Encodes the first members, as many as a frame can name.
    fn members(&mut self, members: &[u32]) -> &mut Self {
        let members = &members[..members.len().min(MEMBERS_MAX)];
        self.number(u32::try_from(members.len()).expect("a frame is short"));
        members.iter().fold(self, |frame, &member| frame.number(member))
    }

    fn piece(&mut self, piece: &[u8]) -> &mut Self {
        self.number(u32::try_from(piece.len()).expect("a piece fits into a frame")).bytes(piece)
    }

    fn origin(&mut self, origin: &ForkPath) -> &mut Self {
        self.number(u32::try_from(origin.forks().len()).expect("a fork path is short"));
        for fork in origin.forks() {
            self.number(fork.number).bytes(&fork.channel.get().to_le_bytes());
        }
        self
    }

    fn peer_infos(&mut self, peer_infos: &[PeerInfo]) -> &mut Self {
        self.number(u32::try_from(peer_infos.len()).expect("a frame is short"));
        peer_infos.iter().fold(self, |frame, &peer_info| frame.peer_info(peer_info))
    }

    fn peer_info(&mut self, peer_info: PeerInfo) -> &mut Self {
        self.address(peer_info.address)
            .bytes(&peer_info.host.to_le_bytes())
            .bytes(&peer_info.process.to_le_bytes());
        self.bytes(&peer_info.unix_socket.map_or(0, UnixSocketName::get).to_le_bytes());
        self.number(peer_info.cores.first).number(peer_info.cores.count);
        self.bytes(&peer_info.pid.namespace.to_le_bytes()).number(peer_info.pid.id);
        self.number(peer_info.sockets_per_peer.into())
    }

    /// IPv4 addresses are sent in their IPv6 form.
    fn address(&mut self, address: SocketAddr) -> &mut Self {
        let ip = to_v6(address.ip());
        let scope = if let SocketAddr::V6(address) = address { address.scope_id() } else { 0 };
        self.bytes(&ip.octets()).number(u32::from(address.port())).number(scope)
    }
}

/// Returns the IPv6 form of an address.
const fn to_v6(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

struct Decoder<'a> {
    bytes: &'a [u8],
}

impl Decoder<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let (head, tail) = self.bytes.split_first_chunk().expect("every frame's fields fit into its size");
        self.bytes = tail;
        *head
    }

    fn number(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    fn long(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    /// Reads a number of ranks or a rank. A number that does not fit becomes the largest one.
    fn size(&mut self) -> usize {
        usize::try_from(self.long()).unwrap_or(usize::MAX)
    }

    fn channel(&mut self) -> ChannelId {
        ChannelId::from_number(self.long())
    }

    fn abort(&mut self) -> Option<Abort> {
        let kind = self.number();
        let (rank, reporter) = (self.number() as usize, self.number() as usize);
        let (call, details) = (Fingerprint(self.bytes()), self.bytes());
        Some(Abort { cause: decode_cause(kind, details)?, rank, reporter, call })
    }

    fn wait(&mut self) -> Option<(WaitReport, [Fingerprint; CALLS_MAX])> {
        let (on, index) = (self.number(), self.number());
        let calls = [(); CALLS_MAX].map(|()| Fingerprint(self.bytes()));
        let (kind, count) = (self.number(), self.long());
        let missing = match kind {
            0 => Missing::Anything,
            1 => Missing::Message(count),
            2 => Missing::Signal(count),
            3 => Missing::Room,
            _ => return None,
        };
        let (messages, signals, is_only_call) = (self.long(), self.long(), self.number() != 0);
        Some((WaitReport { on, index, missing, messages, signals, is_only_call }, calls))
    }

    fn members(&mut self) -> Vec<u32> {
        let count = (self.number() as usize).min(MEMBERS_MAX);
        (0..count).map(|_| self.number()).collect()
    }

    /// Returns `None` if the piece would not fit into a frame.
    fn piece(&mut self) -> Option<Vec<u8>> {
        let len = self.number() as usize;
        (len <= PIECE_BYTES_MAX).then(|| self.bytes[..len].to_vec())
    }

    /// Returns `None` if the path is too long.
    fn origin(&mut self) -> Option<ForkPath> {
        let depth = (self.number() as usize).min(DEPTH_MAX + 1);
        let mut forks = Vec::new();
        for _ in 0..depth {
            forks.push(Fork { number: self.number(), channel: self.channel() });
        }
        ForkPath::new(&forks)
    }

    /// Returns `None` if the ranks would not fit into a frame.
    fn peer_infos(&mut self) -> Option<Vec<PeerInfo>> {
        let count = self.number() as usize;
        (count <= PEERS_MAX).then(|| (0..count).map(|_| self.peer_info()).collect())
    }

    fn peer_info(&mut self) -> PeerInfo {
        let (address, host, process) = (self.address(), self.long(), self.long());
        let unix_socket = UnixSocketName::new(self.long());
        let cores = Cores { first: self.number(), count: self.number() };
        let pid = ProcessId { namespace: self.long(), id: self.number() };
        let sockets_per_peer = u16::try_from(self.number()).unwrap_or(u16::MAX);
        PeerInfo { address, host, process, unix_socket, cores, pid, sockets_per_peer }
    }

    fn address(&mut self) -> SocketAddr {
        let ip = Ipv6Addr::from(self.bytes::<16>());
        let [low, high, ..] = self.number().to_le_bytes();
        let port = u16::from_le_bytes([low, high]);
        let scope = self.number();
        match ip.to_ipv4_mapped() {
            Some(ip) => SocketAddr::from((ip, port)),
            None => std::net::SocketAddrV6::new(ip, port, 0, scope).into(),
        }
    }
}

/// One end of the connection between a rank and the coordinator. Its methods never wait.
#[derive(Debug)]
pub(crate) struct ControlConnection {
    pub(crate) stream: Socket,
    inbox: [u8; FRAME_BYTES],
    filled: usize,
    /// The frames that were not sent completely. Connections share frames that all of them send.
    outbox: VecDeque<Arc<[u8]>>,
    /// The number of bytes of the first piece of the outbox that were sent.
    sent: usize,
}

impl ControlConnection {
    /// Wraps a non-blocking, authenticated connection.
    pub(crate) fn new(stream: Socket) -> Self {
        Self { stream, inbox: [0; FRAME_BYTES], filled: 0, outbox: VecDeque::new(), sent: 0 }
    }

    /// Returns the next frame, if it has arrived.
    ///
    /// # Errors
    /// `UnexpectedEof` if the other end has closed; `InvalidData` if the bytes are no frame.
    pub(crate) fn pull(&mut self) -> io::Result<Option<Frame>> {
        while self.filled < FRAME_BYTES {
            match self.stream.read(&mut self.inbox[self.filled..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.filled += count,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        self.filled = 0;
        Frame::decode(&self.inbox).map(Some).ok_or_else(|| ErrorKind::InvalidData.into())
    }

    /// Sends a frame now or with a later [`flush`](Self::flush).
    ///
    /// # Errors
    /// If the connection has failed.
    pub(crate) fn push(&mut self, frame: Frame) -> io::Result<()> {
        self.push_all(&[frame.encode()])
    }

    /// Like [`push`](Self::push), for many frames at once.
    ///
    /// # Errors
    /// If the connection has failed.
    pub(crate) fn push_all(&mut self, frames: &[[u8; FRAME_BYTES]]) -> io::Result<()> {
        self.push_shared(&Arc::from(frames.as_flattened()))
    }

    /// Like [`push_all`](Self::push_all), for frames that many connections send. They are in memory once.
    ///
    /// # Errors
    /// If the connection has failed.
    pub(crate) fn push_shared(&mut self, frames: &Arc<[u8]>) -> io::Result<()> {
        if !frames.is_empty() {
            self.outbox.push_back(Arc::clone(frames));
        }
        self.flush()
    }

    /// Returns `true` if frames wait to be sent.
    pub(crate) fn unsent(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Sends as much as the connection takes.
    ///
    /// # Errors
    /// If the connection has failed.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        while let Some(piece) = self.outbox.front() {
            let len = piece.len();
            let Some(count) = socket::send(&self.stream, &piece[self.sent..])? else { break };
            self.sent += count;
            if self.sent == len {
                self.outbox.pop_front();
                self.sent = 0;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::store::{MESSAGE_BYTES_MAX, StoreInbox};

    #[test]
    fn cores_count_once_where_ranks_share_them_and_each_where_they_are_bound() {
        let cores = |first, count| Cores { first, count };
        assert_eq!(Cores::total([cores(0, 8), cores(0, 8), cores(0, 8)].into_iter()), 8);
        assert_eq!(Cores::total([cores(0, 2), cores(2, 3)].into_iter()), 5);
        assert_eq!(Cores::total([cores(0, 1), cores(1, 1), cores(0, 1)].into_iter()), 2);
    }

    #[test]
    fn an_interface_has_the_number_that_it_has_on_this_host() {
        let reach = |address: &str, own: &str| {
            let mut peer_info = PeerInfo::here(address.parse().unwrap(), 0, None);
            peer_info.reach_from(own.parse().unwrap());
            peer_info.address.to_string()
        };
        assert_eq!(reach("[fe80::2%5]:1", "[fe80::1%3]:2"), "[fe80::2%3]:1");
        assert_eq!(reach("[fd00::2]:1", "[fd00::1]:2"), "[fd00::2]:1");
        assert_eq!(reach("10.0.0.2:1", "10.0.0.1:2"), "10.0.0.2:1");
    }

    #[test]
    fn frames_survive_the_wire() {
        let cores = Cores { first: 3, count: 5 };
        let pid = ProcessId { namespace: u64::MAX - 1, id: 7 };
        let abort = Abort {
            cause: Cause::Mismatch { theirs: Fingerprint([7; Fingerprint::SIZE]) },
            rank: 3,
            reporter: 900_000,
            call: Fingerprint([9; Fingerprint::SIZE]),
        };
        let v4 = SocketAddr::from(([127, 0, 0, 1], 29500));
        let v6 =
            "[fe80::1%3]:80".parse().unwrap_or_else(|_| SocketAddr::from(([1, 2, 3, 4, 5, 6, 7, 8], 80)));
        let fork = |number: u32| Fork { number, channel: ChannelId::WORLD.child(number.into(), &[1]) };
        let forks: [Fork; DEPTH_MAX] = std::array::from_fn(|number| fork(u32::try_from(number).unwrap()));
        let frames = [
            Frame::Join {
                world_size: 4,
                timeout_ms: 60_000,
                liveness_ms: 2000,
                peer_info: PeerInfo {
                    address: v4,
                    host: u64::MAX,
                    process: 1,
                    unix_socket: UnixSocketName::new(u64::MAX),
                    cores,
                    pid,
                    sockets_per_peer: 64,
                },
            },
            Frame::Peers {
                first: 2,
                peer_infos: vec![
                    PeerInfo {
                        address: v6,
                        host: 7,
                        process: u64::MAX,
                        unix_socket: None,
                        cores,
                        pid,
                        sockets_per_peer: 1,
                    };
                    PEERS_MAX
                ],
            },
            Frame::Peers { first: u32::MAX, peer_infos: Vec::new() },
            Frame::Missing { rank: 1, refused: u64::MAX },
            Frame::NotAll,
            Frame::Duplicate,
            Frame::Over,
            Frame::WorldSize { expected: 8 },
            Frame::OtherWorldSize { rank: 3, size: 4 },
            Frame::Beat,
            Frame::Ended { rank: 3 },
            Frame::Abort(abort.clone()),
            Frame::Abort(Abort { cause: Cause::NotJoined, ..abort }),
            Frame::Abort(Abort {
                cause: Cause::not_in_time((3..99).collect(), Duration::from_secs(60)),
                ..abort
            }),
            Frame::Abort(Abort { cause: Cause::Silent, ..abort }),
            Frame::Abort(Abort {
                cause: Cause::HostLost { host: v4.ip(), hosts: 2, ranks: 900_000 },
                ..abort
            }),
            Frame::Abort(Abort { cause: Cause::Panicked, ..abort }),
            Frame::Abort(Abort { cause: Cause::Unreachable { hosts: None }, ..abort }),
            Frame::Abort(Abort {
                cause: Cause::Unreachable { hosts: Some([v4.ip(), IpAddr::from(Ipv6Addr::LOCALHOST)]) },
                ..abort
            }),
            Frame::Abort(Abort { cause: Cause::gave_up(""), ..abort }),
            Frame::Abort(Abort { cause: Cause::gave_up("é".repeat(Cause::WHY_BYTES / 2)), ..abort }),
            Frame::Abort(Abort { cause: Cause::Length { expected: 3, got: u64::MAX }, ..abort }),
            Frame::Goodbye,
            Frame::Left { rank: 5 },
            Frame::Ask { rank: 6, origin: ForkPath::new(&forks).unwrap() },
            Frame::Ask { rank: 6, origin: ForkPath::default() },
            Frame::LeftChannel { rank: 7, channel: forks[0].channel },
            Frame::OtherMembers { rank: 7, channel: forks[0].channel, members: (0..59).collect() },
            Frame::OtherMembers { rank: 7, channel: forks[0].channel, members: vec![u32::MAX, 3] },
            Frame::Store { number: u64::MAX, is_last: true, piece: vec![5; PIECE_BYTES_MAX] },
            Frame::Store { number: 1, is_last: false, piece: Vec::new() },
            Frame::CancelStore { number: 3 },
            Frame::AskSent { channel: forks[0].channel, to: 5 },
            Frame::Sent { channel: forks[0].channel, to: 5, messages: u64::MAX, signals: 7 },
            Frame::Circle(CircularWait { rank: 900_000, on: 2, call: abort.call }),
            Frame::Abort(Abort { cause: Cause::CircularWait { waits: Vec::new(), count: 900_000 }, ..abort }),
            Frame::Waiting {
                channel: ChannelId::WORLD.child(3, &[0]),
                wait: WaitReport {
                    on: 4,
                    index: 7,
                    missing: Missing::Signal(u64::MAX),
                    messages: 3,
                    signals: 5,
                    is_only_call: true,
                },
                calls: [abort.call, Fingerprint::NONE, Fingerprint([8; 48]), Fingerprint([9; 48])],
            },
        ];
        for frame in frames {
            assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        }
    }

    #[test]
    fn a_store_message_of_any_length_is_put_together_and_a_longer_one_is_refused() {
        for len in [1, PIECE_BYTES_MAX, PIECE_BYTES_MAX + 1, MESSAGE_BYTES_MAX] {
            let message: Vec<u8> = (0..=255).cycle().take(len).collect();
            let mut inbox = StoreInbox::default();
            let taken = store_frames(7, &message).filter_map(|frame| match frame {
                Frame::Store { number: 7, is_last, piece } => inbox.add(&piece, is_last).unwrap(),
                other => panic!("{other:?}"),
            });
            assert_eq!(taken.collect::<Vec<_>>(), [message]);
        }
        let mut inbox = StoreInbox::default();
        assert_eq!(inbox.add(&vec![0; MESSAGE_BYTES_MAX], false).unwrap(), None);
        assert_eq!(inbox.add(&[1], true).unwrap_err().kind(), ErrorKind::InvalidData);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_frame_or_refused(bytes in prop::collection::vec(any::<u8>(), FRAME_BYTES), kind in 0_u8..27) {
            let mut bytes: [u8; FRAME_BYTES] = bytes.try_into().unwrap();
            bytes[..4].copy_from_slice(&[kind, 0, 0, 0]);
            if let Some(frame) = Frame::decode(&bytes) {
                prop_assert_eq!(Frame::decode(&frame.encode()), Some(frame));
            }
        }
    }
}

//! Where strangers knock: accepts connections and lets in those that prove that they belong to the job.
//!
//! Nothing here waits: a stranger that says nothing costs a place among the half-open connections for two seconds.
//! When all places are taken, the oldest that has not said hello makes room for whoever knocks next: ours say it at once.
//! Where all have said it, the next wait in the listener's queue until a place is free or the oldest has had its for longer
//! than any handshake of ours takes.

use std::io::{self, ErrorKind, Read};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use socket2::Socket;

use crate::auth::{self, HELLO_BYTES, Identity, Key, PROOF_BYTES, Purpose, Responder};
use crate::tcp::rendezvous::CONNECT_LIMIT;
use crate::tcp::socket::{self, BACKLOG};
use crate::{Deadline, Runtime, Version, shm};

const HALF_OPEN_MAX: usize = 128;
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(2);
/// What is said to those who have proven themselves, so that they know: others are hung up on.
pub(super) const ADMITTED: u8 = 1;
/// How long a handshake has its place for certain: any of ours is over by then, or tries again.
const PLACE_LIMIT: Duration = Duration::from_millis(200);
/// How long to wait when the system has no more descriptors.
const EXHAUSTED_LIMIT: Duration = Duration::from_millis(100);
/// How soon to look again while no connection can be accepted.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

const _: () = assert!(
    CONNECT_LIMIT.as_millis() * HALF_OPEN_MAX as u128
        > PLACE_LIMIT.saturating_add(LOOK_AGAIN).as_millis() * BACKLOG.unsigned_abs() as u128,
    "whoever gets into the queue comes to its end before it gives up, also behind strangers who say hello"
);

#[derive(Debug)]
pub(super) struct Gate {
    door: Door,
    listener: Socket,
    key: Key,
    epoch: u32,
    runtime: Runtime,
    half_open: Vec<HalfOpen>,
    /// Until when no connection can be accepted because the system has no more descriptors.
    exhausted: Option<Deadline>,
    refused: u64,
    /// Whether it was said that a process of another version knocks: whoever floods the gate does not flood the log.
    other_version: bool,
}

/// Where those who knock come from, and so what they may want.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Door {
    /// The network: they speak to this process through the connection.
    Network,
    /// This host: they share memory with this process.
    Host,
}

impl Door {
    fn prepare(self, stream: &Socket) -> io::Result<()> {
        match self {
            Self::Network => socket::prepare(stream),
            Self::Host if shm::is_ours(stream)? => stream.set_nonblocking(true),
            Self::Host => Err(ErrorKind::PermissionDenied.into()),
        }
    }

    fn is_for(self, purpose: Purpose) -> bool {
        (self == Self::Host) == matches!(purpose, Purpose::Memory(_) | Purpose::Arena(_))
    }
}

/// Somebody who has proven to belong to the job.
#[derive(Debug)]
pub(super) struct Admitted {
    pub(super) stream: Socket,
    pub(super) identity: Identity,
    /// The memory that was taken, if that is what it was about.
    pub(super) share: Option<shm::Share>,
}

/// A connection in the middle of its handshake.
#[derive(Debug)]
struct HalfOpen {
    stream: Socket,
    deadline: Deadline,
    hello: [u8; HELLO_BYTES],
    proof: [u8; PROOF_BYTES],
    filled: usize,
    /// Set when the hello is complete and the challenge sent.
    responder: Option<Responder>,
    /// Set when the proof is accepted and only the memory is missing.
    proven: Option<Identity>,
}

impl HalfOpen {
    fn new(stream: Socket, deadline: Deadline) -> Self {
        let (hello, proof) = ([0; HELLO_BYTES], [0; PROOF_BYTES]);
        Self { stream, deadline, hello, proof, filled: 0, responder: None, proven: None }
    }
}

/// How far a handshake has come.
enum Progress {
    Waiting,
    Done(Identity, Option<shm::Share>),
    Refused,
    /// It hung up and had said nothing: somebody has looked whether anybody listens.
    Left,
}

impl Gate {
    /// A gate behind a non-blocking listener.
    pub(super) fn new(door: Door, listener: Socket, key: Key, epoch: u32, runtime: Runtime) -> Self {
        let (half_open, exhausted, refused, other_version) = (Vec::new(), None, 0, false);
        Self { door, listener, key, epoch, runtime, half_open, exhausted, refused, other_version }
    }

    /// How many connections have been refused so far.
    pub(super) fn refused(&self) -> u64 {
        self.refused
    }

    /// What is to be watched: handshakes, and the listener while there is room for more.
    pub(super) fn watch(&self) -> impl Iterator<Item = PollFd<'_>> {
        let listener = self.has_room().then(|| socket::watch(&self.listener, PollFlags::IN));
        let half_open = self.half_open.iter().map(|knock| socket::watch(&knock.stream, PollFlags::IN));
        listener.into_iter().chain(half_open)
    }

    /// How soon to look again although nothing that is watched has happened, if that is so: for room, and for the oldest
    /// handshake, which is the first whose time is over.
    pub(super) fn look_again_in(&self) -> Option<Duration> {
        let for_room = (!self.has_room()).then_some(LOOK_AGAIN);
        let oldest = self.half_open.first().map(|knock| self.runtime.remaining(knock.deadline));
        for_room.into_iter().chain(oldest).min()
    }

    /// Takes every handshake as far as it goes without waiting, and returns those who have proven themselves.
    pub(super) fn advance(&mut self) -> Vec<Admitted> {
        let mut admitted = Vec::new();
        for knock in std::mem::take(&mut self.half_open) {
            self.go_on(knock, &mut admitted);
        }
        // All that have come by now, and no more: strangers must not keep the thread from everything else.
        for _ in 0..BACKLOG {
            if !self.has_room() {
                break;
            }
            match self.listener.accept() {
                Ok((stream, _)) if self.door.prepare(&stream).is_ok() => {
                    self.make_room(&mut admitted);
                    // What it has said is heard before it can be the one to make room.
                    let deadline = self.runtime.deadline(HANDSHAKE_LIMIT);
                    self.go_on(HalfOpen::new(stream, deadline), &mut admitted);
                }
                Ok(_) => self.refused += 1,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                // A connection that failed before it was accepted is no failure of ours.
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(e) => {
                    tracing::warn!(error = %e, "cannot accept connections for now");
                    self.exhausted = Some(self.runtime.deadline(EXHAUSTED_LIMIT));
                }
            }
        }
        admitted
    }

    fn go_on(&mut self, mut knock: HalfOpen, admitted: &mut Vec<Admitted>) {
        match self.progress(&mut knock) {
            Progress::Waiting => self.half_open.push(knock),
            Progress::Done(identity, share) => {
                admitted.push(Admitted { stream: knock.stream, identity, share });
            }
            Progress::Left => {}
            Progress::Refused => {
                self.refused += 1;
                let peer = knock.stream.peer_addr().ok().and_then(|peer| peer.as_socket());
                tracing::debug!(?peer, "refused a connection");
            }
        }
    }

    /// Those who have not proven themselves, whose places are few, from the oldest on.
    fn strangers(&self) -> impl Iterator<Item = (usize, &HalfOpen)> {
        self.half_open.iter().enumerate().filter(|(_, knock)| knock.proven.is_none())
    }

    /// Whether all places are taken.
    fn is_full(&self) -> bool {
        self.strangers().count() >= HALF_OPEN_MAX
    }

    /// Who makes room for another when all places are taken: the oldest that has not said hello, else the oldest, once it has
    /// had its place for long enough.
    fn first_to_go(&self) -> Option<usize> {
        let silent = self.strangers().find(|(_, knock)| knock.responder.is_none());
        let is_slow = |knock: &HalfOpen| self.runtime.elapsed(knock.deadline) > PLACE_LIMIT;
        silent.or_else(|| self.strangers().next().filter(|(_, oldest)| is_slow(oldest))).map(|(at, _)| at)
    }

    /// Whether another connection can be accepted.
    fn has_room(&self) -> bool {
        (!self.is_full() || self.first_to_go().is_some())
            && self.exhausted.is_none_or(|until| self.runtime.expired(until))
    }

    fn make_room(&mut self, admitted: &mut Vec<Admitted>) {
        while let Some(first) = self.first_to_go().filter(|_| self.is_full()) {
            let mut knock = self.half_open.remove(first);
            let was_silent = knock.responder.is_none();
            // What it has said since it was last listened to is heard before it has to go.
            match self.progress(&mut knock) {
                Progress::Waiting if was_silent && knock.responder.is_some() => {
                    self.half_open.insert(first, knock);
                }
                Progress::Done(identity, share) => {
                    admitted.push(Admitted { stream: knock.stream, identity, share });
                }
                Progress::Left => {}
                Progress::Waiting | Progress::Refused => self.refused += 1,
            }
        }
    }

    fn progress(&mut self, knock: &mut HalfOpen) -> Progress {
        loop {
            if let Some(identity) = knock.proven {
                return self.take_memory(knock, identity);
            }
            let wanted = match knock.responder {
                None => &mut knock.hello[..],
                Some(_) => &mut knock.proof[..],
            };
            while knock.filled < wanted.len() {
                match knock.stream.read(&mut wanted[knock.filled..]) {
                    Ok(0) if knock.filled == 0 && knock.responder.is_none() => return Progress::Left,
                    Ok(0) => return Progress::Refused,
                    Ok(count) => knock.filled += count,
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    Err(e) if e.kind() == ErrorKind::WouldBlock => return self.wait_for(knock),
                    Err(_) => return Progress::Refused,
                }
            }
            knock.filled = 0;
            if let Some(responder) = &knock.responder {
                let admitted =
                    responder.accepts(&knock.proof) && socket::send_all(&knock.stream, &[ADMITTED]).is_ok();
                let claim = responder.claim();
                match claim.purpose {
                    _ if !admitted => return Progress::Refused,
                    Purpose::Memory(_) => knock.proven = Some(claim),
                    _ => return Progress::Done(claim, None),
                }
                continue;
            }
            if let Some(theirs) = auth::greeted_by(&knock.hello).filter(|&theirs| theirs != Version::OURS) {
                if !std::mem::replace(&mut self.other_version, true) {
                    tracing::warn!(%theirs, ours = %Version::OURS, "a process of another version knocks");
                }
                let _ = socket::send_all(&knock.stream, &auth::refusal());
                return Progress::Refused;
            }
            match Responder::new(self.key.clone(), &knock.hello) {
                Ok(Some(responder))
                    if responder.claim().epoch == self.epoch
                        && self.door.is_for(responder.claim().purpose) =>
                {
                    if socket::send_all(&knock.stream, &responder.challenge()).is_err() {
                        return Progress::Refused;
                    }
                    knock.responder = Some(responder);
                }
                _ => return Progress::Refused,
            }
        }
    }

    fn take_memory(&self, knock: &HalfOpen, identity: Identity) -> Progress {
        match shm::take(&knock.stream) {
            Ok(Some(share)) => Progress::Done(identity, Some(share)),
            Err(e) if e.kind() == ErrorKind::WouldBlock => self.wait_for(knock),
            Ok(None) | Err(_) => Progress::Refused,
        }
    }

    fn wait_for(&self, knock: &HalfOpen) -> Progress {
        if self.runtime.expired(knock.deadline) { Progress::Refused } else { Progress::Waiting }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{Ipv4Addr, SocketAddr, TcpStream};

    use super::*;
    use crate::auth::{CHALLENGE_BYTES, Initiator};

    fn gate() -> (Gate, SocketAddr) {
        let listener = socket::listen((Ipv4Addr::LOCALHOST, 0).into(), None).unwrap();
        let address = listener.local_addr().unwrap();
        let (key, runtime) = (Key::new(None, "test"), Runtime::system());
        (Gate::new(Door::Network, listener.into(), key, 0, runtime), address)
    }

    /// Waits for something to happen, and deals with it.
    fn turn(gate: &mut Gate) -> Vec<Admitted> {
        let mut watched: Vec<_> = gate.watch().collect();
        assert!(socket::poll(&mut watched, Duration::from_secs(60)).unwrap());
        gate.advance()
    }

    #[test]
    fn a_stranger_that_says_nothing_is_looked_at_when_its_time_is_over() {
        let (mut gate, address) = gate();
        assert_eq!(gate.look_again_in(), None);
        let _stranger = TcpStream::connect(address).unwrap();
        assert!(turn(&mut gate).is_empty());
        let limit = gate.look_again_in().unwrap();
        assert!(limit <= HANDSHAKE_LIMIT, "{limit:?}");
    }

    #[test]
    fn whoever_hangs_up_and_has_said_nothing_was_not_refused() {
        let (mut gate, address) = gate();
        for (said, refused) in [(&b""[..], 0), (b"hello", 1), (b"", 1)] {
            let mut stranger = TcpStream::connect(address).unwrap();
            stranger.write_all(said).unwrap();
            drop(stranger);
            turn(&mut gate);
            while !gate.half_open.is_empty() {
                turn(&mut gate);
            }
            assert_eq!(gate.refused(), refused, "{said:?}");
        }
    }

    /// The oldest of all would be the one that has said hello.
    #[test]
    fn strangers_that_do_not_say_hello_keep_nobody_out() {
        let (mut gate, address) = gate();
        let identity = Identity { epoch: 0, from: 1, to: 0, purpose: Purpose::Control };
        let ours = Initiator::new(Key::new(None, "test"), identity).unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(ours.hello()).unwrap();
        let mut strangers = Vec::new();
        for count in 1..=2 * HALF_OPEN_MAX {
            let mut stranger = TcpStream::connect(address).unwrap();
            stranger.write_all(&ours.hello()[..count % 3]).unwrap();
            strangers.push(stranger);
            assert!(turn(&mut gate).is_empty());
            assert!(gate.has_room(), "after {count} strangers");
        }
        let mut challenge = [0; CHALLENGE_BYTES];
        stream.read_exact(&mut challenge).unwrap();
        stream.write_all(&ours.answer(&challenge).unwrap()).unwrap();
        let admitted = std::iter::repeat_with(|| turn(&mut gate)).find_map(|mut admitted| admitted.pop());
        assert_eq!(admitted.unwrap().identity, identity);
        assert!(gate.half_open.len() <= HALF_OPEN_MAX);
    }

    #[test]
    fn whoever_has_said_hello_since_it_was_last_heard_makes_no_room() {
        let (mut gate, address) = gate();
        let identity = Identity { epoch: 0, from: 1, to: 0, purpose: Purpose::Control };
        let ours = Initiator::new(Key::new(None, "test"), identity).unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        assert!(turn(&mut gate).is_empty());
        let mut strangers = Vec::new();
        while !gate.is_full() {
            strangers.push(TcpStream::connect(address).unwrap());
            assert!(turn(&mut gate).is_empty());
        }
        stream.write_all(ours.hello()).unwrap();
        gate.make_room(&mut Vec::new());
        assert!(!gate.is_full() && gate.half_open[0].responder.is_some());
    }
}

//! Accepts connections and lets in those that prove that they belong to the job.
//!
//! Nothing here waits, and connections are accepted as fast as they come, so that nobody keeps others out by filling the
//! listener's queue. The number of handshakes under way is limited: beyond it the oldest that has not said hello is dropped, and
//! if all have said hello, a random one. A process of the job tries again at once, and finishes its handshake in less time than
//! strangers take, on average, to drop it.

use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind, Read};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use socket2::Socket;

use crate::auth::{self, HELLO_BYTES, Identity, Key, PROOF_BYTES, Purpose, Responder};
use crate::tcp::socket::{self, BACKLOG};
use crate::tcp::{files, user};
use crate::{Deadline, Runtime, Version, shm};

/// The most handshakes under way, where the process may have many files open.
const HALF_OPEN_MAX: usize = 256;
/// Where it may not, they take at most one of so many files.
const FILES_PER_HALF_OPEN: u64 = 4;
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(2);
/// The same for a handshake that no other can be beside, because the process may open no more files.
const LAST_HANDSHAKE_LIMIT: Duration = Duration::from_millis(200);
/// What is said to those who have proven themselves, so that they know: others are hung up on.
pub(super) const ADMITTED: u8 = 1;
/// How long to wait when the system has no memory for another connection.
const EXHAUSTED_LIMIT: Duration = Duration::from_millis(100);

#[derive(Debug)]
#[allow(clippy::vec_box, reason = "handshakes are large, and are taken out of the middle")]
pub(super) struct Gate {
    door: Door,
    listener: Socket,
    key: Key,
    epoch: u32,
    runtime: Runtime,
    /// From the oldest on.
    half_open: Vec<Box<HalfOpen>>,
    half_open_max: usize,
    /// Those that have proven themselves, and whose memory has yet to come.
    proven: Vec<(Box<HalfOpen>, Identity)>,
    /// A descriptor that is given up for one more connection when the process may open no more files. Then whoever comes is
    /// told from strangers before the job ends.
    spare: Option<Socket>,
    /// That a process of the job has come which there is no descriptor for.
    out_of_files: Option<io::Error>,
    /// Its connection stays open: if it ended before the reason is known, the process would take this one for dead.
    unserved: Vec<Box<HalfOpen>>,
    /// Until when no connection can be accepted because the system has no memory for it.
    exhausted: Option<Deadline>,
    refused: u64,
    /// Chooses who is dropped.
    random: RandomState,
    /// What was logged once: whoever floods the gate does not flood the log.
    said: Said,
}

#[derive(Debug, Default)]
struct Said {
    other_version: bool,
    other_user: bool,
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
    /// It has the last descriptor that the process may open.
    is_last: bool,
}

impl HalfOpen {
    fn new(stream: Socket, deadline: Deadline, is_last: bool) -> Box<Self> {
        let (hello, proof) = ([0; HELLO_BYTES], [0; PROOF_BYTES]);
        Box::new(Self { stream, deadline, hello, proof, filled: 0, responder: None, is_last })
    }
}

/// How far a handshake has come.
enum Progress {
    Waiting,
    Done(Identity),
    Refused,
    /// It hung up and had said nothing: somebody has looked whether anybody listens. Or it hung up after its hello, as a process
    /// does that has been answered elsewhere.
    Left,
}

impl Gate {
    /// A gate behind a non-blocking listener.
    pub(super) fn new(door: Door, listener: Socket, key: Key, epoch: u32, runtime: Runtime) -> Self {
        let most = usize::try_from(files::limit() / FILES_PER_HALF_OPEN).unwrap_or(usize::MAX);
        Self {
            door,
            spare: listener.try_clone().ok(),
            listener,
            key,
            epoch,
            runtime,
            half_open: Vec::new(),
            half_open_max: most.clamp(1, HALF_OPEN_MAX),
            proven: Vec::new(),
            out_of_files: None,
            unserved: Vec::new(),
            exhausted: None,
            refused: 0,
            random: RandomState::new(),
            said: Said::default(),
        }
    }

    /// How many connections have been refused so far.
    pub(super) fn refused(&self) -> u64 {
        self.refused
    }

    /// Takes the reason for which a process of the job could not be let in, if this process or its system may open no more files.
    pub(super) fn take_out_of_files(&mut self) -> Option<io::Error> {
        self.out_of_files.take()
    }

    /// What is to be watched: the listener, and all handshakes.
    pub(super) fn watch(&self) -> impl Iterator<Item = PollFd<'_>> {
        let listener = self.can_accept().then(|| socket::watch(&self.listener, PollFlags::IN));
        let proven = self.proven.iter().map(|(knock, _)| knock);
        let knocks = self.half_open.iter().chain(proven);
        listener.into_iter().chain(knocks.map(|knock| socket::watch(&knock.stream, PollFlags::IN)))
    }

    /// How soon to look again although nothing that is watched has happened: when the time of a handshake is over, and when
    /// connections can be accepted again.
    pub(super) fn look_again_in(&self) -> Option<Duration> {
        let proven = self.proven.iter().map(|(knock, _)| knock);
        let last = self.half_open.iter().chain(proven).filter(|knock| knock.is_last);
        let oldest = self.half_open.first().into_iter().chain(self.proven.first().map(|(knock, _)| knock));
        let handshakes = oldest.chain(last).map(|knock| knock.deadline);
        handshakes.chain(self.exhausted).map(|deadline| self.runtime.remaining(deadline)).min()
    }

    /// Takes every handshake as far as it goes without waiting, and returns those who have proven themselves.
    pub(super) fn advance(&mut self) -> Vec<Admitted> {
        let mut admitted = Vec::new();
        self.advance_handshakes(&mut admitted);
        self.exhausted = self.exhausted.filter(|&until| !self.runtime.expired(until));
        // All that have come by now, and no more: strangers must not keep the thread from everything else.
        for _ in 0..BACKLOG {
            if !self.can_accept() {
                break;
            }
            match self.listener.accept() {
                Ok((stream, _)) => self.accept(stream, &mut admitted),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                // A connection that failed before it was accepted is no failure of ours.
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(e) if socket::is_out_of_files(&e) => self.give_up_a_file(e, &mut admitted),
                Err(e) => {
                    tracing::warn!(error = %e, "cannot accept connections for now");
                    self.exhausted = Some(self.runtime.deadline(EXHAUSTED_LIMIT));
                }
            }
        }
        admitted
    }

    fn advance_handshakes(&mut self, admitted: &mut Vec<Admitted>) {
        for (knock, identity) in std::mem::take(&mut self.proven) {
            self.take_memory(knock, identity, admitted);
        }
        let ready = self.ready();
        for (knock, ready) in std::mem::take(&mut self.half_open).into_iter().zip(ready) {
            if ready || self.runtime.expired(knock.deadline) {
                self.go_on(knock, admitted);
            } else {
                self.half_open.push(knock);
            }
        }
    }

    /// Of each handshake, whether something has come: to read from each would take longer than to ask for all at once.
    fn ready(&self) -> Vec<bool> {
        let mut watched: Vec<_> =
            self.half_open.iter().map(|knock| socket::watch(&knock.stream, PollFlags::IN)).collect();
        match socket::poll(&mut watched, Duration::ZERO) {
            Ok(_) => watched.iter().map(|watched| !watched.revents().is_empty()).collect(),
            Err(_) => vec![true; watched.len()],
        }
    }

    /// Begins the handshake of a new connection.
    fn accept(&mut self, stream: Socket, admitted: &mut Vec<Admitted>) {
        // Without a spare descriptor this may be the last.
        let is_last = !self.keep_spare();
        if self.door.prepare(&stream).is_err() {
            self.refused += 1;
            return;
        }
        while self.half_open.len() >= self.half_open_max {
            self.drop_one(admitted);
        }
        let limit = if is_last { LAST_HANDSHAKE_LIMIT } else { HANDSHAKE_LIMIT };
        // What it has said is heard before it can be dropped.
        self.go_on(HalfOpen::new(stream, self.runtime.deadline(limit), is_last), admitted);
    }

    /// Makes the spare descriptor, unless there is one. Returns `true` if there is one now.
    fn keep_spare(&mut self) -> bool {
        if self.spare.is_none() {
            self.spare = self.listener.try_clone().ok();
        }
        self.spare.is_some()
    }

    /// Closes something, so that one more connection can be accepted: a stranger's, or the spare descriptor.
    fn give_up_a_file(&mut self, error: io::Error, admitted: &mut Vec<Admitted>) {
        if !self.half_open.is_empty() {
            self.drop_one(admitted);
        } else if self.spare.take().is_none() {
            self.run_out_of_files(error);
        }
    }

    /// There is no descriptor for a process of the job.
    fn run_out_of_files(&mut self, error: io::Error) {
        self.out_of_files.get_or_insert(error);
        self.exhausted = Some(self.runtime.deadline(EXHAUSTED_LIMIT));
    }

    /// Whether another connection can be accepted.
    fn can_accept(&self) -> bool {
        let is_last_one_taken = || self.half_open.iter().any(|knock| knock.is_last);
        self.exhausted.is_none() && (self.spare.is_some() || !is_last_one_taken())
    }

    fn go_on(&mut self, mut knock: Box<HalfOpen>, admitted: &mut Vec<Admitted>) {
        match self.progress(&mut knock) {
            Progress::Waiting => self.half_open.push(knock),
            ended => self.end(knock, ended, admitted),
        }
    }

    /// Deals with a handshake that has ended.
    fn end(&mut self, knock: Box<HalfOpen>, ended: Progress, admitted: &mut Vec<Admitted>) {
        match ended {
            Progress::Waiting | Progress::Left => {}
            // Its connection would leave none for anything else.
            Progress::Done(_) if knock.is_last => {
                self.unserved.push(knock);
                self.run_out_of_files(rustix::io::Errno::MFILE.into());
            }
            Progress::Done(identity) if matches!(identity.purpose, Purpose::Memory(_)) => {
                self.take_memory(knock, identity, admitted);
            }
            Progress::Done(identity) => {
                admitted.push(Admitted { stream: knock.stream, identity, share: None })
            }
            Progress::Refused => {
                self.refused += 1;
                let peer = knock.stream.peer_addr().ok().and_then(|peer| peer.as_socket());
                tracing::debug!(?peer, "refused a connection");
            }
        }
    }

    /// Drops the oldest handshake that has not said hello, or a random one if all have. What it has said since it was last
    /// listened to is heard first.
    fn drop_one(&mut self, admitted: &mut Vec<Admitted>) {
        let silent = self.half_open.iter().position(|knock| knock.responder.is_none());
        let at = silent.unwrap_or_else(|| {
            let random = self.random.hash_one(self.refused);
            usize::try_from(random % self.half_open.len() as u64).expect("it is below a length")
        });
        let mut knock = self.half_open.remove(at);
        match self.progress(&mut knock) {
            // It has said hello by now, and is no longer the first to go.
            Progress::Waiting if silent.is_some() && knock.responder.is_some() => {
                self.half_open.insert(at, knock);
            }
            Progress::Waiting => self.refused += 1,
            ended => self.end(knock, ended, admitted),
        }
    }

    fn progress(&mut self, knock: &mut HalfOpen) -> Progress {
        loop {
            let wanted = match knock.responder {
                None => &mut knock.hello[..],
                Some(_) => &mut knock.proof[..],
            };
            while knock.filled < wanted.len() {
                match knock.stream.read(&mut wanted[knock.filled..]) {
                    Ok(0) if knock.filled == 0 => return Progress::Left,
                    Ok(0) => return Progress::Refused,
                    Ok(count) => knock.filled += count,
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    Err(e) if e.kind() == ErrorKind::WouldBlock => return self.wait_for(knock),
                    Err(_) => return Progress::Refused,
                }
            }
            knock.filled = 0;
            if let Some(responder) = &knock.responder {
                let claim = responder.claim();
                let admitted = responder.accepts(&knock.proof)
                    && self.is_of_this_user(&knock.stream)
                    && socket::send_all(&knock.stream, &[ADMITTED]).is_ok();
                return if admitted { Progress::Done(claim) } else { Progress::Refused };
            }
            if let Some(theirs) = auth::greeted_by(&knock.hello).filter(|&theirs| theirs != Version::OURS) {
                if !std::mem::replace(&mut self.said.other_version, true) {
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

    /// Whether the process at the other end may belong to the job, as far as its user tells. Where the key is no secret, anybody
    /// knows it who knows the job's name. A Unix socket was looked at when it was accepted.
    fn is_of_this_user(&mut self, stream: &Socket) -> bool {
        if self.key.is_secret() || self.door == Door::Host {
            return true;
        }
        let user = user::of_peer(stream);
        match &user {
            Ok(user) if *user == rustix::process::geteuid().as_raw() => return true,
            Err(error) if socket::is_out_of_files(error) => {
                self.run_out_of_files(rustix::io::Errno::MFILE.into());
            }
            _ if std::mem::replace(&mut self.said.other_user, true) => {}
            _ => tracing::warn!(
                ?user,
                "refused a process that is not this user's: set DIST_SECRET_FILE on every rank if it belongs to the job"
            ),
        }
        false
    }

    /// Takes the memory that a process of the job offers. It is waited for if it has not come yet.
    fn take_memory(&mut self, knock: Box<HalfOpen>, identity: Identity, admitted: &mut Vec<Admitted>) {
        match shm::take(&knock.stream) {
            Ok(Some(share)) => {
                admitted.push(Admitted { stream: knock.stream, identity, share: Some(share) });
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock && !self.runtime.expired(knock.deadline) => {
                self.proven.push((knock, identity));
            }
            Err(e) if socket::is_out_of_files(&e) => {
                self.unserved.push(knock);
                self.run_out_of_files(e);
            }
            Ok(None) | Err(_) => self.refused += 1,
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

    fn hello() -> Initiator {
        let identity = Identity { epoch: 0, from: 1, to: 0, purpose: Purpose::Control };
        Initiator::new(Key::new(None, "test"), identity).unwrap()
    }

    /// A process of the job, or one that only says hello as it does.
    fn say_hello(address: SocketAddr) -> (TcpStream, Initiator) {
        let ours = hello();
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(ours.hello()).unwrap();
        (stream, ours)
    }

    #[test]
    fn whoever_hangs_up_and_has_said_nothing_was_not_refused() {
        let (mut gate, address) = gate();
        let hello = *hello().hello();
        for (said, refused) in [(&b""[..], 0), (b"hello", 1), (b"", 1), (&hello, 1)] {
            let mut stranger = TcpStream::connect(address).unwrap();
            stranger.write_all(said).unwrap();
            stranger.shutdown(std::net::Shutdown::Write).unwrap();
            turn(&mut gate);
            while !gate.half_open.is_empty() {
                turn(&mut gate);
            }
            assert_eq!(gate.refused(), refused, "{said:?}");
        }
    }

    /// Finishes a handshake as a process of the job does; `None` if it was hung up on.
    fn finish(gate: &mut Gate, (mut stream, ours): (TcpStream, Initiator)) -> Option<Vec<Admitted>> {
        let mut challenge = [0; CHALLENGE_BYTES];
        stream.read_exact(&mut challenge).ok()?;
        stream.write_all(&ours.answer(&challenge).unwrap()).ok()?;
        let admitted: Vec<_> = std::iter::repeat_with(|| turn(gate)).find(|admitted| !admitted.is_empty())?;
        Some(admitted)
    }

    /// The oldest of all would be the one that has said hello.
    #[test]
    fn strangers_that_do_not_say_hello_keep_nobody_out() {
        let (mut gate, address) = gate();
        let ours = say_hello(address);
        let mut strangers = Vec::new();
        for count in 1..=2 * HALF_OPEN_MAX {
            let mut stranger = TcpStream::connect(address).unwrap();
            stranger.write_all(&ours.1.hello()[..count % 3]).unwrap();
            strangers.push(stranger);
            assert!(turn(&mut gate).is_empty());
            assert!(gate.can_accept(), "after {count} strangers");
        }
        let admitted = finish(&mut gate, ours).expect("it has its place still");
        assert_eq!((admitted.len(), admitted[0].identity.from), (1, 1));
        assert!(gate.half_open.len() <= HALF_OPEN_MAX);
    }

    /// They are dropped at random: a process of the job is one of many, and has its place for a while.
    #[test]
    fn strangers_that_say_hello_keep_nobody_out() {
        let (mut gate, address) = gate();
        let mut strangers = Vec::new();
        for _ in 0..2 * HALF_OPEN_MAX {
            strangers.push(say_hello(address).0);
            assert!(turn(&mut gate).is_empty());
            assert!(gate.can_accept());
        }
        assert_eq!(gate.half_open.len(), HALF_OPEN_MAX);
        assert_eq!(gate.refused(), HALF_OPEN_MAX as u64);
        let kept = strangers.iter().skip(HALF_OPEN_MAX).filter(|stranger| {
            stranger.set_nonblocking(true).unwrap();
            // A challenge, and no end.
            matches!((&**stranger).read(&mut [0; 2 * CHALLENGE_BYTES]), Ok(CHALLENGE_BYTES))
                && matches!((&**stranger).read(&mut [0]), Err(e) if e.kind() == ErrorKind::WouldBlock)
        });
        assert!(kept.count() < HALF_OPEN_MAX, "it is not the oldest who are dropped");
        // The place is lost with a probability of one in 256 for each that comes meanwhile.
        let admitted = std::iter::repeat_with(|| {
            let ours = say_hello(address);
            for _ in 0..10 {
                strangers.push(say_hello(address).0);
                turn(&mut gate);
            }
            finish(&mut gate, ours)
        });
        assert_eq!(admitted.flatten().next().unwrap()[0].identity.from, 1);
    }

    #[test]
    fn whoever_has_said_hello_since_it_was_last_heard_is_not_dropped() {
        let (mut gate, address) = gate();
        let mut stream = TcpStream::connect(address).unwrap();
        assert!(turn(&mut gate).is_empty());
        let _stranger = TcpStream::connect(address).unwrap();
        assert!(turn(&mut gate).is_empty());
        stream.write_all(hello().hello()).unwrap();
        gate.drop_one(&mut Vec::new());
        assert_eq!(gate.half_open.len(), 2, "the first has said hello");
        gate.drop_one(&mut Vec::new());
        assert!(gate.half_open.len() == 1 && gate.half_open[0].responder.is_some());
    }

    /// As where the process may open no more files: one descriptor is left for this.
    #[test]
    fn with_the_last_descriptor_strangers_are_told_from_processes_of_the_job() {
        let (mut gate, address) = gate();
        gate.spare = None;
        let accept = |gate: &mut Gate, last: bool| {
            let (stream, _) = gate.listener.accept().unwrap();
            stream.set_nonblocking(true).unwrap();
            let deadline = gate.runtime.deadline(LAST_HANDSHAKE_LIMIT);
            gate.go_on(HalfOpen::new(stream, deadline, last), &mut Vec::new());
        };
        let stranger = TcpStream::connect(address).unwrap();
        accept(&mut gate, true);
        assert!(!gate.can_accept(), "there is no place beside it");
        assert!(gate.look_again_in().unwrap() <= LAST_HANDSHAKE_LIMIT);
        drop(stranger);
        assert!(turn(&mut gate).is_empty());
        assert!(gate.take_out_of_files().is_none(), "a stranger does not end the job");
        gate.spare = None;
        let (mut stream, ours) = say_hello(address);
        accept(&mut gate, true);
        let mut challenge = [0; CHALLENGE_BYTES];
        stream.read_exact(&mut challenge).unwrap();
        stream.write_all(&ours.answer(&challenge).unwrap()).unwrap();
        assert!(turn(&mut gate).is_empty());
        assert!(socket::is_out_of_files(&gate.take_out_of_files().unwrap()));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_of_another_user_is_refused_although_it_knows_the_name_of_the_job() {
        use rustix::process::{Uid, geteuid};
        // Only root can become another user.
        if !geteuid().is_root() {
            return;
        }
        let (mut gate, address) = gate();
        let other = move || {
            let nobody = Uid::from_raw(65534);
            // Of this thread only.
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            let (mut stream, ours) = say_hello(address);
            let mut challenge = [0; CHALLENGE_BYTES];
            stream.read_exact(&mut challenge).unwrap();
            stream.write_all(&ours.answer(&challenge).unwrap()).unwrap();
            assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "nobody is let in");
        };
        let other = Runtime::system().spawn("other", other).unwrap();
        while gate.refused() == 0 {
            assert!(turn(&mut gate).is_empty());
        }
        other.join().unwrap();
    }
}

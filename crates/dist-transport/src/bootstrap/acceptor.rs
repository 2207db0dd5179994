//! The acceptor: accepts connections and admits those that authenticate as processes of the job.
//!
//! This code never waits, and accepts connections as fast as they arrive, so that no client can lock others
//! out by filling the listener's queue. The number of pending handshakes is limited. Beyond the limit, the
//! oldest handshake without a hello is dropped; if all have sent a hello, a random one is dropped. A process
//! of the job then retries at once. On average it finishes its handshake before a flood of other clients
//! drops it.

use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind, Read};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use socket2::Socket;

use crate::bootstrap::auth::{self, HELLO_BYTES, Identity, Key, PROOF_BYTES, Purpose, Responder};
use crate::bootstrap::{files, user};
use crate::link::shm;
use crate::link::socket::{self, BACKLOG};
use crate::{Deadline, Runtime, Version};

/// The most pending handshakes, if the process may open many files.
const PENDING_MAX: usize = 256;
/// If the process may open few files, pending handshakes use at most one in this many of them.
const FILES_PER_PENDING: u64 = 4;
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(2);
/// The limit for a handshake that holds the last file which the process may open.
const LAST_HANDSHAKE_LIMIT: Duration = Duration::from_millis(200);
/// The byte that tells an authenticated process that it is admitted. Other connections are closed.
pub(crate) const ADMITTED: u8 = 1;
/// The pause in accepting connections if the system has no memory for another one.
const EXHAUSTED_LIMIT: Duration = Duration::from_millis(100);

#[derive(Debug)]
#[allow(clippy::vec_box, reason = "handshakes are large, and are taken out of the middle")]
pub(crate) struct Acceptor {
    kind: ListenerKind,
    listener: Socket,
    key: Key,
    epoch: u32,
    runtime: Runtime,
    /// Pending handshakes, the oldest first.
    pending: Vec<Box<PendingHandshake>>,
    pending_max: usize,
    /// Authenticated connections whose shared memory has not arrived yet.
    proven: Vec<(Box<PendingHandshake>, Identity)>,
    /// A spare descriptor. If the process may open no more files, it is closed to free a descriptor for one
    /// more connection. That connection can then authenticate before the job ends.
    spare: Option<Socket>,
    /// The error that left a process of the job without a descriptor, if there was one.
    out_of_files: Option<io::Error>,
    /// Connections of such processes. They stay open: if one closed before the reason is known, the process
    /// would take this one for dead.
    unserved: Vec<Box<PendingHandshake>>,
    /// The time until which no connection is accepted, because the system had no memory for one.
    exhausted: Option<Deadline>,
    refused: u64,
    /// Chooses the handshake that is dropped.
    random: RandomState,
    /// The warnings that were logged. Each is logged once, so that a flood of connections does not flood the
    /// log.
    logged: Logged,
}

#[derive(Debug, Default)]
struct Logged {
    other_version: bool,
    other_user: bool,
}

/// The kind of listener, which decides what its connections may be for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListenerKind {
    /// The network: messages go through the connection.
    Network,
    /// This host: messages go through shared memory.
    CoordinatorHost,
}

impl ListenerKind {
    fn prepare(self, stream: &Socket) -> io::Result<()> {
        match self {
            Self::Network => socket::prepare(stream),
            Self::CoordinatorHost if shm::is_ours(stream)? => stream.set_nonblocking(true),
            Self::CoordinatorHost => Err(ErrorKind::PermissionDenied.into()),
        }
    }

    fn is_for(self, purpose: Purpose) -> bool {
        (self == Self::CoordinatorHost) == matches!(purpose, Purpose::Memory(_) | Purpose::Arena(_))
    }
}

/// An authenticated connection of a process of the job.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) stream: Socket,
    pub(crate) identity: Identity,
    /// The shared memory that was passed, for a connection whose purpose is shared memory.
    pub(crate) share: Option<shm::SharedSegment>,
}

/// A connection in the middle of its handshake.
#[derive(Debug)]
struct PendingHandshake {
    stream: Socket,
    deadline: Deadline,
    hello: [u8; HELLO_BYTES],
    proof: [u8; PROOF_BYTES],
    filled: usize,
    /// The handshake after the hello; `None` until the hello is complete and the challenge was sent.
    responder: Option<Responder>,
    /// `true` if it holds the last file that the process may open.
    is_last: bool,
}

impl PendingHandshake {
    fn new(stream: Socket, deadline: Deadline, is_last: bool) -> Box<Self> {
        let (hello, proof) = ([0; HELLO_BYTES], [0; PROOF_BYTES]);
        Box::new(Self { stream, deadline, hello, proof, filled: 0, responder: None, is_last })
    }
}

/// The state of a handshake.
enum HandshakeProgress {
    Waiting,
    Done(Identity),
    Refused,
    /// The peer hung up without a hello, as a port check does. Or it hung up after its hello, as a process
    /// does that was answered elsewhere.
    Left,
}

impl Acceptor {
    /// Creates an acceptor for a non-blocking listener.
    pub(crate) fn new(kind: ListenerKind, listener: Socket, key: Key, epoch: u32, runtime: Runtime) -> Self {
        let most = usize::try_from(files::limit() / FILES_PER_PENDING).unwrap_or(usize::MAX);
        Self {
            kind,
            spare: listener.try_clone().ok(),
            listener,
            key,
            epoch,
            runtime,
            pending: Vec::new(),
            pending_max: most.clamp(1, PENDING_MAX),
            proven: Vec::new(),
            out_of_files: None,
            unserved: Vec::new(),
            exhausted: None,
            refused: 0,
            random: RandomState::new(),
            logged: Logged::default(),
        }
    }

    /// Returns how many connections have been refused.
    pub(crate) fn refused(&self) -> u64 {
        self.refused
    }

    /// Returns and clears the error of a connection that could not be accepted because there was no free file
    /// descriptor.
    pub(crate) fn take_out_of_files(&mut self) -> Option<io::Error> {
        self.out_of_files.take()
    }

    /// Returns the descriptors to poll: the listener and all handshakes.
    pub(crate) fn watch(&self) -> impl Iterator<Item = PollFd<'_>> {
        let listener = self.can_accept().then(|| socket::watch(&self.listener, PollFlags::IN));
        let proven = self.proven.iter().map(|(pending, _)| pending);
        let all_pending = self.pending.iter().chain(proven);
        listener.into_iter().chain(all_pending.map(|pending| socket::watch(&pending.stream, PollFlags::IN)))
    }

    /// Returns how soon to call [`advance`](Self::advance) if no descriptor is ready: when a handshake
    /// expires, or when connections can be accepted again.
    pub(crate) fn look_again_in(&self) -> Option<Duration> {
        let proven = self.proven.iter().map(|(pending, _)| pending);
        let last = self.pending.iter().chain(proven).filter(|pending| pending.is_last);
        let oldest = self.pending.first().into_iter().chain(self.proven.first().map(|(pending, _)| pending));
        let handshakes = oldest.chain(last).map(|pending| pending.deadline);
        handshakes.chain(self.exhausted).map(|deadline| self.runtime.remaining(deadline)).min()
    }

    /// Advances every handshake as far as possible without waiting. Returns the connections that have
    /// authenticated.
    pub(crate) fn advance(&mut self) -> Vec<Admitted> {
        let mut admitted = Vec::new();
        self.advance_handshakes(&mut admitted);
        self.exhausted = self.exhausted.filter(|&until| !self.runtime.expired(until));
        // Accepts at most the connections that are queued now, so that a flood does not keep the thread from
        // its other work.
        for _ in 0..BACKLOG {
            if !self.can_accept() {
                break;
            }
            match self.listener.accept() {
                Ok((stream, _)) => self.accept(stream, &mut admitted),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                // A connection that failed before it was accepted is no error of this process.
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
        for (pending, identity) in std::mem::take(&mut self.proven) {
            self.receive_memory(pending, identity, admitted);
        }
        let ready = self.ready();
        for (pending, ready) in std::mem::take(&mut self.pending).into_iter().zip(ready) {
            if ready || self.runtime.expired(pending.deadline) {
                self.go_on(pending, admitted);
            } else {
                self.pending.push(pending);
            }
        }
    }

    /// Returns for each handshake whether bytes have arrived. One poll is faster than a read from each.
    fn ready(&self) -> Vec<bool> {
        let mut watched: Vec<_> =
            self.pending.iter().map(|pending| socket::watch(&pending.stream, PollFlags::IN)).collect();
        match socket::poll(&mut watched, Duration::ZERO) {
            Ok(_) => watched.iter().map(|watched| !watched.revents().is_empty()).collect(),
            Err(_) => vec![true; watched.len()],
        }
    }

    /// Begins the handshake of a new connection.
    fn accept(&mut self, stream: Socket, admitted: &mut Vec<Admitted>) {
        // Without a spare descriptor this connection may hold the last file.
        let is_last = !self.keep_spare();
        if self.kind.prepare(&stream).is_err() {
            self.refused += 1;
            return;
        }
        while self.pending.len() >= self.pending_max {
            self.drop_one(admitted);
        }
        let limit = if is_last { LAST_HANDSHAKE_LIMIT } else { HANDSHAKE_LIMIT };
        // Reads what the peer has sent before the handshake can be dropped.
        self.go_on(PendingHandshake::new(stream, self.runtime.deadline(limit), is_last), admitted);
    }

    /// Opens the spare descriptor, unless it is open. Returns `true` if it is open now.
    fn keep_spare(&mut self) -> bool {
        if self.spare.is_none() {
            self.spare = self.listener.try_clone().ok();
        }
        self.spare.is_some()
    }

    /// Frees a file descriptor for one more connection: drops a pending handshake, or closes the spare
    /// descriptor.
    fn give_up_a_file(&mut self, error: io::Error, admitted: &mut Vec<Admitted>) {
        if !self.pending.is_empty() {
            self.drop_one(admitted);
        } else if self.spare.take().is_none() {
            self.run_out_of_files(error);
        }
    }

    /// Records that a process of the job could not be accepted because there was no free file descriptor.
    fn run_out_of_files(&mut self, error: io::Error) {
        self.out_of_files.get_or_insert(error);
        self.exhausted = Some(self.runtime.deadline(EXHAUSTED_LIMIT));
    }

    /// Returns `true` if another connection can be accepted.
    fn can_accept(&self) -> bool {
        let is_last_one_taken = || self.pending.iter().any(|pending| pending.is_last);
        self.exhausted.is_none() && (self.spare.is_some() || !is_last_one_taken())
    }

    fn go_on(&mut self, mut pending: Box<PendingHandshake>, admitted: &mut Vec<Admitted>) {
        match self.progress(&mut pending) {
            HandshakeProgress::Waiting => self.pending.push(pending),
            ended => self.end(pending, ended, admitted),
        }
    }

    /// Handles the result of a finished handshake.
    fn end(
        &mut self,
        pending: Box<PendingHandshake>,
        ended: HandshakeProgress,
        admitted: &mut Vec<Admitted>,
    ) {
        match ended {
            HandshakeProgress::Waiting | HandshakeProgress::Left => {}
            // The connection of this process would leave no descriptor for anything else.
            HandshakeProgress::Done(_) if pending.is_last => {
                self.unserved.push(pending);
                self.run_out_of_files(rustix::io::Errno::MFILE.into());
            }
            HandshakeProgress::Done(identity) if matches!(identity.purpose, Purpose::Memory(_)) => {
                self.receive_memory(pending, identity, admitted);
            }
            HandshakeProgress::Done(identity) => {
                admitted.push(Admitted { stream: pending.stream, identity, share: None })
            }
            HandshakeProgress::Refused => {
                self.refused += 1;
                let peer = pending.stream.peer_addr().ok().and_then(|peer| peer.as_socket());
                tracing::debug!(?peer, "refused a connection");
            }
        }
    }

    /// Drops the oldest handshake without a hello, or a random one if all have sent a hello. Bytes that have
    /// arrived meanwhile are read first.
    fn drop_one(&mut self, admitted: &mut Vec<Admitted>) {
        let silent = self.pending.iter().position(|pending| pending.responder.is_none());
        let at = silent.unwrap_or_else(|| {
            let random = self.random.hash_one(self.refused);
            usize::try_from(random % self.pending.len() as u64).expect("it is below a length")
        });
        let mut pending = self.pending.remove(at);
        match self.progress(&mut pending) {
            // It has sent its hello by now, and is no longer the first to be dropped.
            HandshakeProgress::Waiting if silent.is_some() && pending.responder.is_some() => {
                self.pending.insert(at, pending);
            }
            HandshakeProgress::Waiting => self.refused += 1,
            ended => self.end(pending, ended, admitted),
        }
    }

    fn progress(&mut self, pending: &mut PendingHandshake) -> HandshakeProgress {
        loop {
            let wanted = match pending.responder {
                None => &mut pending.hello[..],
                Some(_) => &mut pending.proof[..],
            };
            while pending.filled < wanted.len() {
                match pending.stream.read(&mut wanted[pending.filled..]) {
                    Ok(0) if pending.filled == 0 => return HandshakeProgress::Left,
                    Ok(0) => return HandshakeProgress::Refused,
                    Ok(count) => pending.filled += count,
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    Err(e) if e.kind() == ErrorKind::WouldBlock => return self.wait_for(pending),
                    Err(_) => return HandshakeProgress::Refused,
                }
            }
            pending.filled = 0;
            if let Some(responder) = &pending.responder {
                let claim = responder.claim();
                let admitted = responder.accepts(&pending.proof)
                    && self.is_of_this_user(&pending.stream)
                    && socket::send_all(&pending.stream, &[ADMITTED]).is_ok();
                return if admitted { HandshakeProgress::Done(claim) } else { HandshakeProgress::Refused };
            }
            if let Some(theirs) = auth::greeted_by(&pending.hello).filter(|&theirs| theirs != Version::OURS) {
                if !std::mem::replace(&mut self.logged.other_version, true) {
                    tracing::warn!(%theirs, ours = %Version::OURS, "a process of another version connects");
                }
                let _ = socket::send_all(&pending.stream, &auth::refusal());
                return HandshakeProgress::Refused;
            }
            match Responder::new(self.key.clone(), &pending.hello) {
                Ok(Some(responder))
                    if responder.claim().epoch == self.epoch
                        && self.kind.is_for(responder.claim().purpose) =>
                {
                    if socket::send_all(&pending.stream, &responder.challenge()).is_err() {
                        return HandshakeProgress::Refused;
                    }
                    pending.responder = Some(responder);
                }
                _ => return HandshakeProgress::Refused,
            }
        }
    }

    /// Returns `true` if the process at the other end may belong to the job, judging by its user. If the key
    /// is not secret, every process that knows the job's name has it, so that the user must be the same. On a
    /// Unix socket this was checked before.
    fn is_of_this_user(&mut self, stream: &Socket) -> bool {
        if self.key.is_secret() || self.kind == ListenerKind::CoordinatorHost {
            return true;
        }
        let user = user::of_peer(stream);
        match &user {
            Ok(user) if *user == rustix::process::geteuid().as_raw() => return true,
            Err(error) if socket::is_out_of_files(error) => {
                self.run_out_of_files(rustix::io::Errno::MFILE.into());
            }
            _ if std::mem::replace(&mut self.logged.other_user, true) => {}
            _ => tracing::warn!(
                ?user,
                "refused a process that is not this user's: set DIST_SECRET_FILE on every rank if it belongs to the job"
            ),
        }
        false
    }

    /// Takes the shared memory that a process of the job offers, or waits for it if it has not arrived.
    fn receive_memory(
        &mut self,
        pending: Box<PendingHandshake>,
        identity: Identity,
        admitted: &mut Vec<Admitted>,
    ) {
        match shm::take(&pending.stream) {
            Ok(Some(share)) => {
                admitted.push(Admitted { stream: pending.stream, identity, share: Some(share) });
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock && !self.runtime.expired(pending.deadline) => {
                self.proven.push((pending, identity));
            }
            Err(e) if socket::is_out_of_files(&e) => {
                self.unserved.push(pending);
                self.run_out_of_files(e);
            }
            Ok(None) | Err(_) => self.refused += 1,
        }
    }

    fn wait_for(&self, pending: &PendingHandshake) -> HandshakeProgress {
        if self.runtime.expired(pending.deadline) {
            HandshakeProgress::Refused
        } else {
            HandshakeProgress::Waiting
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{Ipv4Addr, SocketAddr, TcpStream};
    use std::sync::Arc;

    use super::*;
    use crate::bootstrap::auth::{CHALLENGE_BYTES, Initiator};
    use crate::runtime::{Executor, Wake};

    /// A clock that stands still, so that no handshake expires while the machine is busy.
    struct StoppedClock;

    impl Executor for StoppedClock {
        fn name(&self) -> &'static str {
            "stopped clock"
        }

        fn now(&self) -> Duration {
            Duration::ZERO
        }

        fn spawn(&self, _: &str, _: Box<dyn FnOnce() + Send>) -> io::Result<()> {
            unreachable!("an acceptor starts no thread")
        }

        fn park(&self, _: Option<Duration>) {
            unreachable!("an acceptor does not wait")
        }

        fn current(&self) -> Arc<dyn Wake> {
            unreachable!("an acceptor does not wait")
        }

        fn yield_now(&self) {}
    }

    fn acceptor() -> (Acceptor, SocketAddr) {
        let listener = socket::listen((Ipv4Addr::LOCALHOST, 0).into(), None).unwrap();
        let address = listener.local_addr().unwrap();
        let (key, runtime) = (Key::new(None, "test"), Runtime::new(Arc::new(StoppedClock)));
        (Acceptor::new(ListenerKind::Network, listener.into(), key, 0, runtime), address)
    }

    /// Waits for an event and handles it.
    fn turn(acceptor: &mut Acceptor) -> Vec<Admitted> {
        let mut watched: Vec<_> = acceptor.watch().collect();
        assert!(socket::poll(&mut watched, Duration::from_secs(60)).unwrap());
        acceptor.advance()
    }

    #[test]
    fn a_silent_client_is_checked_when_its_handshake_expires() {
        let (mut acceptor, address) = acceptor();
        assert_eq!(acceptor.look_again_in(), None);
        let _stranger = TcpStream::connect(address).unwrap();
        assert!(turn(&mut acceptor).is_empty());
        let limit = acceptor.look_again_in().unwrap();
        assert!(limit <= HANDSHAKE_LIMIT, "{limit:?}");
    }

    fn hello() -> Initiator {
        let identity = Identity { epoch: 0, from: 1, to: 0, purpose: Purpose::Control };
        Initiator::new(Key::new(None, "test"), identity).unwrap()
    }

    /// Connects and sends a hello, like a process of the job.
    fn send_hello(address: SocketAddr) -> (TcpStream, Initiator) {
        let ours = hello();
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(ours.hello()).unwrap();
        (stream, ours)
    }

    #[test]
    fn a_client_that_hangs_up_without_a_word_does_not_count_as_refused() {
        let (mut acceptor, address) = acceptor();
        let hello = *hello().hello();
        for (logged, refused) in [(&b""[..], 0), (b"hello", 1), (b"", 1), (&hello, 1)] {
            let mut client = TcpStream::connect(address).unwrap();
            client.write_all(logged).unwrap();
            client.shutdown(std::net::Shutdown::Write).unwrap();
            turn(&mut acceptor);
            while !acceptor.pending.is_empty() {
                turn(&mut acceptor);
            }
            assert_eq!(acceptor.refused(), refused, "{logged:?}");
        }
    }

    /// Finishes a handshake like a process of the job. Returns `None` if the acceptor has dropped it, which
    /// can be before or after it sent the challenge.
    fn finish(acceptor: &mut Acceptor, (mut stream, ours): (TcpStream, Initiator)) -> Option<Vec<Admitted>> {
        let mut challenge = [0; CHALLENGE_BYTES];
        stream.read_exact(&mut challenge).ok()?;
        stream.write_all(&ours.answer(&challenge).unwrap()).ok()?;
        while is_pending(acceptor, &stream) {
            let admitted = turn(acceptor);
            if !admitted.is_empty() {
                return Some(admitted);
            }
        }
        None
    }

    /// Returns `true` if the acceptor has a pending handshake with this client.
    fn is_pending(acceptor: &Acceptor, client: &TcpStream) -> bool {
        let client = client.local_addr().ok();
        let peer = |pending: &PendingHandshake| pending.stream.peer_addr().ok()?.as_socket();
        acceptor.pending.iter().any(|pending| peer(pending) == client)
    }

    /// The oldest handshake of all is the one that has sent a hello.
    #[test]
    fn clients_without_a_hello_do_not_lock_others_out() {
        let (mut acceptor, address) = acceptor();
        let ours = send_hello(address);
        let mut clients = Vec::new();
        for count in 1..=2 * PENDING_MAX {
            let mut client = TcpStream::connect(address).unwrap();
            client.write_all(&ours.1.hello()[..count % 3]).unwrap();
            clients.push(client);
            assert!(turn(&mut acceptor).is_empty());
            assert!(acceptor.can_accept(), "after {count} clients");
        }
        let admitted = finish(&mut acceptor, ours).expect("it has its place still");
        assert_eq!((admitted.len(), admitted[0].identity.from), (1, 1));
        assert!(acceptor.pending.len() <= PENDING_MAX);
    }

    /// Handshakes are dropped at random. A process of the job is one of many, and keeps its place for a
    /// while.
    #[test]
    fn clients_with_a_hello_do_not_lock_others_out() {
        let (mut acceptor, address) = acceptor();
        let mut clients = Vec::new();
        for _ in 0..2 * PENDING_MAX {
            clients.push(send_hello(address).0);
            assert!(turn(&mut acceptor).is_empty());
            assert!(acceptor.can_accept());
        }
        assert_eq!(acceptor.pending.len(), PENDING_MAX);
        assert_eq!(acceptor.refused(), PENDING_MAX as u64);
        let kept = clients.iter().skip(PENDING_MAX).filter(|client| {
            client.set_nonblocking(true).unwrap();
            // A challenge has arrived, and the connection is open.
            matches!((&**client).read(&mut [0; 2 * CHALLENGE_BYTES]), Ok(CHALLENGE_BYTES))
                && matches!((&**client).read(&mut [0]), Err(e) if e.kind() == ErrorKind::WouldBlock)
        });
        assert!(kept.count() < PENDING_MAX, "it is not the oldest who are dropped");
        // The place is lost with a probability of 1 in 256 for each new connection.
        let admitted = std::iter::repeat_with(|| {
            let ours = send_hello(address);
            for _ in 0..10 {
                clients.push(send_hello(address).0);
                turn(&mut acceptor);
            }
            finish(&mut acceptor, ours)
        });
        assert_eq!(admitted.flatten().next().unwrap()[0].identity.from, 1);
    }

    #[test]
    fn a_client_whose_hello_has_just_arrived_is_not_dropped() {
        let (mut acceptor, address) = acceptor();
        let mut stream = TcpStream::connect(address).unwrap();
        assert!(turn(&mut acceptor).is_empty());
        let _stranger = TcpStream::connect(address).unwrap();
        assert!(turn(&mut acceptor).is_empty());
        stream.write_all(hello().hello()).unwrap();
        acceptor.drop_one(&mut Vec::new());
        assert_eq!(acceptor.pending.len(), 2, "the first has logged hello");
        acceptor.drop_one(&mut Vec::new());
        assert!(acceptor.pending.len() == 1 && acceptor.pending[0].responder.is_some());
    }

    /// Simulates a process that may open no more files: one descriptor is left.
    #[test]
    fn with_the_last_descriptor_processes_of_the_job_still_authenticate() {
        let (mut acceptor, address) = acceptor();
        acceptor.spare = None;
        let accept = |acceptor: &mut Acceptor, last: bool| {
            let (stream, _) = acceptor.listener.accept().unwrap();
            stream.set_nonblocking(true).unwrap();
            let deadline = acceptor.runtime.deadline(LAST_HANDSHAKE_LIMIT);
            acceptor.go_on(PendingHandshake::new(stream, deadline, last), &mut Vec::new());
        };
        let client = TcpStream::connect(address).unwrap();
        accept(&mut acceptor, true);
        assert!(!acceptor.can_accept(), "it holds the last descriptor");
        assert!(acceptor.look_again_in().unwrap() <= LAST_HANDSHAKE_LIMIT);
        drop(client);
        assert!(turn(&mut acceptor).is_empty());
        assert!(acceptor.take_out_of_files().is_none(), "a client does not end the job");
        acceptor.spare = None;
        let (mut stream, ours) = send_hello(address);
        accept(&mut acceptor, true);
        let mut challenge = [0; CHALLENGE_BYTES];
        stream.read_exact(&mut challenge).unwrap();
        stream.write_all(&ours.answer(&challenge).unwrap()).unwrap();
        assert!(turn(&mut acceptor).is_empty());
        assert!(socket::is_out_of_files(&acceptor.take_out_of_files().unwrap()));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_of_another_user_is_refused_although_it_knows_the_name_of_the_job() {
        use rustix::process::{Uid, geteuid};
        // Only root can become another user.
        if !geteuid().is_root() {
            return;
        }
        let (mut acceptor, address) = acceptor();
        let other = move || {
            let nobody = Uid::from_raw(65534);
            // Changes the user of this thread only.
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            let (mut stream, ours) = send_hello(address);
            let mut challenge = [0; CHALLENGE_BYTES];
            stream.read_exact(&mut challenge).unwrap();
            stream.write_all(&ours.answer(&challenge).unwrap()).unwrap();
            assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "no connection is admitted");
        };
        let other = Runtime::system().spawn("other", other).unwrap();
        while acceptor.refused() == 0 {
            assert!(turn(&mut acceptor).is_empty());
        }
        other.join().unwrap();
    }
}

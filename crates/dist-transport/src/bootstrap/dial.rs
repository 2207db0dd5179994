//! Opens authenticated connections to other processes of the job.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::PollFlags;
use socket2::{SockAddr, Socket};

use crate::bootstrap::abort_state::AbortState;
use crate::bootstrap::acceptor::ADMITTED;
use crate::bootstrap::auth::{self, CHALLENGE_BYTES, Identity, Initiator, Key, Purpose, Stripe};
use crate::bootstrap::config::Medium;
use crate::bootstrap::control::PeerInfo;
use crate::bootstrap::probe::attempt_limit;
use crate::bootstrap::session::{ConnectionWait, Session, WaitError, at_least};
use crate::bootstrap::user;
use crate::link::peer_link::PeerLink;
use crate::link::shm::{self, ShmLink};
use crate::link::socket;
use crate::link::striped_socket::StripedSocket;
use crate::{Activity, ChannelId, Error, Result, Version};

/// The pause before a retry if the coordinator is not there yet, or the other side hangs up.
pub(crate) const RETRY: Duration = Duration::from_millis(20);

/// The time that a process has to answer, even if the deadline is sooner.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_millis(50);

/// The number of hang-ups of the other side that counts as a refusal. The coordinator of an earlier start
/// of the job hangs up until the next one listens at the same address.
const HANG_UPS_MAX: u32 = 20;

/// The wait for an answer after which another attempt is started beside the earlier ones. If the port is
/// flooded, the system drops most connection attempts, and retries each of them only after a second.
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(100);

/// The most attempts that wait for an answer at the same time.
const ATTEMPTS_MAX: usize = 10;

/// Opens an authenticated link to a rank for one channel, through shared memory if possible.
pub(crate) fn dial(
    session: &Arc<Session>,
    peer: usize,
    channel: ChannelId,
    watch: ConnectionWait<'_>,
) -> Result<PeerLink, WaitError<Error>> {
    let (from, to) = (number(session.rank.index())?, number(peer)?);
    let identity = |purpose| Identity { epoch: session.epoch, from, to, purpose };
    if session.may_share(peer) {
        match share(session, identity(Purpose::Memory(channel)), watch) {
            Ok(memory) => return Ok(PeerLink::Shm(memory)),
            // A connection over the network would need a descriptor too.
            Err(WaitError::Failed(error)) if error.is_out_of_files() => return Err(error.into()),
            Err(WaitError::Failed(reason)) => session.record_unshareable(peer, &reason),
            Err(over) => return Err(over),
        }
        if session.medium == Medium::Shm {
            return Err(Error::NotShared { peer }.into());
        }
    }
    dial_striped(session, channel, identity, watch).map(PeerLink::Socket)
}

/// Opens all connections of a link over the network. Their handshakes take several round trips each, so they run at the
/// same time.
fn dial_striped(
    session: &Arc<Session>,
    channel: ChannelId,
    identity: impl Fn(Purpose) -> Identity,
    watch: ConnectionWait<'_>,
) -> Result<StripedSocket, WaitError<Error>> {
    let (attempt, count) = (session.link_attempts.fetch_add(1, Ordering::Relaxed), session.sockets_per_peer);
    let identity = |index| identity(Purpose::Data(channel, Stripe { attempt, index, count }));
    let ConnectionWait { deadline, answer_limit, .. } = watch;
    let dial = |index| {
        let (session, identity) = (session.clone(), identity(index));
        let dial = move || {
            let watch = ConnectionWait { answer_limit, ..session.connection_wait(deadline) };
            dial_over_network(&session, identity, watch)
        };
        watch.runtime.spawn("dist-dial", dial)
    };
    let others: Vec<_> = (1..count).map(dial).collect();
    let first = dial_over_network(session, identity(0), watch);
    let others = others.into_iter().map(|task| match task {
        Ok(task) => task.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        Err(source) => Err(Error::Resources { what: "thread", source }.into()),
    });
    let others: Vec<_> = others.collect();
    all_or_worst(first, others).map(|(first, others)| StripedSocket::new(first, others))
}

/// Returns the connections of a link, or the error of the one that has failed in the most definite way. The peer has the
/// link only if it has admitted all connections, so an unanswered proof matters only if no other connection was late.
fn all_or_worst<T, E>(
    first: Result<T, WaitError<E>>,
    others: Vec<Result<T, WaitError<E>>>,
) -> Result<(T, Vec<T>), WaitError<E>> {
    let severity = |error: &WaitError<E>| match error {
        WaitError::Unanswered => 0,
        WaitError::Late => 1,
        WaitError::Failed(_) => 2,
        WaitError::Aborted(_) => 3,
    };
    let (mut opened, mut worst) = (Vec::new(), None);
    for connection in std::iter::once(first).chain(others) {
        match connection {
            Ok(connection) => opened.push(connection),
            Err(error) if worst.as_ref().is_none_or(|worst| severity(worst) < severity(&error)) => {
                worst = Some(error);
            }
            Err(_) => {}
        }
    }
    let others = opened.split_off(1.min(opened.len()));
    match (worst, opened.pop()) {
        (None, Some(first)) => Ok((first, others)),
        (worst, _) => Err(worst.expect("a connection is either open or has failed")),
    }
}

fn dial_over_network(
    session: &Session,
    identity: Identity,
    watch: ConnectionWait<'_>,
) -> Result<Socket, WaitError<Error>> {
    let peer = identity.to as usize;
    let address = session.peer_infos[peer].address;
    let mut hang_ups = HangUps::default();
    // A connection to another host is retried with new sockets. After a network outage they are open at once,
    // while the system retransmits the packets of old sockets after longer and longer pauses. If no attempt
    // succeeds for the silence limit, the coordinator is told.
    let limit = session.silence_limit(peer);
    let mut unreachable_by = limit.map(|limit| session.runtime.deadline(limit));
    let in_time = || match limit {
        Some(limit) => {
            let deadline = watch.deadline.earlier(session.runtime.deadline(attempt_limit(limit)));
            // The other side may count a connection as open once it has this side's proof, so the answer to
            // the proof has its own limit.
            let answer_limit = watch.answer_limit.max(session.runtime.remaining(watch.deadline));
            ConnectionWait { deadline, answer_limit, ..watch }
        }
        None => watch,
    };
    loop {
        match open(address, &session.key, identity, in_time()) {
            Ok(Opened::Proven(stream)) => return Ok(stream),
            Ok(Opened::HungUp { was_challenged }) => hang_ups.count(was_challenged, identity, address)?,
            Err(WaitError::Late) if session.runtime.expired(watch.deadline) => {
                return Err(hang_ups.late(identity, address, watch.deadline.limit()));
            }
            Err(WaitError::Late) => {}
            Err(WaitError::Failed(error)) if limit.is_some() && is_unreached(&error) => watch.check()?,
            Err(error) => return Err(error),
        }
        if unreachable_by.take_if(|by| session.runtime.expired(*by)).is_some() {
            session.report_unreachable(peer);
        }
        session.runtime.park(Some(watch.deadline.earlier(session.runtime.deadline(RETRY))));
    }
}

/// Creates shared memory and passes it to a rank of this host.
fn share(
    session: &Session,
    identity: Identity,
    watch: ConnectionWait<'_>,
) -> Result<ShmLink, WaitError<Error>> {
    let (stream, address) = connect_on_host(session, identity, watch)?;
    let failed = |source| connect_error("share memory with", address, source);
    let share = shm::offer(&stream, &auth::random_bytes()?).map_err(failed)?;
    let mut answer = [0];
    read_answer(&stream, &mut answer, watch).map_err(|error| error.map(failed))?;
    if answer != [shm::ACCEPTED] {
        return Err(failed(io::Error::new(io::ErrorKind::Unsupported, "it was refused")).into());
    }
    Ok(ShmLink::new(stream, share, session.offers_single_copy()))
}

/// Opens an authenticated connection to a rank of this host, through its Unix socket.
fn connect_on_host(
    session: &Session,
    identity: Identity,
    watch: ConnectionWait<'_>,
) -> Result<(Socket, SocketAddr), WaitError<Error>> {
    let PeerInfo { address, unix_socket, .. } = session.peer_infos[identity.to as usize];
    let mut hang_ups = HangUps::default();
    loop {
        let connected = match unix_socket {
            Some(unix_socket) => shm::connect(unix_socket),
            None => Err(io::Error::new(io::ErrorKind::Unsupported, "it shares no memory")),
        };
        match connected {
            Ok(stream) => match greet(stream, address, &session.key, identity, watch)? {
                Opened::Proven(stream) => return Ok((stream, address)),
                Opened::HungUp { was_challenged } => hang_ups.count(was_challenged, identity, address)?,
            },
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => watch.check()?,
            Err(e) => return Err(connect_error("share memory with", address, e).into()),
        }
        session.runtime.park(Some(session.runtime.deadline(RETRY)));
    }
}

/// Maps an arena of the heap of a rank of this host.
#[cfg(all(feature = "shm", target_os = "linux"))]
pub(crate) fn map_arena(
    session: &Session,
    peer: usize,
    number: u32,
    watch: ConnectionWait<'_>,
) -> Result<crate::host_memory::Mapping, WaitError<Error>> {
    let (from, to) = (self::number(session.rank.index())?, self::number(peer)?);
    let identity = Identity { epoch: session.epoch, from, to, purpose: Purpose::Arena(number) };
    let (stream, address) = connect_on_host(session, identity, watch)?;
    let failed = |source| connect_error("share memory with", address, source);
    loop {
        match shm::take_arena(&stream) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                watch.ready(&stream, PollFlags::IN).map_err(|error| error.map(failed))?;
            }
            taken => return Ok(taken.map_err(failed)?),
        }
    }
}

fn connect_error(action: &'static str, address: SocketAddr, source: io::Error) -> Error {
    Error::Address { activity: Activity::Connect, action, address: address.to_string(), source }
}

/// Returns `true` if a connection failed because packets are lost, in either direction.
pub(crate) fn is_unreached(error: &Error) -> bool {
    use io::ErrorKind::{HostUnreachable, NetworkUnreachable, TimedOut};
    let unreached =
        |source: &io::Error| matches!(source.kind(), HostUnreachable | NetworkUnreachable | TimedOut);
    matches!(error, Error::Address { source, .. } if unreached(source))
}

/// The result of an attempt to open a connection.
#[derive(Debug)]
pub(crate) enum Opened {
    Proven(Socket),
    /// The other side hung up. If it had sent a challenge, it knows the key, and gave the place to another
    /// connection.
    HungUp {
        was_challenged: bool,
    },
}

/// Opens an authenticated connection over the network.
///
/// # Errors
/// [`Error::Address`] if the other side cannot be connected to, and others.
pub(crate) fn open(
    address: SocketAddr,
    key: &Key,
    identity: Identity,
    watch: ConnectionWait<'_>,
) -> Result<Opened, WaitError<Error>> {
    let begin = || -> Result<Attempt> {
        let failed = |source| connect_error("connect to", address, source);
        Attempt::new(socket::begin_connect(address).map_err(failed)?, key, identity)
    };
    let mut attempts = vec![begin()?];
    let mut next = watch.runtime.deadline(ATTEMPT_INTERVAL);
    loop {
        match first_answer(&mut attempts, ConnectionWait { deadline: watch.deadline.earlier(next), ..watch })
        {
            Ok(attempt) => return prove(attempt, address, key, identity, watch),
            Err(WaitError::Failed(Unanswered::HungUp)) => {
                return Ok(Opened::HungUp { was_challenged: false });
            }
            Err(WaitError::Failed(Unanswered::NotConnected(e))) => {
                return Err(connect_error("connect to", address, e).into());
            }
            Err(WaitError::Aborted(abort)) => return Err(WaitError::Aborted(abort)),
            Err(WaitError::Late | WaitError::Unanswered) => watch.check()?,
        }
        if watch.runtime.expired(next) {
            next = watch.runtime.deadline(ATTEMPT_INTERVAL);
            // Earlier attempts may still be answered, so an error of this one is ignored.
            if attempts.len() < ATTEMPTS_MAX
                && let Ok(attempt) = begin()
            {
                attempts.push(attempt);
            }
        }
    }
}

/// Authenticates this process on a new connection, and checks the other side's proof.
fn greet(
    stream: Socket,
    address: SocketAddr,
    key: &Key,
    identity: Identity,
    watch: ConnectionWait<'_>,
) -> Result<Opened, WaitError<Error>> {
    match first_answer(&mut vec![Attempt::new(stream, key, identity)?], watch) {
        Ok(attempt) => prove(attempt, address, key, identity, watch),
        Err(WaitError::Failed(_)) => Ok(Opened::HungUp { was_challenged: false }),
        Err(WaitError::Aborted(abort)) => Err(WaitError::Aborted(abort)),
        Err(WaitError::Late | WaitError::Unanswered) => Err(WaitError::Late),
    }
}

/// A handshake up to the other side's answer to the hello.
#[derive(Debug)]
struct Attempt {
    stream: Socket,
    initiator: Initiator,
    /// Sent as soon as the stream is connected.
    said_hello: bool,
    answer: [u8; CHALLENGE_BYTES],
    filled: usize,
}

impl Attempt {
    fn new(stream: Socket, key: &Key, identity: Identity) -> Result<Self> {
        let initiator = Initiator::new(key.clone(), identity)?;
        Ok(Self { stream, initiator, said_hello: false, answer: [0; CHALLENGE_BYTES], filled: 0 })
    }

    /// Returns the events to poll for.
    fn events(&self) -> PollFlags {
        if self.said_hello { PollFlags::IN } else { PollFlags::OUT }
    }

    /// Advances as far as possible without waiting. Returns `true` once the answer is complete.
    fn advance(&mut self) -> Result<bool, Unanswered> {
        if !self.said_hello {
            check_connected(&self.stream).map_err(Unanswered::NotConnected)?;
            self.said_hello = true;
            socket::send_all(&self.stream, self.initiator.hello()).map_err(|_| Unanswered::HungUp)?;
        }
        while self.filled < self.answer.len() {
            match socket::receive(&self.stream, &mut self.answer[self.filled..]) {
                Ok(None) => return Ok(false),
                Ok(Some(0)) | Err(_) => return Err(Unanswered::HungUp),
                Ok(Some(count)) => self.filled += count,
            }
        }
        Ok(true)
    }
}

/// The reason why an attempt got no answer.
#[derive(Debug)]
enum Unanswered {
    NotConnected(io::Error),
    HungUp,
}

/// Waits for the first of these attempts to be answered. Attempts that end without an answer are removed.
///
/// # Errors
/// The error of the last attempt, once all have ended.
fn first_answer(
    attempts: &mut Vec<Attempt>,
    watch: ConnectionWait<'_>,
) -> Result<Attempt, WaitError<Unanswered>> {
    loop {
        let mut watched: Vec<_> = attempts
            .iter()
            .map(|attempt| socket::watch(&attempt.stream, attempt.events()))
            .chain(watch.abort_state.map(AbortState::watch))
            .collect();
        socket::poll(&mut watched, watch.runtime.remaining(watch.deadline))
            .map_err(Unanswered::NotConnected)?;
        let ready: Vec<_> = watched.iter().map(|watched| !watched.revents().is_empty()).collect();
        for at in (0..attempts.len()).rev().filter(|&at| ready[at]) {
            match attempts[at].advance() {
                Ok(true) => return Ok(attempts.remove(at)),
                Ok(false) => {}
                Err(why) => {
                    attempts.remove(at);
                    if attempts.is_empty() {
                        return Err(why.into());
                    }
                }
            }
        }
        watch.check()?;
    }
}

/// Checks that a connection attempt has succeeded.
fn check_connected(stream: &Socket) -> io::Result<()> {
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    // If no process listens yet, the system may connect a socket to its own port.
    if is_loop(stream) { Err(io::ErrorKind::ConnectionRefused.into()) } else { Ok(()) }
}

/// Returns `true` if both ends of a connection are the same socket. A connection to a local port without a
/// listener can end so.
fn is_loop(stream: &Socket) -> bool {
    let address = |end: io::Result<SockAddr>| end.ok().and_then(|end| end.as_socket());
    let ours = address(stream.local_addr());
    ours.is_some() && ours == address(stream.peer_addr())
}

/// Checks the other side's proof and sends this side's.
fn prove(
    attempt: Attempt,
    address: SocketAddr,
    key: &Key,
    identity: Identity,
    watch: ConnectionWait<'_>,
) -> Result<Opened, WaitError<Error>> {
    let Attempt { stream, initiator, answer, .. } = attempt;
    let activity = activity_of(identity);
    if let Some(theirs) = auth::refused_by(&answer) {
        let address = address.to_string();
        return Err(Error::Version { activity, address, ours: Version::OURS, theirs }.into());
    }
    let Some(proof) = initiator.answer(&answer) else {
        return Err(Error::Refused { activity, address: address.to_string() }.into());
    };
    if !key.is_secret() && stream.local_addr().is_ok_and(|end| end.as_socket().is_some()) {
        match check_user(&stream, activity, address) {
            // The other end is gone.
            Err(Error::OtherUser { user: None, .. }) if !matches!(socket::peek(&stream), Ok(None)) => {
                return Ok(Opened::HungUp { was_challenged: true });
            }
            checked => checked?,
        }
    }
    let mut word = [0];
    let admitted = socket::send_all(&stream, &proof)
        .map_err(WaitError::Failed)
        .and_then(|()| read_answer(&stream, &mut word, watch));
    match admitted {
        Ok(()) if word == [ADMITTED] => Ok(Opened::Proven(stream)),
        Ok(()) | Err(WaitError::Failed(_)) => Ok(Opened::HungUp { was_challenged: true }),
        Err(WaitError::Late) => Err(WaitError::Late),
        Err(WaitError::Unanswered) => Err(WaitError::Unanswered),
        Err(WaitError::Aborted(abort)) => Err(WaitError::Aborted(abort)),
    }
}

/// Checks that the connected process belongs to the same user as this process.
fn check_user(stream: &Socket, activity: Activity, address: SocketAddr) -> Result<()> {
    let other = match user::of_peer(stream) {
        Ok(user) if user == rustix::process::geteuid().as_raw() => return Ok(()),
        Ok(user) => Ok(user),
        Err(source) if socket::is_out_of_files(&source) => {
            return Err(Error::Resources { what: "socket", source });
        }
        Err(source) => Err(source),
    };
    let (user, source) = (other.as_ref().ok().copied(), other.err());
    Err(Error::OtherUser { activity, address: address.to_string(), user, source })
}

const fn activity_of(identity: Identity) -> Activity {
    match identity.purpose {
        Purpose::Control => Activity::Rendezvous,
        Purpose::Data(..) | Purpose::Memory(_) | Purpose::Arena(_) | Purpose::Probe => Activity::Connect,
    }
}

/// The numbers of times that the other side has hung up.
#[derive(Debug, Default)]
pub(crate) struct HangUps {
    /// Hang-ups before the other side has proven that it belongs to the job.
    unproven: u32,
    /// Hang-ups after that proof. The other side has then given the place to another connection, which it does only
    /// if it is flooded.
    proven: u32,
}

impl HangUps {
    /// Counts a connection that the peer closed. After too many that proved nothing, the peer counts as
    /// refusing this process.
    pub(crate) fn count(
        &mut self,
        was_challenged: bool,
        identity: Identity,
        address: SocketAddr,
    ) -> Result<()> {
        if was_challenged {
            self.proven += 1;
            return Ok(());
        }
        self.unproven += 1;
        if self.unproven < HANG_UPS_MAX {
            return Ok(());
        }
        Err(Error::Refused { activity: activity_of(identity), address: address.to_string() })
    }

    /// Returns the error for a passed deadline. It says so if the listener of the other side is overloaded.
    pub(crate) fn late(&self, identity: Identity, address: SocketAddr, limit: Duration) -> WaitError<Error> {
        let (activity, address) = (activity_of(identity), address.to_string());
        match self.proven {
            0 => WaitError::Late,
            dropped => Error::Flooded { activity, address, dropped, limit }.into(),
        }
    }
}

/// Reads the answer to this process's proof, within the answer limit. The other side may already count the
/// connection as open.
fn read_answer(stream: &Socket, bytes: &mut [u8], watch: ConnectionWait<'_>) -> Result<(), WaitError> {
    let deadline = at_least(watch.runtime, watch.deadline, watch.answer_limit);
    match read_exact(stream, bytes, ConnectionWait { deadline, ..watch }) {
        Err(WaitError::Late) => Err(WaitError::Unanswered),
        outcome => outcome,
    }
}

fn read_exact(mut stream: &Socket, bytes: &mut [u8], watch: ConnectionWait<'_>) -> Result<(), WaitError> {
    let mut filled = 0;
    while filled < bytes.len() {
        match io::Read::read(&mut stream, &mut bytes[filled..]) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(count) => filled += count,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => watch.ready(stream, PollFlags::IN)?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Ranks are sent as 32 bits.
pub(crate) fn number(rank: usize) -> Result<u32> {
    u32::try_from(rank).map_err(|_| Error::RankOutOfRange { rank, world_size: u32::MAX as usize })
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use socket2::{Domain, Type};

    use super::*;
    use crate::Runtime;

    fn identity() -> Identity {
        Identity { epoch: 0, from: 1, to: 0, purpose: Purpose::Control }
    }

    fn attempt(stream: Socket) -> Attempt {
        Attempt::new(stream, &Key::new(None, "test"), identity()).unwrap()
    }

    /// The peer has the link only if it has admitted all connections, so that the link may be tried again if one was late.
    #[test]
    fn the_most_definite_error_of_several_connections_is_returned() {
        let link = |connections: &[Result<u8, WaitError<u8>>]| {
            let copy = |connection: &Result<u8, WaitError<u8>>| match connection {
                Ok(number) => Ok(*number),
                Err(WaitError::Failed(why)) => Err(WaitError::Failed(*why)),
                Err(WaitError::Late) => Err(WaitError::Late),
                Err(_) => Err(WaitError::Unanswered),
            };
            let mut connections: Vec<_> = connections.iter().map(copy).collect();
            all_or_worst(connections.remove(0), connections)
        };
        let [late, unanswered] = [|| Err(WaitError::Late), || Err(WaitError::Unanswered)];
        assert!(matches!(link(&[Ok(1)]), Ok((1, others)) if others.is_empty()));
        assert!(matches!(link(&[Ok(1), Ok(2), Ok(3)]), Ok((1, others)) if others == [2, 3]));
        assert!(matches!(link(&[Ok(1), unanswered()]), Err(WaitError::Unanswered)));
        assert!(matches!(link(&[unanswered(), Ok(1), late()]), Err(WaitError::Late)));
        let failed = |why| Err(WaitError::Failed(why));
        assert!(matches!(link(&[late(), failed(7), failed(8), Ok(1)]), Err(WaitError::Failed(7))));
    }

    /// Simulates a flooded port: the system drops the first connections.
    #[test]
    fn a_process_that_gets_no_answer_tries_again_beside() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let deaf = move || {
            // These are accepted and never answered.
            let unanswered = [(); 3].map(|()| listener.accept().unwrap());
            let (stream, _) = listener.accept().unwrap();
            let mut hello = [0; auth::HELLO_BYTES];
            io::Read::read_exact(&mut &stream, &mut hello).unwrap();
            let responder = auth::Responder::new(Key::new(None, "test"), &hello).unwrap().unwrap();
            io::Write::write_all(&mut &stream, &responder.challenge()).unwrap();
            let mut proof = [0; auth::PROOF_BYTES];
            io::Read::read_exact(&mut &stream, &mut proof).unwrap();
            io::Write::write_all(&mut &stream, &[ADMITTED]).unwrap();
            drop(unanswered);
        };
        let runtime = Runtime::system();
        let deaf = runtime.spawn("deaf", deaf).unwrap();
        let watch = ConnectionWait::before_the_job(&runtime, runtime.deadline(Duration::from_secs(60)));
        let opened = open(address, &Key::new(None, "test"), identity(), watch).unwrap();
        assert!(matches!(opened, Opened::Proven(_)), "{opened:?}");
        deaf.join().unwrap();
    }

    #[test]
    fn a_process_that_hangs_up_after_its_answer_is_not_taken_for_another_users() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let stream = socket::begin_connect(address).unwrap();
        let (other, _) = listener.accept().unwrap();
        let mut attempt = attempt(stream);
        assert!(!attempt.advance().unwrap(), "the hello is logged");
        let responder =
            auth::Responder::new(Key::new(None, "test"), attempt.initiator.hello()).unwrap().unwrap();
        attempt.answer = responder.challenge();
        drop(other);
        let runtime = Runtime::system();
        let watch = ConnectionWait::before_the_job(&runtime, runtime.deadline(Duration::from_secs(60)));
        let opened = prove(attempt, address, &Key::new(None, "test"), identity(), watch).unwrap();
        assert!(matches!(opened, Opened::HungUp { was_challenged: true }), "{opened:?}");
    }

    #[test]
    fn a_hang_up_of_a_flooded_process_of_the_job_is_no_refusal() {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let mut hang_ups = HangUps::default();
        let limit = Duration::from_secs(1);
        assert!(matches!(hang_ups.late(identity(), address, limit), WaitError::Late));
        for _ in 0..2 * HANG_UPS_MAX {
            hang_ups.count(true, identity(), address).unwrap();
        }
        let late = hang_ups.late(identity(), address, limit);
        assert!(
            matches!(&late, WaitError::Failed(Error::Flooded { dropped, .. }) if *dropped == 2 * HANG_UPS_MAX),
            "{late:?}"
        );
        let refused =
            (0..HANG_UPS_MAX).find_map(|_| hang_ups.count(false, identity(), address).err()).unwrap();
        assert!(matches!(refused, Error::Refused { .. }), "{refused}");
    }

    /// The system gives up after about two minutes, unless it is told to be quicker.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_connection_that_the_system_gives_up_is_not_late() {
        let full = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        full.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        // A full queue of one: no other connection is answered.
        full.listen(0).unwrap();
        let address = full.local_addr().unwrap().as_socket().unwrap();
        let _queued = std::net::TcpStream::connect(address).unwrap();
        let unanswered = socket::begin_connect(address).unwrap();
        unanswered.set_tcp_user_timeout(Some(Duration::from_millis(1))).unwrap();
        let runtime = Runtime::system();
        let deadline = runtime.deadline(Duration::from_secs(60));
        let mut attempts = vec![attempt(unanswered)];
        let error =
            first_answer(&mut attempts, ConnectionWait::before_the_job(&runtime, deadline)).unwrap_err();
        assert!(
            matches!(&error, WaitError::Failed(Unanswered::NotConnected(e)) if e.kind() == io::ErrorKind::TimedOut),
            "{error:?}"
        );
    }

    #[test]
    fn a_timeout_after_the_proof_is_reported_as_unanswered() {
        let (stream, _silent) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        stream.set_nonblocking(true).unwrap();
        let runtime = Runtime::system();
        let watch = ConnectionWait::before_the_job(&runtime, runtime.deadline(Duration::ZERO));
        let challenge = read_exact(&stream, &mut [0], watch).unwrap_err();
        assert!(matches!(challenge, WaitError::Late), "{challenge:?}");
        let answer = read_answer(&stream, &mut [0], watch).unwrap_err();
        assert!(matches!(answer, WaitError::Unanswered), "{answer:?}");
    }

    #[test]
    fn the_answer_to_a_proof_has_its_own_limit() {
        let (stream, slow) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        stream.set_nonblocking(true).unwrap();
        let runtime = Runtime::system();
        let answer = move || {
            Runtime::system().sleep(2 * ANSWER_LIMIT);
            io::Write::write_all(&mut &slow, &[ADMITTED]).unwrap();
        };
        let slow = runtime.spawn("slow", answer).unwrap();
        let at_once = ConnectionWait::before_the_job(&runtime, runtime.deadline(Duration::ZERO));
        let watch = ConnectionWait { answer_limit: Duration::from_secs(60), ..at_once };
        let mut word = [0];
        read_answer(&stream, &mut word, watch).unwrap();
        assert_eq!(word, [ADMITTED]);
        slow.join().unwrap();
    }

    #[test]
    fn a_connection_to_itself_is_none() {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        let own = socket.local_addr().unwrap();
        assert_eq!(
            socket.connect(&own).map_err(|e| e.kind()),
            Ok(()),
            "the system connects a socket to its own port"
        );
        assert!(is_loop(&socket));
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let other = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!is_loop(&other.into()));
    }
}

//! How a process opens a proven connection to another one of its job.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use rustix::event::PollFlags;
use socket2::Socket;

use crate::auth::{self, CHALLENGE_BYTES, Identity, Initiator, Key, Purpose};
use crate::shm::{self, Memory};
use crate::tcp::config::Medium;
use crate::tcp::gate::ADMITTED;
use crate::tcp::link::Link;
use crate::tcp::session::{Session, WaitError, Watch, at_least};
use crate::tcp::socket;
use crate::{Activity, ChannelId, Error, Result, Version};

/// How long to wait before another try when the coordinator is not there yet, or the other side hangs up.
pub(super) const RETRY: Duration = Duration::from_millis(20);

/// How long a process has to answer, also where a deadline is sooner.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_millis(50);

/// How often the other side may hang up before it counts as a refusal: it does so to strangers, but also when too
/// many knock at once.
const HANG_UPS_MAX: u32 = 20;

/// Opens a proven connection to a rank, for one channel: through memory if that can be.
pub(super) fn dial(
    session: &Session,
    peer: usize,
    channel: ChannelId,
    watch: Watch<'_>,
) -> Result<Link, WaitError<Error>> {
    let (from, to) = (number(session.rank.index())?, number(peer)?);
    let identity = |purpose| Identity { epoch: session.epoch, from, to, purpose };
    if session.may_share(peer) {
        match share(session, identity(Purpose::Memory(channel)), watch) {
            Ok(memory) => return Ok(Link::Memory(memory)),
            Err(WaitError::Failed(reason)) => session.note_apart(peer, &reason),
            Err(over) => return Err(over),
        }
        if session.medium == Medium::Shm {
            return Err(Error::NotShared { peer }.into());
        }
    }
    dial_over_network(session, identity(Purpose::Data(channel)), watch).map(Link::Socket)
}

fn dial_over_network(
    session: &Session,
    identity: Identity,
    watch: Watch<'_>,
) -> Result<Socket, WaitError<Error>> {
    let address = session.homes[identity.to as usize].address;
    let mut hang_ups = 0;
    loop {
        let failed = |source| connect_error("connect to", address, source);
        let stream = connect(address, watch).map_err(|error| error.map(failed))?;
        if let Some(stream) = greet(stream, address, &session.key, identity, watch)? {
            return Ok(stream);
        }
        count_hang_up(&mut hang_ups, identity, address)?;
        session.runtime.park(Some(session.runtime.deadline(RETRY)));
    }
}

/// Makes memory and shares it with a rank that listens on this host.
fn share(session: &Session, identity: Identity, watch: Watch<'_>) -> Result<Memory, WaitError<Error>> {
    let (stream, address) = enter_host_door(session, identity, watch)?;
    let failed = |source| connect_error("share memory with", address, source);
    let share = shm::offer(&stream, &auth::random_bytes()?).map_err(failed)?;
    let mut answer = [0];
    read_answer(&stream, &mut answer, watch).map_err(|error| error.map(failed))?;
    if answer != [shm::ACCEPTED] {
        return Err(failed(io::Error::new(io::ErrorKind::Unsupported, "it was refused")).into());
    }
    Ok(Memory::new(stream, share, session.lends()))
}

/// Opens a proven connection to a rank of this host, through its Unix socket.
fn enter_host_door(
    session: &Session,
    identity: Identity,
    watch: Watch<'_>,
) -> Result<(Socket, SocketAddr), WaitError<Error>> {
    let address = session.homes[identity.to as usize].address;
    let mut hang_ups = 0;
    loop {
        match shm::connect(address) {
            Ok(stream) => match greet(stream, address, &session.key, identity, watch)? {
                Some(stream) => return Ok((stream, address)),
                None => count_hang_up(&mut hang_ups, identity, address)?,
            },
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => watch.check()?,
            Err(e) => return Err(connect_error("share memory with", address, e).into()),
        }
        session.runtime.park(Some(session.runtime.deadline(RETRY)));
    }
}

/// Maps an arena of the heap of a rank of this host.
#[cfg(all(feature = "shm", target_os = "linux"))]
pub(super) fn map_arena(
    session: &Session,
    peer: usize,
    number: u32,
    watch: Watch<'_>,
) -> Result<shm::Mapping, WaitError<Error>> {
    let (from, to) = (self::number(session.rank.index())?, self::number(peer)?);
    let identity = Identity { epoch: session.epoch, from, to, purpose: Purpose::Arena(number) };
    let (stream, address) = enter_host_door(session, identity, watch)?;
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

/// Opens a connection.
pub(super) fn connect(address: SocketAddr, watch: Watch<'_>) -> Result<Socket, WaitError> {
    finish_connect(socket::begin_connect(address)?, watch)
}

fn finish_connect(stream: Socket, watch: Watch<'_>) -> Result<Socket, WaitError> {
    watch.ready(&stream, PollFlags::OUT)?;
    if let Some(error) = stream.take_error()? {
        return Err(error.into());
    }
    // Where nobody listens yet, the system may give a connection the very port that it goes to.
    if is_loop(&stream) {
        return Err(io::Error::from(io::ErrorKind::ConnectionRefused).into());
    }
    Ok(stream)
}

/// Whether both ends of a connection are one socket.
fn is_loop(stream: &Socket) -> bool {
    let ends = (stream.local_addr(), stream.peer_addr());
    matches!(ends, (Ok(ours), Ok(theirs)) if ours.as_socket() == theirs.as_socket())
}

/// Proves to the other side of a new connection that this process belongs to the job, and checks its proof. `None`
/// if the other side hangs up.
pub(super) fn greet(
    stream: Socket,
    address: SocketAddr,
    key: &Key,
    identity: Identity,
    watch: Watch<'_>,
) -> Result<Option<Socket>, WaitError<Error>> {
    let activity = activity_of(identity);
    let address = address.to_string();
    let initiator = Initiator::new(key.clone(), identity)?;
    let mut challenge = [0; CHALLENGE_BYTES];
    let heard = socket::send_all(&stream, initiator.hello())
        .map_err(WaitError::Failed)
        .and_then(|()| read_exact(&stream, &mut challenge, watch))
        .map(|()| initiator.answer(&challenge));
    if let Some(theirs) = auth::refused_by(&challenge) {
        return Err(Error::Version { activity, address, ours: Version::OURS, theirs }.into());
    }
    let admitted = match heard {
        Ok(None) => return Err(Error::Refused { activity, address }.into()),
        Ok(Some(proof)) => {
            let mut word = [0];
            socket::send_all(&stream, &proof)
                .map_err(WaitError::Failed)
                .and_then(|()| read_answer(&stream, &mut word, watch))
                .map(|()| word)
        }
        Err(error) => Err(error),
    };
    match admitted {
        Ok([ADMITTED]) => Ok(Some(stream)),
        Ok(_) | Err(WaitError::Failed(_)) => Ok(None),
        Err(WaitError::Late) => Err(WaitError::Late),
        Err(WaitError::Unanswered) => Err(WaitError::Unanswered),
        Err(WaitError::Aborted(abort)) => Err(WaitError::Aborted(abort)),
    }
}

const fn activity_of(identity: Identity) -> Activity {
    match identity.purpose {
        Purpose::Control => Activity::Rendezvous,
        Purpose::Data(_) | Purpose::Memory(_) | Purpose::Arena(_) => Activity::Connect,
    }
}

/// Once more: one that hangs up too often does not want us.
pub(super) fn count_hang_up(hang_ups: &mut u32, identity: Identity, address: SocketAddr) -> Result<()> {
    *hang_ups += 1;
    if *hang_ups < HANG_UPS_MAX {
        return Ok(());
    }
    Err(Error::Refused { activity: activity_of(identity), address: address.to_string() })
}

/// Reads the answer of a process to which this one has proven itself, and which may count the connection as open then: it has
/// time for it.
fn read_answer(stream: &Socket, bytes: &mut [u8], watch: Watch<'_>) -> Result<(), WaitError> {
    let deadline = at_least(watch.runtime, watch.deadline, watch.answer_limit);
    match read_exact(stream, bytes, Watch { deadline, ..watch }) {
        Err(WaitError::Late) => Err(WaitError::Unanswered),
        outcome => outcome,
    }
}

fn read_exact(mut stream: &Socket, bytes: &mut [u8], watch: Watch<'_>) -> Result<(), WaitError> {
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

/// Ranks travel as 32 bits.
pub(super) fn number(rank: usize) -> Result<u32> {
    u32::try_from(rank).map_err(|_| Error::RankOutOfRange { rank, world_size: u32::MAX as usize })
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use socket2::{Domain, Type};

    use super::*;
    use crate::Runtime;

    /// As it does after some two minutes, unless it is told to be quicker.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_connection_that_the_system_gives_up_is_not_late() {
        let full = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        full.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        // A queue of one, which is taken: nobody else gets an answer.
        full.listen(0).unwrap();
        let address = full.local_addr().unwrap().as_socket().unwrap();
        let _queued = std::net::TcpStream::connect(address).unwrap();
        let unanswered = socket::begin_connect(address).unwrap();
        unanswered.set_tcp_user_timeout(Some(Duration::from_millis(1))).unwrap();
        let runtime = Runtime::system();
        let deadline = runtime.deadline(Duration::from_secs(60));
        let error = finish_connect(unanswered, Watch::before_the_job(&runtime, deadline)).unwrap_err();
        assert!(matches!(&error, WaitError::Failed(e) if e.kind() == io::ErrorKind::TimedOut), "{error:?}");
    }

    #[test]
    fn whoever_waits_in_vain_after_its_proof_cannot_tell_whether_the_connection_is_open() {
        let (stream, _silent) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        stream.set_nonblocking(true).unwrap();
        let runtime = Runtime::system();
        let watch = Watch::before_the_job(&runtime, runtime.deadline(Duration::ZERO));
        let challenge = read_exact(&stream, &mut [0], watch).unwrap_err();
        assert!(matches!(challenge, WaitError::Late), "{challenge:?}");
        let answer = read_answer(&stream, &mut [0], watch).unwrap_err();
        assert!(matches!(answer, WaitError::Unanswered), "{answer:?}");
    }

    #[test]
    fn whoever_may_wait_longer_for_the_answer_to_its_proof_than_for_a_connection_gets_it() {
        let (stream, slow) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        stream.set_nonblocking(true).unwrap();
        let runtime = Runtime::system();
        let answer = move || {
            Runtime::system().sleep(2 * ANSWER_LIMIT);
            io::Write::write_all(&mut &slow, &[ADMITTED]).unwrap();
        };
        let slow = runtime.spawn("slow", answer).unwrap();
        let at_once = Watch::before_the_job(&runtime, runtime.deadline(Duration::ZERO));
        let watch = Watch { answer_limit: Duration::from_secs(60), ..at_once };
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
        assert_eq!(socket.connect(&own).map_err(|e| e.kind()), Ok(()), "this is what the system does");
        assert!(is_loop(&socket));
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let other = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!is_loop(&other.into()));
    }
}

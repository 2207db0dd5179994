//! How a process joins its job.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crossbeam::queue::SegQueue;
use rustix::event::PollFlags;
use socket2::Socket;

use crate::auth::{self, CHALLENGE_BYTES, Identity, Initiator, Key, Purpose};
use crate::shm::{self, Memory};
use crate::tcp::channels::Channels;
use crate::tcp::config::{Config, Host, Medium};
use crate::tcp::control::{Frame, Home, Line};
use crate::tcp::coordinator::{COORDINATOR, Coordinator};
use crate::tcp::gate::ADMITTED;
use crate::tcp::link::Link;
use crate::tcp::service::{Service, listener_address};
use crate::tcp::session::{Arrivals, Bell, Membership, Session, Verdict, WaitError, Watch, timeout};
use crate::tcp::{host, socket};
use crate::{Activity, ChannelId, Deadline, Error, Result, Runtime, Version};

/// How long to wait before another try when the coordinator is not there yet, or the other side hangs up.
const RETRY: Duration = Duration::from_millis(20);

/// How long to wait for one of the coordinator's addresses to take a connection, and to answer, before the next is tried.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// How often the other side may hang up before it counts as a refusal: it does so to strangers, but also when too
/// many knock at once.
const HANG_UPS_MAX: u32 = 20;

/// Meets the other ranks of the job. A world of one has nobody to meet and opens no socket.
pub(super) fn join(config: &Config, runtime: &Runtime) -> Result<Membership> {
    let deadline = runtime.deadline(config.timeout);
    let key = Key::new(config.secret.as_ref(), &config.job);
    let session = |homes| -> Result<Arc<Session>> {
        Ok(Arc::new(Session {
            rank: config.rank,
            runtime: runtime.clone(),
            key: key.clone(),
            epoch: config.epoch,
            homes,
            coordinator: config.host,
            liveness: config.liveness,
            medium: config.medium,
            reach: config.reach,
            heap: Arc::default(),
            #[cfg(all(feature = "shm", target_os = "linux"))]
            arenas: Mutex::default(),
            apart: Mutex::default(),
            verdict: Verdict::new()?,
            arrivals: Arrivals::default(),
            channels: Channels::new(),
            left: Mutex::default(),
            outgoing: SegQueue::new(),
            closing: AtomicBool::new(false),
            service_bell: Bell::new()?,
        }))
    };
    let host = host::id(config.host_id.as_deref());
    if config.rank.world_size() == 1 {
        let address = (Ipv4Addr::LOCALHOST, 0).into();
        let session = session(vec![Home { address, host, shares: false, cores: host::cores() }])?;
        return Ok(Membership { session, service: None, coordinator: None });
    }
    let coordinator = match config.host {
        Host::RankZero if config.rank.index() == 0 => {
            Some(start_coordinator(config, &key, runtime, deadline)?)
        }
        _ => None,
    };
    let stream = reach_coordinator(config, &key, runtime, deadline)?;
    let at = |source| address_error("listen on", &config.coordinator, source);
    let listener = socket::listen(listener_address(&stream).map_err(at)?, config.secret.as_ref())?;
    let mut line = Line::new(stream);
    let address = listener.local_addr().map_err(at)?;
    let host_door = open_host_door(config.medium, address)?;
    let home = Home { address, host, shares: host_door.is_some(), cores: host::cores() };
    let homes = introduce(&mut line, home, config, runtime, deadline)?;
    if let Some((inside, outside)) = parted_by_loopback(&homes) {
        tracing::warn!(
            rank = inside,
            address = %homes[inside].address,
            from = outside,
            "no rank of another machine reaches this one: it came to the coordinator by loopback, others did not"
        );
    }
    let session = session(homes)?;
    let service = Service::new(session.clone(), listener, host_door, line);
    let service = runtime
        .spawn("dist-service", move || service.run())
        .map_err(|source| Error::Resources { what: "thread", source })?;
    tracing::info!(rank = %config.rank, "joined the job");
    Ok(Membership { session, service: Some(service), coordinator })
}

/// The coordinator of a job that rank 0 hosts.
fn start_coordinator(
    config: &Config,
    key: &Key,
    runtime: &Runtime,
    deadline: Deadline,
) -> Result<Coordinator> {
    let addresses = loop {
        match socket::resolve(&config.coordinator, runtime, deadline) {
            Ok(addresses) => break addresses,
            Err(error) if is_malformed(&error) || runtime.remaining(deadline) <= RETRY => return Err(error),
            // A name may come to be known with the host that it is of.
            Err(_) => runtime.park(Some(runtime.deadline(RETRY))),
        }
    };
    let (world_size, secret) = (config.rank.world_size(), config.secret.clone());
    let coordinator = Coordinator::start_epoch(runtime, &addresses, world_size, key, config.epoch, secret)?;
    let address = coordinator.address();
    if leads_to_loopback(&config.coordinator, address) {
        tracing::warn!(
            name = %config.coordinator,
            %address,
            "no rank of another machine reaches the coordinator: its name leads to loopback here, perhaps by /etc/hosts"
        );
    }
    Ok(coordinator)
}

/// Whether a name leads to loopback that does not say so, as a machine's own often does on that machine.
fn leads_to_loopback(name: &str, address: SocketAddr) -> bool {
    let host = name.rsplit_once(':').map_or(name, |(host, _)| host);
    let says_so = name.parse::<SocketAddr>().is_ok() || host.eq_ignore_ascii_case("localhost");
    is_loopback(address) && !says_so
}

fn is_loopback(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// A rank that only its own machine reaches, and one that may run on another.
fn parted_by_loopback(homes: &[Home]) -> Option<(usize, usize)> {
    let inside = homes.iter().position(|home| is_loopback(home.address))?;
    let outside = homes.iter().position(|home| !is_loopback(home.address))?;
    Some((inside, outside))
}

/// Connects to the coordinator, again and again until it is there.
fn reach_coordinator(config: &Config, key: &Key, runtime: &Runtime, deadline: Deadline) -> Result<Socket> {
    let from = number(config.rank.index())?;
    let identity = Identity { epoch: config.epoch, from, to: COORDINATOR, purpose: Purpose::Control };
    let absent =
        |source| Error::NoCoordinator { address: config.coordinator.clone(), limit: config.timeout, source };
    let late = || absent(io::ErrorKind::TimedOut.into());
    let mut hang_ups = 0;
    loop {
        let mut failure = late();
        let addresses = match socket::resolve(&config.coordinator, runtime, deadline) {
            Ok(addresses) => addresses,
            Err(error) if is_malformed(&error) => return Err(error),
            Err(_) if runtime.expired(deadline) => return Err(failure),
            // A name may come to be known with the host that it is of.
            Err(error) => {
                failure = error;
                Vec::new()
            }
        };
        for address in addresses {
            let limit = deadline.earlier(runtime.deadline(CONNECT_LIMIT));
            let attempt = Watch { runtime, verdict: None, deadline: limit };
            match connect(address, attempt) {
                Ok(stream) => match greet(stream, address, key, identity, attempt) {
                    Ok(Some(stream)) => return Ok(stream),
                    Ok(None) => count_hang_up(&mut hang_ups, identity, address)?,
                    Err(WaitError::Failed(error)) => return Err(error),
                    // Something listens there that has nothing to say, and another address may be the coordinator's.
                    Err(WaitError::Late | WaitError::Aborted(_)) => failure = late(),
                },
                Err(WaitError::Failed(e)) => failure = absent(e),
                Err(WaitError::Late | WaitError::Aborted(_)) => failure = late(),
            }
        }
        if runtime.remaining(deadline) <= RETRY {
            return Err(failure);
        }
        runtime.park(Some(runtime.deadline(RETRY)));
    }
}

/// Whether an address is none, whatever names will be known.
fn is_malformed(error: &Error) -> bool {
    matches!(error, Error::Address { source, .. } if source.kind() == io::ErrorKind::InvalidInput)
}

/// Opens a connection.
fn connect(address: SocketAddr, watch: Watch<'_>) -> Result<Socket, WaitError> {
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
fn greet(
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
                .and_then(|()| read_exact(&stream, &mut word, watch))
                .map(|()| word)
        }
        Err(error) => Err(error),
    };
    match admitted {
        Ok([ADMITTED]) => Ok(Some(stream)),
        Ok(_) | Err(WaitError::Failed(_)) => Ok(None),
        Err(WaitError::Late) => Err(WaitError::Late),
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
fn count_hang_up(hang_ups: &mut u32, identity: Identity, address: SocketAddr) -> Result<()> {
    *hang_ups += 1;
    if *hang_ups < HANG_UPS_MAX {
        return Ok(());
    }
    Err(Error::Refused { activity: activity_of(identity), address: address.to_string() })
}

/// Listens where the ranks of this host find this one, if it may share memory with them.
fn open_host_door(medium: Medium, beside: SocketAddr) -> Result<Option<Socket>> {
    match (medium, shm::listen(beside)) {
        (Medium::Tcp, _) => Ok(None),
        (_, Ok(door)) => Ok(Some(door)),
        (Medium::Shm, Err(source)) => {
            Err(Error::Resources { what: "door for the ranks of this host", source })
        }
        (Medium::Auto, Err(error)) => {
            tracing::info!(%error, "no shared memory: messages go over TCP");
            Ok(None)
        }
    }
}

/// Opens a proven connection to a rank, for one channel: through memory if that can be.
pub(super) fn dial(
    session: &Session,
    peer: usize,
    channel: ChannelId,
    deadline: Deadline,
) -> Result<Link, WaitError<Error>> {
    let (from, to) = (number(session.rank.index())?, number(peer)?);
    let identity = |purpose| Identity { epoch: session.epoch, from, to, purpose };
    if session.may_share(peer) {
        match share(session, identity(Purpose::Memory(channel)), deadline) {
            Ok(memory) => return Ok(Link::Memory(memory)),
            Err(WaitError::Failed(reason)) => session.note_apart(peer, &reason),
            Err(over) => return Err(over),
        }
        if session.medium == Medium::Shm {
            return Err(Error::NotShared { peer }.into());
        }
    }
    dial_over_network(session, identity(Purpose::Data(channel)), deadline).map(Link::Socket)
}

fn dial_over_network(
    session: &Session,
    identity: Identity,
    deadline: Deadline,
) -> Result<Socket, WaitError<Error>> {
    let address = session.homes[identity.to as usize].address;
    let watch = Watch { runtime: &session.runtime, verdict: Some(&session.verdict), deadline };
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
fn share(session: &Session, identity: Identity, deadline: Deadline) -> Result<Memory, WaitError<Error>> {
    let (stream, address) = enter_host_door(session, identity, deadline)?;
    let failed = |source| connect_error("share memory with", address, source);
    let share = shm::offer(&stream, &auth::random_bytes()?).map_err(failed)?;
    let mut answer = [0];
    let watch = Watch { runtime: &session.runtime, verdict: Some(&session.verdict), deadline };
    read_exact(&stream, &mut answer, watch).map_err(|error| error.map(failed))?;
    if answer != [shm::ACCEPTED] {
        return Err(failed(io::Error::new(io::ErrorKind::Unsupported, "it was refused")).into());
    }
    Ok(Memory::new(stream, share, session.lends()))
}

/// Opens a proven connection to a rank of this host, through its Unix socket.
fn enter_host_door(
    session: &Session,
    identity: Identity,
    deadline: Deadline,
) -> Result<(Socket, SocketAddr), WaitError<Error>> {
    let address = session.homes[identity.to as usize].address;
    let watch = Watch { runtime: &session.runtime, verdict: Some(&session.verdict), deadline };
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
    deadline: Deadline,
) -> Result<shm::Mapping, WaitError<Error>> {
    let (from, to) = (self::number(session.rank.index())?, self::number(peer)?);
    let identity = Identity { epoch: session.epoch, from, to, purpose: Purpose::Arena(number) };
    let (stream, address) = enter_host_door(session, identity, deadline)?;
    let failed = |source| connect_error("share memory with", address, source);
    let watch = Watch { runtime: &session.runtime, verdict: Some(&session.verdict), deadline };
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

/// Says where this rank runs, and hears where the others do.
fn introduce(
    line: &mut Line,
    home: Home,
    config: &Config,
    runtime: &Runtime,
    deadline: Deadline,
) -> Result<Vec<Home>> {
    let watch = Watch { runtime, verdict: None, deadline };
    let activity = Activity::Rendezvous;
    let coordinator = || config.coordinator.clone();
    let gone = |source| match config.host {
        Host::RankZero => Error::Io { activity, peer: 0, source },
        Host::Launcher => Error::Address {
            activity,
            action: "go on with the coordinator at",
            address: coordinator(),
            source,
        },
    };
    let late = || match config.host {
        Host::RankZero => timeout(runtime, activity, 0, deadline),
        Host::Launcher => {
            let source = io::ErrorKind::TimedOut.into();
            Error::NoCoordinator { address: coordinator(), limit: config.timeout, source }
        }
    };
    let milliseconds = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
    let patience_ms = milliseconds(runtime.remaining(deadline));
    let liveness_ms = milliseconds(config.liveness);
    let world_size = number(config.rank.world_size())?;
    line.push(Frame::Join { world_size, patience_ms, liveness_ms, home }).map_err(gone)?;
    let mut homes = Vec::new();
    let mut missing = Vec::new();
    let mut refusals = 0;
    while homes.len() < config.rank.world_size() {
        match line.pull().map_err(gone)? {
            Some(Frame::Peer { rank, home }) if rank as usize == homes.len() => homes.push(home),
            Some(Frame::Beat) => {}
            Some(Frame::Missing { rank, refused }) => {
                missing.push(rank as usize);
                refusals = refused;
            }
            Some(Frame::NotAll) => {
                return Err(Error::Missing { missing, refused: refusals, limit: config.timeout });
            }
            Some(Frame::Duplicate) => return Err(Error::DuplicateRank { rank: config.rank.index() }),
            Some(Frame::WorldSize { expected }) => {
                let ours = config.rank.world_size();
                return Err(Error::WorldSize { ours, theirs: expected as usize });
            }
            Some(Frame::OtherWorldSize { rank, size }) => {
                let ours = config.rank.world_size();
                return Err(Error::OtherWorldSize { rank: rank as usize, ours, theirs: size as usize });
            }
            Some(Frame::Abort(abort)) => return Err(Error::Aborted(abort)),
            Some(_) => return Err(gone(io::ErrorKind::InvalidData.into())),
            None => watch.ready(&line.stream, PollFlags::IN).map_err(|error| match error {
                WaitError::Late => late(),
                WaitError::Aborted(abort) => Error::Aborted(abort),
                WaitError::Failed(e) => gone(e),
            })?,
        }
    }
    Ok(homes)
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

fn address_error(action: &'static str, address: &str, source: io::Error) -> Error {
    Error::Address { activity: Activity::Rendezvous, action, address: address.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use socket2::{Domain, Type};

    use super::*;

    /// It may have been stopped while the job was started again.
    #[rstest]
    fn a_rank_of_an_earlier_start_of_the_job_is_refused(#[values(1, 0)] epoch: u32) {
        let (runtime, key) = (Runtime::system(), Key::new(None, "test"));
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let coordinator = Coordinator::start_epoch(&runtime, &[any], 2, &key, 1, None).unwrap();
        let ranks = [0, 1].map(|rank| {
            let config = Config::new(rank, 2, &coordinator.address().to_string()).unwrap().with_job("test");
            let config = Config { epoch, ..config.with_external_coordinator() };
            runtime.spawn("rank", move || join(&config, &Runtime::system()).map(drop)).unwrap()
        });
        for rank in ranks {
            match rank.join().unwrap() {
                Ok(()) => assert_eq!(epoch, 1),
                Err(error) => assert!(epoch == 0 && matches!(error, Error::Refused { .. }), "{error}"),
            }
        }
    }

    #[rstest]
    #[case::of_the_machine("node0:29500", "127.0.1.1:29500", true)]
    #[case::of_the_machine_in_ipv6("node0:29500", "[::1]:29500", true)]
    #[case::of_loopback("Localhost:29500", "127.0.0.1:29500", false)]
    #[case::literal("127.0.1.1:29500", "127.0.1.1:29500", false)]
    #[case::literal_in_ipv6("[::1]:29500", "[::1]:29500", false)]
    #[case::of_an_interface("node0:29500", "10.0.0.1:29500", false)]
    fn a_name_is_told_from_loopback(#[case] name: &str, #[case] address: &str, #[case] leads: bool) {
        assert_eq!(leads_to_loopback(name, address.parse().unwrap()), leads);
    }

    #[rstest]
    #[case::one_machine(&["127.0.0.1:1", "[::1]:2", "127.0.1.1:3"], None)]
    #[case::several(&["10.0.0.1:1", "10.0.0.2:1"], None)]
    #[case::mixed(&["10.0.0.1:1", "10.0.0.2:1", "127.0.1.1:1"], Some((2, 0)))]
    #[case::mixed_in_ipv6(&["[::ffff:127.0.0.1]:1", "[fe80::1]:1"], Some((0, 1)))]
    fn ranks_on_loopback_are_told_from_others(
        #[case] addresses: &[&str],
        #[case] expected: Option<(usize, usize)>,
    ) {
        let home = |address: &&str| Home {
            address: address.parse().unwrap(),
            host: 0,
            shares: false,
            cores: host::cores(),
        };
        assert_eq!(parted_by_loopback(&addresses.iter().map(home).collect::<Vec<_>>()), expected);
    }

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
        let error =
            finish_connect(unanswered, Watch { runtime: &runtime, verdict: None, deadline }).unwrap_err();
        assert!(matches!(&error, WaitError::Failed(e) if e.kind() == io::ErrorKind::TimedOut), "{error:?}");
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

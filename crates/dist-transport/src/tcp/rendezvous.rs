//! How a process joins its job.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::PollFlags;
use socket2::Socket;

use crate::auth::{Identity, Key, Purpose};
use crate::tcp::channels::Channels;
use crate::tcp::config::{Config, Host, Medium};
use crate::tcp::control::{Frame, Home, Line};
use crate::tcp::coordinator::{COORDINATOR, Coordinator};
use crate::tcp::dial::{RETRY, connect, count_hang_up, greet, number};
use crate::tcp::meeting::{Worlds, answer_margin};
use crate::tcp::service::{Service, listener_address};
use crate::tcp::session::{Arrivals, FrameQueue, Membership, Session, WaitError, Watch, timeout};
use crate::tcp::verdict::{Bell, Verdict};
use crate::tcp::{host, socket};
use crate::{Activity, Deadline, Error, Result, Runtime, shm};

/// How long to wait for one of the coordinator's addresses to take a connection, and to answer, before the next is tried.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// How soon to ask again whether the next world may meet.
const NEXT_WORLD_RETRY: Duration = Duration::from_millis(100);

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
            announced: Mutex::default(),
            outgoing: FrameQueue::new(),
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
    let (line, listener, host_door, homes) = loop {
        let stream = reach_coordinator(config, &key, runtime, deadline)?;
        let at = |source| address_error("listen on", &config.coordinator, source);
        let listener = socket::listen(listener_address(&stream).map_err(at)?, config.secret.as_ref())?;
        let mut line = Line::new(stream);
        let address = listener.local_addr().map_err(at)?;
        let host_door = open_host_door(config.medium, address)?;
        let home = Home { address, host, shares: host_door.is_some(), cores: host::cores() };
        match introduce(&mut line, home, config, runtime, deadline)? {
            Some(homes) => break (line, listener, host_door, homes),
            // The world before is still there.
            None => runtime.park(Some(runtime.deadline(NEXT_WORLD_RETRY))),
        }
    };
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

/// Tells the coordinator that the processes of these ranks have ended.
pub(super) fn tell_ended(config: &Config, ranks: &[usize]) -> Result<()> {
    let runtime = Runtime::system();
    let deadline = runtime.deadline(config.timeout);
    let key = Key::new(config.secret.as_ref(), &config.job);
    let mut line = Line::new(reach_coordinator(config, &key, &runtime, deadline)?);
    let watch = Watch::before_the_job(&runtime, deadline);
    let failed = |source| address_error("tell the coordinator at", &config.coordinator, source);
    for &rank in ranks {
        line.push(Frame::Ended { rank: number(rank)? }).map_err(failed)?;
    }
    while line.unsent() {
        watch.ready(&line.stream, PollFlags::OUT).map_err(|error| match error {
            WaitError::Failed(source) => failed(source),
            _ => failed(io::ErrorKind::TimedOut.into()),
        })?;
        line.flush().map_err(failed)?;
    }
    Ok(())
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
            Err(error) if !may_come_to_be_known(&error) || runtime.remaining(deadline) <= RETRY => {
                return Err(error);
            }
            // A name may come to be known with the host that it is of.
            Err(_) => runtime.park(Some(runtime.deadline(RETRY))),
        }
    };
    let (world_size, secret) = (config.rank.world_size(), config.secret.clone());
    let coordinator =
        Coordinator::start_epoch(runtime, Worlds::One, &addresses, world_size, key, config.epoch, secret)?;
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
            Err(error) if !may_come_to_be_known(&error) => return Err(error),
            Err(_) if runtime.expired(deadline) => return Err(failure),
            // A name may come to be known with the host that it is of.
            Err(error) => {
                failure = error;
                Vec::new()
            }
        };
        for address in addresses {
            let limit = deadline.earlier(runtime.deadline(CONNECT_LIMIT));
            let attempt = Watch::before_the_job(runtime, limit);
            match connect(address, attempt) {
                Ok(stream) => match greet(stream, address, key, identity, attempt) {
                    Ok(Some(stream)) => return Ok(stream),
                    Ok(None) => count_hang_up(&mut hang_ups, identity, address)?,
                    Err(WaitError::Failed(error)) => return Err(error),
                    // Something listens there that has nothing to say, and another address may be the coordinator's.
                    Err(WaitError::Late | WaitError::Unanswered | WaitError::Aborted(_)) => failure = late(),
                },
                Err(WaitError::Failed(e)) => failure = absent(e),
                Err(WaitError::Late | WaitError::Unanswered | WaitError::Aborted(_)) => failure = late(),
            }
        }
        if runtime.remaining(deadline) <= RETRY {
            return Err(failure);
        }
        runtime.park(Some(runtime.deadline(RETRY)));
    }
}

/// Whether a name that was not found may be: one that is malformed may not, and for lack of a thread none was looked for.
fn may_come_to_be_known(error: &Error) -> bool {
    matches!(error, Error::Address { source, .. } if source.kind() != io::ErrorKind::InvalidInput)
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

/// Says where this rank runs, and hears where the others do; `None` if the world that meets there is one that this rank was in
/// before.
fn introduce(
    line: &mut Line,
    home: Home,
    config: &Config,
    runtime: &Runtime,
    deadline: Deadline,
) -> Result<Option<Vec<Home>>> {
    let watch = Watch::before_the_job(runtime, deadline);
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
    // Later there is no time for another try.
    let margin = answer_margin(config.timeout).max(2 * NEXT_WORLD_RETRY);
    while homes.len() < config.rank.world_size() {
        match line.pull().map_err(gone)? {
            Some(Frame::Peer { rank, home }) if rank as usize == homes.len() => homes.push(home),
            Some(Frame::Beat) => {}
            Some(Frame::Missing { rank, refused }) => {
                missing.push(rank as usize);
                refusals = refused;
            }
            Some(Frame::Over) if missing.is_empty() || runtime.remaining(deadline) > margin => {
                return Ok(None);
            }
            Some(Frame::NotAll | Frame::Over) => {
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
                WaitError::Late | WaitError::Unanswered => late(),
                WaitError::Aborted(abort) => Error::Aborted(abort),
                WaitError::Failed(e) => gone(e),
            })?,
        }
    }
    Ok(Some(homes))
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
        let coordinator = Coordinator::start_epoch(&runtime, Worlds::One, &[any], 2, &key, 1, None).unwrap();
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

    #[test]
    fn whoever_has_no_time_for_another_try_is_told_who_is_still_in_the_world_before() {
        let (ours, theirs) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        ours.set_nonblocking(true).unwrap();
        let [mut ours, mut theirs] = [ours, theirs].map(Line::new);
        let still_there = Frame::Missing { rank: 1, refused: 0 };
        theirs.push_all(&[still_there, Frame::Over].map(|frame| frame.encode())).unwrap();
        let (runtime, limit) = (Runtime::system(), Duration::from_millis(300));
        let config = Config::new(0, 2, "127.0.0.1:1").unwrap().with_timeout(limit);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let home = Home { address, host: 0, shares: false, cores: host::cores() };
        let deadline = runtime.deadline(2 * NEXT_WORLD_RETRY);
        let error = introduce(&mut ours, home, &config, &runtime, deadline).unwrap_err();
        assert!(matches!(&error, Error::Missing { missing, .. } if *missing == [1]), "{error}");
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
}

//! The rendezvous as a process sees it: joins the job.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::PollFlags;
use socket2::Socket;

use crate::bootstrap::abort_state::{AbortState, Waker};
use crate::bootstrap::auth::{Identity, Key, Purpose};
use crate::bootstrap::channels::Channels;
use crate::bootstrap::config::{Config, CoordinatorHost, Medium};
use crate::bootstrap::control::{ControlConnection, Frame, PeerInfo, UnixSocketName};
use crate::bootstrap::coordinator::{COORDINATOR, Coordinator};
use crate::bootstrap::dial::{HangUps, Opened, RETRY, number, open};
use crate::bootstrap::outer_job::OuterJob;
use crate::bootstrap::probe::Probes;
use crate::bootstrap::rendezvous_server::{NOTICE_INTERVAL, Worlds, answer_grace};
use crate::bootstrap::service::{Service, listener_address};
use crate::bootstrap::session::{
    Arrivals, ConnectionWait, FrameQueue, Membership, Session, WaitError, timeout,
};
use crate::bootstrap::store::StoreCalls;
use crate::bootstrap::{files, host};
use crate::error::{first_of_many, turned_away};
use crate::link::{shm, socket};
use crate::{Abort, Activity, Cause, Chain, Deadline, Error, Fingerprint, Result, Runtime, warning};

/// The time that one of the coordinator's addresses has to accept a connection and answer, before the next is
/// tried.
pub(crate) const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// The pause before asking again whether the next world may begin.
const NEXT_WORLD_RETRY: Duration = Duration::from_millis(100);

/// Joins the job. A world of one opens no socket. If its ranks belong to an outer job, that one decides about aborts.
pub(crate) fn join(config: &Config, runtime: &Runtime, outer_job: Option<OuterJob>) -> Result<Membership> {
    let deadline = runtime.deadline(config.timeout);
    let key = Key::new(config.secret.as_ref(), &config.job);
    let session =
        |peer_infos, liveness| new_session((config, outer_job), runtime, key.clone(), peer_infos, liveness);
    if config.rank.world_size() == 1 {
        let (address, host) = ((Ipv4Addr::LOCALHOST, 0).into(), host::id(config.host_id.as_deref()));
        let session = session(vec![PeerInfo::here(address, host, None)], config.liveness(true))?;
        return Ok(Membership { session, service: None, coordinator: None });
    }
    let coordinator = match config.host {
        CoordinatorHost::RankZero if config.rank.index() == 0 => {
            Some(start_coordinator(config, &key, runtime, deadline)?)
        }
        _ => None,
    };
    let joined = match join_at_coordinator(config, &key, runtime, deadline) {
        Ok(joined) => joined,
        Err(error) => {
            if let Some(coordinator) = coordinator.filter(|_| concerns_all(&error)) {
                coordinator.serve_late_ranks(runtime);
            }
            return Err(error);
        }
    };
    let Joined { line, listener, host_listener, peer_infos } = joined;
    warn_if_parted(config.rank.index(), &peer_infos);
    let session = session(peer_infos, config.liveness(socket::is_within_host(&line.stream)))?;
    let service = Service::new(session.clone(), listener, host_listener, line);
    let service = runtime
        .spawn("dist-service", move || service.run())
        .map_err(|source| Error::Resources { what: "thread", source })?;
    tracing::info!(rank = %config.rank, "joined the job");
    Ok(Membership { session, service: Some(service), coordinator })
}

fn new_session(
    (config, outer_job): (&Config, Option<OuterJob>),
    runtime: &Runtime,
    key: Key,
    peer_infos: Vec<PeerInfo>,
    liveness: Duration,
) -> Result<Arc<Session>> {
    Ok(Arc::new(Session {
        rank: config.rank,
        runtime: runtime.clone(),
        key,
        epoch: config.epoch,
        peer_infos,
        coordinator: config.host,
        outer_job,
        liveness,
        liveness_between_hosts: config.liveness(false),
        medium: config.medium,
        sockets_per_peer: config.sockets_per_peer,
        warns_of_threads: config.warns_of_threads,
        link_attempts: AtomicU32::new(0),
        reach: config.reach,
        heap: Arc::default(),
        #[cfg(all(feature = "shm", target_os = "linux"))]
        arenas: Mutex::default(),
        #[cfg(all(feature = "shm", target_os = "linux"))]
        pool: crate::host_memory::PoolHandle::default(),
        #[cfg(all(feature = "shm", target_os = "linux"))]
        proven: Mutex::default(),
        unshareable: Mutex::default(),
        abort_state: AbortState::new()?,
        arrivals: Arrivals::default(),
        channels: Channels::new(),
        left: Mutex::default(),
        announced: Mutex::default(),
        probes: Probes::default(),
        store_calls: StoreCalls::default(),
        outgoing: FrameQueue::new(),
        closing: AtomicBool::new(false),
        service_waker: Waker::new()?,
    }))
}

/// Returns `true` if an error of this rank ends the job for all ranks. A coordinator in this process then
/// serves for a while longer, because other ranks may be about to join.
const fn concerns_all(error: &Error) -> bool {
    matches!(
        error,
        Error::OtherWorldSize { .. }
            | Error::OtherSocketsPerPeer { .. }
            | Error::Aborted(_)
            | Error::FilesLimit { .. }
            | Error::Resources { .. }
    )
}

/// Logs a warning if some ranks can be reached from their own machine only. Of those ranks, the first one logs
/// it.
fn warn_if_parted(rank: usize, peer_infos: &[PeerInfo]) {
    let Some((inside, outside)) = parted_by_loopback(peer_infos).filter(|&(inside, _)| inside == rank) else {
        return;
    };
    warning::show(format_args!(
        "rank {inside} came to the coordinator by loopback, from {}, and rank {outside} from another machine, which does \
         not reach it there: give all ranks an address of the coordinator's machine that others reach (MASTER_ADDR)",
        peer_infos[inside].address
    ));
}

/// Informs the coordinator that the processes of these ranks have ended.
pub(crate) fn tell_ended(config: &Config, ranks: &[usize]) -> Result<()> {
    let runtime = Runtime::system();
    let deadline = runtime.deadline(config.timeout);
    let key = Key::new(config.secret.as_ref(), &config.job);
    let mut line = ControlConnection::new(reach_coordinator(config, &key, &runtime, deadline)?);
    let watch = ConnectionWait::before_the_job(&runtime, deadline);
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

/// The connections and addresses of a rank after all ranks have joined.
struct Joined {
    line: ControlConnection,
    listener: TcpListener,
    host_listener: Option<Socket>,
    peer_infos: Vec<PeerInfo>,
}

/// Joins the other ranks at the coordinator.
fn join_at_coordinator(config: &Config, key: &Key, runtime: &Runtime, deadline: Deadline) -> Result<Joined> {
    let mut before = None;
    loop {
        let stream = match reach_coordinator(config, key, runtime, deadline) {
            Ok(stream) => stream,
            // The coordinator may have gone with the previous world.
            Err(error) => return Err(before.filter(|_| error.is_timeout()).unwrap_or(error)),
        };
        let mut line = ControlConnection::new(stream);
        let LocalEndpoint { listener, host_listener, own_info } =
            open_endpoint(config, &line).inspect_err(|error| {
                // The others would wait for this rank in vain.
                let rank = config.rank.index();
                let cause = Cause::gave_up(Chain(error));
                let _ =
                    line.push(Frame::Abort(Abort { cause, rank, reporter: rank, call: Fingerprint::NONE }));
            })?;
        match introduce(&mut line, own_info, config, runtime, deadline)? {
            Ok(mut peer_infos) => {
                check_sockets_per_peer(config.sockets_per_peer, &peer_infos)?;
                peer_infos.iter_mut().for_each(|theirs| theirs.reach_from(own_info.address));
                return Ok(Joined { line, listener, host_listener, peer_infos });
            }
            Err(PreviousWorld(still_there)) => before = still_there.or(before),
        }
        if runtime.expired(deadline)
            && let Some(error) = before.take()
        {
            return Err(error);
        }
        runtime.park(Some(deadline.earlier(runtime.deadline(NEXT_WORLD_RETRY))));
    }
}

/// Checks that all ranks use the same number of sockets for each peer. If they do not, every rank gets the error.
fn check_sockets_per_peer(ours: u16, peer_infos: &[PeerInfo]) -> Result<()> {
    match peer_infos.iter().position(|theirs| theirs.sockets_per_peer != ours) {
        Some(rank) => {
            Err(Error::OtherSocketsPerPeer { rank, ours, theirs: peer_infos[rank].sockets_per_peer })
        }
        None => Ok(()),
    }
}

/// The local listeners and the address that other ranks get.
struct LocalEndpoint {
    listener: TcpListener,
    host_listener: Option<Socket>,
    own_info: PeerInfo,
}

/// Opens the listeners that the other ranks connect to.
fn open_endpoint(config: &Config, line: &ControlConnection) -> Result<LocalEndpoint> {
    let at = |source| address_error("listen on", &config.coordinator, source);
    let world_size = config.rank.world_size();
    let hosts_coordinator = config.host == CoordinatorHost::RankZero && config.rank.index() == 0;
    let sockets_per_peer = if config.medium == Medium::Shm { 1 } else { config.sockets_per_peer };
    let connections = world_size * usize::from(sockets_per_peer);
    // Each rank has a connection to the coordinator too.
    let hosted = if hosts_coordinator { world_size } else { 0 };
    files::check_limit(connections + hosted, world_size)?;
    let listener = socket::listen(listener_address(&line.stream).map_err(at)?, config.secret.as_ref())?;
    let address = listener.local_addr().map_err(at)?;
    let (host_listener, unix_socket) = open_host_listener(config.medium)?.unzip();
    let own_info = PeerInfo {
        sockets_per_peer: config.sockets_per_peer,
        ..PeerInfo::here(address, host::id(config.host_id.as_deref()), unix_socket)
    };
    Ok(LocalEndpoint { listener, host_listener, own_info })
}

/// The answer of a coordinator that still serves a world which this rank was in before. The error names the
/// remaining ranks of that world, if they are known.
#[derive(Debug)]
struct PreviousWorld(Option<Error>);

/// Starts the coordinator of a job that rank 0 hosts.
fn start_coordinator(
    config: &Config,
    key: &Key,
    runtime: &Runtime,
    deadline: Deadline,
) -> Result<Coordinator> {
    let addresses = loop {
        match socket::resolve(&config.coordinator, runtime, deadline) {
            Ok(addresses) => break addresses,
            Err(error) if !may_come_to_be_known(&error) || runtime.expired(deadline) => return Err(error),
            // A name may become known when its host starts.
            Err(_) => runtime.park(Some(deadline.earlier(runtime.deadline(RETRY)))),
        }
    };
    let (world_size, secret) = (config.rank.world_size(), config.secret.clone());
    // Raises the limit if possible. If it stays too low, the coordinator tells the other ranks.
    let _ = files::check_limit(2 * world_size, world_size);
    let started =
        Coordinator::start_epoch(runtime, Worlds::One, &addresses, world_size, key, config.epoch, secret);
    let coordinator = started.map_err(|error| match error {
        Error::Address { address, source, .. } if source.kind() == io::ErrorKind::AddrInUse => {
            Error::PortInUse { address, source }
        }
        error => error,
    })?;
    let address = coordinator.address();
    if leads_to_loopback(&config.coordinator, address) {
        warning::show(format_args!(
            "the coordinator's name {} leads to {address} here, perhaps by /etc/hosts: no rank of another machine reaches it",
            config.coordinator
        ));
    }
    Ok(coordinator)
}

/// Returns `true` if a name resolves to a loopback address although it does not look like one. A machine's own
/// name often does so on that machine.
fn leads_to_loopback(name: &str, address: SocketAddr) -> bool {
    let host = name.rsplit_once(':').map_or(name, |(host, _)| host);
    let says_so = name.parse::<SocketAddr>().is_ok() || host.eq_ignore_ascii_case("localhost");
    is_loopback(address) && !says_so
}

fn is_loopback(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// Returns a rank that listens on loopback only, and a rank that may run on another machine and so cannot reach it.
fn parted_by_loopback(peer_infos: &[PeerInfo]) -> Option<(usize, usize)> {
    let inside = peer_infos.iter().position(|own_info| is_loopback(own_info.address))?;
    let outside = peer_infos.iter().position(|own_info| !is_loopback(own_info.address))?;
    Some((inside, outside))
}

/// Connects to the coordinator, and retries until it answers or the deadline passes.
fn reach_coordinator(config: &Config, key: &Key, runtime: &Runtime, deadline: Deadline) -> Result<Socket> {
    let from = number(config.rank.index())?;
    let identity = Identity { epoch: config.epoch, from, to: COORDINATOR, purpose: Purpose::Control };
    let absent =
        |source| Error::NoCoordinator { address: config.coordinator.clone(), limit: config.timeout, source };
    let late = || absent(io::ErrorKind::TimedOut.into());
    let mut hang_ups = HangUps::default();
    let mut notice_at = runtime.deadline(NOTICE_INTERVAL);
    loop {
        let mut failure = late();
        let addresses = match socket::resolve(&config.coordinator, runtime, deadline) {
            Ok(addresses) => addresses,
            Err(error) if !may_come_to_be_known(&error) => return Err(error),
            // A name may become known when its host starts.
            Err(error) => {
                failure = error;
                Vec::new()
            }
        };
        for address in addresses {
            let limit = deadline.earlier(runtime.deadline(CONNECT_LIMIT));
            match open(address, key, identity, ConnectionWait::before_the_job(runtime, limit)) {
                Ok(Opened::Proven(stream)) => return Ok(stream),
                Ok(Opened::HungUp { was_challenged }) => {
                    hang_ups.count(was_challenged, identity, address)?;
                    if let WaitError::Failed(flooded) = hang_ups.late(identity, address, config.timeout) {
                        failure = flooded;
                    }
                }
                Err(WaitError::Failed(Error::Address { source, .. }))
                    if !socket::is_out_of_files(&source) =>
                {
                    failure = absent(source);
                }
                Err(WaitError::Failed(error)) => return Err(error),
                // Something listens there without answering; another address may be the coordinator's.
                Err(WaitError::Late | WaitError::Unanswered | WaitError::Aborted(_)) => failure = late(),
            }
        }
        runtime.park(Some(deadline.earlier(runtime.deadline(RETRY))));
        if runtime.expired(deadline) {
            return Err(failure);
        }
        if runtime.expired(notice_at) {
            notice_at = runtime.deadline(NOTICE_INTERVAL);
            waiting_for_coordinator(config, runtime.elapsed(deadline), &failure);
        }
    }
}

/// Returns `true` if a name that was not found may be found later. A malformed name will not be, and without
/// a thread none was looked up.
fn may_come_to_be_known(error: &Error) -> bool {
    matches!(error, Error::Address { source, .. } if source.kind() != io::ErrorKind::InvalidInput)
}

/// Opens the Unix socket for the ranks of this host, if this rank may share memory with them.
fn open_host_listener(medium: Medium) -> Result<Option<(Socket, UnixSocketName)>> {
    if medium == Medium::Tcp {
        return Ok(None);
    }
    let name = UnixSocketName::random()?;
    match (medium, shm::listen(name)) {
        (_, Ok(unix_socket)) => Ok(Some((unix_socket, name))),
        (Medium::Auto, Err(error)) if !socket::is_out_of_files(&error) => {
            tracing::info!(%error, "no shared memory: messages go over TCP");
            Ok(None)
        }
        (_, Err(source)) => Err(Error::Resources { what: "Unix socket for the ranks of this host", source }),
    }
}

/// Sends this rank's address to the coordinator, and receives those of the others.
fn introduce(
    line: &mut ControlConnection,
    own_info: PeerInfo,
    config: &Config,
    runtime: &Runtime,
    deadline: Deadline,
) -> Result<Result<Vec<PeerInfo>, PreviousWorld>> {
    let (peer_infos, missing, refusals) = (Vec::new(), Vec::new(), 0);
    Introduction { own_info, config, runtime, deadline, peer_infos, missing, refusals }.run(line)
}

/// One rank's introduction, and what the coordinator has told so far.
struct Introduction<'a> {
    own_info: PeerInfo,
    config: &'a Config,
    runtime: &'a Runtime,
    deadline: Deadline,
    peer_infos: Vec<PeerInfo>,
    /// The ranks of the list of missing ranks that is being received.
    missing: Vec<usize>,
    /// The number of connections that the coordinator has refused.
    refusals: u64,
}

impl Introduction<'_> {
    fn run(mut self, line: &mut ControlConnection) -> Result<Result<Vec<PeerInfo>, PreviousWorld>> {
        let answer_by =
            self.runtime.deadline(self.runtime.remaining(self.deadline) + answer_grace(self.config.timeout));
        let watch = ConnectionWait::before_the_job(self.runtime, answer_by);
        line.push(self.join_frame(line)?).map_err(|error| self.gone(error))?;
        while self.peer_infos.len() < self.config.rank.world_size() {
            match line.pull().map_err(|error| self.gone(error))? {
                Some(Frame::Over) => return Ok(Err(self.previous_world())),
                Some(frame) => self.take(frame)?,
                None => watch.ready(&line.stream, PollFlags::IN).map_err(|error| match error {
                    WaitError::Late | WaitError::Unanswered => self.late(),
                    WaitError::Aborted(abort) => Error::Aborted(abort),
                    WaitError::Failed(error) => self.gone(error),
                })?,
            }
        }
        Ok(Ok(self.peer_infos))
    }

    fn join_frame(&self, line: &ControlConnection) -> Result<Frame> {
        let milliseconds =
            |time: Duration| u32::try_from(time.as_micros().div_ceil(1000)).unwrap_or(u32::MAX);
        Ok(Frame::Join {
            world_size: number(self.config.rank.world_size())?,
            timeout_ms: milliseconds(self.runtime.remaining(self.deadline)),
            liveness_ms: milliseconds(self.config.liveness(socket::is_within_host(&line.stream))),
            peer_info: self.own_info,
        })
    }

    /// Handles a frame of the coordinator. Returns an error if this rank cannot join.
    fn take(&mut self, frame: Frame) -> Result<()> {
        let ours = self.config.rank.world_size();
        match frame {
            Frame::Peers { first, peer_infos } if first as usize == self.peer_infos.len() => {
                self.peer_infos.extend(peer_infos);
            }
            Frame::Beat => {}
            Frame::Missing { rank, refused } => {
                self.missing.push(rank as usize);
                self.refusals = refused;
            }
            Frame::NotYet { missing: count } => {
                let missing = std::mem::take(&mut self.missing);
                let waited = self.runtime.elapsed(self.deadline);
                let missing = (&missing[..], count as usize);
                let address = self.own_info.address;
                warning::show(still_waiting(self.config, waited, address, missing, self.refusals));
            }
            Frame::NotAll => return Err(self.missing_error()),
            Frame::Duplicate => return Err(Error::DuplicateRank { rank: self.config.rank.index() }),
            Frame::WorldSize { expected } => {
                let theirs = expected as usize;
                return Err(match self.config.host {
                    CoordinatorHost::RankZero => Error::OtherWorldSize { rank: 0, ours, theirs },
                    CoordinatorHost::Launcher => Error::WorldSize { ours, theirs },
                });
            }
            Frame::OtherWorldSize { rank, size } => {
                return Err(Error::OtherWorldSize { rank: rank as usize, ours, theirs: size as usize });
            }
            Frame::Abort(abort) => return Err(Error::Aborted(abort)),
            _ => return Err(self.gone(io::ErrorKind::InvalidData.into())),
        }
        Ok(())
    }

    /// Returns the previous world of this coordinator, whose remaining ranks the coordinator has named.
    fn previous_world(&mut self) -> PreviousWorld {
        PreviousWorld(if self.missing.is_empty() { None } else { Some(self.missing_error()) })
    }

    fn missing_error(&mut self) -> Error {
        let missing = std::mem::take(&mut self.missing);
        Error::Missing { missing, refused: self.refusals, limit: self.config.timeout }
    }

    /// Returns the error of a connection to the coordinator that has ended.
    fn gone(&self, source: io::Error) -> Error {
        let activity = Activity::Rendezvous;
        match self.config.host {
            CoordinatorHost::RankZero => Error::Io { activity, peer: 0, source },
            CoordinatorHost::Launcher => {
                let action = "go on with the coordinator at";
                Error::Address { activity, action, address: self.config.coordinator.clone(), source }
            }
        }
    }

    /// Returns the error of a coordinator that does not answer in time.
    fn late(&self) -> Error {
        match self.config.host {
            CoordinatorHost::RankZero => timeout(self.runtime, Activity::Rendezvous, 0, self.deadline),
            CoordinatorHost::Launcher => {
                let (source, limit) = (io::ErrorKind::TimedOut.into(), self.config.timeout);
                Error::NoCoordinator { address: self.config.coordinator.clone(), limit, source }
            }
        }
    }
}

/// Shows for which ranks this rank waits to join.
fn still_waiting(
    config: &Config,
    waited: Duration,
    address: SocketAddr,
    (missing, count): (&[usize], usize),
    refused: u64,
) -> String {
    format!(
        "rank {} has waited {} s for ranks {} to join at {}{}; it listens on {address}",
        config.rank.index(),
        waited.as_secs_f64().round(),
        first_of_many(missing, count),
        config.coordinator,
        turned_away(refused),
    )
}

/// Warns that this rank does not reach the coordinator. On each machine one rank shows the warning, and the others
/// log it.
fn waiting_for_coordinator(config: &Config, waited: Duration, failure: &Error) {
    let text = format!(
        "rank {} has waited {} s for the coordinator at {}: {}",
        config.rank.index(),
        waited.as_secs_f64().round(),
        config.coordinator,
        Chain(failure),
    );
    let is_first_here = std::env::var_os("LOCAL_RANK").is_none_or(|local| local == "0");
    if is_first_here { warning::show(text) } else { tracing::warn!("{text}") }
}

fn address_error(action: &'static str, address: &str, source: io::Error) -> Error {
    Error::Address { activity: Activity::Rendezvous, action, address: address.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use socket2::{Domain, Type};

    use super::*;

    /// It may have been stopped while the job was restarted.
    #[rstest]
    fn a_rank_of_an_earlier_start_of_the_job_is_refused(#[values(1, 0)] epoch: u32) {
        let (runtime, key) = (Runtime::system(), Key::new(None, "test"));
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let coordinator = Coordinator::start_epoch(&runtime, Worlds::One, &[any], 2, &key, 1, None).unwrap();
        let ranks = [0, 1].map(|rank| {
            let config = Config::new(rank, 2, &coordinator.address().to_string()).unwrap().with_job("test");
            let config = Config { epoch, ..config.with_external_coordinator() };
            runtime.spawn("rank", move || join(&config, &Runtime::system(), None).map(drop)).unwrap()
        });
        for rank in ranks {
            match rank.join().unwrap() {
                Ok(()) => assert_eq!(epoch, 1),
                Err(error) => assert!(epoch == 0 && matches!(error, Error::Refused { .. }), "{error}"),
            }
        }
    }

    /// Returns both ends of a connection to a coordinator, and a rank of two with this timeout.
    fn introduction(timeout: Duration) -> ([ControlConnection; 2], PeerInfo, Config) {
        let (ours, theirs) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        ours.set_nonblocking(true).unwrap();
        let config = Config::new(0, 2, "127.0.0.1:1").unwrap().with_timeout(timeout);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let own_info = PeerInfo::here(address, 0, None);
        ([ours, theirs].map(ControlConnection::new), own_info, config)
    }

    #[test]
    fn a_rank_is_told_who_is_still_in_the_previous_world() {
        let ([mut ours, mut theirs], own_info, config) = introduction(Duration::from_millis(300));
        let still_there = Frame::Missing { rank: 1, refused: 0 };
        theirs.push_all(&[still_there, Frame::Over].map(|frame| frame.encode())).unwrap();
        let runtime = Runtime::system();
        let deadline = runtime.deadline(config.timeout);
        let before = introduce(&mut ours, own_info, &config, &runtime, deadline).unwrap().unwrap_err();
        assert!(
            matches!(&before, PreviousWorld(Some(Error::Missing { missing, .. })) if *missing == [1]),
            "{before:?}"
        );
    }

    #[test]
    fn a_rank_that_is_told_for_whom_it_waits_goes_on_waiting() {
        let ([mut ours, mut theirs], own_info, config) = introduction(Duration::from_secs(60));
        let missing = |rank| Frame::Missing { rank, refused: 0 };
        let notice = [missing(1), Frame::NotYet { missing: 1 }];
        let frames = notice.iter().chain(&notice).cloned().chain([missing(1), Frame::NotAll]);
        theirs.push_all(&frames.map(|frame| frame.encode()).collect::<Vec<_>>()).unwrap();
        let runtime = Runtime::system();
        let deadline = runtime.deadline(config.timeout);
        let error = introduce(&mut ours, own_info, &config, &runtime, deadline).unwrap_err();
        // Each list of missing ranks is one of its own.
        assert!(matches!(&error, Error::Missing { missing, .. } if *missing == [1]), "{error}");
    }

    #[test]
    fn the_line_for_those_who_wait_names_the_missing_and_where_this_rank_listens() {
        let (_, own_info, config) = introduction(Duration::from_secs(60));
        let line = |missing: &[usize], count| {
            still_waiting(&config, Duration::from_millis(4900), own_info.address, (missing, count), 0)
        };
        let listens = "it listens on 127.0.0.1:1";
        assert_eq!(
            line(&[1, 3], 2),
            format!("rank 0 has waited 5 s for ranks [1, 3] to join at 127.0.0.1:1; {listens}")
        );
        let many = Vec::from_iter(1..65);
        assert!(line(&many, 999).contains("15, 16] and 983 more to join"), "{}", line(&many, 999));
    }

    #[test]
    fn a_rank_tells_the_coordinator_all_of_the_time_that_it_has_and_waits_for_the_answer_after_that() {
        let ([mut ours, mut theirs], own_info, config) = introduction(Duration::from_millis(200));
        let runtime = Runtime::system();
        let deadline = runtime.deadline(config.timeout);
        let error = introduce(&mut ours, own_info, &config, &runtime, deadline).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        assert!(runtime.elapsed(deadline) >= config.timeout + answer_grace(config.timeout));
        let Ok(Some(Frame::Join { timeout_ms, .. })) = theirs.pull() else { panic!("it joins first") };
        assert!(timeout_ms <= 200, "{timeout_ms}");
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
        let own_info = |address: &&str| PeerInfo::here(address.parse().unwrap(), 0, None);
        assert_eq!(parted_by_loopback(&addresses.iter().map(own_info).collect::<Vec<_>>()), expected);
    }
}

//! The service thread of a process: handshakes of incoming connections, heartbeats, and the abort.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::PollFlags;
use socket2::Socket;

use crate::bookkeeping::HEARTBEAT;
use crate::bootstrap::acceptor::{Acceptor, Admitted, ListenerKind};
use crate::bootstrap::auth::Purpose;
use crate::bootstrap::config::CoordinatorHost;
use crate::bootstrap::control::{ControlConnection, Frame};
use crate::bootstrap::session::{GOODBYE_LIMIT, Session, lock, number};
use crate::bootstrap::threads::ThreadWatch;
use crate::bootstrap::{host, probe};
use crate::link::peer_link::PeerLink;
use crate::link::shm::{self, ShmLink};
use crate::link::socket;
use crate::store::{StoreInbox, StoreReply};
use crate::{Abort, Cause, CircularWait, Deadline, Fingerprint};

/// The state of the service thread.
pub(crate) struct Service {
    /// The acceptor of the network, and that of the host if there is one.
    acceptors: Vec<Acceptor>,
    line: ControlConnection,
    session: Arc<Session>,
    next_heartbeat: Deadline,
    last_look: Deadline,
    /// The time at which the coordinator counts as silent.
    silent_by: Deadline,
    /// `true` if the coordinator is still there.
    connected: bool,
    /// `true` if there may be free memory to return to the system.
    returns_memory: bool,
    /// The deadline for the coordinator to hang up, once the session is closing.
    hang_up_limit: Option<Deadline>,
    /// The coordinator's address, if it is on another host.
    far_coordinator: Option<SocketAddr>,
    threads: ThreadWatch,
    /// Ranks of this host whose processes are watched, with descriptors that become readable when they end.
    /// The connections of a process may outlive it if it has forked.
    watched: Vec<(usize, OwnedFd)>,
    /// Ranks that need no watching any more, or cannot be watched.
    unwatched: HashSet<usize>,
    store_inbox: StoreInbox,
    /// The waits of the circle that the next abort lists.
    circle: Vec<CircularWait>,
}

impl Service {
    /// Creates the service thread's state, with the network listener and the host's Unix socket, if there is
    /// one.
    pub(crate) fn new(
        session: Arc<Session>,
        listener: TcpListener,
        host_listener: Option<Socket>,
        line: ControlConnection,
    ) -> Self {
        let runtime = &session.runtime;
        let listeners =
            [(ListenerKind::Network, Some(listener.into())), (ListenerKind::CoordinatorHost, host_listener)];
        let is_far = !socket::is_within_host(&line.stream);
        let coordinator = line.stream.peer_addr().ok().and_then(|address| address.as_socket());
        let acceptor = |(unix_socket, listener)| {
            Some(Acceptor::new(unix_socket, listener?, session.key.clone(), session.epoch, runtime.clone()))
        };
        Self {
            acceptors: listeners.into_iter().filter_map(acceptor).collect(),
            line,
            // The coordinator has counted silence since it told this rank that all have joined.
            next_heartbeat: runtime.deadline(Duration::ZERO),
            last_look: runtime.deadline(HEARTBEAT),
            silent_by: runtime.deadline(session.liveness),
            connected: true,
            returns_memory: false,
            hang_up_limit: None,
            far_coordinator: coordinator.filter(|_| is_far),
            threads: ThreadWatch::new(runtime, session.warns_of_threads),
            watched: Vec::new(),
            unwatched: HashSet::from([session.rank.index()]),
            store_inbox: StoreInbox::default(),
            circle: Vec::new(),
            session,
        }
    }

    /// Serves until the session is closing and every frame is sent.
    pub(crate) fn run(mut self) {
        if let Some(outer_job) = &self.session.outer_job {
            outer_job.notify(&self.session);
        }
        loop {
            self.watch_processes();
            if let Err(e) = self.wait() {
                tracing::error!(error = %e, "the service thread cannot wait and ends");
                self.session.give_up(Cause::gave_up(format_args!("waiting: {e}")), Fingerprint::NONE);
                // If the abort cannot be sent, the end of the connection says that this process is gone.
                let _ = self.send_frames();
                self.session.abort_without_coordinator();
                return;
            }
            self.session.service_waker.drain();
            if let Some(outer_job) = &self.session.outer_job {
                self.session.take_decision(outer_job);
            }
            self.returns_memory = self.returns_memory && self.session.heap.return_some();
            self.threads.look(&self.session);
            let closing = self.session.closing.load(Ordering::Acquire);
            let ended = self.take_ended();
            let spoken = self.send_frames();
            // Reads the coordinator's last frames, even if nothing can be sent to it any more.
            self.read_frames();
            let is_coordinator =
                |&rank: &usize| rank == 0 && self.session.coordinator == CoordinatorHost::RankZero;
            if self.connected && (spoken.is_err() || ended.iter().any(is_coordinator)) {
                self.lose_coordinator(Cause::Died);
            }
            self.probe_coordinator();
            // A peer that is told here that it is admitted counts its connection as open, and cannot have
            // left before.
            let admitted: Vec<_> = self.acceptors.iter_mut().flat_map(Acceptor::advance).collect();
            admitted.into_iter().for_each(|admitted| self.admit(admitted));
            if let Some(error) = self.acceptors.iter_mut().find_map(Acceptor::take_out_of_files) {
                let cause = Cause::gave_up(format_args!("accepting a connection: {error}"));
                self.session.give_up(cause, Fingerprint::NONE);
            }
            if closing && self.hang_up_wait_is_over() {
                return;
            }
        }
    }

    /// Returns `true` if the coordinator has hung up, as it does after the goodbye, or has had long enough
    /// for it. If this side hung up first, with unread frames, the coordinator could lose frames that it has
    /// not read. Until then it gets heartbeats.
    fn hang_up_wait_is_over(&mut self) -> bool {
        let runtime = &self.session.runtime;
        let hang_up_limit = *self.hang_up_limit.get_or_insert_with(|| runtime.deadline(GOODBYE_LIMIT));
        self.next_heartbeat = self.next_heartbeat.earlier(hang_up_limit);
        !self.connected || runtime.expired(hang_up_limit)
    }

    fn wait(&self) -> io::Result<()> {
        let mut watched = vec![self.session.service_waker.watch()];
        watched.extend(self.acceptors.iter().flat_map(Acceptor::watch));
        if self.connected {
            let unsent = if self.line.unsent() { PollFlags::OUT } else { PollFlags::empty() };
            watched.push(socket::watch(&self.line.stream, PollFlags::IN | unsent));
        }
        watched.extend(self.watched.iter().map(|(_, process)| socket::watch(process, PollFlags::IN)));
        let silent = self.session.runtime.remaining(self.silent_by);
        let next = self.session.runtime.remaining(self.next_heartbeat);
        let next = if self.connected { next.min(silent) } else { next };
        // Looks for other work in between.
        let next = if self.returns_memory { Duration::ZERO } else { next };
        let next = self.acceptors.iter().filter_map(Acceptor::look_again_in).fold(next, Duration::min);
        socket::poll(&mut watched, next).map(drop)
    }

    /// Starts to watch the process of the next rank on this host that has not left. So each rank is watched by
    /// one other rank. Also watches rank 0 if rank 0 hosts the coordinator.
    fn watch_processes(&mut self) {
        let session = &*self.session;
        let me = session.rank;
        let left = lock(&session.left);
        self.watched.retain(|(rank, _)| !left.contains(rank));
        let hosts = session.coordinator == CoordinatorHost::RankZero;
        let others = (1..me.world_size()).map(|distance| me.plus(distance).index());
        let here = session.peer_infos[me.index()].pid.namespace;
        let is_next = |rank: &usize| {
            let is_here = session.peer_infos[*rank].pid.namespace == here;
            is_here && !self.unwatched.contains(rank) && !left.contains(rank)
        };
        let next = { others }.find(is_next);
        for rank in next.into_iter().chain(hosts.then_some(0).filter(|rank| !left.contains(rank))) {
            if self.unwatched.contains(&rank) || self.watched.iter().any(|(watched, _)| *watched == rank) {
                continue;
            }
            match host::watch_process(session.peer_infos[rank].pid) {
                Some(process) => self.watched.push((rank, process)),
                None => drop(self.unwatched.insert(rank)),
            }
        }
    }

    /// Returns the ranks whose processes have ended since the last call, and informs the coordinator, which
    /// knows whether they had left before.
    fn take_ended(&mut self) -> Vec<usize> {
        let has_ended = |process: &OwnedFd| {
            let mut watched = [socket::watch(process, PollFlags::IN)];
            socket::poll(&mut watched, Duration::ZERO).is_ok() && !watched[0].revents().is_empty()
        };
        let ended: Vec<_> = self.watched.extract_if(.., |(_, process)| has_ended(process)).collect();
        let ended: Vec<_> = ended.into_iter().map(|(rank, _)| rank).collect();
        for &rank in &ended {
            self.unwatched.insert(rank);
            self.session.outgoing.push(Frame::Ended { rank: number(rank) });
        }
        ended
    }

    /// Probes the coordinator with a new connection, if it runs on another host and has been silent for a
    /// while. An answer proves that the coordinator lives and that packets arrive.
    fn probe_coordinator(&mut self) {
        let Some(address) = self.far_coordinator.filter(|_| self.connected) else { return };
        let (runtime, limit) = (&self.session.runtime, self.session.liveness);
        if self.session.probes.coordinator_has_answered() {
            self.silent_by = runtime.deadline(limit);
        }
        if runtime.elapsed(self.silent_by) >= probe::probe_after(limit) {
            probe::coordinator(&self.session, address);
        }
    }

    /// Hands an authenticated connection to its user.
    fn admit(&self, Admitted { stream, identity, share }: Admitted) {
        let session = &self.session;
        let (from, to) = (identity.from as usize, identity.to as usize);
        let is_for_us = to == session.rank.index() && from < session.rank.world_size();
        match identity.purpose {
            Purpose::Data(channel, stripe)
                if is_for_us && stripe.count == session.sockets_per_peer && stripe.index < stripe.count =>
            {
                session.arrivals.put_stripe((channel, from), stripe, stream, &session.abort_state);
            }
            Purpose::Memory(channel) if is_for_us && share.is_some() => {
                let link = share.map(|share| ShmLink::new(stream, share, session.offers_single_copy()));
                let link = link.map(PeerLink::Shm).expect("it has come");
                session.arrivals.put(channel, from, link, &session.abort_state);
            }
            Purpose::Arena(number) if to == session.rank.index() => {
                if let Err(error) = shm::give_arena(&stream, &session.heap, number) {
                    tracing::debug!(%error, from, "an arena was asked for and not taken");
                }
            }
            Purpose::Probe => {}
            _ => tracing::warn!(?identity, "a process of this job connected to the wrong place"),
        }
    }

    /// Sends the queued frames, and a heartbeat if it is time.
    fn send_frames(&mut self) -> io::Result<()> {
        let runtime = &self.session.runtime;
        let heartbeat = runtime.expired(self.next_heartbeat).then_some(Frame::Beat);
        if heartbeat.is_some() {
            self.next_heartbeat = runtime.deadline(HEARTBEAT);
            self.session.heap.age();
            self.returns_memory = true;
        }
        let outgoing = std::iter::from_fn(|| self.session.outgoing.pop());
        for frame in heartbeat.into_iter().chain(outgoing) {
            if self.connected {
                self.line.push(frame)?;
            }
        }
        if self.connected { self.line.flush() } else { Ok(()) }
    }

    /// Reads and handles the coordinator's frames, and notices if it is silent.
    fn read_frames(&mut self) {
        let runtime = self.session.runtime.clone();
        while self.connected {
            match self.line.pull() {
                Ok(None) => break,
                Ok(Some(frame)) => {
                    self.silent_by = runtime.deadline(self.session.liveness);
                    match frame {
                        Frame::Circle(wait) => self.circle.push(wait),
                        Frame::Abort(mut abort) => {
                            if let Some(waits) = abort.cause.circle_mut() {
                                *waits = std::mem::take(&mut self.circle);
                            }
                            self.take_abort(abort);
                        }
                        Frame::AskSent { channel, to } => self.session.report_sent(channel, to),
                        Frame::Left { rank } => self.session.record_left(rank as usize),
                        Frame::Ask { rank, origin } => self.session.answer(rank, &origin),
                        Frame::LeftChannel { rank, channel } => {
                            self.session.record_left_channel(channel, rank as usize);
                        }
                        Frame::OtherMembers { rank, channel, members } => {
                            let members = members.into_iter().map(|member| member as usize).collect();
                            self.session.record_other_members(channel, rank as usize, members);
                        }
                        Frame::Store { number, is_last, piece } => self.take_reply(number, &piece, is_last),
                        _ => {}
                    }
                }
                Err(_) => self.lose_coordinator(Cause::Died),
            }
        }
        if runtime.elapsed(self.last_look) > 2 * HEARTBEAT {
            // This thread was not running, so the silence proves nothing.
            self.silent_by = runtime.deadline(self.session.liveness);
        }
        self.last_look = runtime.deadline(HEARTBEAT);
        if self.connected && runtime.expired(self.silent_by) {
            let lost = self.far_coordinator.and_then(|address| lost_host(&self.session, address.ip()));
            match lost {
                Some((rank, cause)) => self.end_without_coordinator(cause, rank),
                None => self.lose_coordinator(Cause::Silent),
            }
        }
    }

    /// Commits the coordinator's record, or proposes it to the outer job.
    fn take_abort(&self, abort: Abort) {
        match &self.session.outer_job {
            Some(outer_job) => outer_job.decision.propose(outer_job.abort(abort)),
            None => self.session.abort_state.commit(abort),
        }
    }

    /// Takes a piece of a reply of the store, and wakes the thread that waits for the reply.
    fn take_reply(&mut self, number: u64, piece: &[u8], is_last: bool) {
        match self.store_inbox.add(piece, is_last).map(|reply| reply.map(|reply| StoreReply::decode(&reply)))
        {
            Ok(None) => {}
            Ok(Some(Some(reply))) => self.session.deliver_reply(number, reply),
            Ok(Some(None)) | Err(_) => self.lose_coordinator(Cause::Protocol),
        }
    }

    /// Ends the job without the coordinator. If there is an outer job, the coordinator is only that of this host, in its first
    /// rank, to which `cause` has happened.
    fn lose_coordinator(&mut self, cause: Cause) {
        let (cause, rank) = match self.session.coordinator {
            _ if self.session.outer_job.is_some() => (cause, 0),
            CoordinatorHost::RankZero => (Cause::CoordinatorLost, 0),
            CoordinatorHost::Launcher => (Cause::LauncherLost, self.session.rank.index()),
        };
        self.end_without_coordinator(cause, rank);
    }

    fn end_without_coordinator(&mut self, cause: Cause, rank: usize) {
        self.connected = false;
        if self.session.closing.load(Ordering::Acquire) {
            return;
        }
        let reporter = self.session.rank.index();
        let abort = Abort { cause, rank, reporter, call: Fingerprint::NONE };
        self.session.report(abort);
        self.session.abort_without_coordinator();
    }
}

/// Returns the first rank of the coordinator's host, and the cause that nothing arrives from there. Returns `None` if no rank
/// is known to be there.
fn lost_host(session: &Session, coordinator: IpAddr) -> Option<(usize, Cause)> {
    let host = coordinator.to_canonical();
    let all = session.peer_infos.iter().enumerate();
    let mut there = all.filter(|(_, theirs)| theirs.address.ip().to_canonical() == host);
    let (rank, _) = there.next()?;
    Some((rank, Cause::HostLost { host, hosts: 1, ranks: 1 + there.count() }))
}

/// Returns the address of this process's listener that other ranks are to use: on the network interface that
/// reached the coordinator.
pub(crate) fn listener_address(line: &Socket) -> io::Result<SocketAddr> {
    let address = line.local_addr()?.as_socket();
    let mut address = address.ok_or(io::ErrorKind::AddrNotAvailable)?;
    address.set_ip(address.ip().to_canonical());
    address.set_port(0);
    Ok(address)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::Runtime;
    use crate::bootstrap::auth::Key;
    use crate::bootstrap::control::peer_frames;
    use crate::bootstrap::rendezvous::join;
    use crate::process::Config;

    #[test]
    fn a_rank_gives_signs_of_life_from_the_start_until_the_coordinator_hangs_up() {
        let runtime = Runtime::system();
        let listener = socket::listen((Ipv4Addr::LOCALHOST, 0).into(), None).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let config = Config::new(1, 2, &address).unwrap().with_job("test").with_external_coordinator();
        let rank = move || drop(join(&config, &Runtime::system(), None).unwrap());
        let rank = runtime.spawn("rank", rank).unwrap();
        let mut acceptor =
            Acceptor::new(ListenerKind::Network, listener.into(), Key::new(None, "test"), 0, runtime);
        let stream = loop {
            let mut watched: Vec<_> = acceptor.watch().collect();
            assert!(socket::poll(&mut watched, Duration::from_secs(60)).unwrap());
            if let Some(Admitted { stream, .. }) = acceptor.advance().pop() {
                break stream;
            }
        };
        let mut line = ControlConnection::new(stream);
        let hear = |line: &mut ControlConnection| loop {
            if let Some(frame) = line.pull().expect("it has not hung up") {
                return frame;
            }
            let mut watched = [socket::watch(&line.stream, PollFlags::IN)];
            assert!(socket::poll(&mut watched, Duration::from_secs(60)).unwrap());
        };
        let Frame::Join { peer_info, .. } = hear(&mut line) else { panic!("it joins first") };
        line.push_all(&peer_frames(&[peer_info; 2])).unwrap();
        assert_eq!(hear(&mut line), Frame::Beat, "it gives one at once");
        while hear(&mut line) != Frame::Goodbye {}
        assert_eq!(hear(&mut line), Frame::Beat);
        drop(line);
        rank.join().unwrap();
    }
}

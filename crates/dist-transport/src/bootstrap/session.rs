//! The session: the part of one process in a job, shared by all its transports.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::PollFlags;
use socket2::Socket;

use crate::bookkeeping::{CallHistory, HEARTBEAT};
use crate::bootstrap::abort_state::{AbortState, Waker};
use crate::bootstrap::auth::{Key, Stripe};
use crate::bootstrap::channels::{Channels, ForkPath};
use crate::bootstrap::config::{CoordinatorHost, Medium};
use crate::bootstrap::control::{Cores, Frame, Missing, PeerInfo, WaitReport};
use crate::bootstrap::coordinator::Coordinator;
use crate::bootstrap::dial::ANSWER_LIMIT;
#[cfg(all(feature = "shm", target_os = "linux"))]
use crate::bootstrap::dial::map_arena;
use crate::bootstrap::outer_job::OuterJob;
use crate::bootstrap::probe::Probes;
use crate::bootstrap::store::StoreCalls;
use crate::cpu::tuning;
use crate::host_memory::Heap;
#[cfg(all(feature = "shm", target_os = "linux"))]
use crate::host_memory::{GroupPool, POOL_MEMBERS_MAX, POOL_NUMBER, POOL_RANKS_MAX, PoolHandle, Process};
use crate::link::message::LinkError;
use crate::link::peer_link::PeerLink;
use crate::link::socket;
use crate::link::striped_socket::StripedSocket;
use crate::runtime::Task;
use crate::shm_group::Reach;
use crate::{Abort, Activity, Cause, ChannelId, Deadline, Error, Fingerprint, Rank, Result, Runtime};

/// The longest wait of a leaving process until its goodbye is sent.
pub(crate) const GOODBYE_LIMIT: Duration = Duration::from_secs(1);

/// The longest wait for the decision of an outer job, whose place of decision may be on another host.
const OUTER_LIMIT: Duration = Duration::from_secs(5);

/// The longest wait for the coordinator to commit an abort that this process has proposed.
const COMMIT_LIMIT: Duration = Duration::from_millis(250);

/// The limit in the process that hosts the coordinator: nobody would be told without it.
const COMMIT_LIMIT_OF_HOST: Duration = Duration::from_secs(1);

/// The time after which a wait is reported to the coordinator.
pub(crate) const WAITING_LIMIT: Duration = Duration::from_millis(100);

/// The longest wait for the pool of a host. A group whose members have no pool has a segment of its own.
#[cfg(all(feature = "shm", target_os = "linux"))]
const POOL_LIMIT: Duration = Duration::from_secs(1);

/// The shared state of a process in a job. Dropping the last transport ends it.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) rank: Rank,
    pub(crate) runtime: Runtime,
    pub(crate) key: Key,
    pub(crate) epoch: u32,
    /// The address and the host of each rank.
    pub(crate) peer_infos: Vec<PeerInfo>,
    pub(crate) coordinator: CoordinatorHost,
    /// The job of another transport, if this session belongs to it. It decides about aborts.
    pub(crate) outer_job: Option<OuterJob>,
    /// The longest time that the coordinator may send no heartbeat.
    pub(crate) liveness: Duration,
    /// The longest time without a message between this host and another one.
    pub(crate) liveness_between_hosts: Duration,
    /// The medium of messages.
    pub(crate) medium: Medium,
    /// The number of TCP connections of a link, the same on all ranks.
    pub(crate) sockets_per_peer: u16,
    /// Whether this process warns of more threads than its share of the cores.
    pub(crate) warns_of_threads: bool,
    /// The number of links that this process has tried to open over TCP.
    pub(crate) link_attempts: AtomicU32,
    /// Ranks of this host with which memory could not be shared.
    pub(crate) unshareable: Mutex<HashSet<usize>>,
    /// The access to its ordinary memory that this rank allows other ranks.
    pub(crate) reach: Reach,
    /// The heap of memory that this process shares.
    pub(crate) heap: Arc<Heap>,
    /// The arenas of other ranks that this process has mapped.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(crate) arenas: Mutex<HashMap<(usize, u32), Arc<crate::host_memory::Mapping>>>,
    /// The memory of this host from which groups take theirs.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(crate) pool: PoolHandle,
    /// The access that was found in both directions, between this rank and others of its host.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(crate) proven: Mutex<HashMap<usize, ProvenReach>>,
    pub(crate) abort_state: AbortState,
    pub(crate) arrivals: Arrivals,
    pub(crate) channels: Channels,
    /// Ranks that have left in order.
    pub(crate) left: Mutex<HashSet<usize>>,
    /// The last announced calls, by the channel under which they are compared.
    pub(crate) announced: Mutex<HashMap<ChannelId, CallHistory>>,
    /// The running probes.
    pub(crate) probes: Probes,
    /// The requests to the store that wait for their replies.
    pub(crate) store_calls: StoreCalls,
    /// Frames that the service thread has to send to the coordinator.
    pub(crate) outgoing: FrameQueue,
    pub(crate) closing: AtomicBool,
    /// Wakes the service thread.
    pub(crate) service_waker: Waker,
}

/// The access to ordinary memory that was found between this rank and another one.
#[cfg(all(feature = "shm", target_os = "linux"))]
#[derive(Debug, Clone)]
pub(crate) struct ProvenReach {
    pub(crate) reach: Reach,
    /// The process of the other rank, if this process can write into its memory.
    pub(crate) process: Option<Arc<Process>>,
}

/// Frames that wait to be sent. A call that waits long adds frames here and must not allocate.
#[derive(Debug)]
pub(crate) struct FrameQueue(Mutex<VecDeque<Frame>>);

impl FrameQueue {
    /// More frames than long waits add before the service thread sends them.
    const CAPACITY: usize = 64;

    pub(crate) fn new() -> Self {
        Self(Mutex::new(VecDeque::with_capacity(Self::CAPACITY)))
    }

    pub(crate) fn push(&self, frame: Frame) {
        lock(&self.0).push_back(frame);
    }

    /// Adds these frames, with no other frame between them.
    pub(crate) fn push_all(&self, frames: impl Iterator<Item = Frame>) {
        lock(&self.0).extend(frames);
    }

    pub(crate) fn pop(&self) -> Option<Frame> {
        lock(&self.0).pop_front()
    }
}

/// Owns a session's threads. Dropped with its last transport.
#[derive(Debug)]
pub(crate) struct Membership {
    pub(crate) session: Arc<Session>,
    pub(crate) service: Option<Task<()>>,
    pub(crate) coordinator: Option<Coordinator>,
}

impl Session {
    /// Proposes an abort: to this process at once, to the other ranks through the coordinator, which decides. If there is an
    /// outer job, the coordinator proposes one of its ranks' records there.
    pub(crate) fn report(&self, abort: Abort) {
        if self.abort_state.propose(&self.abort_in_job(abort.clone())) {
            if self.rank.world_size() == 1 {
                self.abort_state.finalize();
            }
            self.outgoing.push(Frame::Abort(abort));
            self.service_waker.notify();
        }
    }

    /// Returns the abort record if the job has ended.
    ///
    /// A failed call waits a moment for the coordinator, which may have committed another record than the one
    /// that this process has seen. If rank 0 hosts the coordinator, its own calls fail only after the other
    /// ranks were informed, because its process may end then.
    pub(crate) fn why_ended(&self) -> Option<Abort> {
        let seen = self.abort_state.get()?;
        if let Some(outer_job) = &self.outer_job {
            return Some(self.await_decision(outer_job, seen));
        }
        let hosts = self.coordinator == CoordinatorHost::RankZero && self.rank.index() == 0;
        let limit = if hosts { COMMIT_LIMIT_OF_HOST } else { COMMIT_LIMIT };
        let word = self.abort_state.wait_committed(&self.runtime, self.runtime.deadline(limit));
        Some(word.unwrap_or(seen))
    }

    /// Waits for the decision of the outer job. If the coordinator proposes nothing there, this rank does.
    pub(crate) fn await_decision(&self, outer_job: &OuterJob, seen: Abort) -> Abort {
        let decided = |limit| {
            let deadline = self.runtime.deadline(limit);
            self.abort_state.wait_until(&self.runtime, deadline, || self.take_decision(outer_job))
        };
        let after_proposal = || {
            outer_job.decision.propose(seen.clone());
            decided(OUTER_LIMIT)
        };
        decided(COMMIT_LIMIT).or_else(after_proposal).unwrap_or(seen)
    }

    /// Commits the record of the outer job, once there is one, and returns it. A transport of this session that is dropped then
    /// says no goodbye.
    pub(crate) fn take_decision(&self, outer_job: &OuterJob) -> Option<Abort> {
        let abort = outer_job.decision.decided()?;
        if !self.abort_state.is_final() {
            self.abort_state.commit(abort.clone());
        }
        Some(abort)
    }

    /// Ends the wait for the coordinator, which will commit no record any more.
    pub(crate) fn abort_without_coordinator(&self) {
        match (&self.outer_job, self.abort_state.get()) {
            (Some(outer_job), Some(abort)) => outer_job.decision.propose(abort),
            _ => self.abort_state.finalize(),
        }
    }

    /// Returns the number of a rank in the job: in the outer one, if there is one.
    pub(crate) fn rank_in_job(&self, rank: usize) -> usize {
        self.outer_job.as_ref().map_or(rank, |outer_job| outer_job.rank(rank))
    }

    /// Numbers the ranks of a record as the job does.
    pub(crate) fn abort_in_job(&self, abort: Abort) -> Abort {
        match &self.outer_job {
            Some(outer_job) => outer_job.abort(abort),
            None => abort,
        }
    }

    /// Numbers the peer of an error as the job does. An abort is numbered so already.
    pub(crate) fn error_in_job(&self, error: Error) -> Error {
        match &self.outer_job {
            Some(outer_job) => outer_job.error(error),
            None => error,
        }
    }

    /// Informs the coordinator that no packet has reached a rank, or come back, for the silence limit. If the
    /// coordinator knows that the rank lives, it aborts the job.
    pub(crate) fn report_unreachable(&self, rank: usize) {
        let reporter = self.rank.index();
        let hosts = [rank, reporter].map(|rank| self.peer_infos[rank].address.ip().to_canonical());
        let cause = Cause::Unreachable { hosts: Some(hosts) };
        let abort = Abort { cause, rank, reporter, call: Fingerprint::NONE };
        self.outgoing.push(Frame::Abort(abort));
        self.service_waker.notify();
    }

    /// Returns how long the network to another rank may be silent. Returns `None` if both are on one host,
    /// where only a process can be silent.
    pub(crate) fn silence_limit(&self, peer: usize) -> Option<Duration> {
        let [ours, theirs] = [self.rank.index(), peer].map(|rank| self.peer_infos[rank].address.ip());
        (!socket::are_of_one_host(ours, theirs)).then_some(self.liveness_between_hosts)
    }

    /// Reports a long wait, or its end. The coordinator then notices calls that contradict each other, and
    /// the rank that delays all others.
    fn report_wait(&self, channel: ChannelId, calls: &CallHistory, wait: WaitReport) {
        if wait.on as usize != self.rank.index() {
            // Announced calls are reported first, because they name the work of the program. Their report names no missing
            // message, which belongs to the call that is reported below.
            let wait = WaitReport { missing: Missing::Anything, ..wait };
            for (&channel, calls) in &*lock(&self.announced) {
                self.outgoing.push(Frame::Waiting { channel, wait, calls: calls.last_calls_first() });
            }
        }
        self.outgoing.push(Frame::Waiting { channel, wait, calls: calls.last_calls_first() });
        self.service_waker.notify();
    }

    /// Stores an announced call, which is reported if this rank waits long.
    pub(crate) fn announce(&self, channel: ChannelId, call: &Fingerprint) {
        let mut announced = lock(&self.announced);
        announced.entry(channel.of_announcements()).or_insert(CallHistory::NONE).begin(call);
    }

    /// Removes the announced calls of a channel that this rank leaves.
    pub(crate) fn forget_announced(&self, channel: ChannelId) {
        lock(&self.announced).remove(&channel.of_announcements());
    }

    /// Records that a rank has left in order, and wakes threads that may wait for the rank.
    pub(crate) fn record_left(&self, rank: usize) {
        lock(&self.left).insert(rank);
        self.abort_state.wake_waiters();
    }

    /// Records that a rank has left a channel, and wakes threads that may wait for the rank on that channel.
    pub(crate) fn record_left_channel(&self, channel: ChannelId, rank: usize) {
        self.channels.record_left(channel, rank);
        self.abort_state.wake_waiters();
    }

    /// Returns `true` if a rank is known to have left the job or this channel in order. Every connection that
    /// it opened before has then [arrived](Arrivals): the service thread stores a connection in the same step
    /// in which it admits the rank, and it also receives the departure.
    pub(crate) fn has_left(&self, channel: ChannelId, rank: usize) -> bool {
        lock(&self.left).contains(&rank) || self.channels.was_left_by(channel, rank)
    }

    /// Sends a rank the question whether it has left a channel.
    pub(crate) fn ask(&self, rank: usize, origin: Option<ForkPath>) {
        if let (Some(origin), Ok(rank)) = (origin, u32::try_from(rank)) {
            self.outgoing.push(Frame::Ask { rank, origin });
            self.service_waker.notify();
        }
    }

    /// Records the other members that a rank has named for this channel's fork, and wakes threads that may
    /// wait for it.
    pub(crate) fn record_other_members(&self, channel: ChannelId, rank: usize, members: Vec<usize>) {
        self.channels.record_other_members(channel, rank, members);
        self.abort_state.wake_waiters();
    }

    /// Answers the question of a rank whether this rank has left a channel. Answers if it has, or if it named
    /// other members for that fork; otherwise nothing is sent.
    pub(crate) fn answer(&self, rank: u32, origin: &ForkPath) {
        if let Some(members) = self.channels.named_instead(origin) {
            let members = members.into_iter().map(|member| u32::try_from(member).unwrap_or(u32::MAX));
            let (channel, members) = (origin.channel(), members.collect());
            self.outgoing.push(Frame::OtherMembers { rank, channel, members });
            self.service_waker.notify();
        } else if self.channels.has_left(origin) {
            self.arrivals.dismiss(origin.channel(), rank as usize);
            self.outgoing.push(Frame::LeftChannel { rank, channel: origin.channel() });
            self.service_waker.notify();
        }
    }

    /// Reports how many messages this rank has begun to send to a member of a channel, and how many signals it has given
    /// there, if it has not left the channel.
    pub(crate) fn report_sent(&self, channel: ChannelId, to: u32) {
        if let Some((messages, signals)) = self.channels.sent(channel, to as usize) {
            self.outgoing.push(Frame::Sent { channel, to, messages, signals });
        }
    }

    /// Returns `true` if memory may be shared with a rank, as far as is known.
    pub(crate) fn may_share(&self, peer: usize) -> bool {
        let is_here = || self.peer_infos[peer].host == self.peer_infos[self.rank.index()].host;
        match self.medium {
            Medium::Tcp => false,
            Medium::Shm => true,
            Medium::Auto => is_here() && !lock(&self.unshareable).contains(&peer),
        }
    }

    /// Returns how to wait while a connection to another rank is made: until the deadline, or until the job is
    /// aborted.
    pub(crate) fn connection_wait(&self, deadline: Deadline) -> ConnectionWait<'_> {
        ConnectionWait {
            abort_state: Some(&self.abort_state),
            ..ConnectionWait::before_the_job(&self.runtime, deadline)
        }
    }

    /// Returns the ranks of this process's host, including itself.
    fn ranks_on_host(&self) -> impl Iterator<Item = &PeerInfo> {
        let here = self.peer_infos[self.rank.index()].host;
        self.peer_infos.iter().filter(move |peer_info| peer_info.host == here)
    }

    /// Returns how many cores those of these members that are on this host have together.
    pub(crate) fn cores(&self, members: &[usize]) -> usize {
        let here = self.peer_infos[self.rank.index()].host;
        let peer_infos = members.iter().map(|&member| &self.peer_infos[member]);
        Cores::total(peer_infos.filter(|peer_info| peer_info.host == here).map(|peer_info| peer_info.cores))
    }

    /// Returns how many ranks of this host may run on this rank's cores, including itself, and how many cores these are.
    pub(crate) fn ranks_on_own_cores(&self) -> (usize, usize) {
        let own = self.peer_infos[self.rank.index()].cores;
        let ranks = self.ranks_on_host().filter(|peer_info| peer_info.cores.first == own.first).count();
        (ranks, own.count as usize)
    }

    /// Returns `true` if each rank of this host can have its own core.
    pub(crate) fn has_core_per_rank(&self) -> bool {
        self.ranks_on_host().count() <= Cores::total(self.ranks_on_host().map(|peer_info| peer_info.cores))
    }

    /// Returns `true` if all of these ranks run on one host and may share memory there. Every one of these
    /// ranks gets the same result.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(crate) fn may_all_share(&self, members: &[usize]) -> bool {
        let peer_infos = || members.iter().map(|&member| &self.peer_infos[member]);
        members.len() > 1
            && peer_infos()
                .all(|peer_info| peer_info.shares() && peer_info.host == self.peer_infos[members[0]].host)
    }

    /// Returns the pool of this host, from which groups of these members take memory. It is mapped at the first call,
    /// at most until this deadline. Returns `None` if these members use no pool.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(crate) fn group_pool(&self, members: &[usize], deadline: Deadline) -> Option<&Arc<GroupPool>> {
        if !self.may_use_pool(members) {
            return None;
        }
        let rank = self.rank.index();
        self.pool.get_or_map(rank, || {
            let here = self.peer_infos[rank].host;
            let mut peer_infos = self.peer_infos.iter();
            let first = peer_infos.position(|peer_info| peer_info.host == here && peer_info.shares())?;
            if first == rank {
                return self.heap.pool();
            }
            let deadline = deadline.earlier(self.runtime.deadline(POOL_LIMIT));
            let mapped = map_arena(self, first, POOL_NUMBER, self.connection_wait(deadline));
            let mapped = mapped.inspect_err(|reason| tracing::info!(?reason, "groups use no pool"));
            mapped.ok().and_then(GroupPool::open).map(Arc::new)
        })
    }

    /// Returns `true` if groups of these members may take memory from the pool of their host.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(crate) fn may_use_pool(&self, members: &[usize]) -> bool {
        members.len() <= POOL_MEMBERS_MAX
            && self.peer_infos.len() <= POOL_RANKS_MAX
            && self.may_all_share(members)
    }

    /// Returns `true` if messages may be sent as single copies: the system then copies them faster than the
    /// two sides do.
    pub(crate) fn offers_single_copy(&self) -> bool {
        tuning().copies_by_system && self.reach >= Reach::Read
    }

    /// Records that memory cannot be shared with a rank, so that it is not tried again.
    pub(crate) fn record_unshareable(&self, peer: usize, reason: &Error) {
        if lock(&self.unshareable).insert(peer) {
            tracing::info!(peer, %reason, "no memory can be shared with this rank");
        }
    }

    /// Aborts the job because of this process.
    pub(crate) fn give_up(&self, cause: Cause, call: Fingerprint) {
        let rank = self.rank.index();
        self.report(Abort { cause, rank, reporter: rank, call });
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.session.give_up(Cause::Panicked, Fingerprint::NONE);
        }
        self.session.outgoing.push(Frame::Goodbye);
        self.session.closing.store(true, Ordering::Release);
        self.session.service_waker.notify();
        if let Some(service) = self.service.take() {
            let _ = service.join_by(self.session.runtime.deadline(GOODBYE_LIMIT));
        }
        if let Some(coordinator) = self.coordinator.take() {
            coordinator.serve_until_left(&self.session.runtime, || false);
        }
    }
}

/// A wait for one connection. It ends at the deadline, or when the job is aborted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnectionWait<'a> {
    pub(crate) runtime: &'a Runtime,
    /// `None` while the process has not joined the job.
    pub(crate) abort_state: Option<&'a AbortState>,
    pub(crate) deadline: Deadline,
    /// The time that the other side has to answer a proof, even if the deadline is sooner.
    pub(crate) answer_limit: Duration,
}

impl<'a> ConnectionWait<'a> {
    /// Creates a wait for connections by which a process joins a job.
    pub(crate) fn before_the_job(runtime: &'a Runtime, deadline: Deadline) -> Self {
        Self { runtime, abort_state: None, deadline, answer_limit: ANSWER_LIMIT }
    }

    /// Waits until the connection is ready for one of these events.
    ///
    /// # Errors
    /// At the deadline, if the job is aborted, and if the system cannot wait.
    pub(crate) fn ready(&self, stream: &impl AsFd, events: PollFlags) -> Result<(), WaitError> {
        loop {
            let mut watched = vec![socket::watch(stream, events)];
            watched.extend(self.abort_state.map(AbortState::watch));
            socket::poll(&mut watched, self.runtime.remaining(self.deadline))?;
            if !watched[0].revents().is_empty() {
                return Ok(());
            }
            self.check()?;
        }
    }

    /// Checks that the wait may continue.
    ///
    /// # Errors
    /// At the deadline, and if the job is aborted.
    pub(crate) fn check<E>(&self) -> Result<(), WaitError<E>> {
        if let Some(abort) = self.abort_state.and_then(AbortState::get) {
            return Err(WaitError::Aborted(abort));
        }
        if self.runtime.expired(self.deadline) {
            return Err(WaitError::Late);
        }
        Ok(())
    }
}

/// The reason why a wait for one connection failed. A timeout of the system is a failure, not a deadline: the system
/// gives up a connection long before a deadline of minutes.
#[derive(Debug)]
pub(crate) enum WaitError<E = io::Error> {
    /// The deadline passed.
    Late,
    /// The deadline passed after this side had sent its proof. The other side may count the connection as
    /// open.
    Unanswered,
    /// The job was aborted.
    Aborted(Abort),
    /// The connection failed.
    Failed(E),
}

impl<E> WaitError<E> {
    /// Converts the error of a failed connection.
    pub(crate) fn map<F>(self, say: impl FnOnce(E) -> F) -> WaitError<F> {
        match self {
            Self::Late => WaitError::Late,
            Self::Unanswered => WaitError::Unanswered,
            Self::Aborted(abort) => WaitError::Aborted(abort),
            Self::Failed(error) => WaitError::Failed(say(error)),
        }
    }
}

/// A connection that could not be opened. If it was only late, the link error is a timeout.
impl From<WaitError<Error>> for LinkError {
    fn from(error: WaitError<Error>) -> Self {
        match error {
            WaitError::Late | WaitError::Unanswered => Self::TimedOut,
            WaitError::Aborted(abort) => Self::Aborted(abort),
            WaitError::Failed(error) => Self::Unconnected(error),
        }
    }
}

impl<E> From<E> for WaitError<E> {
    fn from(error: E) -> Self {
        Self::Failed(error)
    }
}

/// A wait for other ranks. It is reported to the coordinator once it has lasted for a while, however often
/// the sleep is interrupted.
#[derive(Debug, Default)]
pub(crate) struct LongWait {
    due: Option<Deadline>,
    /// The time at which this wait was first measured.
    began: Option<Duration>,
    /// The last report.
    reported: Option<WaitReport>,
}

impl LongWait {
    /// Restarts the wait, because something has arrived. From now on it waits for `peer`, by its number in the
    /// world.
    pub(crate) fn renew(&mut self, session: &Session, channel: ChannelId, calls: &CallHistory, peer: usize) {
        (self.due, self.began) = (None, None);
        if self.reported.is_some_and(|report| report.on as usize != peer) {
            self.end(session, channel, calls);
        }
    }

    /// Returns the time until which the rank may sleep.
    pub(crate) fn until(&mut self, runtime: &Runtime) -> Deadline {
        let limit = if self.reported.is_some() { HEARTBEAT } else { WAITING_LIMIT };
        self.began.get_or_insert_with(|| runtime.now());
        *self.due.get_or_insert_with(|| runtime.deadline(limit))
    }

    /// Returns `true` if the wait has lasted long enough to be reported. It is then reported to the
    /// coordinator, unless the same report was sent before.
    pub(crate) fn report_if_due(
        &mut self,
        session: &Session,
        channel: ChannelId,
        calls: &CallHistory,
        wait: impl FnOnce() -> WaitReport,
    ) -> bool {
        let is_due = self.due.take_if(|due| session.runtime.expired(*due)).is_some();
        if is_due {
            let wait = wait();
            if self.reported.replace(wait) != Some(wait) {
                session.report_wait(channel, calls, wait);
            }
        }
        is_due
    }

    /// Returns how long nothing has arrived in this wait.
    pub(crate) fn lasted(&self, runtime: &Runtime) -> Duration {
        self.began.map_or(Duration::ZERO, |began| runtime.now().saturating_sub(began))
    }

    /// Returns `true` if the wait was reported.
    pub(crate) const fn is_reported(&self) -> bool {
        self.reported.is_some()
    }

    /// Ends the wait, and reports that if the wait was reported.
    #[inline]
    pub(crate) fn end(&mut self, session: &Session, channel: ChannelId, calls: &CallHistory) {
        if self.reported.take().is_some() {
            let on = number(session.rank.index());
            session.report_wait(
                channel,
                calls,
                WaitReport {
                    on,
                    index: 0,
                    missing: Missing::Anything,
                    messages: 0,
                    signals: 0,
                    is_only_call: false,
                },
            );
        }
    }
}

/// Connections that peers have opened and that no transport has taken yet.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    links: Mutex<HashMap<(ChannelId, usize), PeerLink>>,
    /// Links of which some connections have not arrived yet.
    incomplete: Mutex<HashMap<(ChannelId, usize), IncompleteLink>>,
    /// The number of connections that have arrived so far.
    count: AtomicU64,
}

/// The connections of a link that have arrived so far.
#[derive(Debug)]
struct IncompleteLink {
    /// The peer's number of the attempt to open the link.
    attempt: u32,
    sockets: Vec<Option<Socket>>,
}

impl Arrivals {
    /// Stores one connection of a link. The link arrives when it has all its connections. Those of an earlier attempt of
    /// the same peer are dropped, because the peer has given it up.
    pub(crate) fn put_stripe(
        &self,
        (channel, peer): (ChannelId, usize),
        stripe: Stripe,
        socket: Socket,
        abort_state: &AbortState,
    ) {
        let complete = if stripe.count == 1 {
            Some(StripedSocket::new(socket, Vec::new()))
        } else {
            let mut incomplete = lock(&self.incomplete);
            let link = incomplete.remove(&(channel, peer)).filter(|link| link.attempt >= stripe.attempt);
            let sockets = || (0..stripe.count).map(|_| None).collect();
            let mut link =
                link.unwrap_or_else(|| IncompleteLink { attempt: stripe.attempt, sockets: sockets() });
            if link.attempt == stripe.attempt {
                link.sockets[usize::from(stripe.index)] = Some(socket);
            }
            if link.sockets.iter().all(Option::is_some) {
                let mut sockets = link.sockets.into_iter().flatten();
                sockets.next().map(|first| StripedSocket::new(first, sockets.collect()))
            } else {
                incomplete.insert((channel, peer), link);
                None
            }
        };
        if let Some(sockets) = complete {
            self.put(channel, peer, PeerLink::Socket(sockets), abort_state);
        }
    }

    /// Stores a connection until a call takes it. An earlier connection of the same peer is replaced, because
    /// the peer has given it up.
    pub(crate) fn put(&self, channel: ChannelId, peer: usize, link: PeerLink, abort_state: &AbortState) {
        lock(&self.links).insert((channel, peer), link);
        self.count.fetch_add(1, Ordering::Release);
        abort_state.wake_waiters();
    }

    /// Returns the number of connections that have arrived so far. If it has not changed, no other connection can be
    /// taken.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// Removes and returns the connections of a channel that this process has left.
    pub(crate) fn forget(&self, channel: ChannelId) -> Vec<PeerLink> {
        lock(&self.incomplete).retain(|(of, _), _| *of != channel);
        lock(&self.links).extract_if(|(of, _), _| *of == channel).map(|(_, link)| link).collect()
    }

    /// Sends a goodbye on a connection that no transport will take.
    fn dismiss(&self, channel: ChannelId, peer: usize) {
        lock(&self.incomplete).remove(&(channel, peer));
        self.take(channel, peer).iter().for_each(PeerLink::say_goodbye);
    }

    /// Returns `true` if a message has arrived on a peer's connection that was not taken yet.
    pub(crate) fn has_message(&self, channel: ChannelId, peer: usize) -> bool {
        lock(&self.links).get_mut(&(channel, peer)).is_some_and(PeerLink::has_message)
    }

    /// Takes a peer's connection, if it has arrived.
    pub(crate) fn take(&self, channel: ChannelId, peer: usize) -> Option<PeerLink> {
        lock(&self.links).remove(&(channel, peer))
    }
}

/// Returns a rank's number in the world in the form that messages carry.
pub(crate) fn number(rank: usize) -> u32 {
    u32::try_from(rank).expect("ranks are numbered by this type")
}

/// Returns this deadline, or the time `limit` from now if that is later.
pub(crate) fn at_least(runtime: &Runtime, deadline: Deadline, limit: Duration) -> Deadline {
    if runtime.remaining(deadline) < limit { runtime.deadline(limit) } else { deadline }
}

/// Returns the error of a wait that lasted too long.
pub(crate) fn timeout(runtime: &Runtime, activity: Activity, peer: usize, deadline: Deadline) -> Error {
    let (elapsed, limit) = (runtime.elapsed(deadline), deadline.limit());
    Error::Timeout { activity, peer, elapsed, limit, waits: Vec::new(), count: 0 }
}

/// Locks a mutex and ignores poisoning: a panic of another thread does not make these records wrong.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use socket2::{Domain, Type};

    use super::*;

    /// Stores these connections of a link with three, each with the number of its attempt. Returns whether the link has
    /// arrived after each.
    fn arrived_after(connections: &[(u32, u16)]) -> Vec<bool> {
        let (arrivals, abort_state) = (Arrivals::default(), AbortState::new().unwrap());
        let place = (ChannelId::WORLD, 1);
        let arrived = |&(attempt, index): &(u32, u16)| {
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
            arrivals.put_stripe(place, Stripe { attempt, index, count: 3 }, socket, &abort_state);
            arrivals.take(place.0, place.1).is_some()
        };
        connections.iter().map(arrived).collect()
    }

    #[test]
    fn a_link_arrives_when_it_has_all_its_connections() {
        assert_eq!(arrived_after(&[(5, 2), (5, 0), (5, 1)]), [false, false, true]);
        let again = [(5, 0), (5, 1), (5, 2), (6, 1), (6, 0), (6, 2)];
        assert_eq!(arrived_after(&again), [false, false, true, false, false, true]);
    }

    #[test]
    fn connections_of_an_attempt_that_was_given_up_are_dropped() {
        let given_up = [(5, 0), (5, 1), (6, 2), (5, 2), (6, 0), (6, 1)];
        assert_eq!(arrived_after(&given_up), [false, false, false, false, false, true]);
    }
}

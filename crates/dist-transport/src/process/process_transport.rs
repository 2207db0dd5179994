//! The transport between processes. It opens connections on first use, through shared memory or TCP. It moves
//! messages without a thread of its own and without a buffer of their size.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFd;
use smallvec::SmallVec;

use crate::announced::MatchedFrame;
use crate::bookkeeping::{self, CallHistory};
use crate::bootstrap::abort_state::Waker;
use crate::bootstrap::channels::ForkPath;
use crate::bootstrap::config::{Config, Medium};
use crate::bootstrap::control::{Missing, PeerInfo, WaitReport};
use crate::bootstrap::dial::ANSWER_LIMIT;
use crate::bootstrap::failure::{AbortOnUnwind, ErrorContext, PeerError};
use crate::bootstrap::outer_job::OuterJob;
use crate::bootstrap::session::{ConnectionWait, LongWait, Membership, Session, WaitError, at_least, number};
use crate::bootstrap::store::CoordinatorStore;
use crate::bootstrap::{dial, probe, rendezvous};
use crate::check::{check_all, check_exchange, check_matched, check_peer};
use crate::link::counts::MessageCounts;
use crate::link::message::{Inbound, LinkError, Outbound};
use crate::link::peer_link::PeerLink;
use crate::link::socket;
use crate::link::staging_buffer::StagingBuffer;
use crate::runtime::Unparker;
use crate::wait::{CoreDemand, Wait, WaitPolicy, WaitStep};
use crate::{
    Abort, Activity, Cause, ChannelId, Combine, Deadline, Error, Fingerprint, Inbox, Incoming, Interrupt,
    LazyDeadline, Outgoing, Pause, Rank, Result, Runtime, Sink, StartedCount, Store, StoreError, Traffic,
    Transport,
};

use super::matched::{FrameKind, MatchedPeer, Pair, Secondary, UnsentMessage, refused};
use super::matched_outbound::{MatchedOutbound, insert_early, unmatched};

#[cfg(all(feature = "shm", target_os = "linux"))]
use std::sync::atomic::Ordering;

#[cfg(all(feature = "shm", target_os = "linux"))]
use super::group_agreement::GroupAgreement;
#[cfg(all(feature = "shm", target_os = "linux"))]
use crate::Allocation;
#[cfg(all(feature = "shm", target_os = "linux"))]
use crate::host_memory::{GroupMemory, MappedGroup, PoolEntry, PoolLease};
#[cfg(all(feature = "shm", target_os = "linux"))]
use crate::link::shm::ShmLink;
#[cfg(all(feature = "shm", target_os = "linux"))]
use crate::shm_group::ShmGroup;

/// One channel of a process that is connected to its peers by TCP or shared memory.
#[derive(Debug)]
pub struct ProcessTransport {
    membership: Arc<Membership>,
    channel: ChannelId,
    /// `None` if the channel is too many forks away from the world's.
    origin: Option<ForkPath>,
    rank: Rank,
    /// The ranks of the group, as numbered in the world.
    members: Vec<usize>,
    children: u64,
    /// One link to each peer. For matched messages, the secondary links of all peers are behind the primary ones.
    links: Vec<Option<PeerLink>>,
    /// The matched messages of each peer. Empty if this transport carries others.
    matched: Vec<MatchedPeer>,
    counts: Arc<MessageCounts>,
    /// Messages of this rank to itself.
    own: VecDeque<(Fingerprint, Vec<u8>)>,
    /// The staging buffer for single messages.
    staging: StagingBuffer,
    /// Staging buffers for messages that arrive at the same time.
    staging_buffers: Vec<StagingBuffer>,
    /// The last calls, reported if this rank waits long.
    calls: CallHistory,
    wait_policy: WaitPolicy,
    traffic: Traffic,
    /// The shared memory of the group. The outer option is `None` until the ranks have agreed; the inner one
    /// is `None` if they share no memory.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    shm_group: Option<Option<Box<MappedGroup>>>,
    /// This rank's place in the pool of its host, if the group agrees by messages.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pool_lease: Option<PoolLease>,
}

impl ProcessTransport {
    /// Joins the job and opens the channel of all ranks (the world). Connections to peers are opened on first
    /// use.
    ///
    /// # Errors
    /// If the coordinator cannot be reached, or a rank does not join, within the config's timeout. If this
    /// process and the coordinator do not share a secret and a job. If an address cannot be listened on, or
    /// would need a secret.
    pub fn join(config: &Config) -> Result<Self> {
        Self::join_beside(config, None)
    }

    /// Joins like [`join`](Self::join). If there is an outer job, that one decides about aborts.
    pub(super) fn join_beside(config: &Config, outer_job: Option<OuterJob>) -> Result<Self> {
        let membership = Arc::new(rendezvous::join(config, &Runtime::system(), outer_job)?);
        let members = (0..config.rank.world_size()).collect();
        Ok(Self::open(membership, ChannelId::WORLD, Some(ForkPath::default()), config.rank, members))
    }

    fn open(
        membership: Arc<Membership>,
        channel: ChannelId,
        origin: Option<ForkPath>,
        rank: Rank,
        members: Vec<usize>,
    ) -> Self {
        let counts = Arc::new(MessageCounts::new(members.len()));
        membership.session.channels.enter(channel, &counts);
        let core_per_rank = membership.session.has_core_per_rank();
        Self {
            channel,
            origin,
            rank,
            links: members.iter().map(|_| None).collect(),
            counts,
            matched: Vec::new(),
            members,
            children: 0,
            own: VecDeque::new(),
            staging: StagingBuffer::default(),
            staging_buffers: Vec::new(),
            calls: CallHistory::NONE,
            wait_policy: WaitPolicy::new(core_per_rank),
            traffic: Traffic::default(),
            #[cfg(all(feature = "shm", target_os = "linux"))]
            shm_group: None,
            #[cfg(all(feature = "shm", target_os = "linux"))]
            pool_lease: None,
            membership,
        }
    }

    /// Returns the medium of this group's messages, as far as this rank knows. It is [`Medium::Auto`] if pairs
    /// of ranks may use different media, and the configured medium for a group of one.
    pub fn medium(&self) -> Medium {
        if self.members.len() == 1 {
            return self.session().medium;
        }
        let peer_infos = || self.members.iter().map(|&member| &self.session().peer_infos[member]);
        let first = &self.session().peer_infos[self.members[0]];
        if peer_infos().all(|peer_info| peer_info.shares() && peer_info.host == first.host) {
            return Medium::Shm;
        }
        let shares_with_another = |peer_info: &PeerInfo| {
            peer_info.shares()
                && peer_infos().filter(|other| other.shares() && other.host == peer_info.host).count() > 1
        };
        if peer_infos().any(shares_with_another) { Medium::Auto } else { Medium::Tcp }
    }

    /// Implements [`Transport::fork`] with the concrete type.
    pub(super) fn fork_own(&mut self, members: &[usize]) -> Result<Option<Self>> {
        let number = self.children;
        let place = bookkeeping::fork(self.rank, self.channel, &mut self.children, members)?;
        let in_world: Vec<usize> = members.iter().map(|&member| self.members[member]).collect();
        let child = place.map(|(channel, rank)| {
            let members = in_world.clone();
            let origin = self.origin.and_then(|origin| origin.child(number, channel));
            Self::open(self.membership.clone(), channel, origin, rank, members)
        });
        let channel = self.channel.child(number, members);
        self.session().channels.record_fork(self.channel, number, channel, in_world);
        Ok(child)
    }

    /// Implements [`Transport::fork_local`] with the concrete type.
    pub(super) fn fork_local_own(&mut self, members: &[usize], number: u64) -> Result<Self> {
        let (channel, rank) = bookkeeping::fork_local(self.rank, self.channel, members, number)?;
        let in_world = members.iter().map(|&member| self.members[member]).collect();
        let origin = self.origin.and_then(|origin| origin.local_child(channel));
        Ok(Self::open(self.membership.clone(), channel, origin, rank, in_world))
    }

    /// Returns the record that stands after this one was seen in the outer job.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(super) fn decision_after(&self, seen: Abort) -> Abort {
        let session = self.session();
        session.outer_job.as_ref().map_or(seen.clone(), |outer_job| session.await_decision(outer_job, seen))
    }

    fn session(&self) -> &Session {
        &self.membership.session
    }

    fn call(&self) -> Fingerprint {
        *self.calls.current()
    }

    pub(super) fn check_alive(&self) -> Result<()> {
        if !self.session().abort_state.is_reached() {
            return Ok(());
        }
        self.session().why_ended().map_or(Ok(()), |abort| Err(Error::Aborted(abort)))
    }

    /// Agrees with the other ranks whether the group shares memory, unless they have agreed before.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    #[inline(never)]
    fn establish_once(&mut self, due: &LazyDeadline<'_>) -> Result<()> {
        self.check_alive()?;
        if self.shm_group.is_none() {
            self.shm_group = Some(self.establish_shm_group(due)?.map(Box::new));
        }
        Ok(())
    }

    /// Agrees with all ranks of the group whether they share memory, and which access they have to each other's
    /// ordinary memory.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    fn establish_shm_group(&mut self, due: &LazyDeadline<'_>) -> Result<Option<MappedGroup>> {
        if !self.session().may_all_share(&self.members) {
            return Ok(None);
        }
        let channel = self.channel.get();
        let from_pool = self.enter_pool(due)?;
        let (mut shm_group, reach) = match from_pool {
            Some(memory) => {
                memory.process(self.rank.index()).store(std::process::id(), Ordering::Relaxed);
                (self.map_group(memory), None)
            }
            None => {
                let (rank, reach) = (self.rank, self.session().reach);
                let agreement = GroupAgreement { world_size: rank.world_size(), reach, transport: self, due };
                let agreed = agreement.reach_by(rank.index());
                let agreed = agreed.map_err(|peer_error| self.fail(peer_error, due))?;
                let Some((memory, reach)) = agreed else {
                    tracing::info!(channel, "not all ranks of the group share memory");
                    return Ok(None);
                };
                (self.map_group(memory), Some(reach))
            }
        };
        let reach = match reach {
            Some(reach) => shm_group.probe(reach, due)?,
            None => shm_group.agree_reach(self.session().reach, due)?,
        };
        tracing::info!(channel, members = ?self.members, ?reach, "the ranks of the group share memory");
        Ok(Some(shm_group))
    }

    #[cfg(all(feature = "shm", target_os = "linux"))]
    fn map_group(&self, memory: GroupMemory) -> MappedGroup {
        let reports = (self.channel, self.origin, self.calls, self.counts.clone());
        MappedGroup::new(memory, &self.membership, reports, self.rank, self.members.clone())
    }

    /// Takes the memory of this group from the pool of the host. Returns `None` if the group agrees on a segment by
    /// messages.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    fn enter_pool(&mut self, due: &LazyDeadline<'_>) -> Result<Option<GroupMemory>> {
        let membership = self.membership.clone();
        let session = &*membership.session;
        let Some(pool) = session.group_pool(&self.members, due.deadline()) else { return Ok(None) };
        loop {
            match pool.enter(self.channel, self.rank, &self.members) {
                Some(PoolEntry::Memory(memory)) => return Ok(Some(memory)),
                Some(PoolEntry::Messages(lease)) => {
                    self.pool_lease = Some(lease);
                    return Ok(None);
                }
                // A rank that holds the lock was stopped, or has ended: then the job will be aborted.
                None => self.check_alive()?,
            }
            if session.runtime.expired(due.deadline()) {
                let peer = self.rank.right().index();
                return Err(self.fail(unconnected(peer)(LinkError::TimedOut), due));
            }
        }
    }

    /// Leaves the memory of a group that this rank has not used, so that other ranks know it.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    fn leave_pool(&self) {
        let session = self.session();
        if self.shm_group.is_none()
            && session.may_use_pool(&self.members)
            && !session.abort_state.is_reached()
            && let Some(pool) = session.pool.get()
        {
            pool.leave_unused(self.channel, self.rank);
        }
    }

    /// Returns the link to a peer if it is a shared-memory link.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(super) fn shm_link(&mut self, peer: usize) -> Option<&mut ShmLink> {
        match self.links[peer].as_mut()? {
            PeerLink::Shm(link) => Some(link),
            PeerLink::Socket(_) => None,
        }
    }

    /// Opens the missing connections to those of `peers` that this rank dials. It needs only the service thread
    /// of the peer. A peer that dials this rank does so when it enters this call, and only messages of that
    /// peer wait for it.
    #[inline]
    pub(super) fn connect(&mut self, peers: &[usize], due: &LazyDeadline<'_>) -> Result<(), PeerError> {
        let connected = peers.iter().all(|&peer| self.links[peer].is_some());
        if connected { Ok(()) } else { self.connect_to(peers, due.deadline()) }
    }

    #[inline(never)]
    fn connect_to(&mut self, peers: &[usize], deadline: Deadline) -> Result<(), PeerError> {
        let membership = self.membership.clone();
        let watch = membership.session.connection_wait(deadline);
        peers.iter().try_for_each(|&peer| {
            self.dial(peer, watch).map_err(|error| unconnected(peer)(LinkError::from(error)))
        })
    }

    /// Opens the connection to a peer, unless it is open or the peer dials.
    fn dial(&mut self, peer: usize, watch: ConnectionWait<'_>) -> Result<(), WaitError<Error>> {
        if self.rank.index() <= peer || self.links[peer].is_some() {
            return Ok(());
        }
        self.dial_link(peer, watch)
    }

    /// Opens the connection of this link.
    fn dial_link(&mut self, link: usize, watch: ConnectionWait<'_>) -> Result<(), WaitError<Error>> {
        let peer = self.peer_of(link);
        let opened = dial::dial(&self.membership.session, self.members[peer], self.channel, watch)?;
        self.counts.record_sent(peer);
        Ok(self.adopt(link, opened)?)
    }

    /// Starts to use a new connection.
    fn adopt(&mut self, link: usize, opened: PeerLink) -> Result<()> {
        let (in_memory, peer) = (matches!(opened, PeerLink::Shm(_)), self.members[self.peer_of(link)]);
        if self.session().medium == Medium::Shm && !in_memory {
            return Err(Error::NotShared { peer });
        }
        let through = if in_memory { "shared memory" } else { "tcp" };
        tracing::info!(peer, through, "messages");
        self.links[link] = Some(opened);
        Ok(())
    }

    /// Returns the peer of a link.
    const fn peer_of(&self, link: usize) -> usize {
        let ranks = self.rank.world_size();
        if link < ranks { link } else { link - ranks }
    }

    const fn pair(&self, peer: usize) -> Pair {
        Pair { me: self.rank.index(), peer, ranks: self.rank.world_size() }
    }

    /// Prepares this transport for matched messages.
    fn carry_matched(&mut self) {
        if self.matched.is_empty() {
            let ranks = self.rank.world_size();
            self.links.resize_with(2 * ranks, || None);
            self.matched.resize_with(ranks, MatchedPeer::new);
        }
    }

    /// Returns the link on which the next matched message to a peer is sent. Opens it if necessary; the service
    /// thread of the peer accepts it. The flag is `true` if markers have to be sent before the message, on the
    /// secondary and on the primary link.
    #[inline]
    fn outgoing_link(&mut self, peer: usize, due: &LazyDeadline<'_>) -> Result<(usize, bool), PeerError> {
        let pair = self.pair(peer);
        let is_primary_known = self.links[pair.primary()].is_some();
        if is_primary_known && (pair.is_higher() || self.matched[peer].secondary == Secondary::Retired) {
            return Ok((pair.primary(), false));
        }
        self.choose_outgoing_link(pair, due)
    }

    #[inline(never)]
    fn choose_outgoing_link(
        &mut self,
        pair: Pair,
        due: &LazyDeadline<'_>,
    ) -> Result<(usize, bool), PeerError> {
        if pair.is_higher() {
            return self.open_link(pair.primary(), due).map(|()| (pair.primary(), false));
        }
        let arrivals = self.session().arrivals.count();
        if self.links[pair.primary()].is_none() && arrivals != self.matched[pair.peer].arrivals_seen {
            self.matched[pair.peer].arrivals_seen = arrivals;
            if let Some(link) = self.session().arrivals.take(self.channel, self.members[pair.peer]) {
                self.adopt_arrival(pair.primary(), link)?;
            }
        }
        let uses_secondary = self.matched[pair.peer].secondary == Secondary::InUse;
        if self.links[pair.primary()].is_some() {
            self.matched[pair.peer].secondary = Secondary::Retired;
            return Ok((pair.primary(), uses_secondary));
        }
        if !uses_secondary {
            self.open_link(pair.secondary(), due)?;
            self.matched[pair.peer].secondary = Secondary::InUse;
        }
        Ok((pair.secondary(), false))
    }

    /// Opens the connection of this link.
    fn open_link(&mut self, link: usize, due: &LazyDeadline<'_>) -> Result<(), PeerError> {
        let membership = self.membership.clone();
        let opened = self.dial_link(link, membership.session.connection_wait(due.deadline()));
        opened.map_err(|error| unconnected(self.peer_of(link))(LinkError::from(error)))
    }

    /// Starts to use a connection that the peer of this link has opened.
    fn adopt_arrival(&mut self, link: usize, opened: PeerLink) -> Result<(), PeerError> {
        let peer = self.peer_of(link);
        self.counts.record_received(peer);
        self.adopt(link, opened).map_err(LinkError::Unconnected).map_err(unconnected(peer))
    }

    /// Ends a failed message: finds the reason, reports it to the other ranks, and returns the error.
    #[cold]
    #[inline(never)]
    fn fail(&mut self, peer_error: PeerError, due: &LazyDeadline<'_>) -> Error {
        self.staging.clear();
        self.links.iter_mut().flatten().for_each(PeerLink::cancel_offer);
        let (session, members) = (&*self.membership.session, &self.members);
        ErrorContext { session, members, channel: self.channel, call: self.call() }
            .fail(peer_error, due.deadline())
    }

    /// Delivers this rank's oldest message to itself.
    fn receive_own(&mut self, len: usize, sink: &mut Sink<'_>) -> Result<(), LinkError> {
        let (theirs, message) = self.own.pop_front().ok_or(LinkError::TimedOut)?;
        if theirs != self.call() {
            return Err(LinkError::Mismatch { theirs });
        }
        if message.len() != len {
            return Err(LinkError::Length { got: message.len() as u64, expected: len as u64 });
        }
        match sink {
            Sink::Into(memory) => memory.copy_from_slice(&message),
            Sink::Each(sink) => self.pass_own(&message, sink),
        }
        Ok(())
    }

    /// Delivers this rank's messages to itself that an inbox awaits.
    fn receive_own_matched(&mut self, inbox: &mut dyn Inbox) -> Result<(), PeerError> {
        let me = self.rank.index();
        while inbox.awaits(me) {
            let Some((call, message)) = self.own.pop_front() else {
                return if inbox.peer_left(me) { Ok(()) } else { Err(receiving(me)(LinkError::TimedOut)) };
            };
            let accepted = inbox.accept(me, &call, message.len());
            accepted.map_err(|refusal| receiving(me)(refused(refusal, call, message.len())))?;
            inbox.memory(me).copy_from_slice(&message);
            inbox.complete(me);
            self.traffic.count(None, Some(message.len()));
        }
        Ok(())
    }

    /// Delivers the bytes that this rank has sent to itself.
    fn pass_own(&mut self, bytes: &[u8], sink: &mut dyn FnMut(usize, &[u8])) {
        let abort_on_unwind = AbortOnUnwind { session: &self.membership.session, calls: &self.calls };
        self.staging.pass(bytes, sink);
        std::mem::forget(abort_on_unwind);
    }

    pub(super) fn try_exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<(), PeerError> {
        let peers = send.iter().map(|send| send.to).chain(receive.iter().map(|receive| receive.from));
        self.connect(&peers.collect::<SmallVec<[usize; 2]>>(), due)?;
        let call = self.call();
        let single_copy = pays_single_copy(send.map_or(0, |send| send.len()), receive.iter());
        let mut outbound =
            send.map(|send| (send, Outbound::new(send.len(), &call).single_copy_if(single_copy)));
        let mut inbound = receive.map(|receive| {
            let message = Inbound::new(receive.len, &call);
            (receive, message)
        });
        let counts = self.counts.clone();
        self.drive(due, |links, staging, waits| {
            let mut moved = false;
            if let Some((send, outbound)) = &mut outbound {
                moved |= push((links, &counts), send, outbound, staging, waits)?;
            }
            if let Some((receive, inbound)) = &mut inbound {
                moved |= pull((links, &counts), receive, inbound, staging, waits)?;
            }
            Ok(moved)
        })
    }

    fn try_exchange_all(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        due: &LazyDeadline<'_>,
    ) -> Result<(), PeerError> {
        let me = self.rank.index();
        let sends = sends.iter().filter(|send| send.to != me);
        let mut receives: Few<_> = receives.iter_mut().filter(|receive| receive.from != me).collect();
        if sends.clone().count() <= 1 && receives.len() <= 1 {
            let (send, receive) = (sends.copied().next(), receives.pop().map(|receive| receive.reborrow()));
            return self.try_exchange(send, receive, due);
        }
        let call = self.call();
        let sent = sends.clone().map(Outgoing::len).sum();
        let single_copy = pays_single_copy(sent, receives.iter().map(|receive| &**receive));
        let mut outbound: Few<_> =
            sends.map(|send| (send, Outbound::new(send.len(), &call).single_copy_if(single_copy))).collect();
        // Messages that arrive at the same time cannot share one staging buffer.
        let message = |receive: &Incoming<'_>| Inbound::new(receive.len, &call).straight();
        let mut staging = || self.staging_buffers.pop().unwrap_or_default();
        let mut inbound: Few<_> =
            receives.into_iter().map(|receive| (message(receive), staging(), receive)).collect();
        let peers = outbound.iter().map(|(send, _)| send.to);
        let peers: Few<usize> = peers.chain(inbound.iter().map(|(_, _, receive)| receive.from)).collect();
        self.connect(&peers, due)?;
        let counts = self.counts.clone();
        self.drive(due, |links, staging, waits| {
            let mut moved = false;
            for (send, outbound) in &mut outbound {
                // A message to the same peer that was not sent completely goes first.
                if !waits.contains(&(Activity::Send, send.to)) {
                    moved |= push((links, &counts), send, outbound, staging, waits)?;
                }
            }
            for (inbound, staged, receive) in &mut inbound {
                if !waits.contains(&(Activity::Receive, receive.from)) {
                    moved |= pull((links, &counts), receive, inbound, staged, waits)?;
                }
            }
            Ok(moved)
        })?;
        self.staging_buffers.extend(inbound.into_iter().map(|(_, staging, _)| staging));
        Ok(())
    }

    fn try_exchange_matched(
        &mut self,
        sends: &[(Fingerprint, Outgoing<'_>)],
        inbox: &mut dyn Inbox,
        due: &LazyDeadline<'_>,
    ) -> Result<(), PeerError> {
        let me = self.rank.index();
        let single_copy = pays_single_copy_matched(sends, inbox);
        let mut outbound = self.matched_outbound(sends, (inbox, single_copy), due)?;
        let mut sources: Few<usize> = inbox.sources().iter().copied().filter(|&from| from != me).collect();
        for (_, send) in sends.iter().filter(|(_, send)| MatchedFrame::announces(send.len())) {
            if send.to != me && !sources.contains(&send.to) {
                sources.push(send.to);
            }
        }
        while let Some((from, number)) = inbox.next_wanted() {
            self.matched[from].wanted.push(number);
        }
        let interrupt = inbox.interrupt();
        let (mut waiting, mut waits) = (WaitState { interrupt, ..WaitState::default() }, Waits::new());
        loop {
            self.send_clears(&mut outbound, &sources, due)?;
            waits.clear();
            waiting.may_end_otherwise = inbox.pauses_at_deadline();
            let moved = self.move_matched(&mut outbound, (&sources, &mut *inbox), &mut waits)?;
            let has_more = self.begin_bodies(&mut outbound, (&sources, single_copy), due)?;
            if waits.is_empty() && !has_more {
                break;
            }
            let pauses = match inbox.pause() {
                Pause::Never => false,
                Pause::WhenIdle => !moved && !has_more && !self.take_arrivals(&waits)?,
                Pause::Now => true,
            };
            if pauses {
                break;
            }
            if has_more {
                continue;
            }
            match self.wait(&waits, moved, &mut waiting, due) {
                Err(PeerError { link_error: LinkError::TimedOut, .. }) if inbox.pauses_at_deadline() => break,
                Err(peer_error) => {
                    return Err(unmatched(peer_error, &outbound, inbox, self.rank.world_size()));
                }
                Ok(()) => {}
            }
        }
        self.keep_unsent(sends, outbound);
        waiting.long.end(&self.membership.session, self.channel, &self.calls);
        Ok(())
    }

    /// Adds the clears of the announced messages of these peers that the inbox wants.
    fn send_clears<'a>(
        &mut self,
        outbound: &mut Few<MatchedOutbound<'a>>,
        sources: &[usize],
        due: &LazyDeadline<'_>,
    ) -> Result<(), PeerError> {
        for &peer in sources {
            for number in std::mem::take(&mut self.matched[peer].wanted) {
                if self.matched[peer].announced.clear(number) {
                    let link = self.present_link(peer, due)?;
                    let message = Outbound::frame(MatchedFrame::Clear(number), 0, &Fingerprint::NONE);
                    insert_early(
                        outbound,
                        MatchedOutbound { link, parts: &[], message, kind: FrameKind::Clear, position: None },
                    );
                }
            }
        }
        Ok(())
    }

    /// Begins to send the announced messages that these peers have cleared. Returns `true` if there are any, or if there
    /// are messages to be cleared.
    fn begin_bodies<'a>(
        &mut self,
        outbound: &mut Few<MatchedOutbound<'a>>,
        (sources, single_copy): (&[usize], bool),
        due: &LazyDeadline<'_>,
    ) -> Result<bool, PeerError> {
        let mut has_more = false;
        for &peer in sources {
            has_more |= !self.matched[peer].wanted.is_empty();
            for number in std::mem::take(&mut self.matched[peer].cleared) {
                let is_cleared = |outbound: &MatchedOutbound<'_>| {
                    outbound.kind == FrameKind::Announced(number) && self.peer_of(outbound.link) == peer
                };
                let Some(index) = outbound.iter().position(is_cleared) else {
                    self.matched[peer].cleared.push(number);
                    continue;
                };
                let MatchedOutbound { parts, position, .. } = outbound.remove(index);
                let link = self.present_link(peer, due)?;
                let length = parts.iter().map(|part| part.len()).sum();
                let message = Outbound::frame(MatchedFrame::Body(number), length, &Fingerprint::NONE);
                let message = message.single_copy_if(single_copy);
                insert_early(
                    outbound,
                    MatchedOutbound { link, parts, message, kind: FrameKind::Body, position },
                );
                has_more = true;
            }
        }
        Ok(has_more)
    }

    /// Returns the link on which this rank sends to a peer now. Opens it if necessary, but does not change to another one.
    fn present_link(&mut self, peer: usize, due: &LazyDeadline<'_>) -> Result<usize, PeerError> {
        let pair = self.pair(peer);
        if !pair.is_higher() && self.matched[peer].secondary == Secondary::InUse {
            return Ok(pair.secondary());
        }
        self.outgoing_link(peer, due).map(|(link, _)| link)
    }

    /// Keeps the state of messages that were not sent completely when a call pauses.
    fn keep_unsent(&mut self, sends: &[(Fingerprint, Outgoing<'_>)], outbound: Few<MatchedOutbound<'_>>) {
        if outbound.iter().all(MatchedOutbound::is_done) {
            return;
        }
        let mut is_unsent = vec![false; sends.len()];
        for position in
            outbound.iter().filter(|outbound| !outbound.is_done()).filter_map(|outbound| outbound.position)
        {
            is_unsent[position] = true;
        }
        for outbound in outbound {
            let MatchedOutbound { link, message, kind, position, .. } = outbound;
            let is_kept = match kind {
                FrameKind::Message | FrameKind::Announcement => !message.done() && message.has_begun(),
                FrameKind::Announced(_) => true,
                FrameKind::Marker | FrameKind::Clear | FrameKind::Body => !message.done(),
            };
            if is_kept {
                let peer = self.peer_of(link);
                let is_before = |(index, (_, send)): &(usize, &(Fingerprint, Outgoing<'_>))| {
                    send.to == peer && is_unsent[*index]
                };
                let ordinal =
                    position.map(|position| sends[..position].iter().enumerate().filter(is_before).count());
                self.matched[peer].unsent.push(UnsentMessage { link, message, kind, ordinal });
            }
        }
    }

    /// Returns the matched messages to other ranks, each with its link.
    fn matched_outbound<'a>(
        &mut self,
        sends: &'a [(Fingerprint, Outgoing<'a>)],
        (inbox, single_copy): (&dyn Inbox, bool),
        due: &LazyDeadline<'_>,
    ) -> Result<Few<MatchedOutbound<'a>>, PeerError> {
        let me = self.rank.index();
        let mut outbound = Few::new();
        let peers = sends.iter().map(|(_, send)| send.to).chain(inbox.sources().iter().copied());
        peers
            .filter(|&peer| peer != me)
            .try_for_each(|peer| self.resume_unsent(sends, peer, &mut outbound))?;
        let resumed: Few<usize> = outbound.iter().filter_map(|outbound| outbound.position).collect();
        for (position, (call, send)) in sends.iter().enumerate().filter(|(_, (_, send))| send.to != me) {
            if resumed.contains(&position) {
                continue;
            }
            let (link, needs_markers) = self.outgoing_link(send.to, due)?;
            if needs_markers {
                for link in [self.pair(send.to).secondary(), link] {
                    let message = Outbound::moved();
                    let kind = FrameKind::Marker;
                    outbound.push(MatchedOutbound { link, parts: &[], message, kind, position: None });
                }
            }
            let (len, position) = (send.len(), Some(position));
            let (message, kind) = if MatchedFrame::announces(len) {
                let frame = MatchedFrame::Announcement(len as u64);
                (Outbound::frame(frame, 0, call), FrameKind::Announcement)
            } else {
                (Outbound::new(len, call).single_copy_if(single_copy), FrameKind::Message)
            };
            outbound.push(MatchedOutbound { link, parts: send.parts, message, kind, position });
        }
        Ok(outbound)
    }

    /// Continues the frames to a peer that were not sent completely when the last call paused. Fails if the caller does not
    /// send their messages again.
    fn resume_unsent<'a>(
        &mut self,
        sends: &'a [(Fingerprint, Outgoing<'a>)],
        peer: usize,
        outbound: &mut Few<MatchedOutbound<'a>>,
    ) -> Result<(), PeerError> {
        let unsent = &mut self.matched[peer].unsent;
        if unsent.is_empty() {
            return Ok(());
        }
        let positions: Vec<usize> = (0..sends.len()).filter(|&index| sends[index].1.to == peer).collect();
        if positions.is_empty() && unsent.iter().any(|unsent| unsent.ordinal.is_some()) {
            return Ok(());
        }
        for UnsentMessage { link, message, kind, ordinal } in std::mem::take(unsent) {
            let position = ordinal.map(|ordinal| positions.get(ordinal).copied());
            let (position, parts) = match position {
                None => (None, &[][..]),
                Some(Some(position)) => (Some(position), sends[position].1.parts),
                Some(None) => {
                    return Err(sending(peer)(LinkError::Own(io::ErrorKind::InvalidInput.into())));
                }
            };
            outbound.push(MatchedOutbound { link, parts, message, kind, position });
        }
        Ok(())
    }

    /// Moves the bytes of matched messages that can move without waiting.
    #[inline]
    fn move_matched(
        &mut self,
        outbound: &mut [MatchedOutbound<'_>],
        (sources, inbox): (&[usize], &mut dyn Inbox),
        waits: &mut Waits,
    ) -> Result<bool, PeerError> {
        let (me, ranks) = (self.rank.index(), self.rank.world_size());
        let Self { membership, calls, links, matched, staging, counts, traffic, .. } = self;
        let abort_on_unwind = AbortOnUnwind { session: &membership.session, calls };
        let pushed = outbound.iter_mut().try_fold(false, |moved, outbound| {
            if outbound.message.done() {
                return Ok(moved);
            }
            let pushed = outbound.push((ranks, links, counts), staging, waits)?;
            if outbound.message.done() {
                outbound.complete((ranks, matched), traffic, inbox);
            }
            Ok(pushed || moved)
        });
        let moved = pushed.and_then(|pushed| {
            let announces = outbound.iter().any(|outbound| outbound.announced_to(ranks).is_some());
            sources.iter().try_fold(pushed, |moved, &from| {
                let pair = Pair { me, peer: from, ranks };
                let awaits_clear =
                    announces && outbound.iter().any(|outbound| outbound.announced_to(ranks) == Some(from));
                let peer = &mut matched[from];
                let pulled =
                    peer.pull((pair, links), (inbox, awaits_clear), staging, (counts, traffic), waits)?;
                Ok(pulled || moved)
            })
        });
        std::mem::forget(abort_on_unwind);
        moved
    }

    fn try_exchange_in_place(
        &mut self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<(), PeerError> {
        self.connect(&[peer], due)?;
        let mut outbound = Outbound::new(buffer.len(), &self.call());
        let mut inbound = Inbound::new(buffer.len(), &self.call());
        let counts = self.counts.clone();
        self.drive(due, |links, staging, waits| {
            let Some(link) = link_to(links, peer, waits) else { return Ok(false) };
            let mut moved = false;
            if !outbound.done() {
                let had_begun = outbound.has_begun();
                moved |= outbound.push(link, staging, &[buffer]).map_err(sending(peer))?;
                if !had_begun && outbound.has_begun() {
                    counts.record_sent(peer);
                }
            }
            if !inbound.done() {
                let came = inbound.pull_in_place(link, staging, &outbound, buffer, combine);
                moved |= came.map_err(receiving(peer))?;
                if inbound.done() {
                    counts.record_received(peer);
                }
            }
            if !outbound.done() {
                waits.push((Activity::Send, peer));
            }
            // While the staging buffer is full, the next bytes have to wait until more of this rank's bytes
            // have left.
            if inbound.wants_more(link, staging, &outbound) {
                waits.push((Activity::Receive, peer));
            }
            Ok(moved)
        })
    }

    /// Opens the connections to those of these peers that this rank dials and that answer in time. Each peer
    /// has at least [`ANSWER_LIMIT`] to answer, even if the deadline is shorter.
    ///
    /// The answer to the last handshake message may take twice the liveness limit. By then the coordinator
    /// would have found a peer that does not answer to be dead. Giving up earlier could leave a connection
    /// that only the peer counts as open.
    fn connect_in_time(&mut self, peers: &[usize], due: &LazyDeadline<'_>) -> Result<(), PeerError> {
        if peers.iter().all(|&peer| self.links[peer].is_some()) {
            return Ok(());
        }
        let membership = self.membership.clone();
        let session = &*membership.session;
        let deadline = at_least(&session.runtime, due.deadline(), ANSWER_LIMIT);
        let watch =
            ConnectionWait { answer_limit: 2 * session.liveness, ..session.connection_wait(deadline) };
        for &peer in peers {
            match self.dial(peer, watch) {
                Ok(()) | Err(WaitError::Late) => {}
                Err(error) => return Err(unconnected(peer)(LinkError::from(error))),
            }
        }
        Ok(())
    }

    /// Waits until a message of one of these peers has arrived, or until the deadline. Returns the peers
    /// without a message.
    fn wait_for_message(&mut self, peers: &[usize], due: &LazyDeadline<'_>) -> Result<Vec<usize>, PeerError> {
        let me = self.rank.index();
        let mut waiting = WaitState { may_end_otherwise: true, ..WaitState::default() };
        let is_new = |links: &[Option<PeerLink>], peer: usize| peer != me && links[peer].is_none();
        let silent = loop {
            let connects = peers.iter().filter(|&&peer| is_new(&self.links, peer));
            let connects: Waits = connects.map(|&peer| (Activity::Connect, peer)).collect();
            self.take_arrivals(&connects)?;
            let (mut silent, mut waits) = (Vec::new(), Waits::new());
            for &peer in peers {
                if !self.has_arrived(peer, &mut waits)? {
                    silent.push(peer);
                }
            }
            // The first of these peers is the one that reports name.
            waits.reverse();
            let Some(&(activity, peer)) = waits.last() else { break silent };
            if let Some(abort) = self.session().abort_state.get() {
                return Err(PeerError { activity, peer, link_error: LinkError::Aborted(abort) });
            }
            if silent.len() < peers.len() || self.session().runtime.expired(due.deadline()) {
                break silent;
            }
            self.sleep(&waits, true, &mut waiting, due.deadline())?;
        };
        waiting.long.end(&self.membership.session, self.channel, &self.calls);
        Ok(silent)
    }

    /// Returns `true` if a message of this peer has arrived. If not, adds the peer to `waits`.
    fn has_arrived(&mut self, peer: usize, waits: &mut Waits) -> Result<bool, PeerError> {
        if peer == self.rank.index() {
            return Ok(!self.own.is_empty());
        }
        let Some(link) = link_to(&mut self.links, peer, waits) else { return Ok(false) };
        let has_arrived = link.has_arrived().map_err(receiving(peer))?;
        if !has_arrived {
            waits.push((Activity::Receive, peer));
        }
        Ok(has_arrived)
    }

    /// Moves messages until all are complete, and waits in between. `step` moves everything that can move
    /// without waiting and lists the unfinished parts. It returns `true` if something moved and more may
    /// follow.
    fn drive(
        &mut self,
        due: &LazyDeadline<'_>,
        mut step: impl FnMut(&mut [Option<PeerLink>], &mut StagingBuffer, &mut Waits) -> Result<bool, PeerError>,
    ) -> Result<(), PeerError> {
        let mut waiting = WaitState::default();
        let mut waits = Waits::new();
        loop {
            waits.clear();
            let abort_on_unwind = AbortOnUnwind { session: &self.membership.session, calls: &self.calls };
            let moved = step(&mut self.links, &mut self.staging, &mut waits);
            std::mem::forget(abort_on_unwind);
            let moved = moved?;
            if waits.is_empty() {
                waiting.long.end(&self.membership.session, self.channel, &self.calls);
                return Ok(());
            }
            self.wait(&waits, moved, &mut waiting, due)?;
        }
    }

    /// Waits until one of `waits` may continue. Returns at once if something has just moved.
    #[inline(never)]
    fn wait(
        &mut self,
        waits: &Waits,
        moved: bool,
        waiting: &mut WaitState,
        due: &LazyDeadline<'_>,
    ) -> Result<(), PeerError> {
        let WaitState { short, long, .. } = waiting;
        let session = &*self.membership.session;
        let &(activity, link) = waits.last().expect("something is waited for");
        let peer = self.peer_of(link);
        let peer_error = |link_error| PeerError { activity, peer, link_error };
        if let Some(abort) = session.abort_state.get() {
            return Err(peer_error(LinkError::Aborted(abort)));
        }
        if moved {
            short.renew();
            long.renew(session, self.channel, &self.calls, self.members[peer]);
        }
        if self.wait_policy.spin_again(short, || may_share_core(&self.links, waits)) {
            return Ok(());
        }
        // Arrivals are taken before the deadline is checked, as received bytes are.
        if self.take_arrivals(waits)? {
            short.renew();
            return Ok(());
        }
        let (runtime, deadline) = (&self.membership.session.runtime, due.deadline());
        if runtime.expired(deadline) {
            return Err(peer_error(LinkError::TimedOut));
        }
        if moved {
            return Ok(());
        }
        let now = runtime.now();
        match self.wait_policy.next(short, now, CoreDemand::Unknown) {
            WaitStep::Spin => Ok(()),
            WaitStep::Yield => {
                self.wait_policy.yield_core(now, runtime);
                Ok(())
            }
            WaitStep::Sleep => self.sleep(waits, waiting.interrupt.is_some(), waiting, deadline),
        }
    }

    /// Takes connections that awaited peers have opened meanwhile. Returns `true` if there were any.
    fn take_arrivals(&mut self, waits: &Waits) -> Result<bool, PeerError> {
        let mut came = false;
        for &(_, link) in waits.iter().filter(|(activity, _)| *activity == Activity::Connect) {
            let peer = self.peer_of(link);
            let (session, member) = (&*self.membership.session, self.members[peer]);
            // Read before the look at arrivals: a connection that the peer opened before it left is visible
            // then.
            let has_left = session.has_left(self.channel, member);
            match session.arrivals.take(self.channel, member) {
                Some(opened) => {
                    self.adopt_arrival(link, opened)?;
                    came = true;
                }
                None if has_left && self.links[link].is_none() => {
                    let pair = self.pair(peer);
                    let Some(matched) = self.matched.get_mut(peer) else {
                        return Err(unconnected(peer)(LinkError::Goodbye));
                    };
                    matched.record_left(pair, &self.links);
                    came = true;
                }
                None => {}
            }
        }
        Ok(came)
    }

    /// Fails if one of the awaited peers has named other members of this group.
    fn check_members(&self, waits: &Waits) -> Result<(), PeerError> {
        let channels = &self.membership.session.channels;
        waits.iter().try_for_each(|&(activity, link)| {
            let peer = self.peer_of(link);
            let theirs = channels.other_members(self.channel, self.members[peer]);
            theirs.map_or(Ok(()), |theirs| {
                Err(PeerError { activity, peer, link_error: LinkError::OtherMembers(theirs) })
            })
        })
    }

    /// Sleeps until one of `waits` may continue, the job is aborted, or the deadline passes. If `is_any`, one
    /// connection is enough; otherwise all are needed.
    fn sleep(
        &mut self,
        waits: &Waits,
        is_any: bool,
        waiting: &mut WaitState,
        deadline: Deadline,
    ) -> Result<(), PeerError> {
        let &(activity, link) = waits.last().expect("something is waited for");
        let peer = self.peer_of(link);
        let membership = self.membership.clone();
        let session = &*membership.session;
        if waiting.long.is_reported() {
            // Ranks that were asked about the channel may have answered.
            self.check_members(waits)?;
        }
        let is_missing = waits.iter().any(|(activity, _)| *activity == Activity::Connect);
        let needs_waker = is_missing || waiting.interrupt.is_some();
        let waker = if needs_waker { waiting.drained_waker() } else { None };
        let _woken = waker.clone().map(|waker| session.abort_state.wake(Unparker::of(waker)));
        // Takes connections that arrived before the waker was registered.
        if self.take_arrivals(waits)? {
            return Ok(());
        }
        let long = &mut waiting.long;
        let limit = session.runtime.remaining(deadline.earlier(long.until(&session.runtime)));
        let limit = if needs_waker && waker.is_none() { limit.min(WITHOUT_WAKER) } else { limit };
        let unparker = waker.clone().map(|waker| Unparker::of(waker));
        let interrupt = waiting.interrupt.as_ref().zip(unparker);
        if interrupt.as_ref().is_some_and(|(interrupt, unparker)| !interrupt.begin_sleep(unparker.clone())) {
            return Ok(());
        }
        let woken = sleep(session, &mut self.links, waits, waker.as_deref(), limit);
        if let Some((interrupt, _)) = interrupt {
            interrupt.end_sleep();
        }
        woken.map_err(|e| PeerError { activity, peer, link_error: LinkError::Own(e) })?;
        let is_only = waits.iter().all(|&(_, other)| self.peer_of(other) == peer);
        let missing = match activity {
            _ if waiting.may_end_otherwise => Missing::Anything,
            Activity::Connect | Activity::Receive if is_only || !is_any => {
                Missing::Message(self.counts.received(peer))
            }
            Activity::Send if is_only || !is_any => Missing::Room,
            _ => Missing::Anything,
        };
        let wait = || WaitReport {
            on: number(self.members[peer]),
            index: number(self.rank.index()),
            missing,
            messages: self.counts.sent(peer),
            signals: self.signals(),
            is_only_call: self.counts.is_only_call(),
        };
        if long.report_if_due(session, self.channel, &self.calls, wait) {
            self.probe(waits, &waiting.long);
            // A dialled rank may have left before, and then nobody takes the connection. A rank that dials
            // may never do so.
            let (me, ranks, origin) = (self.rank.index(), self.rank.world_size(), self.origin);
            let is_dialled = |link| link < me || link >= ranks;
            let may_have_left = |(activity, link)| is_dialled(link) || activity == Activity::Connect;
            let asked = waits.iter().copied().filter(|&wait| may_have_left(wait));
            asked.for_each(|(_, link)| session.ask(self.members[self.peer_of(link)], origin));
        }
        Ok(())
    }

    /// Returns the number of signals that this rank has given in the group's shared memory.
    fn signals(&self) -> u64 {
        #[cfg(all(feature = "shm", target_os = "linux"))]
        if let Some(Some(shm_group)) = &self.shm_group {
            return shm_group.signals();
        }
        0
    }

    /// Probes ranks of other hosts that have been silent for too long.
    fn probe(&self, waits: &Waits, long: &LongWait) {
        let session = &self.membership.session;
        for &(_, link) in waits {
            let member = self.members[self.peer_of(link)];
            let is_due = |limit| long.lasted(&session.runtime) >= probe::probe_after(limit);
            if session.silence_limit(member).is_some_and(is_due) {
                probe::rank(session, member);
            }
        }
    }
}

impl Transport for ProcessTransport {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn channel(&self) -> ChannelId {
        self.channel
    }

    fn runtime(&self) -> &Runtime {
        &self.membership.session.runtime
    }

    fn begin(&mut self, call: &Fingerprint) {
        self.calls.begin(call);
        #[cfg(all(feature = "shm", target_os = "linux"))]
        if let Some(Some(shm_group)) = &mut self.shm_group {
            shm_group.begin(call);
        }
    }

    fn set_started_count(&mut self, count: &StartedCount) {
        self.counts.set_started(count);
    }

    fn announce(&mut self, call: &Fingerprint) {
        self.session().announce(self.channel, call);
    }

    fn exchange(
        &mut self,
        mut send: Option<Outgoing<'_>>,
        mut receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        check_exchange((self.rank, &self.members), send.as_ref(), receive.as_ref())?;
        self.check_alive()?;
        let me = self.rank.index();
        let sent = send.as_ref().map(Outgoing::len);
        let received = receive.as_ref().map(|receive| receive.len);
        if let Some(own) = send.take_if(|send| send.to == me) {
            self.own.push_back((self.call(), own.parts.concat()));
        }
        if let Some(own) = receive.take_if(|receive| receive.from == me) {
            let mut sink = own.sink;
            self.receive_own(own.len, &mut sink)
                .map_err(|link_error| self.fail(receiving(me)(link_error), due))?;
        }
        if send.is_some() || receive.is_some() {
            self.try_exchange(send, receive, due).map_err(|peer_error| self.fail(peer_error, due))?;
        }
        self.traffic.count(sent, received);
        Ok(())
    }

    fn exchange_in_place(
        &mut self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        check_peer(self.rank, peer)?;
        self.check_alive()?;
        let length = buffer.len();
        if peer == self.rank.index() {
            let own = buffer.to_vec();
            self.pass_own(&own, &mut |offset, bytes| combine(&mut buffer[offset..][..bytes.len()], bytes));
        } else {
            self.try_exchange_in_place(peer, buffer, combine, due)
                .map_err(|peer_error| self.fail(peer_error, due))?;
        }
        self.traffic.count(Some(length), Some(length));
        Ok(())
    }

    fn exchange_all(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        check_all((self.rank, &self.members), sends, receives)?;
        self.check_alive()?;
        let me = self.rank.index();
        for own in sends.iter().filter(|send| send.to == me) {
            self.own.push_back((self.call(), own.parts.concat()));
        }
        for own in receives.iter_mut().filter(|receive| receive.from == me) {
            self.receive_own(own.len, &mut own.sink)
                .map_err(|link_error| self.fail(receiving(me)(link_error), due))?;
        }
        self.try_exchange_all(sends, receives, due).map_err(|peer_error| self.fail(peer_error, due))?;
        sends.iter().for_each(|send| self.traffic.count(Some(send.len()), None));
        receives.iter().for_each(|receive| self.traffic.count(None, Some(receive.len)));
        Ok(())
    }

    fn exchange_matched(
        &mut self,
        sends: &[(Fingerprint, Outgoing<'_>)],
        inbox: &mut dyn Inbox,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        check_matched(self.rank, sends, inbox)?;
        self.check_alive()?;
        self.carry_matched();
        let me = self.rank.index();
        for (position, (call, own)) in sends.iter().enumerate().filter(|(_, (_, send))| send.to == me) {
            self.own.push_back((*call, own.parts.concat()));
            self.traffic.count(Some(own.len()), None);
            inbox.sent(position);
        }
        self.receive_own_matched(inbox)
            .and_then(|()| self.try_exchange_matched(sends, inbox, due))
            .map_err(|peer_error| self.fail(peer_error, due))?;
        Ok(())
    }

    fn wait_any_peer(&mut self, peers: &[usize], due: &LazyDeadline<'_>) -> Result<Vec<usize>> {
        peers.iter().try_for_each(|&peer| check_peer(self.rank, peer))?;
        self.check_alive()?;
        self.connect_in_time(peers, due).map_err(|peer_error| self.fail(peer_error, due))?;
        self.wait_for_message(peers, due).map_err(|peer_error| self.fail(peer_error, due))
    }

    fn unread(&mut self) -> Option<usize> {
        if !self.own.is_empty() {
            return Some(self.rank.index());
        }
        let unread = if self.matched.is_empty() {
            self.links.iter_mut().position(|link| link.as_mut().is_some_and(PeerLink::has_message))
        } else {
            let (me, ranks) = (self.rank.index(), self.rank.world_size());
            let Self { matched, links, counts, .. } = self;
            let mut has_unread =
                |peer: usize| matched[peer].has_unread((Pair { me, peer, ranks }, counts), links);
            (0..ranks).find(|&peer| peer != me && has_unread(peer))
        };
        unread.or_else(|| {
            let arrivals = &self.membership.session.arrivals;
            self.members.iter().position(|&member| arrivals.has_message(self.channel, member))
        })
    }

    fn hosts(&self) -> Vec<u64> {
        self.members.iter().map(|&member| self.session().peer_infos[member].host).collect()
    }

    fn cores(&self) -> usize {
        self.session().cores(&self.members)
    }

    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>> {
        Ok(self.fork_own(members)?.map(|child| -> Box<dyn Transport> { Box::new(child) }))
    }

    fn fork_local(&mut self, members: &[usize], number: u64) -> Result<Box<dyn Transport>> {
        Ok(Box::new(self.fork_local_own(members, number)?))
    }

    fn abort(&mut self, cause: Cause) {
        self.session().give_up(cause, self.call());
        // Waits for the report to be sent, because the program may end its process next.
        let _ = self.session().why_ended();
    }

    fn aborted(&self) -> Option<Abort> {
        self.session().abort_state.get()
    }

    fn traffic(&self) -> Traffic {
        #[cfg(all(feature = "shm", target_os = "linux"))]
        if let Some(Some(shm_group)) = &self.shm_group {
            return self.traffic + shm_group.traffic();
        }
        self.traffic
    }

    #[cfg(all(feature = "shm", target_os = "linux"))]
    fn shm_group(&mut self, due: &LazyDeadline<'_>) -> Result<Option<&mut dyn ShmGroup>> {
        if self.shm_group.is_none() || self.session().abort_state.is_reached() {
            self.establish_once(due)?;
        }
        match &mut self.shm_group {
            Some(Some(shm_group)) => Ok(Some(&mut **shm_group)),
            _ => Ok(None),
        }
    }

    fn store(&self) -> Result<Store, StoreError> {
        let service = CoordinatorStore(self.membership.clone());
        Ok(Store::new(Arc::new(service), &self.session().runtime))
    }

    #[cfg(all(feature = "shm", target_os = "linux"))]
    fn allocate(&mut self, bytes: usize) -> Option<Allocation> {
        let session = self.session();
        session.peer_infos[session.rank.index()].shares().then(|| session.heap.allocate(bytes)).flatten()
    }
}

impl Drop for ProcessTransport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.session().give_up(Cause::Panicked, self.call());
        }
        #[cfg(all(feature = "shm", target_os = "linux"))]
        self.leave_pool();
        self.session().channels.leave(self.channel, self.origin.as_ref());
        self.session().forget_announced(self.channel);
        let unasked = self.session().arrivals.forget(self.channel);
        if self.aborted().is_none() {
            self.links.iter().flatten().chain(&unasked).for_each(PeerLink::say_goodbye);
        }
    }
}

/// The unfinished messages of an exchange: first the sends, then the receives, each with its link.
pub(super) type Waits = SmallVec<[(Activity, usize); 2]>;

/// The least number of received bytes for which a message may be sent as a single copy.
const SINGLE_COPY_BYTES_MIN: usize = 1 << 20;

/// The state of a wait in which nothing has moved.
#[derive(Default)]
struct WaitState {
    short: Wait,
    long: LongWait,
    /// Notified if a connection may have arrived, and by an interrupt. Made when it is first needed.
    waker: Option<Arc<Waker>>,
    /// What another thread uses to end the sleep.
    interrupt: Option<Interrupt>,
    /// `true` if the call may go on without what it waits for: with a message of another rank, by another thread, or at
    /// its deadline.
    may_end_otherwise: bool,
}

/// The longest sleep in a wait for a connection if the system could not create a waker.
const WITHOUT_WAKER: Duration = Duration::from_millis(10);

/// A list with one element for each of a few peers, without an allocation.
pub(super) type Few<T> = SmallVec<[T; 4]>;

impl WaitState {
    /// Returns a waker without pending notifications, if the system can make one.
    fn drained_waker(&mut self) -> Option<Arc<Waker>> {
        if self.waker.is_none() {
            self.waker = Waker::new().ok().map(Arc::new);
        }
        let waker = self.waker.clone()?;
        // It may have been notified for an earlier sleep.
        waker.drain();
        Some(waker)
    }
}

/// Returns `true` if other ranks should send single copies to this rank: it receives at least 1 MiB, and at
/// least as many bytes as it sends.
///
/// Single-copy sends stay because the ring copies each byte twice, on both sides. Without them, on a Xeon with
/// 2 cores, a sendrecv takes 1.9 to 2.1 times as long for 1 MiB, 1.6 times for 4 MiB and 1.9 to 2 times for
/// 16 MiB. A pingpong takes 0.8 to 1.2 times as long (2026-11-28).
///
/// A function of the user could end the call while other ranks still copy. So every receive must go into
/// memory.
fn pays_single_copy<'a, 'b: 'a>(
    sent: usize,
    mut receives: impl Iterator<Item = &'a Incoming<'b>> + Clone,
) -> bool {
    let received: usize = receives.clone().map(|receive| receive.len).sum();
    received >= sent.max(SINGLE_COPY_BYTES_MIN)
        && receives.all(|receive| matches!(receive.sink, Sink::Into(_)))
}

/// Returns `true` if matched messages may be sent as single copies, as [`pays_single_copy`] says.
fn pays_single_copy_matched(sends: &[(Fingerprint, Outgoing<'_>)], inbox: &dyn Inbox) -> bool {
    let sent: usize = sends.iter().map(|(_, send)| send.len()).sum();
    sent >= SINGLE_COPY_BYTES_MIN && inbox.awaited_bytes() >= sent
}

/// Sends as much of a message as the link takes.
fn push(
    (links, counts): (&mut [Option<PeerLink>], &MessageCounts),
    send: &Outgoing<'_>,
    outbound: &mut Outbound,
    staging: &mut StagingBuffer,
    waits: &mut Waits,
) -> Result<bool, PeerError> {
    if outbound.done() {
        return Ok(false);
    }
    let Some(link) = link_to(links, send.to, waits) else { return Ok(false) };
    let had_begun = outbound.has_begun();
    let moved = outbound.push(link, staging, send.parts).map_err(sending(send.to))?;
    if !had_begun && outbound.has_begun() {
        counts.record_sent(send.to);
    }
    if !outbound.done() {
        waits.push((Activity::Send, send.to));
    }
    Ok(moved)
}

/// Receives the bytes of a message that have arrived.
fn pull(
    (links, counts): (&mut [Option<PeerLink>], &MessageCounts),
    receive: &mut Incoming<'_>,
    inbound: &mut Inbound,
    staging: &mut StagingBuffer,
    waits: &mut Waits,
) -> Result<bool, PeerError> {
    if inbound.done() {
        return Ok(false);
    }
    let Some(link) = link_to(links, receive.from, waits) else { return Ok(false) };
    let moved = inbound.pull(link, staging, &mut receive.sink).map_err(receiving(receive.from))?;
    if inbound.done() {
        counts.record_received(receive.from);
    } else {
        waits.push((Activity::Receive, receive.from));
    }
    Ok(moved)
}

/// Returns the link to a peer. If the peer has yet to open it, adds that to `waits`.
#[inline]
fn link_to<'a>(
    links: &'a mut [Option<PeerLink>],
    peer: usize,
    waits: &mut Waits,
) -> Option<&'a mut PeerLink> {
    let link = links[peer].as_mut();
    if link.is_none() {
        waits.push((Activity::Connect, peer));
    }
    link
}

pub(super) fn unconnected(peer: usize) -> impl Fn(LinkError) -> PeerError {
    move |link_error| PeerError { activity: Activity::Connect, peer, link_error }
}

pub(super) fn sending(peer: usize) -> impl Fn(LinkError) -> PeerError {
    move |link_error| PeerError { activity: Activity::Send, peer, link_error }
}

pub(super) fn receiving(peer: usize) -> impl Fn(LinkError) -> PeerError {
    move |link_error| PeerError { activity: Activity::Receive, peer, link_error }
}

/// Returns `true` if an awaited peer may have to run on this core.
#[inline(never)]
fn may_share_core(links: &[Option<PeerLink>], waits: &Waits) -> bool {
    waits.iter().any(|&(_, peer)| links[peer].as_ref().is_none_or(PeerLink::may_share_core))
}

/// Sleeps until a link takes or has more bytes, the waker is notified, the job is aborted, or `limit` passes.
fn sleep(
    session: &Session,
    links: &mut [Option<PeerLink>],
    waits: &Waits,
    waker: Option<&Waker>,
    limit: Duration,
) -> io::Result<()> {
    let mut prepare_sleep = |&(activity, peer): &(Activity, usize)| {
        activity == Activity::Match || links[peer].as_mut().is_none_or(|link| link.prepare_sleep(activity))
    };
    let may_sleep = waits.iter().all(&mut prepare_sleep);
    let woken = if may_sleep { watch(session, links, waits, waker, limit) } else { Ok(()) };
    for &(_, peer) in waits {
        if let Some(link) = &mut links[peer] {
            link.end_sleep();
        }
    }
    woken
}

/// The number of connections that are polled without an allocation per sleep.
const WATCHED_INLINE: usize = 32;

fn watch(
    session: &Session,
    links: &[Option<PeerLink>],
    waits: &Waits,
    waker: Option<&Waker>,
    limit: Duration,
) -> io::Result<()> {
    let mut watched: SmallVec<[PollFd<'_>; WATCHED_INLINE]> = SmallVec::new();
    watched.push(session.abort_state.watch());
    watched.extend(waker.map(Waker::watch));
    // A rank that has no room for messages of a peer does not read its link.
    for &(activity, peer) in waits.iter().filter(|(activity, _)| *activity != Activity::Match) {
        if let Some(link) = &links[peer] {
            link.watch(activity, &mut watched);
        }
    }
    socket::poll(&mut watched, limit).map(drop)
}

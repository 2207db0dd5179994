//! The transport between processes. It opens connections on first use, through shared memory or TCP. It moves
//! messages without a thread of its own and without a buffer of their size.

#[cfg(all(feature = "shm", target_os = "linux"))]
mod establish;
mod exchange;
mod failure;
#[cfg(all(feature = "shm", target_os = "linux"))]
mod shm_group;

use std::collections::VecDeque;
use std::sync::Arc;

use self::exchange::{receiving, unconnected};
use self::failure::{AbortOnUnwind, ErrorContext, PeerError};
#[cfg(all(feature = "shm", target_os = "linux"))]
use self::shm_group::ShmGroup;
use crate::bookkeeping::{self, CallHistory};
use crate::bootstrap::channels::ForkPath;
use crate::bootstrap::config::{Config, Medium};
use crate::bootstrap::control::PeerInfo;
use crate::bootstrap::session::{ConnectionWait, Membership, Session, WaitError};
use crate::bootstrap::{dial, rendezvous};
use crate::check::{check_all, check_exchange, check_peer};
use crate::link::counts::MessageCounts;
use crate::link::message::LinkError;
use crate::link::peer_link::PeerLink;
use crate::link::staging_buffer::StagingBuffer;
use crate::wait::link_wait::LinkWaitPolicy;
use crate::{
    Abort, Cause, ChannelId, Combine, Deadline, Error, Fingerprint, Incoming, LazyDeadline, Outgoing, Rank,
    Result, Runtime, Sink, Traffic, Transport,
};

#[cfg(all(feature = "shm", target_os = "linux"))]
use crate::{Allocation, Direct};

/// One channel of a process that is connected to its peers by TCP or shared memory.
#[derive(Debug)]
pub struct TcpTransport {
    membership: Arc<Membership>,
    channel: ChannelId,
    /// `None` if the channel is too many forks away from the world's.
    origin: Option<ForkPath>,
    rank: Rank,
    /// The ranks of the group, as numbered in the world.
    members: Vec<usize>,
    children: u64,
    links: Vec<Option<PeerLink>>,
    counts: Arc<MessageCounts>,
    /// Messages of this rank to itself.
    own: VecDeque<(Fingerprint, Vec<u8>)>,
    scratch: StagingBuffer,
    /// Staging buffers for messages that arrive at the same time.
    scratches: Vec<StagingBuffer>,
    /// The last calls, reported if this rank waits long.
    calls: CallHistory,
    wait_policy: LinkWaitPolicy,
    traffic: Traffic,
    /// The shared memory of the group. The outer option is `None` until the ranks have agreed; the inner one
    /// is `None` if they share no memory.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    shm_group: Option<Option<Box<ShmGroup>>>,
}

impl TcpTransport {
    /// Joins the job and opens the channel that contains all ranks. Connections to peers are opened on first
    /// use.
    ///
    /// # Errors
    /// If the coordinator cannot be reached, or a rank does not join, within the config's timeout. If this
    /// process and the coordinator do not share a secret and a job. If an address cannot be listened on, or
    /// would need a secret.
    pub fn join(config: &Config) -> Result<Self> {
        let membership = Arc::new(rendezvous::join(config, &Runtime::system())?);
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
        membership.session.channels.enter(channel);
        let core_per_rank = membership.session.has_core_per_rank();
        Self {
            channel,
            origin,
            rank,
            links: members.iter().map(|_| None).collect(),
            counts: Arc::new(MessageCounts::new(members.len())),
            members,
            children: 0,
            own: VecDeque::new(),
            scratch: StagingBuffer::default(),
            scratches: Vec::new(),
            calls: CallHistory::NONE,
            wait_policy: LinkWaitPolicy::new(core_per_rank),
            traffic: Traffic::default(),
            #[cfg(all(feature = "shm", target_os = "linux"))]
            shm_group: None,
            membership,
        }
    }

    /// Returns the medium that messages of this group use, as far as the ranks have told: [`Medium::Auto`] if
    /// it differs between pairs. For a group of one it is the medium that the config asked for.
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
        self.session().channels.note_fork(self.channel, number, channel, in_world);
        Ok(child)
    }

    /// Returns the memory of the group, if its ranks have agreed to share some.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(super) fn known_direct(&self) -> Option<&dyn Direct> {
        self.shm_group.as_ref()?.as_deref().map(|shm_group| -> &dyn Direct { shm_group })
    }

    /// Like [`known_direct`](Self::known_direct), but mutable.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(super) fn known_direct_mut(&mut self) -> Option<&mut dyn Direct> {
        self.shm_group.as_mut()?.as_deref_mut().map(|shm_group| -> &mut dyn Direct { shm_group })
    }

    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub(super) fn membership(&self) -> &Arc<Membership> {
        &self.membership
    }

    fn session(&self) -> &Session {
        &self.membership.session
    }

    fn call(&self) -> Fingerprint {
        *self.calls.current()
    }

    fn check_alive(&self) -> Result<()> {
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

    /// Opens the missing connections to those of these peers that this rank dials. That needs only the peer's
    /// service thread. A peer that dials this rank does so when it enters this call; only its own messages
    /// wait for that.
    #[inline]
    fn connect(&mut self, peers: &[usize], due: &LazyDeadline<'_>) -> Result<(), PeerError> {
        let connected = peers.iter().all(|&peer| self.links[peer].is_some());
        if connected { Ok(()) } else { self.connect_to(peers, due.deadline()) }
    }

    #[inline(never)]
    fn connect_to(&mut self, peers: &[usize], deadline: Deadline) -> Result<(), PeerError> {
        let membership = self.membership.clone();
        let watch = membership.session.watch(deadline);
        peers.iter().try_for_each(|&peer| {
            self.dial(peer, watch).map_err(|error| unconnected(peer)(LinkError::unconnected(error)))
        })
    }

    /// Opens the connection to a peer, unless it is open or the peer dials.
    fn dial(&mut self, peer: usize, watch: ConnectionWait<'_>) -> Result<(), WaitError<Error>> {
        if self.rank.index() <= peer || self.links[peer].is_some() {
            return Ok(());
        }
        let link = dial::dial(self.session(), self.members[peer], self.channel, watch)?;
        self.counts.note_sent(peer);
        Ok(self.adopt(peer, link)?)
    }

    /// Starts to use a new connection.
    fn adopt(&mut self, peer: usize, link: PeerLink) -> Result<()> {
        let in_memory = matches!(link, PeerLink::Shm(_));
        if self.session().medium == Medium::Shm && !in_memory {
            return Err(Error::NotShared { peer: self.members[peer] });
        }
        let through = if in_memory { "shared memory" } else { "tcp" };
        tracing::info!(peer = self.members[peer], through, "messages");
        self.links[peer] = Some(link);
        Ok(())
    }

    /// Ends a failed message: finds the reason, reports it to the other ranks, and returns the error.
    #[cold]
    #[inline(never)]
    fn fail(&mut self, peer_error: PeerError, due: &LazyDeadline<'_>) -> Error {
        self.scratch.clear();
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

    /// Delivers this rank's own bytes to `sink`.
    fn pass_own(&mut self, bytes: &[u8], sink: &mut dyn FnMut(usize, &[u8])) {
        let abort_on_unwind = AbortOnUnwind { session: &self.membership.session, calls: &self.calls };
        self.scratch.pass(bytes, sink);
        std::mem::forget(abort_on_unwind);
    }
}

impl Transport for TcpTransport {
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
        let mut links = self.links.iter_mut();
        let unread = links.position(|link| link.as_mut().is_some_and(PeerLink::has_message));
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
    fn direct(&mut self, due: &LazyDeadline<'_>) -> Result<Option<&mut dyn Direct>> {
        if self.shm_group.is_none() || self.session().abort_state.is_reached() {
            self.establish_once(due)?;
        }
        match &mut self.shm_group {
            Some(Some(shm_group)) => Ok(Some(&mut **shm_group)),
            _ => Ok(None),
        }
    }

    #[cfg(all(feature = "shm", target_os = "linux"))]
    fn allocate(&mut self, bytes: usize) -> Option<Allocation> {
        let session = self.session();
        session.peer_infos[session.rank.index()].shares().then(|| session.heap.allocate(bytes)).flatten()
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.session().give_up(Cause::Panicked, self.call());
        }
        self.session().channels.leave(self.channel);
        self.session().forget_announced(self.channel);
        let unasked = self.session().arrivals.forget(self.channel);
        if self.aborted().is_none() {
            self.links.iter().flatten().chain(&unasked).for_each(PeerLink::say_goodbye);
        }
    }
}

//! Shared memory for ranks of one host whose messages go through another transport.
#![allow(unsafe_code, reason = "a trait with unsafe methods is passed on")]

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::{Config, Coordinator, ProcessTransport, Secret};
use crate::bootstrap::auth;
use crate::bootstrap::auth::Key;
use crate::bootstrap::rendezvous_server::Worlds;
use crate::bootstrap::session::Membership;
use crate::forwarding::ForwardingTransport;
use crate::shm_group::sealed::Sealed;
use crate::shm_group::{
    AbandonHandle, CallEntry, DirectCall, ExposedRegion, ExposedView, GroupLayout, Lent, MemoryArea,
    ShmGroup, WordSize, WordUpdate,
};
use crate::{
    Abort, Allocation, Cause, Chain, Combine, Error, Fingerprint, Inbox, Incoming, LazyDeadline, Outgoing,
    Rank, Result, Runtime, Sink, Traffic, Transport,
};

/// A transport that adds shared memory between the ranks of each host to another transport, which carries the
/// messages.
///
/// The ranks of a host connect over loopback, with a secret that the other transport's messages carry, so
/// that only they are admitted. From then on they share memory like ranks of a [`ProcessTransport`]. Among ranks
/// of one host, [`shm_group`](Transport::shm_group) returns the memory of the group, and
/// [`allocate`](Transport::allocate) returns memory that they can all map. The other transport may be any
/// implementation: its errors cannot make safe code corrupt memory. Its ranks run in real time, as sockets
/// do.
///
/// An abort of either transport is passed on to the other, at the latest when the transport is used or
/// dropped. If the other transport learns of an abort by itself, it tells [`HostAbort`], which wakes ranks
/// that wait in shared memory.
///
/// ```
/// use std::time::Duration;
/// use dist_transport::{Runtime, Transport, sim};
/// use dist_transport::process::WithSharedMemory;
///
/// let runtime = Runtime::system();
/// let ranks = sim::network(&runtime, 2).into_iter().map(|messages| {
///     runtime.spawn("rank", move || {
///         let due = messages.runtime().deadline(Duration::from_secs(60)).into();
///         let mut transport = WithSharedMemory::join(messages, &due)?;
///         let memory = transport.shm_group(&due)?;
///         Ok::<_, dist_transport::Error>(memory.is_some())
///     })
/// });
/// let ranks: Vec<_> = ranks.collect();
/// assert!(ranks.into_iter().all(|rank| rank.unwrap().join().unwrap().unwrap()));
/// ```
#[derive(Debug)]
pub struct WithSharedMemory {
    messages: Box<dyn Transport>,
    /// The ranks of this host; `None` if this rank is alone.
    host: Option<HostGroup>,
    /// The coordinator of the host's ranks, in the first of them. Dropped last.
    coordinator: Option<Coordinator>,
}

/// The ranks of the group that run on this rank's host.
#[derive(Debug)]
struct HostGroup {
    transport: ProcessTransport,
    /// Their numbers in the world of the other transport.
    in_world: Vec<usize>,
    /// The same numbers of all ranks of the host. Errors and aborts of a fork name ranks of the host, not of the fork.
    of_host: Arc<[usize]>,
    /// `true` if all ranks of the group are on this host.
    is_all: bool,
}

/// The job name of the ranks of a host.
const JOB: &str = "ranks of a host";

/// The time in which a record in memory arrives on all ranks of the host, also if they get no core for a while.
const RECORD_MAX: Duration = Duration::from_secs(1);
/// The time between two looks for it.
const RECORD_LOOK: Duration = Duration::from_millis(1);

/// Bytes that the first rank of a host sends to the others: whether it succeeded, its port, and a secret.
const OFFER_BYTES: usize = 1 + 2 + 32;

impl WithSharedMemory {
    /// Lets the ranks of each host share memory. Every rank of the group calls this at the same point among
    /// its calls.
    ///
    /// # Errors
    /// If a message fails, or the ranks of a host do not all join by the deadline. The job is then aborted.
    pub fn join(messages: impl Transport + 'static, due: &LazyDeadline<'_>) -> Result<Self> {
        let mut joined = Self { messages: Box::new(messages), host: None, coordinator: None };
        match joined.form_host_group(due) {
            Ok(()) => Ok(joined),
            Err(error) => {
                (*joined.messages).abort(Cause::gave_up(Chain(&error)));
                Err(error)
            }
        }
    }

    fn form_host_group(&mut self, due: &LazyDeadline<'_>) -> Result<()> {
        let (hosts, rank) = (self.messages.hosts(), self.messages.rank());
        let mine = hosts[rank.index()];
        let here: Vec<usize> = (0..hosts.len()).filter(|&peer| hosts[peer] == mine).collect();
        let Some(place) = here.iter().position(|&peer| peer == rank.index()).filter(|_| here.len() > 1)
        else {
            return Ok(());
        };
        (*self.messages).begin(&Fingerprint(*b"dist-transport: the ranks of a host meet on it  "));
        let offer = if place == 0 { self.offer(&here, due)? } else { self.receive_offer(here[0], due)? };
        let [1, low, high, ref secret @ ..] = offer else { return Ok(()) };
        let address = format!("127.0.0.1:{}", u16::from_le_bytes([low, high]));
        let config = Config::new(place, here.len(), &address)?
            .with_secret(Secret::from_bytes(secret)?)
            .with_job(JOB)
            .with_external_coordinator()
            .with_timeout(self.messages.runtime().remaining(due.deadline()));
        let transport = ProcessTransport::join(&config)?;
        let in_world: Vec<usize> = here.iter().map(|&peer| self.messages.members()[peer]).collect();
        let of_host = in_world.clone().into();
        self.host = Some(HostGroup { transport, in_world, of_host, is_all: here.len() == hosts.len() });
        Ok(())
    }

    /// Starts the coordinator of this host's ranks, and sends its address and secret to them.
    fn offer(&mut self, here: &[usize], due: &LazyDeadline<'_>) -> Result<[u8; OFFER_BYTES]> {
        let bytes = auth::random_bytes()?;
        let secret = Secret::from_bytes(&bytes)?;
        let (key, runtime) = (Key::new(Some(&secret), JOB), Runtime::system());
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let started =
            Coordinator::start_epoch(&runtime, Worlds::One, &[any], here.len(), &key, 0, Some(secret));
        let mut offer = [0; OFFER_BYTES];
        match started {
            Ok(coordinator) => {
                offer[0] = 1;
                offer[1..3].copy_from_slice(&coordinator.address().port().to_le_bytes());
                offer[3..].copy_from_slice(&bytes);
                self.coordinator = Some(coordinator);
            }
            Err(error) => tracing::info!(error = %Chain(&error), "the ranks of this host share no memory"),
        }
        for &to in &here[1..] {
            (*self.messages).exchange(Some(Outgoing { to, parts: &[&offer] }), None, due)?;
        }
        Ok(offer)
    }

    fn receive_offer(&mut self, from: usize, due: &LazyDeadline<'_>) -> Result<[u8; OFFER_BYTES]> {
        let mut offer = [0; OFFER_BYTES];
        let receive = Incoming { from, len: OFFER_BYTES, sink: Sink::Into(&mut offer) };
        (*self.messages).exchange(None, Some(receive), due)?;
        Ok(offer)
    }

    /// Returns a handle through which the other transport can report its own abort to the ranks of this host.
    pub fn host_abort(&self) -> HostAbort {
        HostAbort(
            self.host.as_ref().map_or_else(Weak::new, |host| Arc::downgrade(host.transport.membership())),
        )
    }

    /// Calls `work` with the other transport, and passes aborts on before and after.
    fn with_messages<T>(&mut self, work: impl FnOnce(&mut dyn Transport) -> Result<T>) -> Result<T> {
        self.pass_aborts_on();
        let done = work(&mut *self.messages);
        if done.is_err() {
            self.pass_aborts_on();
        }
        done
    }

    fn pass_aborts_on(&mut self) {
        let Some(host) = &mut self.host else { return };
        match ((*self.messages).aborted(), host.aborted()) {
            (Some(abort), None) => host.transport.abort(Cause::gave_up(abort)),
            (None, Some(abort)) => (*self.messages).abort(Cause::gave_up(abort)),
            _ => {}
        }
    }
}

/// A handle that aborts the work of a host's ranks in shared memory, from any thread.
#[derive(Debug, Clone)]
pub struct HostAbort(Weak<Membership>);

impl HostAbort {
    /// Aborts with this rank as the cause. An earlier abort is kept.
    pub fn abort(&self, cause: Cause) {
        if let Some(membership) = self.0.upgrade() {
            membership.session.give_up(cause, Fingerprint::NONE);
        }
    }
}

impl HostGroup {
    fn aborted(&self) -> Option<Abort> {
        self.transport.aborted().map(|abort| self.abort_in_world(abort))
    }

    /// Waits a little for the record in memory, which a rank of this host has passed on in a message. The message may
    /// arrive first.
    fn await_record(&self) -> Option<Abort> {
        let runtime = self.transport.runtime();
        let limit = runtime.deadline(RECORD_MAX);
        while self.aborted().is_none() && !runtime.expired(limit) {
            runtime.sleep(RECORD_LOOK);
        }
        self.aborted()
    }

    fn abort_in_world(&self, abort: Abort) -> Abort {
        let in_world = |rank: usize| self.of_host.get(rank).copied().unwrap_or(rank);
        Abort { rank: in_world(abort.rank), reporter: in_world(abort.reporter), ..abort }
    }

    /// Converts the ranks of an error to their numbers in the world.
    fn in_world(&self, error: Error) -> Error {
        match error {
            Error::Aborted(abort) => Error::Aborted(self.abort_in_world(abort)),
            mut error => {
                if let Some(peer) = error.peer_mut() {
                    *peer = self.of_host.get(*peer).copied().unwrap_or(*peer);
                }
                error
            }
        }
    }

    /// Returns the numbers on this host of these members, and `true`. If some run on other hosts, returns only
    /// this rank, and `false`.
    fn places(&self, members: &[usize]) -> (Vec<usize>, bool) {
        let place = |member: &usize| self.in_world.iter().position(|here| here == member);
        let places: Option<Vec<usize>> = members.iter().map(place).collect();
        let own = self.transport.rank().index();
        places.filter(|places| !places.is_empty()).map_or((vec![own], false), |places| (places, true))
    }

    /// Creates the group of these members. Returns `None` if some run on other hosts, or there is only one.
    fn fork_local(&mut self, members: &[usize], number: u64) -> Result<Option<Self>> {
        let (places, are_here) = self.places(members);
        if !are_here || places.len() < 2 {
            return Ok(None);
        }
        let forked = self.transport.fork_local_own(&places, number);
        let transport = forked.map_err(|error| self.in_world(error))?;
        let in_world = places.iter().map(|&place| self.in_world[place]).collect();
        Ok(Some(Self { transport, in_world, of_host: self.of_host.clone(), is_all: true }))
    }

    fn memory(&self) -> &dyn ShmGroup {
        self.transport.known_shm_group().expect("it was looked at before it was given")
    }

    fn memory_mut(&mut self) -> &mut dyn ShmGroup {
        self.transport.known_shm_group_mut().expect("it was looked at before it was given")
    }
}

impl ForwardingTransport for WithSharedMemory {
    type Inner = dyn Transport;

    fn inner(&self) -> &Self::Inner {
        &*self.messages
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.messages
    }

    fn begin(&mut self, call: &Fingerprint) {
        (*self.messages).begin(call);
        if let Some(host) = &mut self.host {
            host.transport.begin(call);
        }
    }

    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.with_messages(|messages| messages.exchange(send, receive, due))
    }

    fn exchange_in_place(
        &mut self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.with_messages(|messages| messages.exchange_in_place(peer, buffer, combine, due))
    }

    fn exchange_all(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.with_messages(|messages| messages.exchange_all(sends, receives, due))
    }

    fn exchange_matched(
        &mut self,
        sends: &[(Fingerprint, Outgoing<'_>)],
        inbox: &mut dyn Inbox,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        self.with_messages(|messages| messages.exchange_matched(sends, inbox, due))
    }

    fn wait_any_peer(&mut self, peers: &[usize], due: &LazyDeadline<'_>) -> Result<Vec<usize>> {
        self.with_messages(|messages| messages.wait_any_peer(peers, due))
    }

    fn cores(&self) -> usize {
        match &self.host {
            Some(host) => host.transport.cores(),
            None => (*self.messages).cores(),
        }
    }

    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>> {
        let child = (*self.messages).fork(members)?;
        let Some(host) = &mut self.host else {
            return Ok(child);
        };
        let named: Vec<usize> = members.iter().map(|&member| self.messages.members()[member]).collect();
        let (places, are_here) = host.places(&named);
        // Every rank of the host forks, whatever group it has named, so that all count the same forks.
        let forked = host.transport.fork_own(&places).map_err(|error| host.in_world(error))?;
        let in_world = |place: &usize| host.in_world[*place];
        let of_child = forked.filter(|_| are_here && places.len() > 1).map(|transport| HostGroup {
            transport,
            in_world: places.iter().map(in_world).collect(),
            of_host: host.of_host.clone(),
            is_all: true,
        });
        Ok(child.map(|messages| -> Box<dyn Transport> {
            Box::new(Self { messages, host: of_child, coordinator: None })
        }))
    }

    fn fork_local(&mut self, members: &[usize], number: u64) -> Result<Box<dyn Transport>> {
        let messages = (*self.messages).fork_local(members, number)?;
        let named: Vec<usize> = members.iter().map(|&member| self.messages.members()[member]).collect();
        let host = self.host.as_mut().map(|host| host.fork_local(&named, number)).transpose()?;
        Ok(Box::new(Self { messages, host: host.flatten(), coordinator: None }))
    }

    fn abort(&mut self, cause: Cause) {
        (*self.messages).abort(cause.clone());
        if let Some(host) = &mut self.host {
            host.transport.abort(cause);
        }
    }

    fn aborted(&self) -> Option<Abort> {
        let messages = (*self.messages).aborted();
        let Some(host) = &self.host else { return messages };
        let in_memory = match &messages {
            Some(abort) if host.of_host.contains(&abort.rank) => host.await_record(),
            _ => host.aborted(),
        };
        // A rank of this host may have passed on what it saw in memory. The record in memory names the rank that
        // aborted, the other one names the rank that passed it on.
        let was_passed_on = |abort: &Abort| {
            in_memory.as_ref().is_some_and(|original| abort.cause == Cause::gave_up(original))
        };
        messages.filter(|abort| !was_passed_on(abort)).or(in_memory)
    }

    fn traffic(&self) -> Traffic {
        let messages = (*self.messages).traffic();
        self.host.as_ref().map_or(messages, |host| messages + host.transport.traffic())
    }

    fn shm_group(&mut self, due: &LazyDeadline<'_>) -> Result<Option<&mut dyn ShmGroup>> {
        self.pass_aborts_on();
        let Some(host) = self.host.as_mut().filter(|host| host.is_all) else { return Ok(None) };
        match host.transport.shm_group(due).map(|memory| memory.is_some()) {
            Ok(true) => Ok(Some(host)),
            Ok(false) => Ok(None),
            Err(error) => Err(host.in_world(error)),
        }
    }

    fn allocate(&mut self, bytes: usize) -> Option<Allocation> {
        self.host.as_mut()?.transport.allocate(bytes)
    }
}

impl Drop for WithSharedMemory {
    fn drop(&mut self) {
        self.pass_aborts_on();
        if let Some(coordinator) = self.coordinator.take() {
            drop(self.host.take());
            coordinator.serve_until_left(&Runtime::system());
        }
    }
}

impl Sealed for HostGroup {}

/// The memory of the host's ranks. Errors name ranks by their numbers in the world.
impl ShmGroup for HostGroup {
    fn shared(&self) -> GroupLayout {
        self.memory().shared()
    }

    fn rank(&self) -> Rank {
        self.memory().rank()
    }

    fn call(&self) -> DirectCall {
        self.memory().call()
    }

    unsafe fn enter(
        &mut self,
        entry: CallEntry,
        memory: ExposedRegion<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        // SAFETY: as the caller has promised.
        let entered = unsafe { self.memory_mut().enter(entry, memory, due) };
        entered.map_err(|error| self.in_world(error))
    }

    unsafe fn publish(&mut self, place: MemoryArea, offset: usize, bytes: &[u8]) {
        // SAFETY: as the caller has promised.
        unsafe { self.memory_mut().publish(place, offset, bytes) };
    }

    unsafe fn signal(&mut self) {
        // SAFETY: as the caller has promised.
        unsafe { self.memory_mut().signal() };
    }

    fn wait(&mut self, rank: usize, signals: u32, due: &LazyDeadline<'_>) -> Result<()> {
        let waited = self.memory_mut().wait(rank, signals, due);
        waited.map_err(|error| self.in_world(error))
    }

    unsafe fn signal_and_wait(
        &mut self,
        entry: CallEntry,
        to: (usize, MemoryArea, usize),
        bytes: &[u8],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        // SAFETY: as the caller has promised.
        let waited = unsafe { self.memory_mut().signal_and_wait(entry, to, bytes, due) };
        waited.map_err(|error| self.in_world(error))
    }

    unsafe fn view(
        &mut self,
        rank: usize,
        place: MemoryArea,
        range: Range<usize>,
        read: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        // SAFETY: as the caller has promised.
        let viewed = unsafe { self.memory_mut().view(rank, place, range, read) };
        viewed.map_err(|error| self.in_world(error))
    }

    unsafe fn view_all(
        &mut self,
        place: MemoryArea,
        there: &[(usize, usize)],
        len: usize,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()> {
        // SAFETY: as the caller has promised.
        let viewed = unsafe { self.memory_mut().view_all(place, there, len, read) };
        viewed.map_err(|error| self.in_world(error))
    }

    unsafe fn read(&mut self, rank: usize, place: MemoryArea, offset: usize, into: &mut [u8]) -> Result<()> {
        // SAFETY: as the caller has promised.
        let read = unsafe { self.memory_mut().read(rank, place, offset, into) };
        read.map_err(|error| self.in_world(error))
    }

    unsafe fn read_non_temporal(
        &mut self,
        rank: usize,
        place: MemoryArea,
        offset: usize,
        into: &mut [u8],
    ) -> Result<()> {
        // SAFETY: as the caller has promised.
        let read = unsafe { self.memory_mut().read_non_temporal(rank, place, offset, into) };
        read.map_err(|error| self.in_world(error))
    }

    fn copy_non_temporal(&mut self, from: &[u8], into: &mut [u8]) {
        self.memory_mut().copy_non_temporal(from, into);
    }

    unsafe fn write(&mut self, rank: usize, place: MemoryArea, offset: usize, bytes: &[u8]) -> Result<()> {
        // SAFETY: as the caller has promised.
        let written = unsafe { self.memory_mut().write(rank, place, offset, bytes) };
        written.map_err(|error| self.in_world(error))
    }

    unsafe fn change(
        &mut self,
        place: MemoryArea,
        there: &[(usize, usize)],
        len: usize,
        change: &mut dyn FnMut(&mut [&mut [u8]]),
    ) -> Result<bool> {
        // SAFETY: as the caller has promised.
        let changed = unsafe { self.memory_mut().change(place, there, len, change) };
        changed.map_err(|error| self.in_world(error))
    }

    unsafe fn update_word(
        &mut self,
        rank: usize,
        offset: usize,
        size: WordSize,
        update: WordUpdate,
    ) -> Result<u64> {
        // SAFETY: as the caller has promised.
        let updated = unsafe { self.memory_mut().update_word(rank, offset, size, update) };
        updated.map_err(|error| self.in_world(error))
    }

    unsafe fn store_words(&mut self, rank: usize, offset: usize, size: WordSize, bytes: &[u8]) -> Result<()> {
        // SAFETY: as the caller has promised.
        let stored = unsafe { self.memory_mut().store_words(rank, offset, size, bytes) };
        stored.map_err(|error| self.in_world(error))
    }

    unsafe fn exposed_view(&mut self, rank: usize, len: usize) -> Result<Option<ExposedView>> {
        // SAFETY: as the caller has promised.
        let viewed = unsafe { self.memory_mut().exposed_view(rank, len) };
        viewed.map_err(|error| self.in_world(error))
    }

    fn wake_waiters(&mut self) {
        self.memory_mut().wake_waiters();
    }

    fn is_finished(&self) -> bool {
        self.memory().is_finished()
    }

    fn reclaim(&mut self) -> Option<Lent> {
        self.memory_mut().reclaim()
    }

    fn abandon_handle(&self) -> AbandonHandle {
        self.memory().abandon_handle()
    }
}

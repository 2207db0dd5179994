//! Shared memory for ranks of one host, beside a transport between hosts.

use std::net::{Ipv4Addr, SocketAddr};

use super::{Config, Coordinator, Medium, ProcessTransport, Secret};
use crate::bootstrap::auth;
use crate::bootstrap::auth::Key;
use crate::bootstrap::outer_job::OuterJob;
use crate::bootstrap::rendezvous_server::Worlds;
use crate::forwarding::ForwardingTransport;
use crate::native::NativeCollectives;
use crate::shm_group::ShmGroup;
use crate::{
    Abort, Allocation, Cause, Chain, Combine, Error, Fingerprint, Inbox, Incoming, LazyDeadline, Outgoing,
    Result, Runtime, Sink, StartedCount, Traffic, Transport,
};

/// A transport that adds shared memory between the ranks of each host to another transport, which carries the
/// messages between hosts.
///
/// The ranks of a host connect over loopback, with a secret that the other transport's messages carry, so
/// that only they are admitted. From then on they share memory like ranks of a [`ProcessTransport`]. The messages of a group
/// go through shared memory if all its ranks run on one host, and through the other transport otherwise. Among ranks
/// of one host, [`shm_group`](Transport::shm_group) returns the memory of the group, and
/// [`allocate`](Transport::allocate) returns memory that they can all map. The other transport may be any
/// implementation: its errors cannot make safe code corrupt memory. Its ranks run in real time, as sockets
/// do.
///
/// The other transport [decides](Transport::abort_decision) about every abort, also about those that begin in shared memory.
/// Its record wakes ranks that wait there, and is the same on all ranks. If the other transport offers no decision, the
/// ranks share no memory.
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
    /// `true` if all ranks of the group are on this host.
    is_all: bool,
}

/// The job name of the ranks of a host.
const JOB: &str = "ranks of a host";

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
        let Some(decision) = (*self.messages).abort_decision() else {
            tracing::info!(
                "the ranks of this host share no memory: their transport does not decide about aborts of others"
            );
            return Ok(());
        };
        let (hosts, rank) = (self.messages.hosts(), self.messages.rank());
        let mine = hosts[rank.index()];
        let here: Vec<usize> = (0..hosts.len()).filter(|&peer| hosts[peer] == mine).collect();
        let Some(place) = here.iter().position(|&peer| peer == rank.index()).filter(|_| here.len() > 1)
        else {
            return Ok(());
        };
        (*self.messages).begin(&Fingerprint(*b"dist-transport: the ranks of a host meet on it  "));
        let offer = if place == 0 { self.offer(&here, due)? } else { self.receive_offer(here[0], due)? };
        (*self.messages).begin(&Fingerprint::NONE);
        let [1, low, high, ref secret @ ..] = offer else { return Ok(()) };
        let address = format!("127.0.0.1:{}", u16::from_le_bytes([low, high]));
        let config = Config::new(place, here.len(), &address)?
            .with_secret(Secret::from_bytes(secret)?)
            .with_job(JOB)
            .with_external_coordinator()
            .with_timeout(self.messages.runtime().remaining(due.deadline()));
        let in_world: Vec<usize> = here.iter().map(|&peer| self.messages.members()[peer]).collect();
        let outer_job = OuterJob { decision, members: in_world.clone().into() };
        let transport = ProcessTransport::join_beside(&config, Some(outer_job.clone()));
        let transport = transport.map_err(|error| match error {
            Error::Aborted(abort) => Error::Aborted(outer_job.abort(abort)),
            error => outer_job.error(error),
        })?;
        if transport.medium() != Medium::Shm {
            tracing::info!("the ranks of this host cannot share memory");
            return Ok(());
        }
        self.host = Some(HostGroup { transport, in_world, is_all: here.len() == hosts.len() });
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

    /// Calls `work` with the transport that carries the messages of this group, unless the job is aborted. It is that of the
    /// host if all ranks of the group are on it.
    fn with_messages<T>(&mut self, work: impl FnOnce(&mut dyn Transport) -> Result<T>) -> Result<T> {
        self.check_alive()?;
        match &mut self.host {
            Some(host) if host.is_all => work(&mut host.transport),
            _ => work(&mut *self.messages),
        }
    }

    /// Returns the record that stands as an error, if either side knows of an abort.
    fn check_alive(&self) -> Result<()> {
        let Some(host) = &self.host else { return Ok(()) };
        host.transport.check_alive()?;
        (*self.messages)
            .aborted()
            .map_or(Ok(()), |seen| Err(Error::Aborted(host.transport.decision_after(seen))))
    }
}

impl HostGroup {
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
        let transport = self.transport.fork_local_own(&places, number)?;
        let in_world = places.iter().map(|&place| self.in_world[place]).collect();
        Ok(Some(Self { transport, in_world, is_all: true }))
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

    fn announce(&mut self, call: &Fingerprint) {
        (*self.messages).announce(call);
        if let Some(host) = &mut self.host {
            host.transport.announce(call);
        }
    }

    fn set_started_count(&mut self, count: &StartedCount) {
        (*self.messages).set_started_count(count);
        if let Some(host) = &mut self.host {
            host.transport.set_started_count(count);
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

    fn unread(&mut self) -> Option<usize> {
        match &mut self.host {
            Some(host) if host.is_all => host.transport.unread(),
            _ => (*self.messages).unread(),
        }
    }

    /// Returns `None` for a group whose ranks share memory, which is faster.
    fn native(&mut self) -> Option<&mut dyn NativeCollectives> {
        let shares = self.host.as_ref().is_some_and(|host| host.is_all);
        if shares { None } else { (*self.messages).native() }
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
        let forked = host.transport.fork_own(&places)?;
        let in_world = |place: &usize| host.in_world[*place];
        let of_child = forked.filter(|_| are_here && places.len() > 1).map(|transport| HostGroup {
            transport,
            in_world: places.iter().map(in_world).collect(),
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

    fn aborted(&self) -> Option<Abort> {
        let decided = (*self.messages).aborted();
        decided.or_else(|| self.host.as_ref().and_then(|host| host.transport.aborted()))
    }

    fn traffic(&self) -> Traffic {
        match &self.host {
            Some(host) if host.is_all => host.transport.traffic(),
            Some(host) => (*self.messages).traffic() + host.transport.traffic(),
            None => (*self.messages).traffic(),
        }
    }

    fn shm_group(&mut self, due: &LazyDeadline<'_>) -> Result<Option<&mut dyn ShmGroup>> {
        self.check_alive()?;
        match &mut self.host {
            Some(host) if host.is_all => host.transport.shm_group(due),
            _ => Ok(None),
        }
    }

    fn allocate(&mut self, bytes: usize) -> Option<Allocation> {
        self.host.as_mut()?.transport.allocate(bytes)
    }
}

impl Drop for WithSharedMemory {
    fn drop(&mut self) {
        if self.host.is_none() {
            return;
        }
        if std::thread::panicking() {
            (*self.messages).abort(Cause::Panicked);
        }
        // Otherwise a rank that learns first that this one has left could report that as the cause.
        let _ = self.check_alive();
        let decision = (*self.messages).abort_decision();
        if let Some(coordinator) = self.coordinator.take() {
            drop(self.host.take());
            let is_aborted = || decision.as_ref().is_some_and(|decision| decision.decided().is_some());
            coordinator.serve_until_left(&Runtime::system(), is_aborted);
        }
    }
}

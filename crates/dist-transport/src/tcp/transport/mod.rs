//! The transport between processes: connections on first use, through memory or TCP, and messages without a thread or
//! a buffer of their size.

mod moving;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use self::moving::receiving;
use crate::bookkeeping;
use crate::check::{check_all, check_exchange, check_peer};
use crate::tcp::channels::Origin;
use crate::tcp::config::{Config, Medium};
use crate::tcp::link::Link;
use crate::tcp::message::{Fault, Scratch};
use crate::tcp::patience::Patience;
use crate::tcp::session::{Membership, Session, timeout};
use crate::tcp::{rendezvous, socket};
use crate::{
    Abort, Activity, Cause, ChannelId, Combine, Deadline, Error, Fingerprint, Incoming, Outgoing, Rank,
    Result, Runtime, Sink, Traffic, Transport,
};

/// How long to wait for the reason when a connection breaks.
const REASON_LIMIT: Duration = Duration::from_millis(250);

/// One channel of a process that is connected to its peers by TCP.
#[derive(Debug)]
pub struct TcpTransport {
    membership: Arc<Membership>,
    channel: ChannelId,
    /// None if it lies too deep.
    origin: Option<Origin>,
    rank: Rank,
    /// The ranks of the group, as numbered in the world.
    members: Vec<usize>,
    children: u64,
    links: Vec<Option<Link>>,
    /// Messages of this rank to itself.
    own: VecDeque<(Fingerprint, Vec<u8>)>,
    scratch: Scratch,
    /// The call before this one, which tells where this rank comes from if it has to wait for long; and this one.
    calls: [Fingerprint; 2],
    patience: Patience,
    traffic: Traffic,
}

/// What went wrong with which peer.
struct Trouble {
    activity: Activity,
    peer: usize,
    fault: Fault,
}

impl TcpTransport {
    /// Meets the other ranks of the job and opens the channel that contains them all. Connections to peers are
    /// opened when they are first used.
    ///
    /// # Errors
    /// If the coordinator cannot be reached, or some rank does not come, within the config's timeout; if this
    /// process and the coordinator do not share a secret and a job; if an address cannot be listened on, or
    /// would need a secret.
    pub fn join(config: &Config) -> Result<Self> {
        let membership = Arc::new(rendezvous::join(config, &Runtime::system())?);
        let members = (0..config.rank.world_size()).collect();
        Ok(Self::open(membership, ChannelId::WORLD, Some(Origin::default()), config.rank, members))
    }

    fn open(
        membership: Arc<Membership>,
        channel: ChannelId,
        origin: Option<Origin>,
        rank: Rank,
        members: Vec<usize>,
    ) -> Self {
        membership.session.channels.enter(channel);
        let homes = &membership.session.homes;
        let here = homes[membership.session.rank.index()].host;
        let local_ranks = homes.iter().filter(|home| home.host == here).count();
        Self {
            channel,
            origin,
            rank,
            links: members.iter().map(|_| None).collect(),
            members,
            children: 0,
            own: VecDeque::new(),
            scratch: Scratch::default(),
            calls: [Fingerprint::NONE; 2],
            patience: Patience::new(local_ranks),
            traffic: Traffic::default(),
            membership,
        }
    }

    fn session(&self) -> &Session {
        &self.membership.session
    }

    fn call(&self) -> Fingerprint {
        self.calls[1]
    }

    fn check_alive(&self) -> Result<()> {
        self.session().verdict.get().map_or(Ok(()), |abort| Err(Error::Aborted(abort)))
    }

    /// Opens the connections to these peers that are not open yet: first those that this rank dials, which needs
    /// nothing but the peer's service thread, then those that the peer dials when it comes to this call.
    fn connect(&mut self, peers: &[usize], deadline: Deadline) -> Result<(), Trouble> {
        for dialling in [true, false] {
            for &peer in peers {
                let dials = self.rank.index() > peer;
                if self.links[peer].is_none() && dials == dialling {
                    let link =
                        if dials { self.dial(peer, deadline) } else { self.await_dial(peer, deadline) };
                    let trouble = |fault| Trouble { activity: Activity::Connect, peer, fault };
                    let link = link.map_err(trouble)?;
                    if self.session().medium == Medium::Shm && !matches!(link, Link::Memory(_)) {
                        return Err(trouble(Fault::Unconnected(Error::NotShared { peer })));
                    }
                    tracing::debug!(peer, memory = matches!(link, Link::Memory(_)), "connected");
                    self.links[peer] = Some(link);
                }
            }
        }
        Ok(())
    }

    fn dial(&self, peer: usize, deadline: Deadline) -> Result<Link, Fault> {
        let dialled = rendezvous::dial(self.session(), self.members[peer], self.channel, deadline);
        dialled.map_err(|error| match error {
            Error::Address { source, .. } if source.kind() == io::ErrorKind::TimedOut => Fault::TimedOut,
            error => Fault::Unconnected(error),
        })
    }

    fn await_dial(&self, peer: usize, deadline: Deadline) -> Result<Link, Fault> {
        let session = self.session();
        let (peer, mut told) = (self.members[peer], false);
        session.arrivals.take(self.channel, peer, session, deadline, || {
            if !std::mem::replace(&mut told, true) {
                session.tell_waiting(self.channel, self.calls);
            }
            session.ask(peer, self.origin);
        })
    }

    /// Ends a message that failed: finds the reason, tells the others, and makes the error.
    fn fail(&mut self, trouble: Trouble, deadline: Deadline) -> Error {
        self.scratch.clear();
        let Trouble { activity, peer, fault } = trouble;
        // A connection breaks when its peer dies, but also when its peer gave up because of somebody else.
        let reason = match fault {
            Fault::Aborted(abort) => Some(abort),
            Fault::Closed | Fault::Io(_) | Fault::Unconnected(_) => self.await_reason(deadline),
            _ => self.session().verdict.get(),
        };
        if let Some(abort) = reason {
            return Error::Aborted(abort);
        }
        let left = self.session().left(self.channel, self.members[peer]).is_some();
        let (cause, error) = match fault {
            Fault::Aborted(abort) => return Error::Aborted(abort),
            Fault::TimedOut => (Cause::TimedOut, timeout(self.runtime(), activity, peer, deadline)),
            Fault::Goodbye | Fault::Closed => (Cause::Left, Error::Closed { activity, peer }),
            Fault::Mismatch { theirs } => {
                (Cause::Mismatch { theirs }, Error::Mismatch { peer, ours: self.call(), theirs })
            }
            Fault::Length { got, expected } => {
                (Cause::Mismatch { theirs: self.call() }, Error::Length { peer, got, expected })
            }
            Fault::Garbage => (Cause::Protocol, Error::Garbage { peer }),
            Fault::Io(source) => (Cause::Died, Error::Io { activity, peer, source }),
            Fault::Unconnected(_) if left => (Cause::Left, Error::Closed { activity, peer }),
            Fault::Unconnected(error) if is_own_failure(&error) => {
                self.session().give_up(self.call());
                return error;
            }
            Fault::Unconnected(error) => (Cause::Died, error),
        };
        let (rank, reporter) = (self.members[peer], self.session().rank.index());
        self.session().report(Abort { cause, rank, reporter, call: self.call() });
        error
    }

    /// The coordinator notices a death as soon as the peer does: its word tells more than a broken connection.
    fn await_reason(&self, deadline: Deadline) -> Option<Abort> {
        let (session, runtime) = (self.session(), self.runtime());
        let until = runtime.deadline(runtime.remaining(deadline).min(REASON_LIMIT));
        loop {
            let reason = session.verdict.get();
            if reason.is_some() || runtime.expired(until) {
                return reason;
            }
            socket::poll(&mut [session.verdict.watch()], runtime.remaining(until)).ok()?;
        }
    }

    /// Delivers this rank's oldest message to itself.
    fn receive_own(&mut self, len: usize, sink: &mut Sink<'_>) -> Result<(), Fault> {
        let (theirs, message) = self.own.pop_front().ok_or(Fault::TimedOut)?;
        if theirs != self.call() {
            return Err(Fault::Mismatch { theirs });
        }
        if message.len() != len {
            return Err(Fault::Length { got: message.len() as u64, expected: len as u64 });
        }
        match sink {
            Sink::Into(memory) => memory.copy_from_slice(&message),
            Sink::Each(sink) => self.scratch.pass(&message, sink),
        }
        Ok(())
    }
}

/// Whether a connection could not be opened because of this process, not of the peer.
fn is_own_failure(error: &Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable, TimedOut};
    match error {
        Error::Address { source, .. } => !matches!(
            source.kind(),
            ConnectionRefused | ConnectionReset | HostUnreachable | NetworkUnreachable | TimedOut
        ),
        Error::Resources { .. } | Error::NotShared { .. } => true,
        _ => false,
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

    fn begin(&mut self, call: Fingerprint) {
        self.calls = [self.call(), call];
    }

    fn exchange(
        &mut self,
        mut send: Option<Outgoing<'_>>,
        mut receive: Option<Incoming<'_>>,
        deadline: Deadline,
    ) -> Result<()> {
        check_exchange(self.rank, send.as_ref(), receive.as_ref())?;
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
                .map_err(|fault| self.fail(receiving(me)(fault), deadline))?;
        }
        if send.is_some() || receive.is_some() {
            self.try_exchange(send, receive, deadline).map_err(|trouble| self.fail(trouble, deadline))?;
        }
        self.traffic.count(sent, received);
        Ok(())
    }

    fn exchange_in_place(
        &mut self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        check_peer(self.rank, peer)?;
        self.check_alive()?;
        let length = buffer.len();
        if peer == self.rank.index() {
            let own = buffer.to_vec();
            self.scratch
                .pass(&own, &mut |offset, bytes| combine(&mut buffer[offset..][..bytes.len()], bytes));
        } else {
            self.try_exchange_in_place(peer, buffer, combine, deadline)
                .map_err(|trouble| self.fail(trouble, deadline))?;
        }
        self.traffic.count(Some(length), Some(length));
        Ok(())
    }

    fn exchange_all(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        check_all(self.rank, sends, receives)?;
        self.check_alive()?;
        let me = self.rank.index();
        for own in sends.iter().filter(|send| send.to == me) {
            self.own.push_back((self.call(), own.parts.concat()));
        }
        for own in receives.iter_mut().filter(|receive| receive.from == me) {
            self.receive_own(own.len, &mut own.sink)
                .map_err(|fault| self.fail(receiving(me)(fault), deadline))?;
        }
        self.try_exchange_all(sends, receives, deadline).map_err(|trouble| self.fail(trouble, deadline))?;
        sends.iter().for_each(|send| self.traffic.count(Some(send.len()), None));
        receives.iter().for_each(|receive| self.traffic.count(None, Some(receive.len)));
        Ok(())
    }

    fn silent(&mut self, peers: &[usize], deadline: Deadline) -> Result<Vec<usize>> {
        peers.iter().try_for_each(|&peer| check_peer(self.rank, peer))?;
        self.check_alive()?;
        let mut silent = Vec::new();
        for &peer in peers {
            let here = match peer == self.rank.index() {
                true => !self.own.is_empty(),
                false => {
                    self.await_message(peer, deadline).map_err(|trouble| self.fail(trouble, deadline))?
                }
            };
            if !here {
                silent.push(peer);
            }
        }
        Ok(silent)
    }

    fn hosts(&self) -> Vec<u64> {
        self.members.iter().map(|&member| self.session().homes[member].host).collect()
    }

    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>> {
        let number = self.children;
        let place = bookkeeping::fork(self.rank, self.channel, &mut self.children, members)?;
        let child = place.map(|(channel, rank)| -> Box<dyn Transport> {
            let members = members.iter().map(|&member| self.members[member]).collect();
            let origin = self.origin.and_then(|origin| origin.child(number, channel));
            Box::new(Self::open(self.membership.clone(), channel, origin, rank, members))
        });
        self.session().channels.count_forks(self.channel, self.children);
        Ok(child)
    }

    fn abort(&mut self) {
        self.session().give_up(self.call());
    }

    fn aborted(&self) -> Option<Abort> {
        self.session().verdict.get()
    }

    fn traffic(&self) -> Traffic {
        self.traffic
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.session().give_up(self.call());
        }
        self.session().channels.leave(self.channel);
        let unasked = self.session().arrivals.forget(self.channel);
        if self.aborted().is_none() {
            self.links.iter().flatten().chain(&unasked).for_each(Link::say_goodbye);
        }
    }
}

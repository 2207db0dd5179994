//! The transport over TCP: connections on first use, and messages without a thread or a buffer of their size.

use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFlags;

use crate::auth::{Identity, Purpose};
use crate::check::{self, check_exchange, check_peer};
use crate::tcp::config::Config;
use crate::tcp::link::{Fault, Inbound, Outbound, Scratch, say_goodbye};
use crate::tcp::patience::{Patience, Wait};
use crate::tcp::session::{Membership, Session, WAITING_LIMIT, timeout};
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
    rank: Rank,
    /// The ranks of the group, as numbered in the world.
    members: Vec<usize>,
    children: u64,
    links: Vec<Option<TcpStream>>,
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

/// How an exchange stands after it went as far as it goes without waiting.
enum Progress {
    Done,
    /// Something moved; there may be more.
    Moved,
    /// It waits until a connection takes more, or more has come, or for either.
    Stuck {
        send: bool,
        receive: bool,
    },
}

impl Progress {
    const fn new(moved: bool, send: bool, receive: bool) -> Self {
        match (moved, send, receive) {
            (_, false, false) => Self::Done,
            (true, ..) => Self::Moved,
            (false, send, receive) => Self::Stuck { send, receive },
        }
    }
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
        Ok(Self::open(membership, ChannelId::WORLD, config.rank, members))
    }

    fn open(membership: Arc<Membership>, channel: ChannelId, rank: Rank, members: Vec<usize>) -> Self {
        let peers = &membership.session.peers;
        let here = peers.get(membership.session.rank.index()).map(|address| address.ip());
        let local_ranks = peers.iter().filter(|address| Some(address.ip()) == here).count();
        Self {
            channel,
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
    fn connect(&mut self, peers: [Option<usize>; 2], deadline: Deadline) -> Result<(), Trouble> {
        for dialling in [true, false] {
            for peer in peers.into_iter().flatten() {
                let dials = self.rank.index() > peer;
                if self.links[peer].is_none() && dials == dialling {
                    let link =
                        if dials { self.dial(peer, deadline) } else { self.await_dial(peer, deadline) };
                    let trouble = |fault| Trouble { activity: Activity::Connect, peer, fault };
                    self.links[peer] = Some(link.map_err(trouble)?);
                }
            }
        }
        Ok(())
    }

    fn dial(&self, peer: usize, deadline: Deadline) -> Result<TcpStream, Fault> {
        let session = self.session();
        let dial = || {
            let from = rendezvous::number(session.rank.index())?;
            let to = rendezvous::number(self.members[peer])?;
            let identity = Identity { epoch: session.epoch, from, to, purpose: Purpose::Data(self.channel) };
            rendezvous::dial(session, identity, deadline)
        };
        dial().map_err(|error| match error {
            Error::Address { source, .. } if source.kind() == io::ErrorKind::TimedOut => Fault::TimedOut,
            error => Fault::Unconnected(error),
        })
    }

    fn await_dial(&self, peer: usize, deadline: Deadline) -> Result<TcpStream, Fault> {
        let session = self.session();
        session.arrivals.take(self.channel, self.members[peer], session, self.calls, deadline)
    }

    /// Moves both halves as far as they go, again and again, waiting in between.
    fn drive(
        &mut self,
        peers: [Option<usize>; 2],
        deadline: Deadline,
        mut step: impl FnMut([Option<&TcpStream>; 2], &mut Scratch) -> Result<Progress, Trouble>,
    ) -> Result<(), Trouble> {
        let session = &*self.membership.session;
        let links = peers.map(|peer| peer.and_then(|peer| self.links[peer].as_ref()));
        let mut wait = Wait::default();
        let mut told = false;
        loop {
            let progress = step(links, &mut self.scratch)?;
            let (activity, peer) = match (&progress, peers) {
                (Progress::Done, _) => return Ok(()),
                (Progress::Stuck { receive: false, .. }, [Some(to), _]) | (_, [Some(to), None]) => {
                    (Activity::Send, to)
                }
                (_, [_, from]) => (Activity::Receive, from.unwrap_or_default()),
            };
            let trouble = |fault| Trouble { activity, peer, fault };
            if let Some(abort) = session.verdict.get() {
                return Err(trouble(Fault::Aborted(abort)));
            }
            if session.runtime.expired(deadline) {
                return Err(trouble(Fault::TimedOut));
            }
            let Progress::Stuck { send, receive } = progress else {
                wait = Wait::default();
                continue;
            };
            if self.patience.look_again(&mut wait, &session.runtime) {
                continue;
            }
            let limit = session.runtime.remaining(deadline);
            let limit = if told { limit } else { limit.min(WAITING_LIMIT) };
            let [to, from] = links;
            let stuck = [to.filter(|_| send), from.filter(|_| receive)];
            let ready = sleep(session, stuck, limit).map_err(|e| trouble(Fault::Io(e)))?;
            if !ready && !told {
                session.tell_waiting(self.channel, self.calls);
                told = true;
            }
        }
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
        let left = self.session().left(self.members[peer]).is_some();
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

    fn try_exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        deadline: Deadline,
    ) -> Result<(), Trouble> {
        let peers = [send.map(|send| send.to), receive.as_ref().map(|receive| receive.from)];
        self.connect(peers, deadline)?;
        let parts = send.map_or(&[][..], |send| send.parts);
        let mut outbound = send.map(|send| Outbound::new(send.len(), &self.call()));
        let mut inbound = receive.map(|receive| (Inbound::new(receive.len, &self.call()), receive.sink));
        self.drive(peers, deadline, |[to, from], scratch| {
            let (mut moved, mut send, mut receive) = (false, false, false);
            if let (Some(link), Some(outbound)) = (to, &mut outbound)
                && !outbound.done()
            {
                moved |= outbound.push(link, parts).map_err(|fault| sending(peers, fault))?;
                send = !outbound.done();
            }
            if let (Some(link), Some((inbound, sink))) = (from, &mut inbound)
                && !inbound.done()
            {
                let came = match sink {
                    Sink::Into(memory) => inbound.pull_into(link, memory),
                    Sink::Each(sink) => inbound.pull_each(link, scratch, sink),
                };
                moved |= came.map_err(|fault| receiving(peers, fault))?;
                receive = !inbound.done();
            }
            Ok(Progress::new(moved, send, receive))
        })
    }

    fn try_exchange_in_place(
        &mut self,
        peer: usize,
        buffer: &mut [u8],
        combine: &mut Combine<'_>,
        deadline: Deadline,
    ) -> Result<(), Trouble> {
        let peers = [Some(peer); 2];
        self.connect(peers, deadline)?;
        let mut outbound = Outbound::new(buffer.len(), &self.call());
        let mut inbound = Inbound::new(buffer.len(), &self.call());
        self.drive(peers, deadline, |[link, _], scratch| {
            let link = link.expect("connected above");
            let mut moved = false;
            if !outbound.done() {
                moved |= outbound.push(link, &[buffer]).map_err(|fault| sending(peers, fault))?;
            }
            if !inbound.done() {
                let came = inbound.pull_in_place(link, scratch, &outbound, buffer, combine);
                moved |= came.map_err(|fault| receiving(peers, fault))?;
            }
            // With the scratch full, what comes next has to wait until more of ours has left.
            Ok(Progress::new(moved, !outbound.done(), inbound.wants_more(scratch)))
        })
    }

    /// Delivers this rank's oldest message to itself.
    fn receive_own(&mut self, len: usize, sink: Sink<'_>) -> Result<(), Fault> {
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

fn sending(peers: [Option<usize>; 2], fault: Fault) -> Trouble {
    Trouble { activity: Activity::Send, peer: peers[0].unwrap_or_default(), fault }
}

fn receiving(peers: [Option<usize>; 2], fault: Fault) -> Trouble {
    Trouble { activity: Activity::Receive, peer: peers[1].unwrap_or_default(), fault }
}

/// Whether a connection could not be opened because of this process, not of the peer.
fn is_own_failure(error: &Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable, TimedOut};
    match error {
        Error::Address { source, .. } => !matches!(
            source.kind(),
            ConnectionRefused | ConnectionReset | HostUnreachable | NetworkUnreachable | TimedOut
        ),
        Error::Resources { .. } => true,
        _ => false,
    }
}

/// Waits until one of these connections takes more, or more comes on the other, or the job is aborted; `false` when
/// the time is over.
fn sleep(session: &Session, [to, from]: [Option<&TcpStream>; 2], limit: Duration) -> io::Result<bool> {
    let mut watched = [session.verdict.watch(), session.verdict.watch(), session.verdict.watch()];
    let mut count = 1;
    for (link, events) in [(to, PollFlags::OUT), (from, PollFlags::IN)] {
        if let Some(link) = link {
            watched[count] = socket::watch(link, events);
            count += 1;
        }
    }
    socket::poll(&mut watched[..count], limit)
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
            let trouble = |fault| Trouble { activity: Activity::Receive, peer: me, fault };
            self.receive_own(own.len, own.sink).map_err(|fault| self.fail(trouble(fault), deadline))?;
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

    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>> {
        let Some((channel, rank)) = check::fork(self.rank, self.channel, &mut self.children, members)? else {
            return Ok(None);
        };
        let members = members.iter().map(|&member| self.members[member]).collect();
        Ok(Some(Box::new(Self::open(self.membership.clone(), channel, rank, members))))
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
        if self.aborted().is_none() {
            self.links.iter().flatten().for_each(say_goodbye);
        }
        self.session().arrivals.forget(self.channel);
    }
}

//! One rank's end of the in-process network.

use std::fmt;
use std::sync::Arc;
use std::thread;

use super::message::Message;
use super::network::{Found, Network, Place, Sent};
use crate::bookkeeping;
use crate::check::{check_exchange, check_peer};
use crate::{
    Abort, Activity, Cause, ChannelId, Combine, Deadline, Error, Fingerprint, Incoming, Outgoing, Rank,
    Result, Runtime, Sink, Traffic, Transport,
};

/// Bytes between threads of one process. Sends never wait; receives wait by the runtime that
/// [`network`] was given.
///
/// Dropping it is an orderly goodbye: what it sent is still delivered, but who waits for more gets
/// [`Error::Closed`], and the job is aborted with [`Cause::Left`]. Dropping it in a panic aborts the job with
/// [`Cause::GaveUp`].
pub struct SimTransport {
    network: Arc<Network>,
    runtime: Runtime,
    rank: Rank,
    channel: ChannelId,
    /// The group's ranks by their numbers in the world.
    members: Arc<[usize]>,
    /// Where the ranks of the world are said to run.
    hosts: Arc<[u64]>,
    children: u64,
    /// The call before this one, and this one.
    calls: [Fingerprint; 2],
    traffic: Traffic,
}

/// The in-process network: one [`Transport`] per rank, in rank order, over the system's or a simulated runtime.
pub fn network(runtime: &Runtime, world_size: usize) -> Vec<SimTransport> {
    let network = Arc::new(Network::new(world_size));
    let members: Arc<[usize]> = (0..world_size).collect();
    let hosts: Arc<[u64]> = vec![0; world_size].into();
    let ranks = Rank::all(world_size);
    ranks
        .map(|rank| {
            let (members, hosts) = (members.clone(), hosts.clone());
            SimTransport::enter(network.clone(), runtime.clone(), rank, ChannelId::WORLD, members, hosts)
        })
        .collect()
}

impl SimTransport {
    fn enter(
        network: Arc<Network>,
        runtime: Runtime,
        rank: Rank,
        channel: ChannelId,
        members: Arc<[usize]>,
        hosts: Arc<[u64]>,
    ) -> Self {
        let (calls, traffic) = ([Fingerprint::NONE; 2], Traffic::default());
        let transport = Self { network, runtime, rank, channel, members, hosts, children: 0, calls, traffic };
        transport.network.enter(transport.place(rank.index()), rank.world_size());
        transport
    }

    /// Lets the ranks of the world run where this list says, one host for each; without it they share one. Every
    /// rank is to say the same.
    ///
    /// # Panics
    /// If the list has not as many entries as the world has ranks.
    #[must_use]
    pub fn with_hosts(mut self, hosts: &[u64]) -> Self {
        assert_eq!(hosts.len(), self.hosts.len(), "every rank of the world runs on one host");
        self.hosts = hosts.into();
        self
    }

    /// How many channels the network knows.
    #[cfg(test)]
    pub(super) fn channels(&self) -> usize {
        self.network.channels()
    }

    fn place(&self, rank: usize) -> Place {
        Place { channel: self.channel, rank, world_rank: self.members[rank] }
    }

    fn own_place(&self) -> Place {
        self.place(self.rank.index())
    }

    fn call(&self) -> Fingerprint {
        self.calls[1]
    }

    fn check_alive(&self) -> Result<()> {
        self.network.aborted().map_or(Ok(()), |abort| Err(Error::Aborted(abort)))
    }

    fn send(&self, outgoing: Outgoing<'_>) -> Result<()> {
        let peer = outgoing.to;
        let message = Message::new(self.call(), outgoing);
        self.runtime.interleave();
        match self.network.send(self.own_place(), self.place(peer), message) {
            Sent::Queued => Ok(()),
            Sent::Left => Err(self.fail(peer, Cause::Left, Error::Closed { activity: Activity::Send, peer })),
            Sent::Aborted(abort) => Err(Error::Aborted(abort)),
        }
    }

    fn receive(&self, peer: usize, len: usize, deadline: Deadline) -> Result<Message> {
        self.runtime.interleave();
        let message = self.wait_for_message(peer, deadline)?;
        let (ours, theirs) = (self.call(), message.call);
        if ours != theirs {
            return Err(self.fail(peer, Cause::Mismatch { theirs }, Error::Mismatch { peer, ours, theirs }));
        }
        if message.len() != len {
            let (expected, got) = (len as u64, message.len() as u64);
            return Err(self.fail(peer, Cause::Protocol, Error::Length { peer, expected, got }));
        }
        Ok(message)
    }

    fn wait_for_message(&self, peer: usize, deadline: Deadline) -> Result<Message> {
        if self.message_comes(peer, deadline)? {
            let message = self.network.take(self.own_place(), peer);
            return Ok(message.expect("only this transport takes what is sent to it"));
        }
        let (elapsed, limit) = (self.runtime.elapsed(deadline), deadline.limit());
        let error = Error::Timeout { activity: Activity::Receive, peer, elapsed, limit };
        Err(self.fail(peer, Cause::TimedOut, error))
    }

    /// Whether a message of this peer is here, at the deadline at the latest.
    fn message_comes(&self, peer: usize, deadline: Deadline) -> Result<bool> {
        let activity = Activity::Receive;
        loop {
            match self.network.look(self.own_place(), self.place(peer), &self.calls, self.runtime.unparker())
            {
                Found::Message => return Ok(true),
                Found::Aborted(abort) => return Err(Error::Aborted(abort)),
                Found::Left => return Err(self.fail(peer, Cause::Left, Error::Closed { activity, peer })),
                Found::Elsewhere { rank: peer, ours, theirs } => {
                    let abort = Abort { call: ours, ..self.record(peer, Cause::Mismatch { theirs }) };
                    let first = self.network.abort(abort);
                    return Err(first.map_or_else(Error::Aborted, |()| Error::Mismatch {
                        peer,
                        ours,
                        theirs,
                    }));
                }
                Found::Nothing => {}
            }
            if self.runtime.expired(deadline) {
                return Ok(false);
            }
            self.runtime.park(Some(deadline));
        }
    }

    /// Aborts the job because of `peer`. The first to find something gets `error`, the others the abort.
    fn fail(&self, peer: usize, cause: Cause, error: Error) -> Error {
        self.network.abort(self.record(peer, cause)).map_or_else(Error::Aborted, |()| error)
    }

    fn record(&self, rank: usize, cause: Cause) -> Abort {
        Abort {
            cause,
            rank: self.members[rank],
            reporter: self.members[self.rank.index()],
            call: self.call(),
        }
    }
}

impl Transport for SimTransport {
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
        &self.runtime
    }

    fn begin(&mut self, call: Fingerprint) {
        self.calls = [self.call(), call];
    }

    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        deadline: Deadline,
    ) -> Result<()> {
        check_exchange(self.rank, send.as_ref(), receive.as_ref())?;
        self.check_alive()?;
        let sent = send.as_ref().map(Outgoing::len);
        let received = receive.as_ref().map(|receive| receive.len);
        if let Some(outgoing) = send {
            self.send(outgoing)?;
        }
        if let Some(incoming) = receive {
            let message = self.receive(incoming.from, incoming.len, deadline)?;
            match incoming.sink {
                Sink::Into(memory) => memory.copy_from_slice(message.bytes()),
                Sink::Each(take) => {
                    message.pieces().for_each(|piece| take(piece.start, &message.bytes()[piece]));
                }
            }
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
        // A send copies: all of our bytes have left before the first of the peer's is delivered.
        self.send(Outgoing { to: peer, parts: &[buffer] })?;
        let message = self.receive(peer, buffer.len(), deadline)?;
        for piece in message.pieces() {
            combine(&mut buffer[piece.clone()], &message.bytes()[piece]);
        }
        self.traffic.count(Some(buffer.len()), Some(buffer.len()));
        Ok(())
    }

    fn silent(&mut self, peers: &[usize], deadline: Deadline) -> Result<Vec<usize>> {
        peers.iter().try_for_each(|&peer| check_peer(self.rank, peer))?;
        self.check_alive()?;
        let mut silent = Vec::new();
        for &peer in peers {
            if !self.message_comes(peer, deadline)? {
                silent.push(peer);
            }
        }
        Ok(silent)
    }

    fn hosts(&self) -> Vec<u64> {
        self.members.iter().map(|&member| self.hosts[member]).collect()
    }

    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>> {
        let Some((channel, rank)) = bookkeeping::fork(self.rank, self.channel, &mut self.children, members)?
        else {
            return Ok(None);
        };
        let members = members.iter().map(|&member| self.members[member]).collect();
        let (network, runtime, hosts) = (self.network.clone(), self.runtime.clone(), self.hosts.clone());
        let child = Self::enter(network, runtime, rank, channel, members, hosts);
        Ok(Some(Box::new(child)))
    }

    fn abort(&mut self) {
        // An earlier abort stands.
        let _ = self.network.abort(self.record(self.rank.index(), Cause::GaveUp));
    }

    fn aborted(&self) -> Option<Abort> {
        self.network.aborted()
    }

    fn traffic(&self) -> Traffic {
        self.traffic
    }
}

impl Drop for SimTransport {
    fn drop(&mut self) {
        if thread::panicking() {
            self.abort();
        }
        self.network.leave(self.own_place());
    }
}

impl fmt::Debug for SimTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimTransport").field("rank", &self.rank).field("channel", &self.channel).finish()
    }
}

//! A transport of a rank whose world does not exist. Its groups have the right ranks, and it sends nothing.

use dist_collectives::transport::{
    Abort, Activity, Cause, ChannelId, Combine, Error, Fingerprint, Inbox, Incoming, LazyDeadline, Outgoing,
    Rank, Result, Runtime, Traffic, Transport,
};

/// The transport of a prediction. Every message to or from another rank is an error.
#[derive(Debug)]
pub(crate) struct Unconnected {
    rank: Rank,
    members: Vec<usize>,
    channel: ChannelId,
    forks: u64,
    runtime: Runtime,
}

impl Unconnected {
    /// Returns the transport of rank 0.
    pub(crate) fn rank_0(world_size: usize) -> Self {
        let rank = Rank::new(0, world_size.max(1)).expect("the world has a rank");
        let members = (0..rank.world_size()).collect();
        Self { rank, members, channel: ChannelId::WORLD, forks: 0, runtime: Runtime::system() }
    }

    fn group(&self, members: &[usize], channel: ChannelId) -> Option<Box<dyn Transport>> {
        let index = members.iter().position(|member| *member == self.rank.index())?;
        let (rank, runtime) = (Rank::new(index, members.len())?, self.runtime.clone());
        let members = members.iter().filter_map(|member| self.members.get(*member).copied()).collect();
        Some(Box::new(Self { rank, members, channel, forks: 0, runtime }))
    }

    fn refuse(peers: impl IntoIterator<Item = usize>) -> Result<()> {
        let peer = peers.into_iter().next();
        peer.map_or(Ok(()), |peer| Err(Error::Closed { activity: Activity::Connect, peer }))
    }
}

impl Transport for Unconnected {
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

    fn begin(&mut self, _: &Fingerprint) {}

    fn exchange(
        &mut self,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_>>,
        _: &LazyDeadline<'_>,
    ) -> Result<()> {
        Self::refuse(send.map(|send| send.to).into_iter().chain(receive.map(|receive| receive.from)))
    }

    fn exchange_in_place(
        &mut self,
        peer: usize,
        _: &mut [u8],
        _: &mut Combine<'_>,
        _: &LazyDeadline<'_>,
    ) -> Result<()> {
        Self::refuse([peer])
    }

    fn exchange_all(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        _: &LazyDeadline<'_>,
    ) -> Result<()> {
        let receivers = sends.iter().map(|send| send.to);
        Self::refuse(receivers.chain(receives.iter().map(|receive| receive.from)))
    }

    fn exchange_matched(
        &mut self,
        sends: &[(Fingerprint, Outgoing<'_>)],
        _: &mut dyn Inbox,
        _: &LazyDeadline<'_>,
    ) -> Result<()> {
        Self::refuse(sends.iter().map(|(_, send)| send.to))
    }

    fn wait_any_peer(&mut self, peers: &[usize], _: &LazyDeadline<'_>) -> Result<Vec<usize>> {
        Ok(peers.to_vec())
    }

    fn hosts(&self) -> Vec<u64> {
        vec![0; self.members.len()]
    }

    fn fork(&mut self, members: &[usize]) -> Result<Option<Box<dyn Transport>>> {
        self.forks += 1;
        Ok(self.group(members, self.channel.child(self.forks, members)))
    }

    fn fork_local(&mut self, members: &[usize], number: u64) -> Result<Box<dyn Transport>> {
        let group = self.group(members, self.channel.local_child(number, members));
        group.ok_or_else(|| Error::NotAMember { rank: self.rank.index(), members: members.to_vec() })
    }

    fn abort(&mut self, _: Cause) {}

    fn aborted(&self) -> Option<Abort> {
        None
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
}

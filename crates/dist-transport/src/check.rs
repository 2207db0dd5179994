//! What every transport checks and counts in the same way.

use crate::{ChannelId, Error, Incoming, Outgoing, Rank, Result, Sink, Traffic};

impl Traffic {
    /// Counts what one exchange moved.
    pub(crate) fn count(&mut self, sent: Option<usize>, received: Option<usize>) {
        self.messages_sent += u64::from(sent.is_some());
        self.bytes_sent += sent.unwrap_or(0) as u64;
        self.messages_received += u64::from(received.is_some());
        self.bytes_received += received.unwrap_or(0) as u64;
    }
}

/// Refuses a peer that is not in the group.
pub(crate) fn check_peer(rank: Rank, peer: usize) -> Result<()> {
    let world_size = rank.world_size();
    if peer < world_size { Ok(()) } else { Err(Error::RankOutOfRange { rank: peer, world_size }) }
}

/// Refuses an exchange that names a peer outside the group, or whose receiving memory is not as long as the message.
pub(crate) fn check_exchange(
    rank: Rank,
    send: Option<&Outgoing<'_>>,
    receive: Option<&Incoming<'_>>,
) -> Result<()> {
    if let Some(&Incoming { from: peer, len, sink: Sink::Into(ref memory) }) = receive
        && memory.len() != len
    {
        return Err(Error::Length { peer, expected: memory.len() as u64, got: len as u64 });
    }
    let peers = [send.map(|send| send.to), receive.map(|receive| receive.from)];
    peers.into_iter().flatten().try_for_each(|peer| check_peer(rank, peer))
}

/// Refuses a list of members that makes no group.
fn check_members(rank: Rank, members: &[usize]) -> Result<()> {
    members.iter().try_for_each(|&member| check_peer(rank, member))?;
    let mut sorted = members.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    if sorted.is_empty() || sorted.len() < members.len() {
        return Err(Error::Members { members: members.to_vec() });
    }
    Ok(())
}

/// The channel of a group's next fork, and this rank's place in it, if it has one. Ranks that are not members count
/// the fork as well, so that all stay in step.
pub(crate) fn fork(
    rank: Rank,
    channel: ChannelId,
    children: &mut u64,
    members: &[usize],
) -> Result<Option<(ChannelId, Rank)>> {
    check_members(rank, members)?;
    let child = channel.child(*children, members);
    *children += 1;
    let index = members.iter().position(|&member| member == rank.index());
    Ok(index.and_then(|index| Rank::new(index, members.len())).map(|rank| (child, rank)))
}

//! What every transport refuses.

use crate::{Error, Incoming, Outgoing, Rank, Result, Sink};

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

/// Refuses messages of which one would be refused alone.
pub(crate) fn check_all(rank: Rank, sends: &[Outgoing<'_>], receives: &[Incoming<'_>]) -> Result<()> {
    sends.iter().try_for_each(|send| check_exchange(rank, Some(send), None))?;
    receives.iter().try_for_each(|receive| check_exchange(rank, None, Some(receive)))
}

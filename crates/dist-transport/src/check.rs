//! Argument checks that every transport makes.

use crate::{Error, Fingerprint, Inbox, Incoming, Outgoing, Rank, Result, Sink};

/// Returns an error if a peer is not in the group.
pub(crate) fn check_peer(rank: Rank, peer: usize) -> Result<()> {
    let world_size = rank.world_size();
    if peer < world_size { Ok(()) } else { Err(Error::RankOutOfRange { rank: peer, world_size }) }
}

/// Returns an error if an exchange names a peer outside the group, or if its receive buffer does not have the
/// length of the message.
pub(crate) fn check_exchange(
    (rank, members): (Rank, &[usize]),
    send: Option<&Outgoing<'_>>,
    receive: Option<&Incoming<'_>>,
) -> Result<()> {
    let peers = [send.map(|send| send.to), receive.map(|receive| receive.from)];
    peers.into_iter().flatten().try_for_each(|peer| check_peer(rank, peer))?;
    match receive {
        Some(&Incoming { from, len, sink: Sink::Into(ref memory) }) if memory.len() != len => {
            Err(Error::Length { peer: members[from], expected: memory.len() as u64, got: len as u64 })
        }
        _ => Ok(()),
    }
}

/// Refuses messages if one of them would be refused alone.
pub(crate) fn check_all(
    group: (Rank, &[usize]),
    sends: &[Outgoing<'_>],
    receives: &[Incoming<'_>],
) -> Result<()> {
    sends.iter().try_for_each(|send| check_exchange(group, Some(send), None))?;
    receives.iter().try_for_each(|receive| check_exchange(group, None, Some(receive)))
}

/// Returns an error if a peer of matched messages is not in the group.
pub(crate) fn check_matched(
    rank: Rank,
    sends: &[(Fingerprint, Outgoing<'_>)],
    inbox: &dyn Inbox,
) -> Result<()> {
    sends.iter().try_for_each(|(_, send)| check_peer(rank, send.to))?;
    inbox.sources().iter().try_for_each(|&from| check_peer(rank, from))
}

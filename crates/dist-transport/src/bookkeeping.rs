//! The state and constants that every transport needs: the call history, forks, heartbeats, and the size of a
//! header.

use std::time::Duration;

use crate::check::check_peer;
use crate::shm_group::CALLS_MAX;
use crate::{ChannelId, Error, Fingerprint, Rank, Result};

/// The time between two heartbeats of a process.
pub(crate) const HEARTBEAT: Duration = Duration::from_millis(500);
/// The time without a heartbeat after which a process on the coordinator's host counts as dead, unless the
/// job sets a limit. A job cannot set a shorter one.
pub(crate) const LIVENESS_ON_HOST: Duration = Duration::from_secs(2);
/// The limit between hosts, where the network may be silent for a while although all processes live.
pub(crate) const LIVENESS_BETWEEN_HOSTS: Duration = Duration::from_secs(10);

/// Bytes of the header of every message.
pub(crate) const HEADER_BYTES: usize = 64;

/// The last calls of a rank: as many as other ranks may be ahead or behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallHistory {
    all: [Fingerprint; CALLS_MAX],
    current: usize,
}

impl CallHistory {
    pub(crate) const NONE: Self = Self { all: [Fingerprint::NONE; CALLS_MAX], current: 0 };

    #[inline]
    pub(crate) fn begin(&mut self, call: &Fingerprint) {
        self.current = (self.current + 1) % CALLS_MAX;
        self.all[self.current] = *call;
    }

    #[inline]
    pub(crate) const fn current(&self) -> &Fingerprint {
        &self.all[self.current]
    }

    #[cfg(feature = "sim")]
    pub(crate) const fn current_mut(&mut self) -> &mut Fingerprint {
        &mut self.all[self.current]
    }

    /// Returns all of them, the current one first.
    #[cfg(feature = "tcp")]
    pub(crate) fn last_calls_first(&self) -> [Fingerprint; CALLS_MAX] {
        std::array::from_fn(|age| self.all[(self.current + CALLS_MAX - age) % CALLS_MAX])
    }

    /// Returns all of them, in no particular order.
    #[cfg(feature = "sim")]
    pub(crate) const fn all(&self) -> &[Fingerprint; CALLS_MAX] {
        &self.all
    }
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

/// Returns the channel of a group that its members make [alone](crate::Transport::fork_local), and this rank in it.
pub(crate) fn fork_local(
    rank: Rank,
    channel: ChannelId,
    members: &[usize],
    number: u64,
) -> Result<(ChannelId, Rank)> {
    check_members(rank, members)?;
    let index = members.iter().position(|&member| member == rank.index());
    let place = index.and_then(|index| Rank::new(index, members.len()));
    let no_member = || Error::NotAMember { rank: rank.index(), members: members.to_vec() };
    Ok((channel.local_child(number, members), place.ok_or_else(no_member)?))
}

/// Returns the channel of a group's next fork, and this rank in it, if it is a member. Ranks that are not
/// members count the fork as well, so that all count alike.
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

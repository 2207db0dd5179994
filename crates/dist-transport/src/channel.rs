//! Channel ids.

/// The id of a channel: the separate message stream of one communicator. Messages of different channels never
/// mix.
///
/// Every rank computes the id itself. All ranks that make the same calls in the same order get the same id,
/// and nothing is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChannelId(u64);

impl ChannelId {
    /// The channel that a job begins with.
    pub const WORLD: Self = Self(0);

    /// Returns the id of the channel's fork number `child`, with these ranks of the parent as members.
    #[must_use]
    pub fn child(self, child: u64, members: &[usize]) -> Self {
        let words = [self.0, child].into_iter().chain(members.iter().map(|&member| member as u64));
        // FNV-1a over the bytes of the words, with a final mix so that short lists differ in every bit.
        let hash = words.flat_map(u64::to_le_bytes).fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Self((hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns the id of the channel that these ranks of the channel make [alone](crate::Transport::fork_local), with a
    /// number of theirs.
    #[must_use]
    pub fn local_child(self, number: u64, members: &[usize]) -> Self {
        // No fork that all ranks count has this number.
        self.child(u64::MAX, &[]).child(number, members)
    }

    /// Returns the channel id under which [announced](crate::Transport::announce) calls of this channel are
    /// compared. It is another id, because announced calls have their own numbers.
    #[must_use]
    pub const fn of_announcements(self) -> Self {
        Self(self.0 ^ 0xa5a5_5a5a_c3c3_3c3c)
    }

    /// Returns the id as a number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the id with this number, as read from a peer.
    #[cfg(feature = "tcp")]
    pub(crate) const fn from_number(number: u64) -> Self {
        Self(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_differ_by_number_members_and_order() {
        let ids = [
            ChannelId::WORLD,
            ChannelId::WORLD.child(0, &[0, 1]),
            ChannelId::WORLD.child(1, &[0, 1]),
            ChannelId::WORLD.child(0, &[1, 0]),
            ChannelId::WORLD.child(0, &[0, 1, 2]),
            ChannelId::WORLD.child(0, &[0, 1]).child(0, &[0, 1]),
            ChannelId::WORLD.local_child(0, &[0, 1]),
            ChannelId::WORLD.local_child(1, &[0, 1]),
        ];
        let distinct: std::collections::HashSet<_> = ids.iter().collect();
        assert_eq!(distinct.len(), ids.len());
    }
}

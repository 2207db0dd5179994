//! The channels of this process, and whether it has left one for good.
//!
//! A rank may leave a group and stay in the job. Peers that are connected to it there receive its goodbye.
//! Others ask it after they have waited for a while. Left channels are not remembered: because a process
//! makes the forks of each channel in order, the [`ForkPath`] of a channel tells whether it was made.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};

use crate::ChannelId;
use crate::bootstrap::session::lock;
use crate::link::counts::MessageCounts;

/// The most forks between the world's channel and a channel that can be asked about.
pub(crate) const DEPTH_MAX: usize = 8;

/// The forks that lead from the world's channel to a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ForkPath {
    forks: [Fork; DEPTH_MAX],
    depth: usize,
}

/// The number of a fork within its parent channel, and the channel that it made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fork {
    pub(crate) number: u32,
    pub(crate) channel: ChannelId,
}

impl Default for Fork {
    fn default() -> Self {
        Self { number: 0, channel: ChannelId::WORLD }
    }
}

impl ForkPath {
    /// Creates a path of these forks. Returns `None` if they are too many.
    pub(crate) fn new(forks: &[Fork]) -> Option<Self> {
        let mut origin = Self { depth: forks.len(), ..Self::default() };
        origin.forks.get_mut(..forks.len())?.copy_from_slice(forks);
        Some(origin)
    }

    /// Returns the path of a channel forked from this one. Returns `None` if it is too long.
    pub(crate) fn child(&self, number: u64, channel: ChannelId) -> Option<Self> {
        let fork = Fork { number: u32::try_from(number).ok().filter(|&number| number != LOCAL)?, channel };
        Self::new(&[self.forks(), &[fork]].concat())
    }

    /// Returns the path of a channel that its members have made alone. Returns `None` if it is too long.
    pub(crate) fn local_child(&self, channel: ChannelId) -> Option<Self> {
        let fork = Fork { number: LOCAL, channel };
        Self::new(&[self.forks(), &[fork]].concat())
    }

    pub(crate) fn forks(&self) -> &[Fork] {
        &self.forks[..self.depth]
    }

    pub(crate) fn channel(&self) -> ChannelId {
        self.forks().last().map_or(ChannelId::WORLD, |fork| fork.channel)
    }
}

/// The number of a fork that only its members make.
const LOCAL: u32 = u32::MAX;

/// The channels of this process.
#[derive(Debug)]
pub(crate) struct Channels(Mutex<HashMap<ChannelId, Channel>>);

#[derive(Debug, Default)]
struct Channel {
    /// The counts of its messages, once a transport has entered it.
    counts: Option<Arc<MessageCounts>>,
    /// The number of forks of this channel.
    forks: u64,
    /// The last channels that this process has made from it as [local](LOCAL) forks and has left, the newest first.
    left_local: VecDeque<ChannelId>,
    /// The last forks of this channel, the newest first.
    made: VecDeque<ForkedGroup>,
    /// Other members that ranks have named for this channel, by rank.
    other_members: HashMap<usize, Vec<usize>>,
    /// Ranks of the world that have left it.
    left: HashSet<usize>,
}

/// A group that this rank has made by a fork, whether it is a member or not.
#[derive(Debug)]
struct ForkedGroup {
    number: u64,
    channel: ChannelId,
    /// The members, as numbered in the world.
    members: Vec<usize>,
}

/// The most forks of a channel that are remembered.
const MADE_MAX: usize = 64;
/// The most local forks of a channel that are remembered after this process has left them.
const LEFT_LOCAL_MAX: usize = 1024;

impl Channels {
    /// Creates the channels of a process, which begin with the channel of the world.
    pub(crate) fn new() -> Self {
        Self(Mutex::new(HashMap::from([(ChannelId::WORLD, Channel::default())])))
    }

    /// Records that a transport has entered a channel and counts its messages here.
    pub(crate) fn enter(&self, channel: ChannelId, counts: &Arc<MessageCounts>) {
        lock(&self.0).entry(channel).or_default().counts = Some(Arc::clone(counts));
    }

    /// Returns the number of messages that this rank has begun to send to a member of a channel, and of the signals that it
    /// has given there.
    pub(crate) fn sent(&self, channel: ChannelId, to: usize) -> Option<(u64, u64)> {
        let here = lock(&self.0);
        let counts = here.get(&channel)?.counts.as_ref()?;
        (to < counts.ranks()).then(|| (counts.sent(to), counts.signals()))
    }

    /// Records that a channel was forked. Called after the new channel was entered. The members are numbered
    /// as in the world.
    pub(crate) fn record_fork(
        &self,
        parent: ChannelId,
        number: u64,
        channel: ChannelId,
        members: Vec<usize>,
    ) {
        if let Some(parent) = lock(&self.0).get_mut(&parent) {
            parent.forks = number + 1;
            parent.made.truncate(MADE_MAX - 1);
            parent.made.push_front(ForkedGroup { number, channel, members });
        }
    }

    /// Returns the members that this process has named for a fork, if another process has named others for the
    /// same fork. Returns `None` if both agree, if this process has not made the fork yet, or if it has
    /// forgotten it.
    pub(crate) fn named_instead(&self, origin: &ForkPath) -> Option<Vec<usize>> {
        let here = lock(&self.0);
        let parents = std::iter::once(ChannelId::WORLD).chain(origin.forks().iter().map(|fork| fork.channel));
        let mut steps = parents.zip(origin.forks());
        steps.find_map(|(parent, fork)| {
            let is_meant =
                |made: &&ForkedGroup| made.number == u64::from(fork.number) && made.channel != fork.channel;
            here.get(&parent)?.made.iter().find(is_meant).map(|made| made.members.clone())
        })
    }

    /// Records the members that a peer has named for the fork that made this channel.
    pub(crate) fn record_other_members(&self, channel: ChannelId, rank: usize, members: Vec<usize>) {
        if let Some(channel) = lock(&self.0).get_mut(&channel) {
            channel.other_members.insert(rank, members);
        }
    }

    /// Returns the other members that a peer is known to have named for this channel.
    pub(crate) fn other_members(&self, channel: ChannelId, rank: usize) -> Option<Vec<usize>> {
        lock(&self.0).get(&channel)?.other_members.get(&rank).cloned()
    }

    /// Records that this process has left a channel, which was made by these forks.
    pub(crate) fn leave(&self, channel: ChannelId, origin: Option<&ForkPath>) {
        let mut here = lock(&self.0);
        here.remove(&channel);
        if let Some([before @ .., Fork { number: LOCAL, .. }]) = origin.map(ForkPath::forks) {
            let parent = before.last().map_or(ChannelId::WORLD, |fork| fork.channel);
            if let Some(parent) = here.get_mut(&parent) {
                parent.left_local.truncate(LEFT_LOCAL_MAX - 1);
                parent.left_local.push_front(channel);
            }
        }
    }

    /// Returns `true` if this process was in a channel and has left it.
    pub(crate) fn has_left(&self, origin: &ForkPath) -> bool {
        let here = lock(&self.0);
        if here.contains_key(&origin.channel()) {
            return false;
        }
        // The nearest ancestor that is still here tells whether the fork was made. Channels below a left
        // ancestor are not here and never will be.
        let parents = std::iter::once(ChannelId::WORLD).chain(origin.forks().iter().map(|fork| fork.channel));
        let steps: Vec<_> = parents.zip(origin.forks()).collect();
        let nearest = steps.into_iter().rev().find_map(|(parent, fork)| Some((here.get(&parent)?, fork)));
        nearest.is_none_or(|(parent, fork)| match fork.number {
            LOCAL => parent.left_local.contains(&fork.channel),
            number => parent.forks > u64::from(number),
        })
    }

    /// Records that a peer has left a channel. Does nothing if this process has left that channel too.
    pub(crate) fn record_left(&self, channel: ChannelId, rank: usize) {
        if let Some(channel) = lock(&self.0).get_mut(&channel) {
            channel.left.insert(rank);
        }
    }

    /// Returns `true` if a peer is known to have left a channel.
    pub(crate) fn was_left_by(&self, channel: ChannelId, rank: usize) -> bool {
        lock(&self.0).get(&channel).is_some_and(|channel| channel.left.contains(&rank))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(channels: &Channels, channel: ChannelId) {
        channels.enter(channel, &Arc::new(MessageCounts::new(2)));
    }

    /// Returns the paths of a channel, of a fork of it, and of a fork of that.
    fn line() -> [ForkPath; 3] {
        let child = |of: &ForkPath, number| {
            let channel = of.channel().child(number, &[0, 1]);
            of.child(number, channel).unwrap()
        };
        let first = child(&ForkPath::default(), 2);
        let second = child(&first, 0);
        [first, second, child(&second, 1)]
    }

    #[test]
    fn a_channel_was_left_once_its_fork_was_made_and_it_is_not_here() {
        let (channels, [first, second, third]) = (Channels::new(), line());
        let left = || [first, second, third].map(|origin| channels.has_left(&origin));
        let fork = |parent: ChannelId, number| {
            channels.record_fork(parent, number, parent.child(number, &[0, 1]), vec![0, 1]);
        };
        assert_eq!(left(), [false; 3], "none was made yet");
        fork(ChannelId::WORLD, 1);
        assert_eq!(left(), [false; 3], "others were made");
        enter(&channels, first.channel());
        fork(ChannelId::WORLD, 2);
        enter(&channels, second.channel());
        fork(first.channel(), 0);
        assert_eq!(left(), [false; 3], "two are here, and the third can still be made");
        channels.leave(first.channel(), Some(&first));
        assert_eq!(left(), [true, false, false], "the second can still be forked");
        channels.leave(second.channel(), Some(&second));
        assert_eq!(left(), [true; 3], "nothing is left to fork");
        channels.leave(ChannelId::WORLD, Some(&ForkPath::default()));
        assert_eq!(left(), [true; 3]);
    }

    #[test]
    fn a_channel_that_its_members_have_made_alone_was_left_once_it_was_here() {
        let channels = Channels::new();
        let [one, other] = [1, 2]
            .map(|number| ChannelId::WORLD.local_child(number, &[0, 1]))
            .map(|channel| ForkPath::default().local_child(channel).unwrap());
        let left = || [one, other].map(|origin| channels.has_left(&origin));
        channels.record_fork(ChannelId::WORLD, 5, ChannelId::WORLD.child(5, &[0]), vec![0]);
        enter(&channels, one.channel());
        assert_eq!(left(), [false; 2]);
        channels.leave(one.channel(), Some(&one));
        assert_eq!(left(), [true, false]);
    }

    #[test]
    fn a_channel_whose_parents_were_all_left_is_still_here() {
        let (channels, [first, second, third]) = (Channels::new(), line());
        enter(&channels, third.channel());
        channels.leave(ChannelId::WORLD, Some(&ForkPath::default()));
        assert_eq!([first, second, third].map(|origin| channels.has_left(&origin)), [true, true, false]);
    }

    #[test]
    fn other_members_get_the_fork_that_they_were_named_for() {
        let (channels, [first, second, third]) = (Channels::new(), line());
        let named = || [first, second, third].map(|origin| channels.named_instead(&origin));
        channels.record_fork(ChannelId::WORLD, 2, first.channel(), vec![0, 1]);
        assert_eq!(named(), [None, None, None], "the first is the same, the others were not made");
        enter(&channels, first.channel());
        channels.record_fork(first.channel(), 0, first.channel().child(0, &[1, 0]), vec![1, 0]);
        assert_eq!(named(), [None, Some(vec![1, 0]), Some(vec![1, 0])]);
        (0..2 * MADE_MAX as u64).for_each(|number| {
            channels.record_fork(first.channel(), number + 1, ChannelId::from_number(9), vec![0]);
        });
        assert_eq!(named(), [None, None, None], "it was long ago");
        channels.record_other_members(first.channel(), 1, vec![1]);
        assert_eq!(channels.other_members(first.channel(), 1), Some(vec![1]));
        assert_eq!(channels.other_members(first.channel(), 0), None);
    }

    #[test]
    fn a_channel_after_too_many_forks_has_no_path() {
        let deepest = (0..DEPTH_MAX as u64).fold(ForkPath::default(), |origin, number| {
            origin.child(number, ChannelId::from_number(7)).unwrap()
        });
        assert_eq!(deepest.child(0, ChannelId::from_number(8)), None);
        assert_eq!(ForkPath::default().child(1 << 32, ChannelId::from_number(8)), None);
    }
}

//! The effects of faults on messages: partitions, delays, losses, changed bytes and slow senders.

use std::time::Duration;

use super::link::NEVER;
use super::random::SplitMix64;

/// The active faults of the network.
#[derive(Debug, Default)]
pub(super) struct NetworkConditions {
    pub(super) partitions: Vec<NetworkPartition>,
    pub(super) delays: Vec<Delay>,
    pub(super) losses: Vec<PacketLoss>,
    /// Sender, receiver, and the index of the byte to change in their next message.
    pub(super) corruptions: Vec<(usize, usize, usize)>,
    /// Rank, and the pause before each send.
    pub(super) pauses: Vec<(usize, Duration)>,
}

/// A partition: nothing passes from one side to the other.
#[derive(Debug)]
pub(super) struct NetworkPartition {
    pub(super) from: Vec<usize>,
    pub(super) to: Vec<usize>,
    pub(super) since: Duration,
    pub(super) until: Duration,
}

#[derive(Debug)]
pub(super) struct Delay {
    pub(super) pair: (usize, usize),
    pub(super) by: Duration,
    pub(super) until: Duration,
}

#[derive(Debug)]
pub(super) struct PacketLoss {
    pub(super) pair: (usize, usize),
    pub(super) one_in: usize,
    pub(super) until: Duration,
}

/// The time until a lost packet is retransmitted; it doubles each time.
const RETRANSMISSION: Duration = Duration::from_millis(200);
/// The most doublings.
const DOUBLINGS_MAX: u32 = 9;
/// Payload of a packet.
const PACKET_BYTES: usize = 1448;

impl NetworkPartition {
    fn separates(&self, from: usize, to: usize) -> bool {
        from != to && self.from.contains(&from) && self.to.contains(&to)
    }
}

impl NetworkConditions {
    /// Returns `true` if a message from one rank to the other arrives now.
    pub(super) fn reaches(&self, from: usize, to: usize, now: Duration) -> bool {
        !self.partitions.iter().any(|partition| now < partition.until && partition.separates(from, to))
    }

    /// Returns the start of the first current partition that separates these ranks in either direction; `None`
    /// if there is none.
    pub(super) fn partitioned_since(&self, [one, other]: [usize; 2], now: Duration) -> Option<Duration> {
        let separates = |partition: &&NetworkPartition| {
            partition.separates(one, other) || partition.separates(other, one)
        };
        self.partitions
            .iter()
            .filter(|partition| now < partition.until)
            .filter(separates)
            .map(|partition| partition.since)
            .min()
    }

    /// Returns the arrival time of a message that is sent now. Without faults it would arrive at `arrives`.
    pub(super) fn arrival(
        &self,
        (from, to): (usize, usize),
        bytes: usize,
        (now, arrives): (Duration, Duration),
        random: &mut SplitMix64,
    ) -> Duration {
        let mut late = Duration::ZERO;
        for delay in self.delays.iter().filter(|delay| delay.pair == (from, to) && now < delay.until) {
            late = late.saturating_add(delay.by);
        }
        for loss in self.losses.iter().filter(|loss| loss.pair == (from, to) && now < loss.until) {
            late = late.saturating_add(loss.delay(bytes, random));
        }
        self.after_partitions((from, to), (now, arrives.saturating_add(late)))
    }

    /// Returns the arrival time of a message in flight.
    pub(super) fn after_partitions(
        &self,
        (from, to): (usize, usize),
        (now, arrives): (Duration, Duration),
    ) -> Duration {
        let partitions =
            self.partitions.iter().filter(|partition| now < partition.until && partition.separates(from, to));
        partitions.fold(arrives, |arrives, partition| match partition.until {
            NEVER => NEVER,
            until => arrives.max(until.saturating_add(arrives.saturating_sub(now))),
        })
    }

    /// Takes the byte to change in the next message between these ranks, if there is one.
    pub(super) fn corruption(&mut self, from: usize, to: usize) -> Option<usize> {
        let place = self.corruptions.iter().position(|&(a, b, _)| (a, b) == (from, to))?;
        Some(self.corruptions.swap_remove(place).2)
    }

    /// Returns the pause of this rank before each send.
    pub(super) fn pause(&self, rank: usize) -> Duration {
        self.pauses.iter().filter(|(slow, _)| *slow == rank).map(|(_, pause)| *pause).sum()
    }
}

impl PacketLoss {
    /// Returns the delay of a message because of its lost packets, which are retransmitted together.
    fn delay(&self, bytes: usize, random: &mut SplitMix64) -> Duration {
        let mut waiting = bytes / PACKET_BYTES + 1;
        let mut late = Duration::ZERO;
        for doubling in 0..DOUBLINGS_MAX {
            waiting = (0..waiting).filter(|_| random.below(self.one_in.max(1)) == 0).count();
            if waiting == 0 {
                break;
            }
            late += RETRANSMISSION * (1 << doubling);
        }
        late
    }
}

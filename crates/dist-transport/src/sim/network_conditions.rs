//! What faults do to messages: partitions, delays, losses, changed bytes and slow senders.

use std::time::Duration;

use super::link::NEVER;
use super::random::SplitMix64;

/// The faults of the network that are in force.
#[derive(Debug, Default)]
pub(super) struct NetworkConditions {
    pub(super) partitions: Vec<Partition>,
    pub(super) delays: Vec<Delay>,
    pub(super) losses: Vec<Loss>,
    /// Sender, receiver, and which byte of the next message between them is changed.
    pub(super) corruptions: Vec<(usize, usize, usize)>,
    /// Rank, and how long it pauses before it sends.
    pub(super) pauses: Vec<(usize, Duration)>,
}

/// Nothing gets from one side to the other.
#[derive(Debug)]
pub(super) struct Partition {
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
pub(super) struct Loss {
    pub(super) pair: (usize, usize),
    pub(super) one_in: usize,
    pub(super) until: Duration,
}

/// After how long a lost packet is sent again; twice as long if it is lost again.
const RETRANSMISSION: Duration = Duration::from_millis(200);
/// So often is it doubled.
const DOUBLINGS_MAX: u32 = 9;
/// Payload of a packet.
const PACKET_BYTES: usize = 1448;

impl Partition {
    fn separates(&self, from: usize, to: usize) -> bool {
        from != to && self.from.contains(&from) && self.to.contains(&to)
    }
}

impl NetworkConditions {
    /// Whether what this rank sends now gets to that one.
    pub(super) fn reaches(&self, from: usize, to: usize, now: Duration) -> bool {
        !self.partitions.iter().any(|partition| now < partition.until && partition.separates(from, to))
    }

    /// Since when these two do not reach each other, if they do not: one direction is enough for that.
    pub(super) fn partitioned_since(&self, [one, other]: [usize; 2], now: Duration) -> Option<Duration> {
        let separates =
            |partition: &&Partition| partition.separates(one, other) || partition.separates(other, one);
        self.partitions
            .iter()
            .filter(|partition| now < partition.until)
            .filter(separates)
            .map(|partition| partition.since)
            .min()
    }

    /// When a message arrives that is sent now and would arrive then in good conditions.
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

    /// When a message arrives that is under way.
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

    /// Which byte of this rank's next message to that one is changed, if one is.
    pub(super) fn corruption(&mut self, from: usize, to: usize) -> Option<usize> {
        let place = self.corruptions.iter().position(|&(a, b, _)| (a, b) == (from, to))?;
        Some(self.corruptions.swap_remove(place).2)
    }

    /// How long this rank pauses before it sends.
    pub(super) fn pause(&self, rank: usize) -> Duration {
        self.pauses.iter().filter(|(slow, _)| *slow == rank).map(|(_, pause)| *pause).sum()
    }
}

impl Loss {
    /// How much later a message arrives because of its lost packets, which are all sent again shm_group.
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

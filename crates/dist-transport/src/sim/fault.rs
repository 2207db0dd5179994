//! Faults of a simulated network, and the times at which they happen.

use std::fmt;
use std::time::Duration;

use super::random::SplitMix64;
use crate::bookkeeping::HEADER_BYTES;

/// A fault. Ranks are numbered as in the world.
///
/// The ranks see what processes connected by TCP would see. Heartbeats are sent every half second. A rank
/// from which the coordinator hears nothing for two seconds counts as silent, or for ten seconds if it is on
/// another host.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The rank's process dies: its threads unwind. The others are told that it died, or, if it hosted the
    /// coordinator, that the coordinator is lost.
    Kill {
        /// The rank.
        rank: usize,
    },
    /// The rank's process stops, as by SIGSTOP: its threads do not run. It counts as silent if that lasts.
    Stall {
        /// The rank.
        rank: usize,
        /// The duration; `None` means until the end of the run.
        lasts: Option<Duration>,
    },
    /// The rank is slow: it pauses before each message that it sends.
    Slow {
        /// The rank.
        rank: usize,
        /// The length of the pause.
        pause: Duration,
    },
    /// Messages sent from one rank to another arrive later.
    Delay {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// The additional delay.
        by: Duration,
        /// Messages sent within this time are delayed.
        lasts: Duration,
    },
    /// Packets from one rank to another are lost and retransmitted: messages arrive later, and none is
    /// missing.
    Loss {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// One packet in this many is lost.
        one_in: usize,
        /// Messages sent within this time are affected.
        lasts: Duration,
    },
    /// Nothing passes between two sides. Messages arrive when the partition ends. If it lasts, a rank that
    /// the coordinator cannot hear counts as silent, and a rank that cannot hear the coordinator counts it as
    /// lost. If the coordinator hears both of two ranks, and one waits for the other, both are named.
    Partition {
        /// The ranks of one side.
        from: Vec<usize>,
        /// The ranks of the other.
        to: Vec<usize>,
        /// The directions in which messages are lost.
        directions: Directions,
        /// The duration; `None` means until the end of the run.
        lasts: Option<Duration>,
    },
    /// One byte of the next message between two ranks is changed, and no checksum of the network notices. The
    /// header of 64 bytes counts first. A changed header is refused. The transport has no checksum of its
    /// own, so a changed payload is delivered.
    Corrupt {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// The index of the byte, modulo the bytes of the message.
        byte: usize,
    },
    /// The coordinator ends, and no rank with it.
    CoordinatorDeath,
}

/// The directions of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Directions {
    /// Only messages of the first side are lost.
    One,
    /// Neither side reaches the other.
    Both,
}

/// The time of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// The fault happens at this virtual time. Without links that cost time, time does not move while any rank can
    /// run.
    At(Duration),
    /// The fault happens when this rank begins the operation with this number, counted from 1. An operation is an exchange on
    /// any of its transports.
    Operation {
        /// The rank.
        rank: usize,
        /// The number.
        number: u64,
    },
}

/// The most operations before a random fault.
const OPERATIONS_MAX: usize = 60;

impl Fault {
    /// Returns a random fault in a world of at least one rank, and its time.
    pub(super) fn random(random: &mut SplitMix64, world_size: usize) -> (When, Self) {
        let rank = random.below(world_size);
        let number = 1 + random.below(OPERATIONS_MAX) as u64;
        let when = When::Operation { rank: random.below(world_size), number };
        let (from, to) = (random.below(world_size), random.below(world_size));
        let short = random.up_to(Duration::from_secs(1));
        let long = random.up_to(Duration::from_secs(5));
        let lasts = if random.below(3) == 0 { None } else { Some(long) };
        let fault = match random.below(9) {
            0 => Self::Kill { rank },
            1 => Self::Stall { rank, lasts },
            2 => Self::Slow { rank, pause: short },
            3 => Self::Delay { from, to, by: short, lasts: long },
            4 => Self::Loss { from, to, one_in: 1 + random.below(20), lasts: long },
            5 => Self::partition(random, world_size, Directions::One, lasts),
            6 => Self::partition(random, world_size, Directions::Both, lasts),
            // A changed payload would only show that nothing checks it.
            7 => Self::Corrupt { from, to, byte: random.below(HEADER_BYTES) },
            _ => Self::CoordinatorDeath,
        };
        (when, fault)
    }

    fn partition(
        random: &mut SplitMix64,
        world_size: usize,
        directions: Directions,
        lasts: Option<Duration>,
    ) -> Self {
        let (from, to) = (0..world_size).partition(|_| random.below(2) == 0);
        Self::Partition { from, to, directions, lasts }
    }

    /// Returns the ranks that the fault names.
    pub(super) fn ranks(&self) -> Vec<usize> {
        match self {
            Self::Kill { rank } | Self::Stall { rank, .. } | Self::Slow { rank, .. } => vec![*rank],
            Self::Delay { from, to, .. } | Self::Loss { from, to, .. } | Self::Corrupt { from, to, .. } => {
                vec![*from, *to]
            }
            Self::Partition { from, to, .. } => [&from[..], to].concat(),
            Self::CoordinatorDeath => Vec::new(),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kill { rank } => write!(f, "rank {rank} is killed"),
            Self::Stall { rank, lasts } => write!(f, "rank {rank} stands still{}", For(*lasts)),
            Self::Slow { rank, pause } => write!(f, "rank {rank} pauses {pause:?} before each send"),
            Self::Delay { from, to, by, lasts } => {
                write!(f, "messages from rank {from} to rank {to} are {by:?} late for {lasts:?}")
            }
            Self::Loss { from, to, one_in, lasts } => {
                write!(f, "one packet in {one_in} from rank {from} to rank {to} is lost for {lasts:?}")
            }
            Self::Partition { from, to, directions, lasts } => {
                let arrow = if *directions == Directions::One { "to" } else { "or back to" };
                write!(f, "nothing gets from ranks {from:?} {arrow} {to:?}{}", For(*lasts))
            }
            Self::Corrupt { from, to, byte } => {
                write!(f, "byte {byte} of the next message from rank {from} to rank {to} is changed")
            }
            Self::CoordinatorDeath => f.write_str("the coordinator dies"),
        }
    }
}

struct For(Option<Duration>);

impl fmt::Display for For {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str(" for ever"),
            Some(lasts) => write!(f, " for {lasts:?}"),
        }
    }
}

impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At(time) => write!(f, "at {time:?}"),
            Self::Operation { rank, number } => write!(f, "at operation {number} of rank {rank}"),
        }
    }
}

//! The costs of schedules and the time that they take on a machine.

/// The cost of one algorithm for one world size. All fields but the first count chunks of `buffer /
/// chunks(world_size)`. [`verify`](crate::verify) compares the schedules with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cost {
    /// The length of the longest chain of messages, if every message takes the same time.
    pub rounds: usize,
    /// The length of the longest chain in chunks, if the time of a message is its number of chunks.
    pub path: usize,
    /// Chunks that the busiest rank sends, for the most expensive root.
    pub sent_max: usize,
    /// Chunks that the busiest rank reduces into others, for the most expensive root.
    pub reduced_max: usize,
    /// The messages of all ranks together, for the most expensive root.
    pub all: Messages,
    /// The longest chain of messages in which each must arrive before the next can leave. Messages that a rank
    /// sends one after the other count once.
    pub depth: Messages,
    /// Chunks that all ranks together reduce into others.
    pub reduced: usize,
}

/// A number of messages and of the chunks in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Messages {
    /// The number of messages.
    pub count: usize,
    /// The number of chunks.
    pub chunks: usize,
}

impl Messages {
    /// Returns `count` messages with `chunks` chunks together.
    pub const fn new(count: usize, chunks: usize) -> Self {
        Self { count, chunks }
    }

    /// Returns the sum of both.
    pub(crate) const fn and(self, other: Self) -> Self {
        Self { count: self.count + other.count, chunks: self.chunks + other.chunks }
    }

    /// Returns the larger value of each field.
    pub(crate) const fn at_least(self, other: Self) -> Self {
        Self {
            count: if self.count > other.count { self.count } else { other.count },
            chunks: if self.chunks > other.chunks { self.chunks } else { other.chunks },
        }
    }

    /// Returns the messages of this many ranks.
    pub(crate) const fn times(self, ranks: usize) -> Self {
        Self { count: self.count * ranks, chunks: self.chunks * ranks }
    }
}

impl Cost {
    /// The cost of no communication.
    pub const NOTHING: Self = Self {
        rounds: 0,
        path: 0,
        sent_max: 0,
        reduced_max: 0,
        all: Messages::new(0, 0),
        depth: Messages::new(0, 0),
        reduced: 0,
    };

    /// Returns the cost if every rank sends in every round, sends `chunks` chunks in all and reduces `reduced`.
    pub const fn alike(world_size: usize, rounds: usize, chunks: usize, reduced: usize) -> Self {
        let depth = Messages::new(rounds, chunks);
        Self {
            rounds,
            path: chunks,
            sent_max: chunks,
            reduced_max: reduced,
            all: depth.times(world_size),
            depth,
            reduced: reduced * world_size,
        }
    }

    /// Returns the cost of a tree in which each message is the whole buffer. The root sends in `rounds` rounds, and
    /// the deepest rank is `depth` messages away from it.
    pub(crate) const fn tree(world_size: usize, rounds: usize, depth: usize) -> Self {
        let peers = world_size - 1;
        let (all, depth) = (Messages::new(peers, peers), Messages::new(depth, depth));
        Self { rounds, path: rounds, sent_max: rounds, all, depth, ..Self::NOTHING }
    }

    /// Returns the cost if each chunk is replaced by `each` chunks.
    pub(crate) const fn magnified(self, each: usize) -> Self {
        let Self { rounds, path, sent_max, reduced_max, all, depth, reduced } = self;
        Self {
            rounds,
            path: path * each,
            sent_max: sent_max * each,
            reduced_max: reduced_max * each,
            all: Messages { chunks: all.chunks * each, ..all },
            depth: Messages { chunks: depth.chunks * each, ..depth },
            reduced: reduced * each,
        }
    }

    /// Returns the larger value of each field.
    pub(crate) fn at_least(self, other: Self) -> Self {
        Self {
            rounds: self.rounds.max(other.rounds),
            path: self.path.max(other.path),
            sent_max: self.sent_max.max(other.sent_max),
            reduced_max: self.reduced_max.max(other.reduced_max),
            all: self.all.at_least(other.all),
            depth: self.depth.at_least(other.depth),
            reduced: self.reduced.max(other.reduced),
        }
    }

    /// Returns the cost of both, one after the other.
    pub(crate) const fn then(self, other: Self) -> Self {
        Self {
            rounds: self.rounds + other.rounds,
            path: self.path + other.path,
            sent_max: self.sent_max + other.sent_max,
            reduced_max: self.reduced_max + other.reduced_max,
            all: self.all.and(other.all),
            depth: self.depth.and(other.depth),
            reduced: self.reduced + other.reduced,
        }
    }
}

/// The costs of messages in picoseconds. They are integers so that every machine makes the same choice.
///
/// ```
/// use dist_algos::{ALGORITHMS, CollectiveKind, CostModel, Order, Placement};
///
/// let (slow, fast) = (CostModel::default(), CostModel { round_ps: 500_000, ..CostModel::default() });
/// let suggest = |model: &CostModel| {
///     let (ranks, order) = (Placement::dedicated(8), Order::Canonical);
///     ALGORITHMS.suggest(CollectiveKind::AllReduce, ranks, 65_536, order, model).unwrap().name
/// };
/// assert_eq!(suggest(&slow), "recursive_doubling");
/// assert_eq!(suggest(&fast), "halving_doubling");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CostModel {
    /// The minimum time of a message: α.
    pub round_ps: u64,
    /// The time per byte of a message: β.
    pub byte_ps: u64,
    /// The time to reduce a byte into another: γ.
    pub reduced_byte_ps: u64,
}

impl CostModel {
    /// Returns the time of an operation on a buffer of `buffer_bytes` bytes, which the schedule divides into
    /// `chunks` chunks.
    pub fn picoseconds(&self, cost: Cost, buffer_bytes: usize, chunks: usize) -> u128 {
        let chunks_take = |count: usize, byte_ps: u64| {
            let bytes = (count as u128).saturating_mul(buffer_bytes as u128) / chunks.max(1) as u128;
            bytes.saturating_mul(byte_ps.into())
        };
        (cost.rounds as u128)
            .saturating_mul(self.round_ps.into())
            .saturating_add(chunks_take(cost.path, self.byte_ps))
            .saturating_add(chunks_take(cost.reduced_max, self.reduced_byte_ps))
    }

    /// Returns the time on an oversubscribed host, which has fewer cores than ranks. There the work of all ranks
    /// counts, and not the longest chain.
    ///
    /// The work of all ranks is divided among the cores. While nothing can happen before a message arrives, the
    /// other cores are idle for the time of two messages: the message is sent, and its receiver is scheduled. With
    /// a root it is the time of one message, because ranks that do not wait continue to their next call. The
    /// [measured](Self::round_ps) cost is that of a round in which every rank sends a message and waits once.
    /// Schedules in which all ranks do the same therefore have the same cost as with one core per rank.
    ///
    /// This second model stays because the choice by [`picoseconds`](Self::picoseconds) is slower on such a host. It was
    /// measured with 4 ranks over TCP on 2 cores of a Xeon, from 8 B to 1 MiB (lowest times of three rounds, 2026-11-28).
    /// That choice takes 1.1 to 1.5 times as long for a broadcast, and 1.4 to 1.9 times for a gather. A scatter takes 1.0
    /// to 1.3 times as long, and an all_to_all of 8 B and 1 KiB 1.3 and 1.5 times. The models differ for trees: a tree
    /// has few rounds, but as many messages as a root that sends to every rank itself.
    pub(crate) fn picoseconds_on(
        &self,
        placement: Placement,
        rooted: bool,
        cost: Cost,
        (buffer_bytes, chunks): (usize, usize),
    ) -> u128 {
        let idle = placement.cores.saturating_sub(1) * if rooted { 1 } else { 2 };
        let rounds = |all: usize, depth: usize| all as u128 + (idle * depth) as u128;
        let each = rounds(placement.ranks, 1).max(1);
        let chunks_take = |count: u128, byte_ps: u64| {
            let bytes = count.saturating_mul(buffer_bytes as u128) / (each * chunks.max(1) as u128);
            bytes.saturating_mul(byte_ps.into())
        };
        (rounds(cost.all.count, cost.depth.count).saturating_mul(self.round_ps.into()) / each)
            .saturating_add(chunks_take(rounds(cost.all.chunks, cost.depth.chunks), self.byte_ps))
            .saturating_add(chunks_take(rounds(cost.reduced, cost.reduced_max), self.reduced_byte_ps))
    }
}

/// The ranks of one host and the number of cores that they use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Placement {
    /// The number of ranks.
    pub ranks: usize,
    /// The number of cores.
    pub cores: usize,
}

impl Placement {
    /// Returns a placement with one core for each rank.
    pub const fn dedicated(ranks: usize) -> Self {
        Self { ranks, cores: ranks }
    }

    /// Returns `true` if several ranks share a core.
    pub const fn is_oversubscribed(self) -> bool {
        self.cores < self.ranks
    }
}

/// The default: a round takes as long as 64 KiB at 5 GB/s, and arriving data is reduced while more arrives.
///
/// With it, halving-doubling replaces recursive doubling above 256 KiB on 4 ranks and above 154 KiB on 8. A
/// measurement with 4 ranks over TCP found recursive doubling faster at 256 KiB and slower at 1 MiB.
impl Default for CostModel {
    fn default() -> Self {
        let byte_ps = 200;
        Self { round_ps: 65_536 * byte_ps, byte_ps, reduced_byte_ps: 0 }
    }
}

/// Returns the number of chunks that move when `chunks` are halved again and again, rounded down, and the smaller
/// halves are sent. It is the number of ones in the binary digits of all numbers below `chunks`.
pub(crate) const fn halvings(chunks: usize) -> usize {
    let (mut moved, mut bit, mut above) = (0, usize::BITS, 0);
    while bit > 0 {
        bit -= 1;
        if chunks >> bit & 1 == 1 {
            // The numbers that agree with `chunks` above this digit and are smaller in it.
            moved += (above << bit) + ((bit as usize) << bit) / 2;
            above += 1;
        }
    }
    moved
}

/// Returns ⌈log₂ n⌉, the number of rounds after which every rank can have data of every other; 0 for 0 and 1.
pub(crate) const fn log2_ceil(n: usize) -> usize {
    if n <= 1 { 0 } else { (usize::BITS - (n - 1).leading_zeros()) as usize }
}

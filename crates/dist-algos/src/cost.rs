//! What a schedule costs, and what that takes on a machine.

/// The price of one algorithm for one world size. The unit of all but the first is a chunk of
/// `buffer / chunks(world_size)`; [`verify`](crate::verify) holds the schedules to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cost {
    /// Messages that follow one another when every message takes as long as every other.
    pub rounds: usize,
    /// Chunks that follow one another when a message takes as long as it has chunks.
    pub path: usize,
    /// Chunks that the busiest rank sends; of operations with a root, with the root that makes most of it.
    pub sent_max: usize,
    /// Chunks that the rank reduces that reduces most of them, into others; with the root that makes most of it.
    pub reduced_max: usize,
    /// What all ranks send together, with the root that makes most of it.
    pub all: Messages,
    /// Messages that follow one another because each had to arrive before the next could leave: those that a rank sends
    /// one after the other count once.
    pub depth: Messages,
    /// Chunks that all ranks together reduce into others.
    pub reduced: usize,
}

/// Some messages, and the chunks in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Messages {
    /// How many they are.
    pub count: usize,
    /// How many chunks they have.
    pub chunks: usize,
}

impl Messages {
    /// So many messages of so many chunks together.
    pub(crate) const fn new(count: usize, chunks: usize) -> Self {
        Self { count, chunks }
    }

    /// Both.
    pub(crate) const fn and(self, other: Self) -> Self {
        Self { count: self.count + other.count, chunks: self.chunks + other.chunks }
    }

    /// Each number the larger of both.
    pub(crate) const fn at_least(self, other: Self) -> Self {
        Self {
            count: if self.count > other.count { self.count } else { other.count },
            chunks: if self.chunks > other.chunks { self.chunks } else { other.chunks },
        }
    }

    /// The same from so many ranks.
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

    /// The cost where every rank sends in every round, so many chunks in all, and reduces so many.
    pub(crate) const fn alike(world_size: usize, rounds: usize, chunks: usize, reduced: usize) -> Self {
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

    /// The cost where each chunk is so many chunks.
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

    /// Each number the larger of both.
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

    /// The cost of both, one after the other.
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

/// How long things take, in picoseconds: by whole numbers every machine chooses the same.
///
/// ```
/// use dist_algos::{AllReduce, Choice, CostModel, Order};
///
/// let (slow, fast) = (CostModel::default(), CostModel { round_ps: 500_000, ..CostModel::default() });
/// let suggest = |model: &CostModel| AllReduce::suggest(8, 65_536, Order::Canonical, model);
/// assert_eq!(suggest(&slow), AllReduce::RecursiveDoubling);
/// assert_eq!(suggest(&fast), AllReduce::HalvingDoubling);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CostModel {
    /// What every message takes at least: α.
    pub round_ps: u64,
    /// What a byte of a message takes: β.
    pub byte_ps: u64,
    /// What it takes to reduce a byte into another: γ.
    pub reduced_byte_ps: u64,
}

impl CostModel {
    /// How long an operation takes on a buffer of so many bytes, of which the schedule makes so many chunks.
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

    /// The same where the ranks have fewer cores than they are: then what all of them do together counts, and not what
    /// one waits for.
    ///
    /// All work together is divided among the cores. While a message is under way that has to arrive before anything else
    /// can leave, the other cores have nothing to do, for as long as two messages take: it is sent, and its receiver gets a
    /// core. With a root it is one, since those who do not wait go ahead to their next call meanwhile. A round of all ranks,
    /// which is what is [measured](Self::round_ps), is a message of each and one such wait: schedules in which all ranks do
    /// the same cost what they cost with a core for each.
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

/// Ranks of one host, and the cores that they have between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Placement {
    /// How many ranks.
    pub ranks: usize,
    /// How many cores.
    pub cores: usize,
}

impl Placement {
    /// Ranks that have a core each.
    pub const fn dedicated(ranks: usize) -> Self {
        Self { ranks, cores: ranks }
    }

    /// Whether several ranks have to share a core.
    pub const fn is_oversubscribed(self) -> bool {
        self.cores < self.ranks
    }
}

/// A round takes as long as 64 KiB, at 5 GB/s, and what arrives is reduced while more arrives.
///
/// So recursive doubling gives way to halving-doubling above 256 KiB on 4 ranks and above 154 KiB on 8. On 4 ranks
/// over TCP it was measured to be the better choice at 256 KiB, and to lose at 1 MiB.
impl Default for CostModel {
    fn default() -> Self {
        let byte_ps = 200;
        Self { round_ps: 65_536 * byte_ps, byte_ps, reduced_byte_ps: 0 }
    }
}

/// Chunks that move when `chunks` are halved again and again, rounded down, and the lesser halves handed on: as many
/// as the numbers below it have ones in binary.
pub(crate) const fn halvings(chunks: usize) -> usize {
    let (mut moved, mut bit, mut above) = (0, usize::BITS, 0);
    while bit > 0 {
        bit -= 1;
        if chunks >> bit & 1 == 1 {
            // Numbers that agree with `chunks` above this digit and are less in it.
            moved += (above << bit) + ((bit as usize) << bit) / 2;
            above += 1;
        }
    }
    moved
}

/// ⌈log₂ n⌉: rounds in which everybody can have heard of everybody. 0 for 0 and 1.
pub(crate) const fn log2_ceil(n: usize) -> usize {
    if n <= 1 { 0 } else { (usize::BITS - (n - 1).leading_zeros()) as usize }
}

//! The plan of a direct call and the iterator over one rank's steps.

use std::hash::{Hash, Hasher};

use dist_transport::Rank;
use dist_transport::direct::{GroupLayout, MemoryArea, SlotUse};

use super::cells::place_bytes;
use super::collective::BlockUse;
use super::digest::Digest;
use super::{DirectAlgorithm, DirectCollective, DirectStep, PartSet, PeerSet, RemoteAccess, SumTarget};
use crate::Source;

/// The plan of a direct call, from which the schedules of all ranks are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DirectPlan {
    collective: DirectCollective,
    algorithm: DirectAlgorithm,
    world_size: usize,
    blocks: usize,
    published: PublishPlace,
    generation: usize,
    leaves_caches: bool,
}

/// The place where data for other ranks is published, if it is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum PublishPlace {
    FlagLine,
    EagerBuffer,
    Slot,
}

impl DirectPlan {
    /// Creates a plan for memory whose largest part has `part_bytes_max` bytes. A slot should use not much more
    /// than `block_bytes`. Returns `None` if the algorithm does not support the operation, if the memory does not
    /// allow the access or is too small, or if there is no such root.
    pub fn new(
        (collective, algorithm): (DirectCollective, DirectAlgorithm),
        world_size: usize,
        part_bytes_max: usize,
        block_bytes: usize,
        shared: GroupLayout,
    ) -> Option<Self> {
        if !algorithm.serves(collective) || collective.root().unwrap_or(0) >= world_size {
            return None;
        }
        let leaves_caches = leaves_caches(collective, world_size, part_bytes_max);
        let published = PublishPlace::Slot;
        let plan =
            Self { collective, algorithm, world_size, blocks: 1, published, generation: 0, leaves_caches };
        let places = plan.places();
        if algorithm.remote_access() != RemoteAccess::Nothing {
            return Some(plan);
        }
        if algorithm == DirectAlgorithm::OneShot && places == 1 && part_bytes_max <= shared.flag_line_bytes {
            return Some(Self { published: PublishPlace::FlagLine, ..plan });
        }
        // If one rank waits for nobody, or only one rank waits, the other ranks can continue to the next call.
        let goes_ahead = algorithm == DirectAlgorithm::OneShot && collective.root().is_some();
        if goes_ahead && part_bytes_max <= block_bytes.min(shared.eager_bytes) {
            return Some(Self { published: PublishPlace::EagerBuffer, ..plan });
        }
        let place_bytes_max = block_bytes.min(shared.slot_bytes) / places / 64 * 64;
        let blocks = part_bytes_max.div_ceil(place_bytes_max.max(64)).max(1);
        let fits = place_bytes(part_bytes_max, blocks) * places <= shared.slot_bytes;
        let plan = Self { blocks, ..plan };
        (fits && plan.slots() <= shared.slots).then_some(plan)
    }

    /// Returns a plan with this many blocks, at least one. Only slots can hold more than one block.
    pub(super) const fn in_blocks(
        (collective, algorithm): (DirectCollective, DirectAlgorithm),
        world_size: usize,
        blocks: usize,
        published: PublishPlace,
    ) -> Self {
        Self { collective, algorithm, world_size, blocks, published, generation: 0, leaves_caches: false }
    }

    /// Returns the operation.
    #[inline]
    pub const fn collective(&self) -> DirectCollective {
        self.collective
    }

    /// Returns the algorithm.
    #[inline]
    pub const fn algorithm(&self) -> DirectAlgorithm {
        self.algorithm
    }

    /// Returns the number of ranks.
    #[inline]
    pub const fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the number of blocks of every part.
    #[inline]
    pub const fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns the number of parts.
    #[inline]
    pub const fn parts(&self) -> usize {
        self.collective.parts(self.algorithm, self.world_size)
    }

    /// Returns the number of places in a slot; see [`DirectCollective::places`].
    #[inline]
    pub const fn places(&self) -> usize {
        self.collective.places(self.algorithm, self.world_size)
    }

    /// Returns the place of a part in a slot.
    pub(super) const fn place(&self, part: usize) -> usize {
        if self.places() == 1 { 0 } else { part }
    }

    /// Returns the number of slots that each rank uses.
    #[inline]
    pub const fn slots(&self) -> usize {
        match (self.algorithm.remote_access(), self.published) {
            (RemoteAccess::Nothing, PublishPlace::Slot) if self.blocks < SLOTS => self.blocks,
            (RemoteAccess::Nothing, PublishPlace::Slot) => SLOTS,
            _ => 0,
        }
    }

    /// Returns the use of slots that the ranks declare when they enter the call.
    #[inline]
    pub const fn use_of_slots(&self) -> SlotUse {
        if self.slots() == 0 { SlotUse::Unused } else { SlotUse::Used }
    }

    /// Returns the plan with this generation of the slots.
    #[inline]
    #[must_use]
    pub const fn with_generation(self, generation: usize) -> Self {
        Self { generation, ..self }
    }

    /// Returns a number that distinguishes this plan from plans with which it cannot run together. It is the same
    /// in every process.
    ///
    /// The generation of the slots is left out. The memory of a rank's own parts for a reduce_scatter or an
    /// all_gather is left out too, because each rank chooses it freely: its signals and waits, and the memory that
    /// others access, are the same either way.
    pub fn digest(&self) -> u64 {
        let mut digest = Digest::default();
        let collective = match self.collective {
            DirectCollective::ReduceScatter { .. } => DirectCollective::ReduceScatter { of: Source::Buffer },
            DirectCollective::AllGather { .. } => DirectCollective::AllGather { of: Source::Buffer },
            collective => collective,
        };
        Self { collective, generation: 0, ..*self }.hash(&mut digest);
        digest.finish()
    }

    /// Returns an equivalent plan of fewer blocks, so that proving a plan of many blocks stays cheap.
    ///
    /// A round refers only to its own block and to the two before, to their slots, and to signals at a fixed
    /// distance. The assignment of slots repeats after a fixed number of blocks, and the set of slots repeats after
    /// twice that number. So every round that is left out equals one that stays, together with the rounds around
    /// it.
    #[must_use]
    pub const fn shortened(self) -> Self {
        const PERIOD: usize = 2 * SLOTS;
        let blocks = if self.blocks < 3 * PERIOD { self.blocks } else { 2 * PERIOD + self.blocks % PERIOD };
        Self { blocks, generation: self.generation % 2, leaves_caches: false, ..self }
    }

    /// Returns the generation of the slots before the call.
    #[inline]
    pub const fn generation(&self) -> usize {
        self.generation
    }

    /// Returns how many generations of slots the call uses.
    #[inline(always)]
    pub const fn generations(&self) -> usize {
        if self.alternates_slots() { self.blocks.div_ceil(SLOTS) } else { 0 }
    }

    /// Returns the place where a block is published.
    #[inline]
    pub(super) const fn where_published(&self, block: usize) -> MemoryArea {
        match self.published {
            PublishPlace::FlagLine => MemoryArea::FlagLine,
            PublishPlace::EagerBuffer => MemoryArea::EagerBuffer,
            PublishPlace::Slot => MemoryArea::Slot(block % SLOTS),
        }
    }

    /// Returns the location of a cell for other ranks: the rank whose memory holds it, and its place in a slot.
    ///
    /// Two ranks alternate in the use of the cells that they have for each other alone: each rank writes into the
    /// cell that it has read before. A processor does that several times faster than it writes memory that other
    /// cores have read since.
    #[inline(always)]
    pub const fn home(
        &self,
        rank: usize,
        (part, block): (usize, usize),
        place: MemoryArea,
    ) -> (usize, usize) {
        match place {
            MemoryArea::FlagLine | MemoryArea::EagerBuffer | MemoryArea::Exposed => (rank, 0),
            MemoryArea::Slot(_) if self.alternates_slots() && (self.generation + block / SLOTS) % 2 == 1 => {
                if self.places() == 1 {
                    (1 - rank, 0)
                } else {
                    (part, rank)
                }
            }
            MemoryArea::Slot(_) => (rank, self.place(part)),
        }
    }

    #[inline(always)]
    const fn alternates_slots(&self) -> bool {
        matches!((self.algorithm, self.published), (DirectAlgorithm::OneShot, PublishPlace::Slot))
            && self.collective.root().is_none()
            && (self.world_size == 2 || self.places() > 1)
    }

    /// Returns `true` if every rank only publishes its data, waits for all other ranks, and perhaps reduces their
    /// data. [`signal_and_wait`](super::signal_and_wait) does that in one step.
    #[inline]
    pub const fn is_fused(&self) -> bool {
        matches!(
            (self.collective, self.algorithm),
            (DirectCollective::AllReduce | DirectCollective::Barrier, DirectAlgorithm::OneShot)
        ) && self.blocks == 1
    }

    /// Returns `true` if the contributions are added in one loop, if there is such a loop. Each rank begins with
    /// its own contribution, followed by those of the ranks whose numbers differ by exclusive or with 1, 2, 3 and so on. For a power of two that is canonical order, in which only the sides of sums are exchanged. With two ranks it
    /// adds one contribution to the other.
    pub(super) const fn adds_at_once(&self) -> bool {
        self.is_fused() && matches!(self.world_size, 4 | 8)
    }

    /// Returns `true` if a rank copies so much data into its buffer that non-temporal stores are faster.
    pub const fn leaves_caches(&self) -> bool {
        self.leaves_caches
    }

    /// Returns how many times every rank signals.
    #[inline]
    pub fn signals(&self) -> u32 {
        let signals = match self.algorithm {
            DirectAlgorithm::OneShot => self.blocks,
            DirectAlgorithm::Staged => self.blocks + 1,
            DirectAlgorithm::ReadFromAll if self.in_two_phases() => 3,
            DirectAlgorithm::ReadFromAll | DirectAlgorithm::WriteToAll => 2,
        };
        u32::try_from(signals).expect("memory has fewer than 2^32 blocks")
    }

    /// Returns `true` if one rank computes something for all other ranks before they use it.
    const fn in_two_phases(&self) -> bool {
        matches!(
            (self.collective, self.algorithm),
            (
                DirectCollective::AllReduce | DirectCollective::Reduce { .. },
                DirectAlgorithm::ReadFromAll | DirectAlgorithm::Staged
            )
        )
    }

    /// Returns the steps of this rank.
    pub const fn schedule(self, rank: Rank) -> DirectSchedule {
        DirectSchedule { plan: self, rank, round: 0, phase: 0 }
    }
}

/// The number of slots in a pipeline: one for the block that is published, one for each block that others may still
/// use, and one more. Without the last one a rank would wait for others that wait for this rank.
pub(super) const SLOTS: usize = 4;

/// The iterator over all steps of one rank, which needs no allocation.
#[derive(Clone, Debug)]
pub struct DirectSchedule {
    plan: DirectPlan,
    rank: Rank,
    round: usize,
    phase: usize,
}

/// The step at a position in a round.
enum PhaseStep {
    DirectStep(DirectStep),
    /// There is no step for this rank in this round.
    Nothing,
    EndOfRound,
}

impl DirectSchedule {
    /// Returns the plan.
    pub const fn plan(&self) -> &DirectPlan {
        &self.plan
    }

    /// Returns the rank.
    pub const fn rank(&self) -> Rank {
        self.rank
    }

    fn rounds(&self) -> usize {
        match self.plan.algorithm {
            DirectAlgorithm::OneShot => self.plan.blocks + 1,
            DirectAlgorithm::Staged => self.plan.blocks + 2,
            DirectAlgorithm::ReadFromAll | DirectAlgorithm::WriteToAll => 1,
        }
    }

    fn at(&self, round: usize, phase: usize) -> PhaseStep {
        match self.plan.algorithm {
            DirectAlgorithm::OneShot => self.one_shot(round, phase),
            DirectAlgorithm::Staged => self.staged(round, phase),
            DirectAlgorithm::ReadFromAll if self.plan.in_two_phases() => self.read_in_two_phases(phase),
            DirectAlgorithm::ReadFromAll => self.read_at_once(phase),
            DirectAlgorithm::WriteToAll => self.write_to_all(phase),
        }
    }

    /// Round `i` publishes block `i`, copies this rank's own part of it, and uses block `i − 1`.
    fn one_shot(&self, round: usize, phase: usize) -> PhaseStep {
        let DirectPlan { collective, algorithm, blocks, .. } = self.plan;
        match phase {
            0 => self.free(round),
            1 if round < blocks => PhaseStep::of(
                collective.publishes(algorithm, self.rank.index()).map(|parts| self.publish(parts, round)),
            ),
            2 if round < blocks => PhaseStep::DirectStep(DirectStep::Signal),
            3 if round < blocks => self.kept(round),
            1..=3 => PhaseStep::Nothing,
            _ if round == 0 => PhaseStep::EndOfRound,
            _ => self.used(phase - 4, round - 1, self.plan.where_published(round - 1), signals(round)),
        }
    }

    /// Waits before a slot is written again: the ranks that use its content have signalled in the second round
    /// after.
    fn free(&self, round: usize) -> PhaseStep {
        let DirectPlan { collective, blocks, .. } = self.plan;
        if round < SLOTS || round >= blocks {
            return PhaseStep::Nothing;
        }
        // A rank that waits for all other ranks in each round has already done so in the round before.
        let awaits_all = matches!(
            collective.uses(self.rank.index()),
            BlockUse::Reduce(_) | BlockUse::Take(PeerSet::Others)
        );
        let users =
            collective.users(self.rank.index()).filter(|users| !(awaits_all && *users == PeerSet::Others));
        PhaseStep::of(users.map(|ranks| DirectStep::Wait { ranks, signals: signals(round + 3 - SLOTS) }))
    }

    /// Copies this rank's own part of a block, while the input is in the cache and no rank waits for this one.
    fn kept(&self, block: usize) -> PhaseStep {
        PhaseStep::of(
            self.plan.collective.keeps(self.rank.index()).map(|part| DirectStep::Keep { part, block }),
        )
    }

    /// Returns the steps that use one block, which is available after this many signals.
    fn used(&self, index: usize, block: usize, of: MemoryArea, signals: u32) -> PhaseStep {
        let rank = self.rank.index();
        let step = match (self.plan.collective.uses(rank), index) {
            (BlockUse::Wait | BlockUse::Reduce(_), 0) => {
                Some(DirectStep::Wait { ranks: PeerSet::Others, signals })
            }
            (BlockUse::Reduce(part), 1) => {
                Some(DirectStep::Reduce { part, block, of, into: SumTarget::Buffer })
            }
            (BlockUse::Take(peers), _) => self.peer(peers, index / 2).map(|from| {
                let (part, into) = self.plan.collective.taken(rank, from);
                match index % 2 {
                    0 => DirectStep::Wait { ranks: PeerSet::One(from), signals },
                    _ => DirectStep::Take { from, part, block, of, into },
                }
            }),
            _ => None,
        };
        step.map_or(PhaseStep::EndOfRound, PhaseStep::DirectStep)
    }

    /// Round `i` publishes block `i`, reduces this rank's part of block `i − 1` and copies the returned sums of
    /// block `i − 2`.
    ///
    /// Sums are written back to the contributions. Writing cache lines that this core has just read from another
    /// core is cheaper than writing own lines that all other cores have read.
    fn staged(&self, round: usize, phase: usize) -> PhaseStep {
        let DirectPlan { collective, algorithm, blocks, .. } = self.plan;
        let rank = self.rank.index();
        let last = blocks + usize::from(self.takers().is_some());
        match phase {
            0 if round < blocks => {
                PhaseStep::of(collective.publishes(algorithm, rank).map(|parts| self.publish(parts, round)))
            }
            1 if round >= 1 && round <= last => {
                PhaseStep::DirectStep(DirectStep::Wait { ranks: PeerSet::Others, signals: signals(round) })
            }
            2 if round >= 1 && round <= blocks => {
                let of = self.plan.where_published(round - 1);
                let into = collective.wants_sum(rank).map_or(SumTarget::Buffer, SumTarget::Back);
                PhaseStep::DirectStep(DirectStep::Reduce { part: rank, block: round - 1, of, into })
            }
            0..=2 => PhaseStep::Nothing,
            _ => {
                let takers = self.takers().filter(|_| round >= 2);
                let peer = takers.and_then(|peers| self.peer(peers, phase - 3));
                let count = takers.map_or(0, |_| self.rank.world_size() - 1);
                match peer {
                    Some(part) => {
                        let (block, of) = (round - 2, self.plan.where_published(round - 2));
                        PhaseStep::DirectStep(DirectStep::Take { from: rank, part, block, of, into: part })
                    }
                    None if phase == 3 + count && round <= blocks => {
                        PhaseStep::DirectStep(DirectStep::Signal)
                    }
                    None => PhaseStep::EndOfRound,
                }
            }
        }
    }

    /// Every rank reduces its part of all ranks' memory; then the other ranks copy the sums.
    fn read_in_two_phases(&self, phase: usize) -> PhaseStep {
        let rank = self.rank.index();
        let takes = self.takers().map_or(0, |_| self.rank.world_size() - 1);
        match phase {
            0 | 3 => PhaseStep::DirectStep(DirectStep::Signal),
            1 => PhaseStep::DirectStep(DirectStep::Wait { ranks: PeerSet::Others, signals: 1 }),
            2 => PhaseStep::DirectStep(DirectStep::Reduce {
                part: rank,
                block: 0,
                of: MemoryArea::Exposed,
                into: SumTarget::Buffer,
            }),
            _ if phase < 4 + 2 * takes => {
                let from = self.rank.plus(1 + (phase - 4) / 2).index();
                PhaseStep::DirectStep(match phase % 2 {
                    0 => DirectStep::Wait { ranks: PeerSet::One(from), signals: 2 },
                    _ => DirectStep::Take { from, part: from, block: 0, of: MemoryArea::Exposed, into: from },
                })
            }
            _ => self.leave(phase - 4 - 2 * takes, 3),
        }
    }

    /// Every rank gets its result directly from the other ranks' memory.
    fn read_at_once(&self, phase: usize) -> PhaseStep {
        let uses = match self.plan.collective.uses(self.rank.index()) {
            BlockUse::Nothing => 0,
            BlockUse::Wait => 1,
            BlockUse::Reduce(_) | BlockUse::Take(PeerSet::One(_)) => 2,
            BlockUse::Take(PeerSet::Others) => 2 * (self.rank.world_size() - 1),
        };
        match phase {
            0 => PhaseStep::DirectStep(DirectStep::Signal),
            1 => self.kept(0),
            _ if phase < 2 + uses => self.used(phase - 2, 0, MemoryArea::Exposed, 1),
            _ => self.leave(phase - uses - 2, 2),
        }
    }

    /// Every rank reduces its part of all ranks' memory and writes the sum into their memory.
    fn write_to_all(&self, phase: usize) -> PhaseStep {
        let part = self.rank.index();
        match phase {
            0 => PhaseStep::DirectStep(DirectStep::Signal),
            1 => PhaseStep::DirectStep(DirectStep::Wait { ranks: PeerSet::Others, signals: 1 }),
            2 => PhaseStep::DirectStep(DirectStep::Reduce {
                part,
                block: 0,
                of: MemoryArea::Exposed,
                into: SumTarget::Back(PeerSet::Others),
            }),
            _ => self.leave(phase - 3, 2),
        }
    }

    /// Signals for the last time, and waits until no other rank accesses this rank's memory any more.
    fn leave(&self, index: usize, signals: u32) -> PhaseStep {
        match index {
            0 => PhaseStep::DirectStep(DirectStep::Signal),
            1 => PhaseStep::of(
                self.plan
                    .collective
                    .users(self.rank.index())
                    .map(|ranks| DirectStep::Wait { ranks, signals }),
            ),
            _ => PhaseStep::EndOfRound,
        }
    }

    fn publish(&self, parts: PartSet, block: usize) -> DirectStep {
        DirectStep::Publish {
            parts,
            block,
            of: self.plan.collective.source(),
            place: self.plan.where_published(block),
        }
    }

    /// Returns the ranks whose sums this rank copies.
    fn takers(&self) -> Option<PeerSet> {
        let takes = self.plan.collective.root().is_none_or(|root| root == self.rank.index());
        takes.then_some(PeerSet::Others)
    }

    fn peer(&self, peers: PeerSet, index: usize) -> Option<usize> {
        match peers {
            PeerSet::One(peer) => (index == 0).then_some(peer),
            PeerSet::Others => {
                (index + 1 < self.rank.world_size()).then(|| self.rank.plus(index + 1).index())
            }
        }
    }
}

impl PhaseStep {
    fn of(step: Option<DirectStep>) -> Self {
        step.map_or(Self::Nothing, Self::DirectStep)
    }
}

impl Iterator for DirectSchedule {
    type Item = DirectStep;

    fn next(&mut self) -> Option<DirectStep> {
        while self.round < self.rounds() {
            let at = self.at(self.round, self.phase);
            self.phase += 1;
            match at {
                PhaseStep::DirectStep(step) => return Some(step),
                PhaseStep::Nothing => {}
                PhaseStep::EndOfRound => (self.round, self.phase) = (self.round + 1, 0),
            }
        }
        None
    }
}

/// Returns `true` if the inputs and results of all ranks exceed the last-level cache.
const fn leaves_caches(collective: DirectCollective, world_size: usize, part_bytes_max: usize) -> bool {
    let parts = match collective {
        DirectCollective::AllGather { .. } => world_size + 1,
        DirectCollective::AllToAll => 2 * world_size,
        _ => return false,
    };
    part_bytes_max.saturating_mul(parts).saturating_mul(world_size) >= CACHED_BYTES_MAX
}

/// The size of the last-level cache on the measured host. For buffers that fit, non-temporal stores take up to
/// twice as long; for larger buffers they take a fifth less.
const CACHED_BYTES_MAX: usize = 32 << 20;

fn signals(count: usize) -> u32 {
    u32::try_from(count).expect("memory has fewer than 2^32 blocks")
}

//! The plan of a direct call and the iterator over one rank's steps.

use std::hash::{Hash, Hasher};

use dist_transport::Rank;
use dist_transport::shm_group::{GroupLayout, MemoryArea, SlotUse};

use super::cells::place_bytes;
use super::digest::Digest;
use super::step_context::{PhaseStep, PublishPlace, SLOTS, StepContext, signals};
use super::{DirectAlgorithm, DirectCollective, DirectStep, RemoteAccess};
use crate::Source;

/// The plan of a direct call, from which the schedules of all ranks are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DirectPlan {
    collective: DirectCollective,
    algorithm: &'static DirectAlgorithm,
    world_size: usize,
    blocks: usize,
    published: PublishPlace,
    generation: usize,
    leaves_caches: bool,
}

impl DirectPlan {
    /// Creates a plan for memory whose largest part has `part_bytes_max` bytes. A slot should use not much more
    /// than `block_bytes`. Returns `None` if the algorithm does not support the operation, if the memory does not
    /// allow the access or is too small, or if there is no such root.
    pub fn new(
        (collective, algorithm): (DirectCollective, &'static DirectAlgorithm),
        world_size: usize,
        part_bytes_max: usize,
        block_bytes: usize,
        shared: GroupLayout,
    ) -> Option<Self> {
        if algorithm.collective != collective.kind() || collective.root().unwrap_or(0) >= world_size {
            return None;
        }
        let leaves_caches = leaves_caches(collective, world_size, part_bytes_max);
        let published = PublishPlace::Slot;
        let plan =
            Self { collective, algorithm, world_size, blocks: 1, published, generation: 0, leaves_caches };
        let places = plan.places();
        if algorithm.remote_access != RemoteAccess::Nothing {
            return Some(plan);
        }
        if algorithm.is_one_shot && places == 1 && part_bytes_max <= shared.flag_line_bytes {
            return Some(Self { published: PublishPlace::FlagLine, ..plan });
        }
        // If one rank does not wait, or only one rank waits, the other ranks can continue to the next call.
        let goes_ahead = algorithm.is_one_shot && collective.root().is_some();
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
        (collective, algorithm): (DirectCollective, &'static DirectAlgorithm),
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
    pub const fn algorithm(&self) -> &'static DirectAlgorithm {
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
        self.algorithm.parts(self.world_size)
    }

    /// Returns the number of places in a slot; see [`DirectAlgorithm::places`].
    #[inline]
    pub const fn places(&self) -> usize {
        self.algorithm.places(self.world_size)
    }

    /// Returns the place of a part in a slot.
    pub(super) const fn place(&self, part: usize) -> usize {
        if self.places() == 1 { 0 } else { part }
    }

    /// Returns the number of slots that each rank uses.
    #[inline]
    pub const fn slots(&self) -> usize {
        match (self.algorithm.remote_access, self.published) {
            (RemoteAccess::Nothing, PublishPlace::Slot) if self.blocks < SLOTS => self.blocks,
            (RemoteAccess::Nothing, PublishPlace::Slot) => SLOTS,
            _ => 0,
        }
    }

    /// Returns the use of slots by the call, which the ranks declare when they enter it.
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

    /// Returns a number that is equal for plans that can be executed together, and different for others. It is the
    /// same in every process.
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
    /// distance. The assignment of slots repeats after a fixed number of blocks, and the set of slots repeats
    /// after twice that number. Therefore every round that is left out equals one that stays, together with
    /// the rounds around it.
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
        self.published.area(block)
    }

    /// Returns the location of a cell that other ranks read: the rank whose memory holds it, and its place in a slot.
    ///
    /// Two ranks alternate in the use of the cells that they have for each other alone: each rank writes into the
    /// cell that it has read before. A processor does that several times faster than it writes memory that other
    /// cores have read since.
    #[inline(always)]
    pub const fn cell_location(
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
        self.algorithm.is_one_shot
            && matches!(self.published, PublishPlace::Slot)
            && self.collective.root().is_none()
            && (self.world_size == 2 || self.places() > 1)
    }

    /// Returns `true` if every rank only publishes its data, waits for all other ranks, and reduces their data if the
    /// operation is a reduction. [`signal_and_wait`](super::signal_and_wait) does that in one step.
    #[inline]
    pub const fn is_fused(&self) -> bool {
        matches!(self.collective, DirectCollective::AllReduce | DirectCollective::Barrier)
            && self.algorithm.is_one_shot
            && self.blocks == 1
    }

    /// Returns `true` if the contributions are added in one loop over all ranks, for element types that have such a
    /// loop.
    ///
    /// Each rank begins with its own contribution. Then it adds the ranks whose numbers differ from its own
    /// by exclusive or with 1, 2, 3 and so on. If the number of ranks is a power of two, this is the
    /// canonical order, except that the two sides of a sum may be exchanged, which changes no bit.
    pub(super) const fn adds_at_once(&self) -> bool {
        self.is_fused() && matches!(self.world_size, 4 | 8)
    }

    /// Returns `true` if the data exceeds the caches, so that ranks copy it with non-temporal stores.
    pub const fn leaves_caches(&self) -> bool {
        self.leaves_caches
    }

    /// Returns how many times every rank signals.
    #[inline]
    pub fn signals(&self) -> u32 {
        signals((self.algorithm.signals)(self.blocks))
    }

    /// Returns the steps of this rank.
    pub const fn schedule(self, rank: Rank) -> DirectSchedule {
        let Self { collective, algorithm, blocks, published, .. } = self;
        let context = StepContext { collective, division: algorithm.division, blocks, published, rank };
        DirectSchedule { plan: self, context, round: 0, phase: 0 }
    }
}

/// The iterator over all steps of one rank, which needs no allocation.
#[derive(Clone, Debug)]
pub struct DirectSchedule {
    plan: DirectPlan,
    context: StepContext,
    round: usize,
    phase: usize,
}

impl DirectSchedule {
    /// Returns the plan.
    pub const fn plan(&self) -> &DirectPlan {
        &self.plan
    }

    /// Returns the rank.
    pub const fn rank(&self) -> Rank {
        self.context.rank()
    }
}

impl Iterator for DirectSchedule {
    type Item = DirectStep;

    fn next(&mut self) -> Option<DirectStep> {
        let DirectPlan { algorithm, blocks, .. } = self.plan;
        while self.round < (algorithm.rounds)(blocks) {
            let step = (algorithm.step)(&self.context, self.round, self.phase);
            self.phase += 1;
            match step {
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

//! The runner of direct schedules, which executes direct steps on bytes.

use std::borrow::Borrow;
use std::ops::Range;

use dist_transport::shm_group::{CHANGED_MAX, MemoryArea};
use dist_transport::{Combine, Error as TransportError, LazyDeadline, Rank};
use smallvec::SmallVec;

use super::access::DirectAccess;
use super::canonical_sum::{CanonicalSum, RemoteCell};
use super::cells;
use super::{DirectCollective, DirectPlan, DirectStep, PartSet, PeerSet, RemoteAccess, SumTarget};
use crate::{Error, Partition, RunError, Scratch, Source};

/// The memory of one rank that a direct schedule works on.
#[derive(Debug)]
pub struct DirectMemory<'a> {
    /// The memory that steps read and write.
    pub own: OwnMemory<'a>,
    /// The partition of that memory, for which the schedule was made.
    pub partition: Partition<'a>,
    /// An input that steps only publish, expose or copy, and its partition, if the schedule has such steps. For a
    /// gather, it contains only the rank's own part.
    pub input: Option<(&'a [u8], Partition<'a>)>,
    /// Bytes of other ranks' memory that are summed at a time. The value is small if all memory can be read
    /// directly, and larger if each access is a system call.
    pub piece_bytes: usize,
}

/// The memory that a schedule changes.
#[derive(Debug)]
pub enum OwnMemory<'a> {
    /// Other ranks may only read it.
    Borrowed(&'a mut [u8]),
    /// The memory is lent to the call. Other ranks write into it, except into this rank's part.
    Lent {
        /// The number of lent bytes.
        len: usize,
        /// The offset of this rank's part.
        start: usize,
        /// This rank's part.
        part: &'a mut [u8],
    },
}

/// The memory that a rank exposes to the others in a call.
#[derive(Debug)]
pub enum ExposedMemory<'a> {
    /// None.
    Nothing,
    /// Other ranks may read these bytes.
    Read(&'a [u8]),
    /// Other ranks may read and write all memory that the steps work on.
    OwnMemory,
}

/// A function that sums the contributions of 4 or 8 ranks in one loop, in canonical order. All contributions have
/// the same length. The sums are left in the first argument.
pub type SumKernel<'a> = dyn FnMut(&mut [u8], &[&[u8]]) + 'a;

/// The arithmetic of a reduction.
pub struct ReductionKernel<'a> {
    /// Adds its second argument into its first; as for [`run`](crate::run()).
    pub combine: &'a mut Combine<'a>,
    /// Completes sums. The rank that computed a sum calls it once.
    pub finish: &'a mut (dyn FnMut(&mut [u8]) + 'a),
    /// Combines the contributions of all ranks, given in rank order, and finishes the sums. All contributions have
    /// the same length. The result in canonical order is left in each of them.
    pub complete: &'a mut (dyn FnMut(&mut [&mut [u8]]) + 'a),
}

impl std::fmt::Debug for ReductionKernel<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Kernel")
    }
}

/// Returns the memory that a rank exposes when it enters the call of a plan, before it [runs](run()) its steps on
/// this memory.
#[inline]
pub fn exposed_memory<'m>(plan: &DirectPlan, rank: Rank, memory: &'m DirectMemory<'_>) -> ExposedMemory<'m> {
    match (plan.algorithm().remote_access, &memory.own) {
        (RemoteAccess::Nothing, _) => ExposedMemory::Nothing,
        (RemoteAccess::Write, OwnMemory::Lent { .. }) => ExposedMemory::OwnMemory,
        _ => ExposedMemory::Read(contribution(plan, rank, memory)),
    }
}

/// Executes the steps of this rank in order, in a call that `access` has entered for the plan. The steps are those
/// of the plan's [schedule](DirectPlan::schedule), computed now or stored. After an error the memory's contents are
/// unspecified.
///
/// # Errors
/// If the transport fails, or the memory does not match the plan.
#[inline(always)]
pub fn run<A: DirectAccess + ?Sized>(
    access: &mut A,
    (plan, rank): (&DirectPlan, Rank),
    steps: impl IntoIterator<Item = impl Borrow<DirectStep>>,
    memory: &mut DirectMemory<'_>,
    kernel: &mut ReductionKernel<'_>,
    scratch: &mut Scratch,
    due: &LazyDeadline<'_>,
) -> Result<(), RunError<TransportError>> {
    check(plan, memory)?;
    let place_bytes = place_bytes(&*access, plan, memory)?;
    let failed = |step: usize| move |source| RunError::Transport { step, source };
    let mut runner = DirectRunner { access, rank, plan, place_bytes, memory, kernel, scratch, due };
    for (index, step) in steps.into_iter().enumerate() {
        runner.step(step.borrow()).map_err(failed(index))?;
    }
    runner.access.wake_waiters();
    Ok(())
}

/// Executes a call that is a [fused barrier](DirectPlan::is_fused) in one step, which takes less time than [`run`].
/// Without a [`SumKernel`], two contributions are combined at a time. The caller completes the sums. After an error
/// the memory's contents are unspecified.
///
/// # Errors
/// If the transport fails.
///
/// # Panics
/// If the memory is larger than the plan allows and does not fit into its place.
#[inline(always)]
pub fn signal_and_wait<A: DirectAccess + ?Sized>(
    access: &mut A,
    (plan, rank): (&DirectPlan, Rank),
    own: &mut [u8],
    (mut combine, total): (impl FnMut(&mut [u8], &[u8]), Option<impl FnMut(&mut [u8], &[&[u8]])>),
    scratch: &mut Scratch,
    due: &LazyDeadline<'_>,
) -> Result<(), RunError<TransportError>> {
    let failed = |source| RunError::Transport { step: 0, source };
    let place = plan.where_published(0);
    let there = RemoteCell { of: place, cell: (0, 0), place_bytes: 0, offset: 0 };
    let at = (there.of_rank(plan, rank.index()).0, place, 0);
    let slots = plan.use_of_slots();
    if plan.collective() == DirectCollective::Barrier {
        return access.signal_and_wait(rank, slots, at, &[], due).map_err(failed);
    }
    access.signal_and_wait(rank, slots, at, own, due).map_err(failed)?;
    match total {
        Some(mut total) if plan.adds_at_once() => {
            let mut others = [(0, 0); CHANGED_MAX];
            let others = &mut others[..rank.world_size() - 1];
            for (other, distance) in others.iter_mut().zip(1..) {
                *other = there.of_rank(plan, rank.index() ^ distance);
            }
            access.view_all(place, others, own.len(), &mut |others| total(own, others)).map_err(failed)
        }
        _ => {
            let combine = &mut combine;
            CanonicalSum { access, rank, plan, there, own, scratch, combine }.sum().map_err(failed)
        }
    }
}

struct DirectRunner<'a, 'm, 'k, A: ?Sized> {
    access: &'a mut A,
    rank: Rank,
    plan: &'a DirectPlan,
    /// The distance between two places in a slot.
    place_bytes: usize,
    memory: &'a mut DirectMemory<'m>,
    kernel: &'a mut ReductionKernel<'k>,
    scratch: &'a mut Scratch,
    due: &'a LazyDeadline<'a>,
}

/// Returns the distance between two places in a slot. Returns `None` if the places do not fit into the slots, or the
/// data does not fit into its place.
#[inline]
fn place_bytes(
    access: &(impl DirectAccess + ?Sized),
    plan: &DirectPlan,
    memory: &DirectMemory<'_>,
) -> Result<usize, Error> {
    if plan.algorithm().remote_access != RemoteAccess::Nothing {
        return Ok(0);
    }
    let published = memory.input.map_or(0, |(_, partition)| partition.chunk_bytes_max());
    let part_bytes_max = published.max(memory.partition.chunk_bytes_max());
    let shared = access.shared();
    let (place_bytes, room) = match plan.where_published(0) {
        MemoryArea::FlagLine => (part_bytes_max, shared.flag_line_bytes),
        MemoryArea::EagerBuffer => (part_bytes_max, shared.eager_bytes),
        MemoryArea::Slot(_) | MemoryArea::Exposed => {
            (cells::place_bytes(part_bytes_max, plan.blocks()), shared.slot_bytes)
        }
    };
    let needed = place_bytes * plan.places();
    let fits = needed <= room && plan.slots() <= shared.slots;
    if fits { Ok(place_bytes) } else { Err(Error::Slots { needed, slot_bytes: room }) }
}

impl<A: DirectAccess + ?Sized> DirectRunner<'_, '_, '_, A> {
    #[inline]
    fn step(&mut self, step: &DirectStep) -> Result<(), TransportError> {
        match *step {
            DirectStep::Publish { parts, block, of, place } => self.publish(parts, block, of, place)?,
            DirectStep::Signal => self.signal(),
            DirectStep::Wait { ranks, signals } => {
                for rank in ranks.ranks(self.rank.index(), self.rank.world_size()) {
                    self.access.wait(rank, signals, self.due)?;
                }
            }
            DirectStep::Reduce { part, block, of, into } => self.reduce((part, block), of, into)?,
            DirectStep::Take { from, part, block, of, into } => {
                let (holder, offset) = self.there((part, block), of).of_rank(self.plan, from);
                let range = self.cell(into, block);
                let into = self.memory.own.range_mut(range);
                if self.plan.leaves_caches() {
                    self.access.read_non_temporal(holder, of, offset, into)?;
                } else {
                    self.access.read(holder, of, offset, into)?;
                }
            }
            DirectStep::Keep { part, block } => self.keep(part, block),
        }
        Ok(())
    }

    #[inline]
    fn signal(&mut self) {
        match (self.plan.algorithm().remote_access, self.plan.collective().source()) {
            (RemoteAccess::Nothing | RemoteAccess::Write, _) | (_, Source::Input) => {}
            _ => self.access.update_exposed(contribution(self.plan, self.rank, self.memory)),
        }
        self.access.signal();
    }

    fn publish(
        &mut self,
        parts: PartSet,
        block: usize,
        of: Source,
        place: MemoryArea,
    ) -> Result<(), TransportError> {
        let (bytes, partition) = match (of, &self.memory.input) {
            (Source::Input, Some((input, partition))) => (*input, partition),
            // Published memory is not lent.
            _ => (self.memory.own.bytes(), &self.memory.partition),
        };
        for part in parts.indices(self.plan.parts()) {
            let (holder, at) = self.there((part, block), place).of_rank(self.plan, self.rank.index());
            let bytes = &bytes[cells::range(partition, self.plan.blocks(), (part, block))];
            if holder == self.rank.index() {
                self.access.publish(place, at, bytes);
            } else {
                self.access.write(holder, place, at, bytes)?;
            }
        }
        Ok(())
    }

    fn keep(&mut self, part: usize, block: usize) {
        let Some((input, partition)) = self.memory.input else { return };
        let from = &input[cells::range(&partition, self.plan.blocks(), (part, block))];
        let range = self.cell(part, block);
        let into = self.memory.own.range_mut(range);
        if self.plan.leaves_caches() {
            self.access.copy_non_temporal(from, into);
        } else {
            self.access.copy(from, into);
        }
    }

    fn reduce(
        &mut self,
        (part, block): (usize, usize),
        of: MemoryArea,
        into: SumTarget,
    ) -> Result<(), TransportError> {
        let (range, there) = (self.cell(part, block), self.there((part, block), of));
        let alone = self.rank.world_size() == 2;
        // If only one of several other ranks wants the sum, nothing may be written to the rest.
        if matches!(into, SumTarget::Back(peers) if alone || peers == PeerSet::Others)
            && self.complete_there(range.clone(), there)?
        {
            return Ok(());
        }
        let piece_bytes = match (of, into) {
            (MemoryArea::Exposed, _) => self.memory.piece_bytes,
            // In one piece: nothing is read again.
            (_, SumTarget::Buffer) if alone => range.len(),
            _ => PIECE_BYTES,
        };
        let own = self.memory.own.range_mut(range.clone());
        for at in pieces(range.len(), piece_bytes) {
            let own = &mut own[at.clone()];
            let (access, rank, plan) = (&mut *self.access, self.rank, self.plan);
            let there = RemoteCell { offset: there.offset + at.start, ..there };
            let (scratch, combine) = (&mut *self.scratch, &mut *self.kernel.combine);
            CanonicalSum { access, rank, plan, there, own, scratch, combine }.sum()?;
            (self.kernel.finish)(own);
            match into {
                SumTarget::Buffer => {}
                SumTarget::Back(ranks) => {
                    for peer in ranks.ranks(rank.index(), rank.world_size()) {
                        let (holder, offset) = there.of_rank(plan, peer);
                        self.access.write(holder, of, offset, own)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Computes the sum of all contributions, without a copy, and writes it over each of them. Returns `false` and
    /// does nothing if the memory of the ranks is not all mapped.
    fn complete_there(&mut self, own: Range<usize>, there: RemoteCell) -> Result<bool, TransportError> {
        let Self { access, memory, kernel, rank, plan, .. } = self;
        if rank.world_size() > CHANGED_MAX + 1 {
            return Ok(false);
        }
        let others = (0..rank.world_size()).filter(|&other| other != rank.index());
        let others: SmallVec<[_; CHANGED_MAX]> = others.map(|other| there.of_rank(plan, other)).collect();
        let own = memory.own.range_mut(own);
        access.change(there.of, &others, own.len(), &mut |others| {
            let mut all: SmallVec<[&mut [u8]; CHANGED_MAX + 1]> =
                others.iter_mut().map(|other| &mut **other).collect();
            // The order of two operands does not matter. The kernel writes to the first one, so the nearer memory
            // goes first.
            all.insert(if all.len() == 1 { 0 } else { rank.index() }, own);
            (kernel.complete)(&mut all);
        })
    }

    /// Returns the byte range of a cell in this rank's buffer.
    #[inline]
    fn cell(&self, part: usize, block: usize) -> Range<usize> {
        cells::range(&self.memory.partition, self.plan.blocks(), (part, block))
    }

    /// Returns the location of a cell in other ranks' memory.
    #[inline]
    fn there(&self, cell: (usize, usize), of: MemoryArea) -> RemoteCell {
        RemoteCell { of, cell, place_bytes: self.place_bytes, offset: self.start(cell, of) }
    }

    /// Returns the offset of a cell in another rank's exposed memory; 0 if the cell is published.
    #[inline]
    fn start(&self, (part, block): (usize, usize), of: MemoryArea) -> usize {
        match (of, self.memory.input) {
            (MemoryArea::FlagLine | MemoryArea::EagerBuffer | MemoryArea::Slot(_), _) => 0,
            (MemoryArea::Exposed, _)
                if matches!(self.plan.collective(), DirectCollective::AllGather { .. }) =>
            {
                0
            }
            (MemoryArea::Exposed, Some((_, partition)))
                if self.plan.collective().source() == Source::Input =>
            {
                cells::range(&partition, self.plan.blocks(), (part, block)).start
            }
            (MemoryArea::Exposed, _) => self.cell(part, block).start,
        }
    }
}

/// Returns the memory that other ranks may read. For an all_gather it is only this rank's own part, of the input or
/// of the buffer.
#[inline]
fn contribution<'m>(
    plan: &DirectPlan,
    rank: Rank,
    DirectMemory { own, partition, input, .. }: &'m DirectMemory<'_>,
) -> &'m [u8] {
    match (plan.collective(), input) {
        (collective, Some((input, _))) if collective.source() == Source::Input => input,
        (DirectCollective::AllGather { .. }, _) => {
            &own.bytes()[cells::range(partition, plan.blocks(), (rank.index(), 0))]
        }
        _ => own.bytes(),
    }
}

/// Checks that the memory matches the plan.
#[inline]
fn check(
    plan: &DirectPlan,
    DirectMemory { own, partition, input, .. }: &DirectMemory<'_>,
) -> Result<(), Error> {
    let (expected, got) = (partition.bytes(), own.len());
    if expected != got {
        return Err(Error::BufferLength { expected, got });
    }
    if let Some((input, partition)) = input
        && input.len() != partition.bytes()
    {
        return Err(Error::InputLength { expected: partition.bytes(), got: input.len() });
    }
    let parts = input.as_ref().map_or(partition.parts(), |(_, input)| input.parts().min(partition.parts()));
    if parts != plan.parts() {
        return Err(Error::Parts { expected: plan.parts(), got: parts });
    }
    if plan.collective().kind().reduces() && !partition.divides_cache_lines() {
        return Err(Error::DividedElements { element_size: partition.element_size() });
    }
    match (plan.algorithm().remote_access, own) {
        (RemoteAccess::Write, OwnMemory::Borrowed(_)) => Err(Error::Borrowed),
        _ => Ok(()),
    }
}

impl OwnMemory<'_> {
    #[inline]
    fn len(&self) -> usize {
        match self {
            Self::Borrowed(bytes) => bytes.len(),
            Self::Lent { len, .. } => *len,
        }
    }

    /// Returns the memory that other ranks only read; it is empty if the memory is lent.
    #[inline]
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Lent { .. } => &[],
        }
    }

    /// Returns a range of the memory. If the memory is lent, the range must be in this rank's part.
    #[inline]
    fn range_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        match self {
            Self::Borrowed(bytes) => &mut bytes[range],
            Self::Lent { start, part, .. } => &mut part[range.start - *start..range.end - *start],
        }
    }
}

/// Divides a range into pieces of `piece_bytes` bytes. An empty range has no pieces.
pub(super) fn pieces(len: usize, piece_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let piece_bytes = piece_bytes.max(64);
    let mut start = 0;
    std::iter::from_fn(move || {
        let piece = (start < len).then(|| start..len.min(start + piece_bytes))?;
        start = piece.end;
        Some(piece)
    })
}

/// Bytes of a slot that are summed at a time. Together with the scratch memory they stay in the first-level cache.
const PIECE_BYTES: usize = 8 << 10;

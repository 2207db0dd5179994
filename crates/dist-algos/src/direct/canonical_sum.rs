//! The sum of all ranks' contributions to a range of memory, in canonical order, computed by one rank.

use dist_transport::shm_group::MemoryArea;
use dist_transport::{Rank, Result};

use super::{DirectAccess, DirectPlan};
use crate::Scratch;

/// The inputs of a sum.
pub(super) struct CanonicalSum<'a, A: ?Sized, C: ?Sized> {
    pub(super) access: &'a mut A,
    pub(super) rank: Rank,
    pub(super) plan: &'a DirectPlan,
    /// The location of the range in the other ranks' memory.
    pub(super) there: RemoteCell,
    /// This rank's contribution; afterwards the sum.
    pub(super) own: &'a mut [u8],
    pub(super) scratch: &'a mut Scratch,
    pub(super) combine: &'a mut C,
}

/// The location of a range of a cell in other ranks' memory.
#[derive(Clone, Copy)]
pub(super) struct RemoteCell {
    pub(super) of: MemoryArea,
    /// The part and the block.
    pub(super) cell: (usize, usize),
    /// The distance between two places in a slot.
    pub(super) place_bytes: usize,
    /// The offset of the range in its place or in exposed memory.
    pub(super) offset: usize,
}

impl RemoteCell {
    /// Returns the location of the contribution of `rank`: the rank whose memory holds it, and its byte offset there.
    #[inline(always)]
    pub(super) const fn of_rank(&self, plan: &DirectPlan, rank: usize) -> (usize, usize) {
        let (holder, place) = plan.cell_location(rank, self.cell, self.of);
        (holder, place * self.place_bytes + self.offset)
    }
}

/// The location of the sum of some consecutive ranks.
#[derive(Clone, Copy)]
enum SumLocation {
    /// The sum is in this rank's own memory and contains its contribution.
    OwnMemory,
    /// The sum is in the slot of the scratch memory with this number.
    Scratch(usize),
    /// The sum is in the memory of this rank, from this byte on.
    There(usize, usize),
}

impl<A: DirectAccess + ?Sized, C: FnMut(&mut [u8], &[u8]) + ?Sized> CanonicalSum<'_, A, C> {
    /// Computes the canonical sum T(p) of all ranks' contributions in this rank's own memory.
    #[inline(always)]
    pub(super) fn sum(&mut self) -> Result<()> {
        if self.rank.world_size() == 2 {
            let (holder, offset) = self.there.of_rank(self.plan, 1 - self.rank.index());
            return view_into(self.access, (holder, self.there.of, offset), self.own, self.combine);
        }
        self.sum_of(0, self.rank.world_size(), 0).map(drop)
    }

    /// Computes T(count) of the ranks from `start` on. Scratch slots from `free` on are unused.
    fn sum_of(&mut self, start: usize, count: usize, free: usize) -> Result<SumLocation> {
        if count == 1 {
            let (holder, offset) = self.there.of_rank(self.plan, start);
            return Ok(if start == self.rank.index() {
                SumLocation::OwnMemory
            } else {
                SumLocation::There(holder, offset)
            });
        }
        let low = count.next_power_of_two() / 2;
        let left = self.sum_of(start, low, free)?;
        let free = free + usize::from(matches!(left, SumLocation::Scratch(_)));
        let right = self.sum_of(start + low, count - low, free)?;
        self.add(left, right, free)
    }

    fn add(&mut self, left: SumLocation, right: SumLocation, free: usize) -> Result<SumLocation> {
        let len = self.own.len();
        match (left, right) {
            (SumLocation::OwnMemory, other) | (other, SumLocation::OwnMemory) => {
                match other {
                    SumLocation::There(holder, offset) => {
                        view_into(self.access, (holder, self.there.of, offset), self.own, self.combine)?;
                    }
                    SumLocation::Scratch(slot) => {
                        (self.combine)(self.own, self.scratch.slots().slot(slot, len, len))
                    }
                    SumLocation::OwnMemory => unreachable!("a rank contributes once"),
                }
                Ok(SumLocation::OwnMemory)
            }
            (SumLocation::Scratch(slot), SumLocation::There(holder, offset))
            | (SumLocation::There(holder, offset), SumLocation::Scratch(slot)) => {
                let sum = self.scratch.slots().slot(slot, len, len);
                view_into(self.access, (holder, self.there.of, offset), sum, self.combine)?;
                Ok(SumLocation::Scratch(slot))
            }
            (SumLocation::There(left, from), SumLocation::There(right, offset)) => {
                let sum = self.scratch.slots().slot(free, len, len);
                self.access.read(left, self.there.of, from, sum)?;
                view_into(self.access, (right, self.there.of, offset), sum, self.combine)?;
                Ok(SumLocation::Scratch(free))
            }
            (SumLocation::Scratch(left), SumLocation::Scratch(right)) => {
                let (sum, other) = self.scratch.slots().two_slots((left, right), len, len);
                (self.combine)(sum, other);
                Ok(SumLocation::Scratch(left))
            }
        }
    }
}

/// Combines a rank's contribution into memory.
#[inline]
fn view_into(
    access: &mut (impl DirectAccess + ?Sized),
    (rank, of, offset): (usize, MemoryArea, usize),
    into: &mut [u8],
    combine: &mut (impl FnMut(&mut [u8], &[u8]) + ?Sized),
) -> Result<()> {
    let range = offset..offset + into.len();
    access.view(rank, of, range, &mut |at, bytes| combine(&mut into[at..at + bytes.len()], bytes))
}

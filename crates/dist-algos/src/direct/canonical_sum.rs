//! The sum of what all ranks have for a range of memory, in canonical order, by one of them.

use dist_transport::{Place, Rank, Result};

use super::{DirectAccess, DirectPlan};
use crate::Scratch;

/// What a sum is made from, and with what.
pub(super) struct CanonicalSum<'a, A: ?Sized, C: ?Sized> {
    pub(super) access: &'a mut A,
    pub(super) rank: Rank,
    pub(super) plan: &'a DirectPlan,
    /// Where the other ranks have the range.
    pub(super) there: RemoteCell,
    /// This rank's contribution, and in the end the sum.
    pub(super) own: &'a mut [u8],
    pub(super) scratch: &'a mut Scratch,
    pub(super) combine: &'a mut C,
}

/// Where ranks have a range of a cell for others.
#[derive(Clone, Copy)]
pub(super) struct RemoteCell {
    pub(super) of: Place,
    /// The part and the block.
    pub(super) cell: (usize, usize),
    /// From one place in a slot to the next.
    pub(super) place_bytes: usize,
    /// Where the range begins in the place, or in memory that is exposed.
    pub(super) offset: usize,
}

impl RemoteCell {
    /// In whose memory, and at which byte of what is reached there, a rank has it.
    #[inline(always)]
    pub(super) const fn of_rank(&self, plan: &DirectPlan, rank: usize) -> (usize, usize) {
        let (holder, place) = plan.home(rank, self.cell, self.of);
        (holder, place * self.place_bytes + self.offset)
    }
}

/// Where the sum of some neighbouring ranks is.
#[derive(Clone, Copy)]
enum SumLocation {
    /// In this rank's own memory, with its contribution.
    OwnMemory,
    /// In the scratch memory's slot with this number.
    Scratch(usize),
    /// In the memory of this rank, from this byte on.
    There(usize, usize),
}

impl<A: DirectAccess + ?Sized, C: FnMut(&mut [u8], &[u8]) + ?Sized> CanonicalSum<'_, A, C> {
    /// T(p) of all ranks, into this rank's own memory.
    #[inline(always)]
    pub(super) fn sum(&mut self) -> Result<()> {
        if self.rank.world_size() == 2 {
            let (holder, offset) = self.there.of_rank(self.plan, 1 - self.rank.index());
            return view_into(self.access, (holder, self.there.of, offset), self.own, self.combine);
        }
        self.sum_of(0, self.rank.world_size(), 0).map(drop)
    }

    /// T(count) of the ranks from `start` on; scratch slots from `free` on are free.
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
                    SumLocation::Scratch(slot) => (self.combine)(self.own, self.scratch.slot(slot, len, len)),
                    SumLocation::OwnMemory => unreachable!("a rank contributes once"),
                }
                Ok(SumLocation::OwnMemory)
            }
            (SumLocation::Scratch(slot), SumLocation::There(holder, offset))
            | (SumLocation::There(holder, offset), SumLocation::Scratch(slot)) => {
                let sum = self.scratch.slot(slot, len, len);
                view_into(self.access, (holder, self.there.of, offset), sum, self.combine)?;
                Ok(SumLocation::Scratch(slot))
            }
            (SumLocation::There(left, from), SumLocation::There(right, offset)) => {
                let sum = self.scratch.slot(free, len, len);
                self.access.read(left, self.there.of, from, sum)?;
                view_into(self.access, (right, self.there.of, offset), sum, self.combine)?;
                Ok(SumLocation::Scratch(free))
            }
            (SumLocation::Scratch(left), SumLocation::Scratch(right)) => {
                let (sum, other) = self.scratch.two_slots((left, right), len, len);
                (self.combine)(sum, other);
                Ok(SumLocation::Scratch(left))
            }
        }
    }
}

/// Combines what a rank has into memory.
#[inline]
fn view_into(
    access: &mut (impl DirectAccess + ?Sized),
    (rank, of, offset): (usize, Place, usize),
    into: &mut [u8],
    combine: &mut (impl FnMut(&mut [u8], &[u8]) + ?Sized),
) -> Result<()> {
    let range = offset..offset + into.len();
    access.view(rank, of, range, &mut |at, bytes| combine(&mut into[at..at + bytes.len()], bytes))
}

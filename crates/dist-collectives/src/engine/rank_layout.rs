//! The layout of a buffer that holds one part of each rank.

use std::ops::Range;

use dist_algos::Partition;
use dist_transport::Rank;

use super::Engine;
use crate::digest::digest;
use crate::{Error, Operation, Result};

/// The layout of memory that holds the parts of all ranks, or of some consecutive ranks, one after the other.
#[derive(Clone, Debug)]
pub(crate) struct RankLayout {
    sizes: PartSizes,
    /// The ranks whose parts are in the memory.
    held: Range<usize>,
    world_size: usize,
}

#[derive(Clone, Debug)]
enum PartSizes {
    /// All parts have this many elements.
    Even(usize),
    /// Parts of any sizes: the first element of every part, then the end of the last part.
    Uneven(Vec<usize>),
}

impl Engine {
    /// Returns the layout with these counts, or, without counts, with parts that are as long as this rank's. Checks the
    /// lengths of this rank's part and of the whole buffer, if it is given. The names are for errors.
    #[inline]
    pub(crate) fn layout(
        &self,
        operation: Operation,
        counts: Option<&[usize]>,
        (part, part_len): (&'static str, usize),
        whole: Option<(&'static str, usize)>,
    ) -> Result<RankLayout> {
        let Some(counts) = counts else {
            whole.map_or(Ok(()), |(_, len)| check_parts(self.world_size(), operation, len, part_len))?;
            return Ok(RankLayout::even(part_len, self.world_size()));
        };
        check_counts(self.rank, operation, counts, (part, part_len), whole)?;
        Ok(RankLayout::counted(counts))
    }

    /// Returns the sum of counts, one for each rank.
    #[cfg(feature = "ndarray")]
    pub(crate) fn total(&self, operation: Operation, counts: &[usize]) -> Result<usize> {
        total(self.world_size(), operation, counts)
    }
}

/// Checks counts as [`Engine::layout`] does. Returns the length of all parts together.
pub(crate) fn check_counts(
    rank: Rank,
    operation: Operation,
    counts: &[usize],
    (part, part_len): (&'static str, usize),
    whole: Option<(&'static str, usize)>,
) -> Result<usize> {
    let total = total(rank.world_size(), operation, counts)?;
    check_length(operation, part, counts[rank.index()], part_len)?;
    whole.map_or(Ok(()), |(name, len)| check_length(operation, name, total, len))?;
    Ok(total)
}

/// Checks that a buffer consists of equal parts of this length, one for each rank.
pub(crate) fn check_parts(world_size: usize, operation: Operation, whole: usize, part: usize) -> Result<()> {
    if part.checked_mul(world_size) == Some(whole) {
        Ok(())
    } else {
        Err(Error::Parts { operation, whole, part, world_size })
    }
}

pub(super) fn check_length(
    operation: Operation,
    buffer: &'static str,
    expected: usize,
    got: usize,
) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::Length { operation, buffer, expected, got }) }
}

/// Returns the sum of counts, one for each rank.
pub(super) fn total(world_size: usize, operation: Operation, counts: &[usize]) -> Result<usize> {
    if counts.len() != world_size {
        return Err(Error::Counts { operation, counts: counts.len(), world_size });
    }
    let total = counts.iter().try_fold(0_usize, |total, &count| total.checked_add(count));
    total.ok_or(Error::TotalCount { operation })
}

impl RankLayout {
    /// Returns the layout of equal parts.
    #[inline]
    pub(super) fn even(part: usize, world_size: usize) -> Self {
        Self { sizes: PartSizes::Even(part), held: 0..world_size, world_size }
    }

    /// Returns the layout of parts with these lengths, one for each rank. Their sum must not overflow, as
    /// [`Engine::total`] checks.
    pub(super) fn counted(counts: &[usize]) -> Self {
        let mut borders = vec![0; counts.len() + 1];
        for (rank, &count) in counts.iter().enumerate() {
            borders[rank + 1] = borders[rank] + count;
        }
        Self { sizes: PartSizes::Uneven(borders), held: 0..counts.len(), world_size: counts.len() }
    }

    /// Returns the layout of memory that holds only the parts of these ranks.
    #[inline]
    pub(super) fn of(&self, held: Range<usize>) -> Self {
        let sizes = match &self.sizes {
            PartSizes::Even(part) => PartSizes::Even(*part),
            PartSizes::Uneven(borders) => {
                let borders = &borders[held.start..=held.end];
                PartSizes::Uneven(borders.iter().map(|border| border - borders[0]).collect())
            }
        };
        Self { sizes, held, world_size: self.world_size }
    }

    /// Returns the layout of memory that holds only this rank's part.
    #[inline]
    pub(super) fn of_rank(&self, rank: usize) -> Self {
        self.of(rank..rank + 1)
    }

    /// Returns `true` if this rank's part is in the memory.
    pub(super) fn holds(&self, rank: usize) -> bool {
        self.held.contains(&rank)
    }

    /// Returns `true` if the parts of all ranks are in the memory.
    pub(super) fn is_whole(&self) -> bool {
        self.held == (0..self.world_size)
    }

    /// Returns the sizes of the parts in memory of this many bytes per element.
    pub(super) fn sizes_in(&self, unit: usize) -> Vec<usize> {
        self.held.clone().map(|rank| self.range(rank).len() * unit).collect()
    }

    /// Returns the range of one rank's part, in elements.
    pub(super) fn range(&self, rank: usize) -> Range<usize> {
        let place = rank - self.held.start;
        match &self.sizes {
            PartSizes::Even(part) => place * part..(place + 1) * part,
            PartSizes::Uneven(borders) => borders[place]..borders[place + 1],
        }
    }

    /// Returns the range of one rank's part in memory of this many `T` per element.
    pub(super) fn range_in(&self, rank: usize, unit: usize) -> Range<usize> {
        let Range { start, end } = self.range(rank);
        start * unit..end * unit
    }

    /// Returns the number of elements of all parts in the memory.
    #[inline]
    pub(super) fn total(&self) -> usize {
        match &self.sizes {
            PartSizes::Even(part) => part * self.held.len(),
            PartSizes::Uneven(borders) => borders[self.held.len()],
        }
    }

    /// Returns the parts as chunks of a schedule, one for each rank.
    #[inline]
    pub(super) fn partition(&self, element_size: usize) -> Partition<'_> {
        let partition = match &self.sizes {
            PartSizes::Uneven(borders) if !self.held.is_empty() => Partition::at(borders, element_size),
            _ => Partition::new(self.total(), element_size, self.held.len().max(1)),
        };
        let first = self.held.start.min(self.world_size - 1);
        partition
            .and_then(|partition| partition.among(first, self.world_size))
            .expect("a slice is as long as these parts, and elements have bytes")
    }

    /// Returns the count that the call states: the elements of one part, or of all parts if their sizes differ.
    pub(super) fn count(&self) -> usize {
        match self.sizes {
            PartSizes::Even(part) => part,
            PartSizes::Uneven(_) => self.total(),
        }
    }

    /// Returns the digest that the call states: of the sizes of the parts, if they differ, and of `sizes`.
    pub(super) fn digest(&self, sizes: u64) -> u64 {
        match &self.sizes {
            PartSizes::Even(_) => sizes,
            PartSizes::Uneven(borders) => {
                let numbers = borders.iter().map(|&border| border as u64);
                digest(numbers.chain((sizes != 0).then_some(sizes)))
            }
        }
    }
}

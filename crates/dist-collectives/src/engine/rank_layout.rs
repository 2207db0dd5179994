//! How memory is cut among the ranks.

use std::ops::Range;

use dist_algos::Partition;

use super::Engine;
use crate::digest::digest;
use crate::{Error, Operation, Result};

/// What each rank has of memory in which the parts of all ranks lie one after the other, or those of some neighbours.
#[derive(Clone, Debug)]
pub(crate) struct RankLayout {
    sizes: PartSizes,
    /// The ranks whose parts are there.
    held: Range<usize>,
    world_size: usize,
}

#[derive(Clone, Debug)]
enum PartSizes {
    /// Parts of so many elements.
    Even(usize),
    /// Parts of any sizes, by the elements at which they begin and the last one ends.
    Uneven(Vec<usize>),
}

impl Engine {
    /// How memory is cut by these counts, or evenly into parts as long as this rank's. What this rank has of it, its part, and
    /// the whole if it has that, have names and are refused unless they are as long.
    #[inline]
    pub(crate) fn layout(
        &self,
        operation: Operation,
        counts: Option<&[usize]>,
        (part, part_len): (&'static str, usize),
        whole: Option<(&'static str, usize)>,
    ) -> Result<RankLayout> {
        let Some(counts) = counts else {
            whole.map_or(Ok(()), |(_, len)| self.check_parts(operation, len, part_len))?;
            return Ok(RankLayout::even(part_len, self.world_size()));
        };
        self.check_counts(operation, counts, (part, part_len), whole)?;
        Ok(RankLayout::counted(counts))
    }

    /// How long all parts are together, if [`layout`](Self::shares) takes these counts.
    pub(crate) fn check_counts(
        &self,
        operation: Operation,
        counts: &[usize],
        (part, part_len): (&'static str, usize),
        whole: Option<(&'static str, usize)>,
    ) -> Result<usize> {
        let total = self.total(operation, counts)?;
        Self::check_length(operation, part, counts[self.rank.index()], part_len)?;
        whole.map_or(Ok(()), |(name, len)| Self::check_length(operation, name, total, len))?;
        Ok(total)
    }

    /// The sum of counts, of which there is one for each rank.
    pub(crate) fn total(&self, operation: Operation, counts: &[usize]) -> Result<usize> {
        let world_size = self.world_size();
        if counts.len() != world_size {
            return Err(Error::Counts { operation, counts: counts.len(), world_size });
        }
        let total = counts.iter().try_fold(0_usize, |total, &count| total.checked_add(count));
        total.ok_or(Error::TotalCount { operation })
    }
}

impl RankLayout {
    /// Parts of so many elements, each.
    #[inline]
    pub(super) fn even(part: usize, world_size: usize) -> Self {
        Self { sizes: PartSizes::Even(part), held: 0..world_size, world_size }
    }

    /// Parts of so many elements, one for each rank, that have a [total](Engine::total).
    pub(super) fn counted(counts: &[usize]) -> Self {
        let mut borders = vec![0; counts.len() + 1];
        for (rank, &count) in counts.iter().enumerate() {
            borders[rank + 1] = borders[rank] + count;
        }
        Self { sizes: PartSizes::Uneven(borders), held: 0..counts.len(), world_size: counts.len() }
    }

    /// The same parts, where only those of these ranks are there.
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

    /// The elements of one rank's part.
    pub(super) fn range(&self, rank: usize) -> Range<usize> {
        let place = rank - self.held.start;
        match &self.sizes {
            PartSizes::Even(part) => place * part..(place + 1) * part,
            PartSizes::Uneven(borders) => borders[place]..borders[place + 1],
        }
    }

    /// Elements of all parts that are there.
    #[inline]
    pub(super) fn total(&self) -> usize {
        match &self.sizes {
            PartSizes::Even(part) => part * self.held.len(),
            PartSizes::Uneven(borders) => borders[self.held.len()],
        }
    }

    /// The parts as the chunks of a schedule, one for each rank.
    #[inline]
    pub(super) fn partition<T>(&self) -> Partition<'_> {
        let partition = match &self.sizes {
            PartSizes::Uneven(borders) if !self.held.is_empty() => Partition::at(borders, size_of::<T>()),
            _ => Partition::new(self.total(), size_of::<T>(), self.held.len().max(1)),
        };
        let first = self.held.start.min(self.world_size - 1);
        partition
            .and_then(|partition| partition.among(first, self.world_size))
            .expect("a slice is as long as these parts, and elements divide 64")
    }

    /// What stands in the call: elements of a part, or of all parts where they differ.
    pub(super) fn count(&self) -> usize {
        match self.sizes {
            PartSizes::Even(part) => part,
            PartSizes::Uneven(_) => self.total(),
        }
    }

    /// What stands in the call, so that ranks which disagree about the sizes find out; with what else stands there.
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

//! The consensus of the ranks on a step: the call of each rank, and the totals of the micro-batches.

use std::fmt;

use crate::loss::to_be_summed;
use crate::updates::Updates;
use crate::{Error, Result};

/// The step that a rank has called for, as errors describe it to other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepDescriptor {
    /// The call.
    pub call: TrainingCall,
    /// The number of micro-batches of all ranks, accumulated ones included; 0 for a join.
    pub micro_batches: usize,
    /// `true` if they have [weights](crate::Loss).
    pub weighted: bool,
}

/// A call that computes micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TrainingCall {
    /// A step of a number of micro-batches that are assigned to the ranks.
    Step,
    /// A step of the micro-batches that each rank has.
    Join,
    /// The accumulation of micro-batches before a step.
    Accumulate,
    /// An evaluation.
    Evaluation,
}

/// The kind of all calls that compare a [`StepDescriptor`]. If descriptors differ, every rank gets an error, and the
/// job is not aborted.
pub(crate) const STEP: &str = "step";

impl StepDescriptor {
    pub(crate) const fn new(call: TrainingCall, micro_batches: usize, weighted: bool) -> Self {
        Self { call, micro_batches, weighted }
    }

    /// Encodes the descriptor in a number. 2²⁰ micro-batches and more are encoded alike, so that the squares of 2¹⁷
    /// ranks can be added.
    pub(crate) fn encode(self) -> i64 {
        let call = match self.call {
            TrainingCall::Step => 0,
            TrainingCall::Join => 1,
            TrainingCall::Accumulate => 2,
            TrainingCall::Evaluation => 3,
        };
        let micro_batches = i64::try_from(self.micro_batches.min(1 << 20)).expect("2²⁰ is an i64");
        micro_batches * 8 + call * 2 + i64::from(self.weighted)
    }

    pub(crate) fn decode(number: i64) -> Self {
        let call = match number / 2 % 4 {
            0 => TrainingCall::Step,
            1 => TrainingCall::Join,
            2 => TrainingCall::Accumulate,
            _ => TrainingCall::Evaluation,
        };
        Self::new(call, usize::try_from(number / 8).unwrap_or(0), number % 2 == 1)
    }
}

impl fmt::Display for StepDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.call {
            TrainingCall::Step => write!(f, "a step of {} micro-batches", self.micro_batches)?,
            TrainingCall::Join => f.write_str("a join with its own micro-batches")?,
            TrainingCall::Accumulate => {
                write!(f, "an accumulation of up to {} micro-batches", self.micro_batches)?
            }
            TrainingCall::Evaluation => write!(f, "an evaluation of {} micro-batches", self.micro_batches)?,
        }
        if self.weighted { f.write_str(" with weights") } else { Ok(()) }
    }
}

/// The totals of a step: integers that were summed over all ranks.
#[derive(Debug)]
pub(crate) struct StepConsensus<'a> {
    /// The number of micro-batches, and their total weight.
    computed: i64,
    count: i64,
    /// The sum of each rank's descriptor and updates, encoded as one number, and the sum of its squares.
    requested: [i128; 2],
    /// For each parameter, the number of ranks on which it has had a gradient.
    used: &'a [i64],
}

impl<'a> StepConsensus<'a> {
    /// The number of integers before those of the parameters.
    pub(crate) const TOTALS: usize = 4;

    pub(crate) fn encode(
        computed: usize,
        count: u64,
        requested: StepDescriptor,
        updates: &Updates,
        used: &[bool],
    ) -> Vec<i64> {
        // If updates are equal, the numbers differ exactly if the descriptors differ, and vice versa.
        let requested = requested.encode() ^ updates.number();
        let numbers = [to_be_summed(computed as u64), to_be_summed(count), requested, requested * requested];
        numbers.into_iter().chain(used.iter().map(|&used| i64::from(used))).collect()
    }

    /// Decodes the sum of the encodings of all ranks.
    pub(crate) fn decode(sums: &'a [i64]) -> Self {
        let (&[computed, count, requested, squares], used) =
            sums.split_first_chunk().expect("every rank encodes four numbers and more");
        Self { computed, count, requested: [requested.into(), squares.into()], used }
    }

    /// Returns `true` if all ranks have called for the same step and have updated their parameters alike. The result
    /// is the same on every rank.
    pub(crate) const fn agrees(&self, world_size: usize) -> bool {
        are_equal(world_size, self.requested)
    }

    /// Returns the divisor of the sums if the ranks agree. It is an error if micro-batches are missing or if the
    /// total weight is 0. The result is the same on every rank.
    pub(crate) fn divisor(&self, requested: StepDescriptor) -> Result<usize> {
        let computed = self.micro_batches();
        if requested.call != TrainingCall::Join && computed != requested.micro_batches {
            return Err(Error::AccumulatedDiffers { micro_batches: requested.micro_batches, computed });
        }
        match (computed, self.count()) {
            (0, _) => Err(Error::NoMicroBatches),
            (micro_batches, 0) => Err(Error::ZeroWeight { micro_batches }),
            (_, count) => Ok(count),
        }
    }

    /// Returns the number of micro-batches that all ranks have computed.
    pub(crate) fn micro_batches(&self) -> usize {
        usize::try_from(self.computed).unwrap_or(0)
    }

    /// Returns their total weight.
    pub(crate) fn count(&self) -> usize {
        usize::try_from(self.count).unwrap_or(0)
    }

    /// Returns for each parameter whether any rank has had a gradient for it.
    pub(crate) fn used(&self) -> impl Iterator<Item = bool> {
        self.used.iter().map(|&ranks| ranks > 0)
    }
}

/// Returns `true` if the numbers of `ranks` ranks, with this sum and this sum of squares, are equal. They are equal
/// exactly if n times the sum of the squares is the square of the sum.
const fn are_equal(ranks: usize, [sum, squares]: [i128; 2]) -> bool {
    ranks as i128 * squares == sum * sum
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const fn step(micro_batches: usize) -> StepDescriptor {
        StepDescriptor::new(TrainingCall::Step, micro_batches, false)
    }

    const JOIN: StepDescriptor = StepDescriptor::new(TrainingCall::Join, 0, false);

    /// Returns the sum of the encodings of three ranks with `computed` micro-batches of weight `count` each.
    fn consensus(requested: [StepDescriptor; 3], computed: usize, count: u64) -> Vec<i64> {
        let tallies = requested
            .map(|requested| StepConsensus::encode(computed, count, requested, &Updates::new(), &[]));
        (0..4).map(|index| tallies.iter().map(|consensus| consensus[index]).sum()).collect()
    }

    #[test]
    fn ranks_agree_if_and_only_if_all_were_asked_for_the_same() {
        for counts in [[12, 12, 12], [12, 12, 13], [11, 12, 13], [0, 0, 36]] {
            let agrees = StepConsensus::decode(&consensus(counts.map(step), 4, 1)).agrees(3);
            assert_eq!(agrees, counts == [12, 12, 12], "{counts:?}");
        }
        assert!(StepConsensus::decode(&consensus([JOIN; 3], 4, 4)).agrees(3));
        let weighted = StepDescriptor { weighted: true, ..step(4) };
        let accumulated = StepDescriptor { call: TrainingCall::Accumulate, ..step(4) };
        for requested in [[JOIN, step(0), JOIN], [JOIN, step(1), step(1)], [step(4), step(4), weighted]]
            .into_iter()
            .chain([[accumulated, step(4), accumulated]])
        {
            assert!(!StepConsensus::decode(&consensus(requested, 4, 4)).agrees(3), "{requested:?}");
        }
    }

    #[test]
    fn a_step_descriptor_is_decoded() {
        for call in
            [TrainingCall::Step, TrainingCall::Join, TrainingCall::Accumulate, TrainingCall::Evaluation]
        {
            for (micro_batches, weighted) in [(0, false), (1, true), (7, false), (1 << 19, true)] {
                let requested = StepDescriptor::new(call, micro_batches, weighted);
                assert_eq!(StepDescriptor::decode(requested.encode()), requested);
            }
        }
        assert_eq!(StepDescriptor::decode(step(usize::MAX).encode()), step(1 << 20));
    }

    #[rstest]
    fn micro_batches_that_are_missing_or_too_many_are_noticed(#[values(0, 1, 3, 4)] each: usize) {
        let divisor = StepConsensus::decode(&consensus([step(6); 3], each, 1)).divisor(step(6));
        let Err(Error::AccumulatedDiffers { micro_batches: 6, computed }) = divisor else {
            panic!("{divisor:?}")
        };
        assert_eq!(computed, 3 * each);
    }

    #[test]
    fn sums_are_divided_by_the_weight_of_micro_batches() {
        let divisor =
            |computed, count| StepConsensus::decode(&consensus([JOIN; 3], computed, count)).divisor(JOIN);
        assert_eq!(divisor(2, 70).unwrap(), 210);
        assert!(matches!(divisor(2, 0), Err(Error::ZeroWeight { micro_batches: 6 })));
        assert!(matches!(divisor(0, 0), Err(Error::NoMicroBatches)));
    }
}

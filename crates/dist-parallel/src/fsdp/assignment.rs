//! The assignment of micro-batches to ranks.
//!
//! Each replica of the model gets a contiguous range. Inside a replica, micro-batches are assigned in rounds, one to
//! each rank.

use std::ops::Range;

/// One rank's position in the assignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MicroBatchAssignment {
    pub(crate) replicas: usize,
    pub(crate) replica: usize,
    pub(crate) shards: usize,
    pub(crate) shard: usize,
}

impl MicroBatchAssignment {
    /// Returns the number of rounds that this rank's replica needs for `micro_batches` micro-batches.
    pub(crate) fn rounds(self, micro_batches: usize) -> usize {
        share(micro_batches, self.replicas, self.replica).len().div_ceil(self.shards)
    }

    /// Returns this rank's micro-batch in a round. `None` if the last round has none for it.
    pub(crate) fn micro_batch(self, micro_batches: usize, round: usize) -> Option<usize> {
        let block = share(micro_batches, self.replicas, self.replica);
        Some(block.start + round * self.shards + self.shard).filter(|index| block.contains(index))
    }
}

/// Returns range number `part` of `things` items that are divided into `parts` contiguous ranges, as equal as
/// possible.
pub(crate) fn share(things: usize, parts: usize, part: usize) -> Range<usize> {
    let (each, left) = (things / parts, things % parts);
    let start = |part: usize| part * each + part * left / parts;
    start(part)..start(part + 1)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::fully_sharded(1, 4)]
    #[case::copies(3, 1)]
    #[case::both(2, 3)]
    fn every_micro_batch_is_computed_once(
        #[case] replicas: usize,
        #[case] shards: usize,
        #[values(0, 1, 5, 12, 13)] micro_batches: usize,
    ) {
        let mut dealt = Vec::new();
        for (replica, shard) in
            (0..replicas).flat_map(|replica| (0..shards).map(move |shard| (replica, shard)))
        {
            let assignment = MicroBatchAssignment { replicas, replica, shards, shard };
            let rounds = assignment.rounds(micro_batches);
            dealt.extend((0..rounds).filter_map(|round| assignment.micro_batch(micro_batches, round)));
            assert_eq!(assignment.micro_batch(micro_batches, rounds), None);
        }
        dealt.sort_unstable();
        assert_eq!(dealt, Vec::from_iter(0..micro_batches));
    }

    #[test]
    fn rounds_go_around_the_ranks_of_a_copy() {
        let second = MicroBatchAssignment { replicas: 2, replica: 1, shards: 2, shard: 1 };
        assert_eq!(second.rounds(8), 2);
        assert_eq!([0, 1, 2].map(|round| second.micro_batch(8, round)), [Some(5), Some(7), None]);
        assert_eq!(second.micro_batch(7, 1), Some(6));
    }
}

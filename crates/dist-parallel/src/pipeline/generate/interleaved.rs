//! Interleaved 1F1B with several stages on each rank: a shorter bubble for more messages and memory.
//!
//! Micro-batches run in rounds of one per rank. A round passes the rank's first stage, then its second, and so on,
//! before the next round starts. A number of micro-batches that the ranks do not divide is rounded up, and the
//! surplus is left out.

use super::only;
use crate::pipeline::schedule::{backward, forward, round_robin};
use crate::pipeline::{Action, PipelineSchedule};

pub(in crate::pipeline) fn interleaved(
    ranks: usize,
    micro_batches: usize,
    stages_per_rank: usize,
) -> PipelineSchedule {
    let kept_max = (0..ranks)
        .map(|rank| (micro_batches * stages_per_rank).min(warmup(rank, ranks, stages_per_rank) + 1));
    let lists = (0..ranks).map(|rank| {
        let rounded = micro_batches.next_multiple_of(ranks);
        only(micro_batches, list(rank, ranks, rounded, stages_per_rank))
    });
    PipelineSchedule::new(
        round_robin(ranks, stages_per_rank),
        micro_batches,
        kept_max.collect(),
        lists.collect(),
    )
}

/// Returns the number of forwards before the first backward, less one.
const fn warmup(rank: usize, ranks: usize, stages_per_rank: usize) -> usize {
    2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks
}

fn list(rank: usize, ranks: usize, micro_batches: usize, stages_per_rank: usize) -> Vec<Action> {
    let total = micro_batches * stages_per_rank;
    let warmup = total.min(warmup(rank, ranks, stages_per_rank));
    // Returns the rank's own stage and the micro-batch of the nth forward.
    let place = |n: usize| {
        let (round, within) = (n / (ranks * stages_per_rank), n % (ranks * stages_per_rank));
        (within / ranks, round * ranks + within % ranks)
    };
    let nth_forward = |n| {
        let (turn, micro_batch) = place(n);
        forward(turn * ranks + rank, micro_batch)
    };
    let nth_backward = |n| {
        let (turn, micro_batch) = place(n);
        backward((stages_per_rank - 1 - turn) * ranks + rank, micro_batch)
    };
    let warm = (0..warmup).map(nth_forward);
    let steady = (warmup..total).flat_map(|n| [nth_forward(n), nth_backward(n - warmup)]);
    warm.chain(steady).chain((total - warmup..total).map(nth_backward)).collect()
}

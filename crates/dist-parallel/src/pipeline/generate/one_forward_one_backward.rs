//! 1F1B: one forward, one backward. A rank holds the activations of one micro-batch per rank from itself to the last.

use crate::pipeline::schedule::{backward, forward, round_robin};
use crate::pipeline::{Action, PipelineSchedule};

pub(in crate::pipeline) fn one_forward_one_backward(ranks: usize, micro_batches: usize) -> PipelineSchedule {
    let kept_max = (0..ranks).map(|rank| micro_batches.min(ranks - rank)).collect();
    let lists = (0..ranks).map(|rank| list(rank, ranks, micro_batches)).collect();
    PipelineSchedule::new(round_robin(ranks, 1), micro_batches, kept_max, lists)
}

fn list(rank: usize, ranks: usize, micro_batches: usize) -> Vec<Action> {
    let warmup = micro_batches.min(ranks - rank - 1);
    let warm = (0..warmup).map(|micro_batch| forward(rank, micro_batch));
    let steady = (warmup..micro_batches)
        .flat_map(|micro_batch| [forward(rank, micro_batch), backward(rank, micro_batch - warmup)]);
    let cooldown = (micro_batches - warmup..micro_batches).map(|micro_batch| backward(rank, micro_batch));
    warm.chain(steady).chain(cooldown).collect()
}

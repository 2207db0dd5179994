//! One forward, one backward, with the gradients of parameters put off until they fill a bubble.
//!
//! Rank r begins with P − r forwards, as many micro-batches as are under way behind it, and lets r micro-batches wait
//! for the gradients of their parameters: so no rank keeps more than P.

use super::only;
use crate::pipeline::schedule::{forward, input_gradient, round_robin, weight_gradient};
use crate::pipeline::{Action, PipelineSchedule};

pub(in crate::pipeline) fn zb1p(ranks: usize, micro_batches: usize) -> PipelineSchedule {
    let list = |rank| only(micro_batches, list(rank, ranks, micro_batches.max(ranks)));
    PipelineSchedule::new(
        round_robin(ranks, 1),
        micro_batches,
        vec![micro_batches.min(ranks); ranks],
        (0..ranks).map(list).collect(),
    )
}

fn list(rank: usize, ranks: usize, micro_batches: usize) -> Vec<Action> {
    let ahead = ranks - rank;
    let mut list: Vec<Action> = (0..ahead).map(|micro_batch| forward(rank, micro_batch)).collect();
    for micro_batch in 0..micro_batches {
        list.push(input_gradient(rank, micro_batch));
        if micro_batch >= rank {
            list.push(weight_gradient(rank, micro_batch - rank));
        }
        if micro_batch + ahead < micro_batches {
            list.push(forward(rank, micro_batch + ahead));
        }
    }
    list.extend((micro_batches - rank..micro_batches).map(|micro_batch| weight_gradient(rank, micro_batch)));
    list
}

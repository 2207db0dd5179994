//! ZB-H1: 1F1B whose weight gradients are delayed until they fill a bubble.
//!
//! Rank r begins with P − r forwards, the number of micro-batches in flight behind it. It delays the weight gradients
//! of r micro-batches. No rank holds more than P activations.

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

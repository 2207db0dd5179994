//! GPipe: all forwards, then all backwards.

use crate::pipeline::PipelineSchedule;
use crate::pipeline::schedule::{backward, forward, round_robin};

pub(in crate::pipeline) fn gpipe(ranks: usize, micro_batches: usize) -> PipelineSchedule {
    let list = |rank| {
        let forwards = (0..micro_batches).map(move |micro_batch| forward(rank, micro_batch));
        forwards.chain((0..micro_batches).map(move |micro_batch| backward(rank, micro_batch))).collect()
    };
    let lists = (0..ranks).map(list).collect();
    PipelineSchedule::new(round_robin(ranks, 1), micro_batches, vec![micro_batches; ranks], lists)
}

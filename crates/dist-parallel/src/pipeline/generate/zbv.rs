//! ZB-V: two stages on each rank, placed down and back up. With equal times no rank waits between its first and last
//! computation.
//!
//! A micro-batch goes down through the first stages of ranks 0 to P − 1 and back up through their second ones. Rank 0
//! has the first and the last stage. If there are too few micro-batches to fill the pipeline, the schedule of a full
//! pipeline is used and the surplus is left out.

use super::only;
use crate::pipeline::schedule::{forward, input_gradient, v_shaped, weight_gradient};
use crate::pipeline::{Action, PipelineSchedule};

pub(in crate::pipeline) fn zbv(ranks: usize, micro_batches: usize) -> PipelineSchedule {
    let list = |rank| only(micro_batches, ZbvRank::new(rank, ranks, micro_batches.max(2 * ranks)).list());
    let kept_max = vec![2 * micro_batches.min(ranks); ranks];
    PipelineSchedule::new(v_shaped(ranks), micro_batches, kept_max, (0..ranks).map(list).collect())
}

/// The progress of one of a rank's two stages.
struct StageProgress {
    stage: usize,
    forwards: usize,
    input_gradients: usize,
    weight_gradients: usize,
}

struct ZbvRank {
    rank: usize,
    ranks: usize,
    micro_batches: usize,
    down: StageProgress,
    up: StageProgress,
    list: Vec<Action>,
}

impl StageProgress {
    const fn new(stage: usize) -> Self {
        Self { stage, forwards: 0, input_gradients: 0, weight_gradients: 0 }
    }

    fn forward(&mut self) -> Action {
        self.forwards += 1;
        forward(self.stage, self.forwards - 1)
    }

    fn input_gradient(&mut self) -> Action {
        self.input_gradients += 1;
        input_gradient(self.stage, self.input_gradients - 1)
    }

    fn weight_gradient(&mut self) -> Action {
        self.weight_gradients += 1;
        weight_gradient(self.stage, self.weight_gradients - 1)
    }

    /// Returns the whole backward.
    fn backward(&mut self) -> [Action; 2] {
        [self.input_gradient(), self.weight_gradient()]
    }
}

impl ZbvRank {
    fn new(rank: usize, ranks: usize, micro_batches: usize) -> Self {
        let (down, up) = (StageProgress::new(rank), StageProgress::new(2 * ranks - 1 - rank));
        Self { rank, ranks, micro_batches, down, up, list: Vec::new() }
    }

    fn list(mut self) -> Vec<Action> {
        self.warmup();
        self.steady();
        self.cooldown();
        self.list
    }

    /// Adds the actions until the first micro-batch has returned to rank 0.
    fn warmup(&mut self) {
        for _ in 0..2 * (self.ranks - self.rank) - 1 {
            self.list.push(self.down.forward());
        }
        for _ in 0..self.rank {
            self.list.extend([self.up.forward(), self.down.forward()]);
        }
        for _ in self.rank..self.ranks {
            self.list.push(self.up.forward());
            self.list.extend(self.up.backward());
        }
    }

    fn steady(&mut self) {
        while self.up.forwards < self.micro_batches {
            if self.down.forwards < self.micro_batches {
                self.list.push(self.down.forward());
            }
            self.list.extend(self.down.backward());
            self.list.push(self.up.forward());
            self.list.extend(self.up.backward());
        }
    }

    /// Adds the remaining actions. Weight gradients come last, because no rank waits for them.
    fn cooldown(&mut self) {
        for _ in 0..self.rank {
            self.list.extend([self.down.input_gradient(), self.up.input_gradient()]);
        }
        for _ in self.rank..self.ranks {
            self.list.extend(self.down.backward());
        }
        while self.up.weight_gradients < self.micro_batches {
            self.list.push(self.up.weight_gradient());
        }
        while self.down.weight_gradients < self.micro_batches {
            self.list.push(self.down.weight_gradient());
        }
    }
}

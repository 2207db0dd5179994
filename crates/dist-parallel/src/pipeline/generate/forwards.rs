//! Schedules of forwards only, for evaluations with any placement of stages.
//!
//! Ranks advance in steps of one computation each. In every step a rank takes the last of its stages that has an
//! input and whose previous output was taken, so that the most advanced micro-batch leaves first. A later stage takes
//! its input before an earlier one produces the next, and the last stage can always run. Some rank therefore advances
//! in every step, whatever the placement. This prevents a deadlock, although a stage's output waits until the one
//! before it was received.

use crate::pipeline::Action;
use crate::pipeline::schedule::forward;

/// Returns the computations of `rank`. `placement` contains the rank of each stage.
pub(in crate::pipeline) fn forwards(
    placement: &[usize],
    ranks: usize,
    micro_batches: usize,
    rank: usize,
) -> Vec<Action> {
    let mut list = Vec::new();
    // For each stage, the number of micro-batches that it has computed, now and before this step.
    let mut done = vec![0; placement.len()];
    while done.last().is_some_and(|&done| done < micro_batches) {
        let before = done.clone();
        let mut is_busy = vec![false; ranks];
        for (stage, &place) in placement.iter().enumerate().rev() {
            let given = stage.checked_sub(1).map_or(micro_batches, |earlier| before[earlier]);
            let is_taken = done.get(stage + 1).is_none_or(|&taken| taken == done[stage]);
            if is_busy[place] || done[stage] == given || !is_taken {
                continue;
            }
            if place == rank {
                list.push(forward(stage, done[stage]));
            }
            is_busy[place] = true;
            done[stage] += 1;
        }
    }
    list
}

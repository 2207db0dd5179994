//! Forwards only, for stages that lie anywhere: what an evaluation computes.
//!
//! Ranks go in steps of one computation each. In every step a rank takes the last of its stages that has an input and
//! whose last output has been taken, so that what has come furthest leaves first. A later stage takes before an earlier one
//! gives, and the last one always can: somebody goes on in every step, whatever the placement. So nobody waits forever
//! where a stage's output waits until the one before it is received.

use crate::pipeline::Action;
use crate::pipeline::schedule::forward;

/// What `rank` computes, where `placement` says for each stage which of the ranks has it.
pub(in crate::pipeline) fn forwards(
    placement: &[usize],
    ranks: usize,
    micro_batches: usize,
    rank: usize,
) -> Vec<Action> {
    let mut list = Vec::new();
    // For each stage, how many micro-batches it has computed, and had before this step.
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

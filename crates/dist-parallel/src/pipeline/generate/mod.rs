//! Generators of schedules: pure functions from numbers to lists of actions.

mod forwards;
mod gpipe;
mod interleaved;
mod one_forward_one_backward;
mod zb1p;
mod zbv;

pub(super) use forwards::forwards;
pub(super) use gpipe::gpipe;
pub(super) use interleaved::interleaved;
pub(super) use one_forward_one_backward::one_forward_one_backward;
pub(super) use zb1p::zb1p;
pub(super) use zbv::zbv;

use super::Action;

/// Keeps the computations of the first `micro_batches` micro-batches, in order.
fn only(micro_batches: usize, list: Vec<Action>) -> Vec<Action> {
    let wanted = |action: &Action| action.micro_batch().is_some_and(|index| index < micro_batches);
    list.into_iter().filter(wanted).collect()
}

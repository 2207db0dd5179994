//! The generators of schedules: pure functions from numbers to lists.

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

/// The computations of fewer micro-batches: what is left of a list stays in order.
fn only(micro_batches: usize, list: Vec<Action>) -> Vec<Action> {
    let wanted = |action: &Action| action.micro_batch().is_some_and(|index| index < micro_batches);
    list.into_iter().filter(wanted).collect()
}

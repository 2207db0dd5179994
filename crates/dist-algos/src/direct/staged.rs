//! Staged schedules: one rank reduces each part of the published data and writes the sum back, from where the other
//! ranks copy it.

use super::step_context::{PhaseStep, signals};
use super::{
    BLOCK_BYTES, DirectAlgorithm, DirectCase, DirectStep, Division, PeerSet, RemoteAccess, StepContext,
    SumTarget,
};
use crate::CollectiveKind;

/// All_reduce, for large buffers.
pub static ALL_REDUCE: DirectAlgorithm = staged(CollectiveKind::AllReduce, |case| {
    case.bytes >= case.crossovers.staged.unwrap_or(if case.world_size == 2 { 256 << 10 } else { 32 << 10 })
});

/// Reduce, for large buffers.
pub static REDUCE: DirectAlgorithm = staged(CollectiveKind::Reduce, |case| {
    case.bytes >= case.crossovers.staged.unwrap_or(if case.world_size == 2 { usize::MAX } else { 4 << 20 })
});

/// Returns the staged algorithm of an operation. `fits` returns `true` if it is faster than one-shot.
const fn staged(collective: CollectiveKind, fits: fn(&DirectCase<'_>) -> bool) -> DirectAlgorithm {
    DirectAlgorithm {
        collective,
        name: "direct/staged",
        remote_access: RemoteAccess::Nothing,
        division: Division::PerRank,
        is_one_shot: false,
        fits,
        block_bytes: |_| BLOCK_BYTES,
        rounds: |blocks| blocks + 2,
        signals: |blocks| blocks + 1,
        step,
    }
}

/// Returns a step of the pipeline. Round `i` publishes block `i`, reduces this rank's part of block `i − 1`, and
/// copies the sums of block `i − 2` that the other ranks have written back.
///
/// Sums are written back to the contributions. Writing cache lines that this core has just read from another
/// core is cheaper than writing own lines that all other cores have read.
fn step(context: &StepContext, round: usize, phase: usize) -> PhaseStep {
    let (collective, blocks) = (context.collective(), context.blocks());
    let rank = context.rank().index();
    let last = blocks + usize::from(context.takers().is_some());
    match phase {
        0 if round < blocks => PhaseStep::of(context.publishes().map(|parts| context.publish(parts, round))),
        1 if round >= 1 && round <= last => {
            PhaseStep::DirectStep(DirectStep::Wait { ranks: PeerSet::Others, signals: signals(round) })
        }
        2 if round >= 1 && round <= blocks => {
            let of = context.published.area(round - 1);
            let into = collective.wants_sum(rank).map_or(SumTarget::Buffer, SumTarget::Back);
            PhaseStep::DirectStep(DirectStep::Reduce { part: rank, block: round - 1, of, into })
        }
        0..=2 => PhaseStep::Nothing,
        _ => {
            let takers = context.takers().filter(|_| round >= 2);
            let peer = takers.and_then(|peers| context.peer(peers, phase - 3));
            let count = takers.map_or(0, |_| context.rank().world_size() - 1);
            match peer {
                Some(part) => {
                    let (block, of) = (round - 2, context.published.area(round - 2));
                    PhaseStep::DirectStep(DirectStep::Take { from: rank, part, block, of, into: part })
                }
                None if phase == 3 + count && round <= blocks => PhaseStep::DirectStep(DirectStep::Signal),
                None => PhaseStep::EndOfRound,
            }
        }
    }
}

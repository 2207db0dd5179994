//! Schedules that read the other ranks' own memory, and publish nothing.
//!
//! If one rank computes something for all other ranks, there are two phases; otherwise there is one.

use dist_transport::shm_group::{GroupLayout, MemoryArea, Reach};

use super::collective::BlockUse;
use super::step_context::PhaseStep;
use super::{
    BLOCK_BYTES, DirectAlgorithm, DirectCase, DirectStep, Division, Ownership, PeerSet, RemoteAccess,
    StepContext, SumTarget,
};
use crate::CollectiveKind;

/// All_reduce in two phases. It is never chosen.
pub static ALL_REDUCE: DirectAlgorithm = in_two_phases(CollectiveKind::AllReduce);
/// Reduce in two phases. It is never chosen.
pub static REDUCE: DirectAlgorithm = in_two_phases(CollectiveKind::Reduce);
/// Reduce_scatter, for large buffers in memory that all ranks share.
pub static REDUCE_SCATTER: DirectAlgorithm =
    DirectAlgorithm { fits: is_read_in_place, ..at_once(CollectiveKind::ReduceScatter) };
/// All_gather of two ranks, for large buffers. With more ranks, data is published once for all of them.
pub static ALL_GATHER: DirectAlgorithm = DirectAlgorithm {
    fits: |case| case.world_size == 2 && (is_read_in_place(case) || is_copied_in_place(case)),
    ..at_once(CollectiveKind::AllGather)
};
/// Broadcast. It is never chosen, since data that all ranks read is published once for all of them.
pub static BROADCAST: DirectAlgorithm =
    DirectAlgorithm { division: Division::Whole, ..at_once(CollectiveKind::Broadcast) };
/// All_to_all, for large buffers.
pub static ALL_TO_ALL: DirectAlgorithm = DirectAlgorithm {
    fits: |case| is_read_in_place(case) || is_copied_in_place(case),
    ..at_once(CollectiveKind::AllToAll)
};

const fn at_once(collective: CollectiveKind) -> DirectAlgorithm {
    DirectAlgorithm {
        collective,
        name: "direct/read_from_all",
        remote_access: RemoteAccess::Read,
        division: Division::PerRank,
        is_one_shot: false,
        fits: |_| false,
        block_bytes: |_| BLOCK_BYTES,
        rounds: |_| 1,
        signals: |_| 2,
        step: |context, _, phase| read_at_once(context, phase),
    }
}

const fn in_two_phases(collective: CollectiveKind) -> DirectAlgorithm {
    let step = |context: &StepContext, _, phase| read_in_two_phases(context, phase);
    DirectAlgorithm { signals: |_| 3, step, ..at_once(collective) }
}

/// Returns `true` if reading allocated memory in place is faster than publishing it.
fn is_read_in_place(case: &DirectCase<'_>) -> bool {
    case.ownership == Ownership::Allocated && case.bytes >= case.crossovers.read_from_all.unwrap_or(1 << 20)
}

/// Returns `true` if it is faster to let the system copy ordinary memory from its owner than to publish it.
fn is_copied_in_place(case: &DirectCase<'_>) -> bool {
    case.ownership != Ownership::Allocated
        && case.shared.reach >= Reach::Read
        && case.bytes.saturating_mul(case.world_size) <= COPIED_BYTES_MAX
        && case.bytes >= case.crossovers.read_ordinary.unwrap_or_else(|| read_ordinary_from(case.shared))
}

/// Returns the size from which ordinary memory is read in place.
const fn read_ordinary_from(shared: &GroupLayout) -> usize {
    if shared.fast_attach { 1 << 20 } else { usize::MAX }
}

/// The maximum size of all ranks' buffers together. Larger buffers are copied through slots with non-temporal
/// stores, which the system's copy does not use.
const COPIED_BYTES_MAX: usize = 32 << 20;

/// Lets every rank reduce its part of all ranks' memory; then the other ranks copy the sums.
fn read_in_two_phases(context: &StepContext, phase: usize) -> PhaseStep {
    let rank = context.rank().index();
    let takes = context.takers().map_or(0, |_| context.rank().world_size() - 1);
    match phase {
        0 | 3 => PhaseStep::DirectStep(DirectStep::Signal),
        1 => PhaseStep::DirectStep(DirectStep::Wait { ranks: PeerSet::Others, signals: 1 }),
        2 => PhaseStep::DirectStep(DirectStep::Reduce {
            part: rank,
            block: 0,
            of: MemoryArea::Exposed,
            into: SumTarget::Buffer,
        }),
        _ if phase < 4 + 2 * takes => {
            let from = context.rank().plus(1 + (phase - 4) / 2).index();
            PhaseStep::DirectStep(match phase % 2 {
                0 => DirectStep::Wait { ranks: PeerSet::One(from), signals: 2 },
                _ => DirectStep::Take { from, part: from, block: 0, of: MemoryArea::Exposed, into: from },
            })
        }
        _ => context.leave(phase - 4 - 2 * takes, 3),
    }
}

/// Lets every rank take its result directly from the other ranks' memory.
fn read_at_once(context: &StepContext, phase: usize) -> PhaseStep {
    let uses = match context.collective().uses(context.rank().index()) {
        BlockUse::Nothing => 0,
        BlockUse::Wait => 1,
        BlockUse::Reduce(_) | BlockUse::Take(PeerSet::One(_)) => 2,
        BlockUse::Take(PeerSet::Others) => 2 * (context.rank().world_size() - 1),
    };
    match phase {
        0 => PhaseStep::DirectStep(DirectStep::Signal),
        1 => context.keep(0),
        _ if phase < 2 + uses => context.use_block(phase - 2, 0, MemoryArea::Exposed, 1),
        _ => context.leave(phase - uses - 2, 2),
    }
}

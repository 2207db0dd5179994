//! Schedules with one reducing rank for each part: it reads the part from the other ranks' memory and writes
//! the sum there.

use dist_transport::shm_group::MemoryArea;

use super::step_context::PhaseStep;
use super::{
    BLOCK_BYTES, DirectAlgorithm, DirectStep, Division, Ownership, PeerSet, RemoteAccess, StepContext,
    SumTarget,
};
use crate::CollectiveKind;

/// All_reduce, for large buffers in memory that all ranks share.
pub static ALL_REDUCE: DirectAlgorithm = DirectAlgorithm {
    collective: CollectiveKind::AllReduce,
    name: "direct/write_to_all",
    remote_access: RemoteAccess::Write,
    division: Division::PerRank,
    is_one_shot: false,
    fits: |case| {
        let from = if case.world_size == 2 { 8 << 10 } else { 16 << 10 };
        case.ownership == Ownership::Allocated && case.bytes >= case.crossovers.write_to_all.unwrap_or(from)
    },
    block_bytes: |_| BLOCK_BYTES,
    rounds: |_| 1,
    signals: |_| 2,
    step: |context, _, phase| write_to_all(context, phase),
};

/// Lets every rank reduce its part of all ranks' memory and write the sum into their memory.
fn write_to_all(context: &StepContext, phase: usize) -> PhaseStep {
    let part = context.rank().index();
    match phase {
        0 => PhaseStep::DirectStep(DirectStep::Signal),
        1 => PhaseStep::DirectStep(DirectStep::Wait { ranks: PeerSet::Others, signals: 1 }),
        2 => PhaseStep::DirectStep(DirectStep::Reduce {
            part,
            block: 0,
            of: MemoryArea::Exposed,
            into: SumTarget::Back(PeerSet::Others),
        }),
        _ => context.leave(phase - 3, 2),
    }
}

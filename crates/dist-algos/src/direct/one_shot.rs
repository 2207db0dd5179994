//! One-shot schedules: every rank publishes its data, and then every rank computes its own result from all of it.
//!
//! With more than one block it is a pipeline: the next block is published before a block is used.

use super::collective::BlockUse;
use super::step_context::{PhaseStep, SLOTS, signals};
use super::{BLOCK_BYTES, DirectAlgorithm, DirectStep, Division, PeerSet, RemoteAccess, StepContext};
use crate::CollectiveKind;

/// All_reduce: every rank reduces everything.
pub static ALL_REDUCE: DirectAlgorithm = whole(CollectiveKind::AllReduce);
/// Reduce: the root reduces everything.
pub static REDUCE: DirectAlgorithm =
    DirectAlgorithm { block_bytes: pipelined_block_bytes, ..whole(CollectiveKind::Reduce) };
/// Reduce_scatter: every rank reduces its part.
pub static REDUCE_SCATTER: DirectAlgorithm = per_rank(CollectiveKind::ReduceScatter);
/// All_gather: every rank copies all parts.
pub static ALL_GATHER: DirectAlgorithm = per_rank(CollectiveKind::AllGather);
/// Broadcast: every rank copies what the root has published.
pub static BROADCAST: DirectAlgorithm =
    DirectAlgorithm { block_bytes: pipelined_block_bytes, ..whole(CollectiveKind::Broadcast) };
/// All_to_all: every rank copies the parts for it.
pub static ALL_TO_ALL: DirectAlgorithm = per_rank(CollectiveKind::AllToAll);
/// Barrier: nothing is published.
pub static BARRIER: DirectAlgorithm = whole(CollectiveKind::Barrier);

const fn whole(collective: CollectiveKind) -> DirectAlgorithm {
    DirectAlgorithm { division: Division::Whole, ..per_rank(collective) }
}

const fn per_rank(collective: CollectiveKind) -> DirectAlgorithm {
    DirectAlgorithm {
        collective,
        name: "direct/one_shot",
        remote_access: RemoteAccess::Nothing,
        division: Division::PerRank,
        is_one_shot: true,
        fits: |_| true,
        block_bytes: |_| BLOCK_BYTES,
        rounds: |blocks| blocks + 1,
        signals: |blocks| blocks,
        step,
    }
}

/// The minimum size of a block, if a buffer is divided into several blocks.
const BLOCK_BYTES_MIN: usize = 64 << 10;

/// Returns the size of a block for operations with a root, whose data goes in one direction. Readers use the first
/// block while the second one is written, and no slot is written twice.
fn pipelined_block_bytes(bytes: usize) -> usize {
    bytes.div_ceil(SLOTS).clamp(BLOCK_BYTES_MIN, BLOCK_BYTES)
}

/// Returns a step of the pipeline. Round `i` publishes block `i`, copies this rank's own part of it, and uses block
/// `i − 1` of the other ranks.
fn step(context: &StepContext, round: usize, phase: usize) -> PhaseStep {
    let blocks = context.blocks();
    match phase {
        0 => wait_for_slot(context, round),
        1 if round < blocks => PhaseStep::of(context.publishes().map(|parts| context.publish(parts, round))),
        2 if round < blocks => PhaseStep::DirectStep(DirectStep::Signal),
        3 if round < blocks => context.keep(round),
        1..=3 => PhaseStep::Nothing,
        _ if round == 0 => PhaseStep::EndOfRound,
        _ => context.use_block(phase - 4, round - 1, context.published.area(round - 1), signals(round)),
    }
}

/// Returns the wait before a slot is written again. The ranks that use its content have signalled in the second round
/// after it was written.
fn wait_for_slot(context: &StepContext, round: usize) -> PhaseStep {
    let (collective, blocks) = (context.collective(), context.blocks());
    if round < SLOTS || round >= blocks {
        return PhaseStep::Nothing;
    }
    // A rank that waits for all other ranks in each round has already done so in the round before.
    let awaits_all = matches!(
        collective.uses(context.rank().index()),
        BlockUse::Reduce(_) | BlockUse::Take(PeerSet::Others)
    );
    let users =
        collective.users(context.rank().index()).filter(|users| !(awaits_all && *users == PeerSet::Others));
    PhaseStep::of(users.map(|ranks| DirectStep::Wait { ranks, signals: signals(round + 3 - SLOTS) }))
}

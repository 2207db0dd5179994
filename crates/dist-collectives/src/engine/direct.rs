//! The choice of direct plans: collectives of ranks that share memory, executed without messages.

use std::sync::{Arc, OnceLock};

use dist_algos::direct::{Crossovers, DirectAlgorithm, DirectCase, DirectPlan, Ownership, RemoteAccess};
use dist_algos::{Algorithm, AlgorithmTable, CollectiveKind};
use dist_transport::Cause;
use dist_transport::shm_group::{GroupLayout, Reach};

use super::direct_access::CheckedPlan;
use super::plan_cache::{CallKey, Collective};
use super::{CallOptions, Engine};
use crate::{Error, Operation, ReduceKind, Result};

/// The memory that the ranks of the group share. They find out together, in the first operation that needs to know.
/// Clones know it at the same time.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedMemory(Arc<OnceLock<Option<GroupLayout>>>);

/// The generations of the two sets of slots that direct calls use in turn. Each reuse of a set is a new generation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SlotGenerations([usize; 2]);

impl SlotGenerations {
    /// Sets the generation of the slots in the plan of the next call, and counts the generations that the call uses.
    #[inline(always)]
    pub(super) const fn take(&mut self, checked: &mut CheckedPlan) {
        let Self([now, next]) = *self;
        *self = Self([next, now + checked.plan().generations()]);
        checked.set_generation(now);
    }
}

impl SharedMemory {
    /// Returns `true` if the ranks know which memory they share.
    pub(super) fn is_known(&self) -> bool {
        self.0.get().is_some()
    }

    /// Returns the direct algorithm of a table that would be chosen for an operation. Returns `None` if the ranks share no
    /// memory, or do not know it yet.
    pub(crate) fn direct_algorithm(
        &self,
        (table, world_size): (AlgorithmTable<'static>, usize),
        (operation, bytes): (Operation, usize),
        ownership: Ownership,
        crossovers: Crossovers,
    ) -> Option<&'static DirectAlgorithm> {
        let Some(Some(shared)) = self.0.get() else { return None };
        suggest(table, operation.collective()?, world_size, bytes, (ownership, shared), crossovers)
    }

    /// Checks that a forced algorithm can access memory of this kind. Succeeds if the ranks do not know their shared
    /// memory yet.
    pub(crate) fn check_direct(
        &self,
        direct: &'static DirectAlgorithm,
        ownership: Ownership,
        world_size: usize,
    ) -> Result<()> {
        let algorithm = Algorithm::Direct(direct);
        match self.0.get() {
            Some(Some(shared)) if !reaches(direct, ownership, shared.reach) => {
                Err(Error::NotOpen { algorithm })
            }
            Some(None) => Err(Error::NotShared { algorithm }),
            _ if world_size == 1 => Err(Error::NotShared { algorithm }),
            _ => Ok(()),
        }
    }
}

impl Engine {
    /// Returns the direct plan of an operation; `None` if messages are to be used.
    pub(super) fn direct_plan(
        &mut self,
        key: &CallKey,
        part_bytes_max: &dyn Fn(usize) -> usize,
        options: &CallOptions<'_>,
    ) -> Result<Option<DirectPlan>> {
        let kind = key.collective.kind();
        let operation = Operation::from(kind);
        let forced = match options.settings.forced(operation) {
            None if !self.uses_hierarchical() => None,
            Some(Algorithm::Direct(direct)) => Some(direct),
            _ => return Ok(None),
        };
        let Collective::Direct(collective) = key.collective else { return Ok(None) };
        if self.world_size() == 1 || key.op == Some(ReduceKind::Custom) {
            return Ok(None);
        }
        let Some(shared) = self.shared_memory(operation, key, options)? else { return Ok(None) };
        let world_size = self.world_size();
        let crossovers = options.settings.crossovers;
        let table = self.algorithms;
        let suggest = || suggest(table, kind, world_size, key.bytes, (key.ownership, &shared), crossovers);
        let Some(algorithm) = forced.or_else(suggest) else { return Ok(None) };
        let part_bytes_max = part_bytes_max(algorithm.parts(world_size));
        let block_bytes = (algorithm.block_bytes)(key.bytes);
        let plan = DirectPlan::new((collective, algorithm), world_size, part_bytes_max, block_bytes, shared);
        let Some(plan) = plan else {
            let unsupported =
                |direct| Error::Unsupported { algorithm: Algorithm::Direct(direct), world_size };
            return forced.map(unsupported).map_or(Ok(None), Err);
        };
        let is_open = |ownership| reaches(algorithm, ownership, shared.reach);
        if is_open(key.ownership) {
            return Ok(Some(plan));
        }
        if is_open(key.ownership.expected()) {
            // This rank could not get shared memory, and uses a substitute. The other ranks may have got theirs, so
            // they execute the direct plan and wait for this rank.
            let error = Error::OutOfReach { operation, bytes: key.bytes };
            self.transport.abort(Cause::gave_up(&error));
            return Err(error);
        }
        forced.map_or(Ok(None), |direct| Err(Error::NotOpen { algorithm: Algorithm::Direct(direct) }))
    }

    /// Returns the layout of the memory that the ranks share; `None` if they share none. The first operation of a group
    /// that needs to know establishes the memory on all ranks.
    pub(super) fn shared_memory(
        &mut self,
        operation: Operation,
        key: &CallKey,
        options: &CallOptions<'_>,
    ) -> Result<Option<GroupLayout>> {
        if let Some(known) = self.shared_memory.0.get() {
            return Ok(*known);
        }
        // The transport compares this call, so a rank in another call is detected here too.
        let call = self.call_of(operation, key, options.settings.order);
        self.announce(&call, &call.encode_with(self.algorithms));
        let shm_group =
            self.transport.shm_group(&options.due).map_err(|source| Error::in_call(call, source))?;
        // A transport may number the ranks differently in its shared memory. Such memory is not used.
        let own = shm_group.filter(|shm_group| shm_group.rank() == self.rank);
        let shared = own.map(|shm_group| shm_group.shared());
        // Calls state whether the shared memory is known, so earlier plans have the wrong fingerprint.
        self.invalidate_plans();
        Ok(*self.shared_memory.0.get_or_init(|| shared))
    }
}

/// Returns the fastest direct algorithm of a table for an operation on a buffer of this many bytes, among ranks that
/// share this memory.
fn suggest(
    table: AlgorithmTable<'_>,
    collective: CollectiveKind,
    world_size: usize,
    bytes: usize,
    (ownership, shared): (Ownership, &GroupLayout),
    crossovers: Crossovers,
) -> Option<&'static DirectAlgorithm> {
    let case = DirectCase { world_size, bytes, ownership: ownership.expected(), shared, crossovers };
    table.suggest_direct(collective, &case)
}

/// Returns `true` if other ranks can access memory of this kind as the algorithm needs.
const fn reaches(algorithm: &DirectAlgorithm, ownership: Ownership, reach: Reach) -> bool {
    match (algorithm.remote_access, ownership) {
        (RemoteAccess::Nothing, _) | (_, Ownership::Allocated) => true,
        (RemoteAccess::Read, _) => !matches!(reach, Reach::Slots),
        (RemoteAccess::Write, Ownership::Owned | Ownership::Substitute) => matches!(reach, Reach::Write),
        (RemoteAccess::Write, Ownership::Borrowed) => false,
    }
}

//! Operations of ranks that share memory. They run direct schedules instead of sending messages.

use dist_algos::direct::{
    Crossovers, DirectAlgorithm, DirectCase, DirectMemory, DirectPlan, OwnMemory, Ownership, ReductionKernel,
    RemoteAccess,
};
use dist_algos::{ALGORITHMS, Algorithm, CollectiveKind, Partition};
use dist_transport::direct::{GroupLayout, Reach};
use dist_transport::{Cause, LazyDeadline};

use super::arithmetic::Arithmetic;
use super::direct_access::CheckedPlan;
use super::plan_cache::{CallKey, Collective};
use super::{CallOptions, Engine};
use crate::{Buffer, Element, Error, Operation, Result};

/// The memory that the ranks of the group share.
#[derive(Clone, Copy, Debug)]
pub(super) enum SharedMemory {
    /// The ranks have not found out yet. They do so in the first operation that needs to know.
    Unknown,
    Nothing,
    Memory(GroupLayout),
}

/// Counts how often the slots were reused by direct calls. Direct calls use two sets of slots in turn.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SlotGenerations([usize; 2]);

impl SlotGenerations {
    /// Gives the plan of the next call the current generation of the slots.
    #[inline(always)]
    const fn take(&mut self, checked: &mut CheckedPlan) {
        let Self([now, next]) = *self;
        *self = Self([next, now + checked.plan().generations()]);
        checked.set_generation(now);
    }
}

/// The memory that a reduction works on.
#[derive(Debug)]
pub(crate) enum ReductionBuffer<'a, T> {
    Borrowed(&'a mut [T]),
    Owned(&'a mut Buffer<T>),
}

/// The memory that an operation reads. Other ranks may read it too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input<'a, T> {
    elements: &'a [T],
    /// The kind of the memory on all ranks, then its kind on this rank.
    ownership: [Ownership; 2],
}

impl Engine {
    /// Returns the direct plan of an operation; `None` if the operation is done by messages.
    pub(super) fn plan(
        &mut self,
        key: &CallKey,
        part_bytes_max: impl Fn(usize) -> usize,
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
        if self.world_size() == 1 {
            return Ok(None);
        }
        let Some(shared) = self.shared_memory(operation, key, options)? else { return Ok(None) };
        let world_size = self.world_size();
        let crossovers = options.settings.crossovers;
        let suggest = || suggest(kind, world_size, key.bytes, (key.ownership, &shared), crossovers);
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
        if is_open(key.here) {
            return Ok(Some(plan));
        }
        if is_open(key.ownership) {
            // The other ranks can reach this memory and wait for this rank.
            let error = Error::OutOfReach { operation, bytes: key.bytes };
            self.transport.abort(Cause::gave_up(&error));
            return Err(error);
        }
        forced.map_or(Ok(None), |direct| Err(Error::NotOpen { algorithm: Algorithm::Direct(direct) }))
    }

    /// Returns the direct algorithm that would be chosen for an operation, as far as this rank knows the shared
    /// memory.
    pub(crate) fn direct_algorithm(
        &self,
        operation: Operation,
        bytes: usize,
        ownership: Ownership,
        crossovers: Crossovers,
    ) -> Option<&'static DirectAlgorithm> {
        let SharedMemory::Memory(shared) = &self.shared_memory else { return None };
        let algorithm =
            suggest(operation.collective()?, self.world_size(), bytes, (ownership, shared), crossovers);
        algorithm.filter(|_| !self.uses_hierarchical())
    }

    /// Checks that a requested algorithm supports memory of this kind, as far as this rank knows the shared memory.
    pub(crate) fn check_direct(&self, direct: &'static DirectAlgorithm, ownership: Ownership) -> Result<()> {
        let algorithm = Algorithm::Direct(direct);
        match self.shared_memory {
            SharedMemory::Memory(shared) if !reaches(direct, ownership, shared.reach) => {
                Err(Error::NotOpen { algorithm })
            }
            SharedMemory::Nothing => Err(Error::NotShared { algorithm }),
            _ if self.world_size() == 1 => Err(Error::NotShared { algorithm }),
            _ => Ok(()),
        }
    }

    /// Returns the memory that the ranks share. The ranks find it out in the first operation of a group that needs
    /// to know.
    pub(super) fn shared_memory(
        &mut self,
        operation: Operation,
        key: &CallKey,
        options: &CallOptions<'_>,
    ) -> Result<Option<GroupLayout>> {
        if let SharedMemory::Unknown = self.shared_memory {
            // A rank that is in another call is detected here as in any call.
            let call = self.call_of(operation, key, options.settings.order);
            self.announce(&call, &call.encode());
            let direct =
                self.transport.direct(&options.due).map_err(|source| Error::in_call(call, source))?;
            // The memory is of no use if its owner numbers this rank differently.
            let own = direct.filter(|direct| direct.rank() == self.rank);
            self.shared_memory =
                own.map_or(SharedMemory::Nothing, |direct| SharedMemory::Memory(direct.shared()));
            // From here on, calls state that the shared memory is known.
            self.invalidate_plans();
        }
        match self.shared_memory {
            SharedMemory::Memory(shared) => Ok(Some(shared)),
            _ => Ok(None),
        }
    }

    /// Runs the current call as one fused barrier. The other ranks only see copies of the memory.
    #[inline(always)]
    pub(super) fn signal_and_wait(
        &mut self,
        own: &mut [u8],
        combine: impl FnMut(&mut [u8], &[u8]),
        total: Option<impl FnMut(&mut [u8], &[&[u8]])>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let (call, checked) = self.plan_cache.current_mut().direct_program();
        self.slot_generations.take(checked);
        let direct = self.transport.direct(due).map_err(|source| Error::in_call(*call, source))?;
        let Some(direct) = direct else { return Err(Error::Sharing) };
        checked
            .signal_and_wait(call.number(), direct, own, (combine, total), &mut self.scratch, due)
            .map_err(|error| Self::failed(&mut *self.transport, call, error))
    }

    /// Runs the current call on memory that other ranks only read.
    #[inline(always)]
    pub(super) fn run_directly<T: Element>(
        &mut self,
        (buffer, partition): (&mut [T], Partition<'_>),
        input: Option<(&[T], Partition<'_>)>,
        arithmetic: &Arithmetic,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let own = OwnMemory::Borrowed(bytemuck::cast_slice_mut(buffer));
        let input = input.map(|(input, partition)| (bytemuck::cast_slice(input), partition));
        let mut memory = DirectMemory { own, partition, input, piece_bytes: self.piece_bytes() };
        self.run_on::<T>(&mut memory, arithmetic, due)
    }

    /// Runs the current all_reduce. Other ranks may write into the memory if it is owned.
    #[inline(always)]
    pub(super) fn reduce_held<T: Element>(
        &mut self,
        mut held: ReductionBuffer<'_, T>,
        arithmetic: &Arithmetic,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        if self.plan_cache.current().plan().is_fused() {
            let own = held.elements();
            arithmetic.prepare(own);
            let total = arithmetic.total::<T>(self.world_size());
            self.signal_and_wait(bytemuck::cast_slice_mut(own), arithmetic.combine::<T>(), total, due)?;
            arithmetic.finish(own);
            Ok(())
        } else {
            arithmetic.prepare(held.elements());
            self.reduce_large(held, arithmetic, due)
        }
    }

    #[inline(never)]
    fn reduce_large<T: Element>(
        &mut self,
        held: ReductionBuffer<'_, T>,
        arithmetic: &Arithmetic,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let plan = self.plan_cache.current().plan();
        let partition = super::partition::<T>(held.len(), plan.parts());
        let buffer = match held {
            ReductionBuffer::Owned(buffer) if plan.algorithm().remote_access == RemoteAccess::Write => buffer,
            ReductionBuffer::Owned(buffer) => {
                return self.run_directly((&mut **buffer, partition), None, arithmetic, due);
            }
            ReductionBuffer::Borrowed(buffer) => {
                return self.run_directly((buffer, partition), None, arithmetic, due);
            }
        };
        self.reduce_lent(buffer, partition, arithmetic, due)
    }

    /// Runs the current all_reduce on memory that other ranks write.
    fn reduce_lent<T: Element>(
        &mut self,
        buffer: &mut Buffer<T>,
        partition: Partition<'_>,
        arithmetic: &Arithmetic,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let piece_bytes = self.piece_bytes();
        let (call, checked) = self.plan_cache.current_mut().direct_program();
        self.slot_generations.take(checked);
        let direct = self.transport.direct(due).map_err(|source| Error::in_call(*call, source))?;
        let Some(direct) = direct else { return Err(Error::Sharing) };
        let kernel = &mut ReductionKernel {
            combine: &mut arithmetic.combine::<T>(),
            finish: &mut |sums| arithmetic.finish::<T>(bytemuck::cast_slice_mut(sums)),
            complete: &mut arithmetic.complete::<T>(),
        };
        let (kind, lent) = buffer.lend();
        let lent = (lent, partition, piece_bytes);
        let (done, lent) = checked.run_lent(call.number(), direct, lent, kernel, &mut self.scratch, due);
        if let Some(lent) = lent {
            buffer.take_back(kind, lent);
        }
        done.map_err(|error| Self::failed(&mut *self.transport, call, error))
    }

    /// Returns how many bytes of other ranks' memory are summed at a time.
    fn piece_bytes(&self) -> usize {
        match self.plan_cache.current().here() {
            Ownership::Allocated => SHARED_PIECE_BYTES,
            _ => ATTACHED_PIECE_BYTES,
        }
    }

    fn run_on<T: Element>(
        &mut self,
        memory: &mut DirectMemory<'_>,
        arithmetic: &Arithmetic,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let (call, checked) = self.plan_cache.current_mut().direct_program();
        self.slot_generations.take(checked);
        let direct = self.transport.direct(due).map_err(|source| Error::in_call(*call, source))?;
        let Some(direct) = direct else { return Err(Error::Sharing) };
        let kernel = &mut ReductionKernel {
            combine: &mut arithmetic.combine::<T>(),
            finish: &mut |sums| arithmetic.finish::<T>(bytemuck::cast_slice_mut(sums)),
            complete: &mut arithmetic.complete::<T>(),
        };
        let done = checked.run(call.number(), direct, memory, kernel, &mut self.scratch, due);
        done.map_err(|error| Self::failed(&mut *self.transport, call, error))
    }
}

/// Returns the fastest algorithm of an operation on a buffer of this many bytes, for ranks that share this memory.
fn suggest(
    collective: CollectiveKind,
    world_size: usize,
    bytes: usize,
    (ownership, shared): (Ownership, &GroupLayout),
    crossovers: Crossovers,
) -> Option<&'static DirectAlgorithm> {
    let case = DirectCase { world_size, bytes, ownership, shared, crossovers };
    ALGORITHMS.suggest_direct(collective, &case)
}

/// Returns `true` if an algorithm can use memory of this kind.
const fn reaches(algorithm: &DirectAlgorithm, ownership: Ownership, reach: Reach) -> bool {
    match (algorithm.remote_access, ownership) {
        (RemoteAccess::Nothing, _) | (_, Ownership::Allocated) => true,
        (RemoteAccess::Read, _) => !matches!(reach, Reach::Slots),
        (RemoteAccess::Write, Ownership::Owned) => matches!(reach, Reach::Write),
        (RemoteAccess::Write, Ownership::Borrowed) => false,
    }
}

impl<'a, T: Element> ReductionBuffer<'a, T> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Borrowed(elements) => elements.len(),
            Self::Owned(buffer) => buffer.len(),
        }
    }

    /// Returns the kind of the memory on all ranks, then its kind on this rank.
    pub(super) fn ownership(&self) -> [Ownership; 2] {
        match self {
            Self::Borrowed(_) => [Ownership::Borrowed; 2],
            Self::Owned(buffer) => [buffer.nominal_ownership(), buffer.ownership()],
        }
    }

    #[inline(always)]
    pub(super) fn elements(&mut self) -> &mut [T] {
        match self {
            Self::Borrowed(elements) => elements,
            Self::Owned(buffer) => buffer,
        }
    }

    /// Returns the elements and their kinds of memory.
    pub(super) fn into_parts(self) -> (&'a mut [T], [Ownership; 2]) {
        let ownership = self.ownership();
        match self {
            Self::Borrowed(elements) => (elements, ownership),
            Self::Owned(buffer) => (buffer, ownership),
        }
    }
}

impl<'a, T> Input<'a, T> {
    pub(super) const fn len(&self) -> usize {
        self.elements.len()
    }

    pub(crate) const fn elements(&self) -> &'a [T] {
        self.elements
    }

    pub(super) const fn ownership(&self) -> [Ownership; 2] {
        self.ownership
    }
}

impl<'a, T> From<&'a [T]> for Input<'a, T> {
    fn from(elements: &'a [T]) -> Self {
        Self { elements, ownership: [Ownership::Borrowed; 2] }
    }
}

impl<'a, T: Element> From<&'a Buffer<T>> for Input<'a, T> {
    fn from(buffer: &'a Buffer<T>) -> Self {
        Self { elements: buffer, ownership: [buffer.nominal_ownership(), buffer.ownership()] }
    }
}

impl<'a, T> From<&'a mut [T]> for ReductionBuffer<'a, T> {
    fn from(elements: &'a mut [T]) -> Self {
        Self::Borrowed(elements)
    }
}

impl<'a, T> From<&'a mut Buffer<T>> for ReductionBuffer<'a, T> {
    fn from(buffer: &'a mut Buffer<T>) -> Self {
        Self::Owned(buffer)
    }
}

/// If the kernel copies the bytes, larger pieces need fewer system calls. The copied bytes still fit into the
/// second-level cache.
const ATTACHED_PIECE_BYTES: usize = 128 << 10;
/// If the bytes are read in place, the sums stay in the first-level cache until they are written to all ranks.
const SHARED_PIECE_BYTES: usize = 16 << 10;

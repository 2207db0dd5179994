//! Executes compiled calls: as messages, or on memory that the ranks share.

use std::ops::Range;

use bytemuck::Pod;
use dist_algos::direct::{DirectMemory, OwnMemory, Ownership, ReductionKernel, RemoteAccess};
use dist_algos::{Memory, Partition, Reduce};
use dist_transport::LazyDeadline;

use super::arithmetic::Arithmetic;
use super::memory::{CallBuffer, CallOperands};
use super::plan_cache::{PlanId, Program};
use super::{CallOptions, Engine, copy, partition};
use crate::{Buffer, Element, Error, ReduceOp, Result};

/// The buffer of a direct call.
enum DirectBuffer<'m, 'a, T> {
    /// Memory that other ranks only read.
    Borrowed(&'m mut DirectMemory<'a>),
    /// A buffer that is lent to the other ranks, its partition, and the bytes that are summed at a time.
    Lent(&'m mut Buffer<T>, Partition<'a>, usize),
}

impl Engine {
    /// Begins the next call of this plan and executes it. After an error the contents of the buffer are unspecified.
    #[inline(always)]
    pub(super) fn execute<T: Element>(
        &mut self,
        plan: PlanId,
        memory: CallOperands<'_, T>,
        op: ReduceOp,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.begin_compiled(plan);
        let arithmetic = self.arithmetic::<T>(plan, op, options)?;
        self.run_compiled(plan, memory, &arithmetic, &options.due)
    }

    /// Begins the next call of this plan and executes it. The call moves elements without a reduction.
    #[inline(always)]
    pub(super) fn execute_moving<T: Pod>(
        &mut self,
        plan: PlanId,
        memory: CallOperands<'_, T>,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.begin_compiled(plan);
        self.run_compiled(plan, memory.into_bytes(), &Arithmetic::NONE, &options.due)
    }

    /// Executes the call that has begun.
    #[inline(always)]
    pub(super) fn run_compiled<T: Element>(
        &mut self,
        plan: PlanId,
        mut memory: CallOperands<'_, T>,
        arithmetic: &Arithmetic,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        if memory.input.is_none() {
            arithmetic.prepare(memory.buffer.elements());
        }
        match &self.plan_cache.get(plan).program {
            Program::Fused(_) => self.run_fused(plan, memory.buffer.elements(), arithmetic, due),
            Program::Direct(_) => self.run_direct(plan, memory, arithmetic, due),
            Program::Native(_) => {
                arithmetic.finish(self.run_native(plan, memory, due)?);
                Ok(())
            }
            Program::Messages(_) => {
                let finish = |sums: &mut [u8]| arithmetic.finish::<T>(bytemuck::cast_slice_mut(sums));
                let combine = &mut arithmetic.combine::<T>();
                let kernel = MessageKernel {
                    reduce: Reduce::AnySide(combine),
                    finish: arithmetic.finishes().then_some(&finish),
                };
                self.run_messages(plan, memory.into_bytes(), kernel, due)
            }
        }
    }

    /// Executes a direct call as one fused barrier. Other ranks only see copies of the memory.
    #[inline(always)]
    fn run_fused<T: Element>(
        &mut self,
        plan: PlanId,
        own: &mut [T],
        arithmetic: &Arithmetic,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let kernels = (arithmetic.combine::<T>(), arithmetic.total::<T>(self.world_size()));
        let (call, checked) = self.plan_cache.get_mut(plan).direct_program();
        self.slot_generations.take(checked);
        let shm_group = self.transport.shm_group(due).map_err(|source| Error::in_call(*call, source))?;
        let Some(shm_group) = shm_group else { return Err(Error::Sharing) };
        let bytes = bytemuck::cast_slice_mut(own);
        checked
            .signal_and_wait(call.sequence, shm_group, bytes, kernels, &mut self.scratch, due)
            .map_err(|error| Self::failed(&mut *self.transport, call, error))?;
        arithmetic.finish(own);
        Ok(())
    }

    /// Executes a direct call step by step. If the algorithm writes into the memory of other ranks, the buffer is lent
    /// to them during the call.
    #[inline(always)]
    fn run_direct<T: Element>(
        &mut self,
        plan: PlanId,
        memory: CallOperands<'_, T>,
        arithmetic: &Arithmetic,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let CallOperands { mut buffer, layout, input, unit } = memory;
        let element_size = unit * size_of::<T>();
        let compiled = self.plan_cache.get(plan);
        let (program, piece_bytes) = (compiled.direct_plan(), piece_bytes(compiled.key.ownership));
        let partition = match layout {
            Some(layout) => layout.partition(element_size),
            None => partition(buffer.elements().len() / unit, element_size, program.parts()),
        };
        match buffer {
            CallBuffer::Owned(buffer) if program.algorithm().remote_access == RemoteAccess::Write => {
                self.run_on(plan, DirectBuffer::Lent(buffer, partition, piece_bytes), arithmetic, due)
            }
            buffer => {
                let own = OwnMemory::Borrowed(bytemuck::cast_slice_mut(buffer.into_elements()));
                let input = input
                    .map(|(input, layout)| (bytemuck::cast_slice(input), layout.partition(element_size)));
                let memory = &mut DirectMemory { own, partition, input, piece_bytes };
                self.run_on(plan, DirectBuffer::<T>::Borrowed(memory), arithmetic, due)
            }
        }
    }

    /// Executes the steps of a direct call on this buffer.
    #[inline(never)]
    fn run_on<T: Element>(
        &mut self,
        plan: PlanId,
        memory: DirectBuffer<'_, '_, T>,
        arithmetic: &Arithmetic,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let (call, checked) = self.plan_cache.get_mut(plan).direct_program();
        self.slot_generations.take(checked);
        let shm_group = self.transport.shm_group(due).map_err(|source| Error::in_call(*call, source))?;
        let Some(shm_group) = shm_group else { return Err(Error::Sharing) };
        let kernel = &mut ReductionKernel {
            combine: &mut arithmetic.combine::<T>(),
            finish: &mut |sums| arithmetic.finish::<T>(bytemuck::cast_slice_mut(sums)),
            complete: &mut arithmetic.complete::<T>(),
        };
        let (number, scratch) = (call.sequence, &mut self.scratch);
        let done = match memory {
            DirectBuffer::Borrowed(memory) => checked.run(number, shm_group, memory, kernel, scratch, due),
            DirectBuffer::Lent(buffer, partition, piece_bytes) => {
                let (kind, lent) = buffer.lend();
                let lent = (lent, partition, piece_bytes);
                let (done, lent) = checked.run_lent(number, shm_group, lent, kernel, scratch, due);
                if let Some(lent) = lent {
                    buffer.take_back(kind, lent);
                }
                done
            }
        };
        done.map_err(|error| Self::failed(&mut *self.transport, call, error))
    }

    /// Executes a call as messages, on memory of bytes. If it has an input, this rank's own part is copied to its place
    /// first.
    pub(super) fn run_messages(
        &mut self,
        plan: PlanId,
        memory: CallOperands<'_, u8>,
        mut kernel: MessageKernel<'_, '_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let CallOperands { buffer, layout, input, unit: element_size } = memory;
        let (own, buffer) = (self.rank.index(), buffer.into_elements());
        let Some(layout) = layout else {
            return self.run_blocks(plan, (buffer, element_size), kernel, due);
        };
        if let Some((input, parts)) = input
            && parts.holds(own)
            && layout.holds(own)
        {
            copy(&input[parts.range_in(own, element_size)], &mut buffer[layout.range_in(own, element_size)]);
        }
        let input = input.map(|(input, parts)| (input, parts.partition(element_size)));
        let memory = Memory { buffer, partition: layout.partition(element_size), input };
        self.run_block(plan, memory, &mut kernel, due)
    }

    /// Executes the schedule on one block of the buffer after the other.
    fn run_blocks(
        &mut self,
        plan: PlanId,
        (buffer, element_size): (&mut [u8], usize),
        mut kernel: MessageKernel<'_, '_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let schedule = self.plan_cache.get(plan).schedule();
        let (chunks, at_once) =
            (schedule.chunks, (schedule.block_bytes / element_size).max(1) * element_size);
        let mut rest = buffer;
        loop {
            // Messages are sent even if there are no elements.
            let (block, later) = rest.split_at_mut(rest.len().min(at_once));
            let partition = partition(block.len() / element_size, element_size, chunks);
            self.run_block(plan, Memory::new(block, partition), &mut kernel, due)?;
            if later.is_empty() {
                return Ok(());
            }
            rest = later;
        }
    }

    /// Executes the schedule on this memory, and finishes the sums that this rank owns.
    fn run_block(
        &mut self,
        plan: PlanId,
        Memory { buffer, partition, input }: Memory<'_>,
        kernel: &mut MessageKernel<'_, '_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let compiled = self.plan_cache.get(plan);
        let schedule = compiled.schedule();
        let reduce = &mut kernel.reduce;
        let mut run = |steps: Range<usize>, buffer: &mut [u8]| {
            let memory = Memory { buffer, partition, input };
            let (transport, scratch) = (&mut *self.transport, &mut self.scratch);
            dist_algos::run_validated(
                transport,
                (&schedule.steps, steps),
                memory,
                reduce.reborrow(),
                scratch,
                due,
            )
            .map_err(|error| Self::failed(&mut *self.transport, &compiled.call, error))
        };
        let end = schedule.steps.len();
        let Some(finish) = kernel.finish else { return run(0..end, buffer) };
        run(0..schedule.sums_complete, buffer)?;
        for chunk in schedule.owned.indices() {
            finish(&mut buffer[partition.range(chunk)]);
        }
        run(schedule.sums_complete..end, buffer)
    }
}

/// The arithmetic of a call by messages, on the bytes of whole elements.
pub(super) struct MessageKernel<'a, 'f> {
    pub(super) reduce: Reduce<'a, 'f>,
    /// Finishes complete sums, if that changes them.
    pub(super) finish: Option<&'a FinishSums<'a>>,
}

/// A function that finishes the bytes of complete sums.
type FinishSums<'a> = dyn Fn(&mut [u8]) + 'a;

/// Returns the size of the pieces in which other ranks' memory is summed. If the kernel copies the bytes, larger
/// pieces need fewer system calls, and the copied bytes still fit into the second-level cache. If the bytes are read
/// in place, the sums stay in the first-level cache until they are written to all ranks.
const fn piece_bytes(ownership: Ownership) -> usize {
    match ownership {
        Ownership::Allocated => 16 << 10,
        _ => 128 << 10,
    }
}

//! Executes compiled calls: as messages, or on memory that the ranks share.

use std::ops::Range;

use bytemuck::Pod;
use dist_algos::direct::{DirectMemory, OwnMemory, Ownership, ReductionKernel, RemoteAccess};
use dist_algos::{Memory, Partition};
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
        match &self.plan_cache.get(plan).program {
            Program::Fused(_) => self.run_fused(plan, memory.buffer.elements(), arithmetic, due),
            Program::Direct(_) => self.run_direct(plan, memory, arithmetic, due),
            Program::Messages(_) => self.run_messages(plan, memory, arithmetic, due),
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
        arithmetic.prepare(own);
        let kernels = (arithmetic.combine::<T>(), arithmetic.total::<T>(self.world_size()));
        let (call, checked) = self.plan_cache.get_mut(plan).direct_program();
        self.slot_generations.take(checked);
        let shm_group = self.transport.shm_group(due).map_err(|source| Error::in_call(*call, source))?;
        let Some(shm_group) = shm_group else { return Err(Error::Sharing) };
        let bytes = bytemuck::cast_slice_mut(own);
        checked
            .signal_and_wait(call.number(), shm_group, bytes, kernels, &mut self.scratch, due)
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
        if input.is_none() {
            arithmetic.prepare(buffer.elements());
        }
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
        let (number, scratch) = (call.number(), &mut self.scratch);
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

    /// Executes a call as messages. If it has an input, this rank's own part is copied to its place first.
    fn run_messages<T: Element>(
        &mut self,
        plan: PlanId,
        memory: CallOperands<'_, T>,
        arithmetic: &Arithmetic,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let (own, CallOperands { buffer, layout, input, unit }) = (self.rank.index(), memory);
        let (buffer, element_size) = (buffer.into_elements(), unit * size_of::<T>());
        let Some(layout) = layout else {
            arithmetic.prepare(buffer);
            return self.run_blocks(plan, (buffer, unit), arithmetic, due);
        };
        match input {
            Some((input, parts)) if parts.holds(own) && layout.holds(own) => {
                copy(&input[parts.range_in(own, unit)], &mut buffer[layout.range_in(own, unit)]);
            }
            Some(_) => {}
            None => arithmetic.prepare(buffer),
        }
        let input = input.map(|(input, parts)| (bytemuck::cast_slice(input), parts.partition(element_size)));
        self.run_block(plan, (buffer, layout.partition(element_size)), input, arithmetic, due)
    }

    /// Executes the schedule on one block of the buffer after the other. `unit` is the number of `T` in an element.
    fn run_blocks<T: Element>(
        &mut self,
        plan: PlanId,
        (buffer, unit): (&mut [T], usize),
        arithmetic: &Arithmetic,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let schedule = self.plan_cache.get(plan).schedule();
        let (chunks, at_once) = (schedule.chunks, schedule.block_bytes / size_of::<T>());
        let mut rest = buffer;
        loop {
            // Messages are sent even if there are no elements.
            let (block, later) = rest.split_at_mut(rest.len().min(at_once.max(unit)));
            let parts = partition(block.len() / unit, unit * size_of::<T>(), chunks);
            self.run_block(plan, (block, parts), None, arithmetic, due)?;
            if later.is_empty() {
                return Ok(());
            }
            rest = later;
        }
    }

    /// Executes the schedule on memory with this partition, and finishes the sums that this rank owns.
    fn run_block<T: Element>(
        &mut self,
        plan: PlanId,
        (buffer, partition): (&mut [T], Partition<'_>),
        input: Option<(&[u8], Partition<'_>)>,
        arithmetic: &Arithmetic,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let compiled = self.plan_cache.get(plan);
        let schedule = compiled.schedule();
        let combine = &mut arithmetic.combine::<T>();
        let mut run = |steps: Range<usize>, buffer: &mut [T]| {
            let memory = Memory { buffer: bytemuck::cast_slice_mut(buffer), partition, input };
            let (transport, scratch) = (&mut *self.transport, &mut self.scratch);
            dist_algos::run_validated(
                transport,
                (&schedule.steps, steps),
                memory,
                &mut *combine,
                scratch,
                due,
            )
            .map_err(|error| Self::failed(&mut *self.transport, &compiled.call, error))
        };
        let end = schedule.steps.len();
        if !arithmetic.finishes() {
            return run(0..end, buffer);
        }
        run(0..schedule.sums_complete, buffer)?;
        for chunk in schedule.owned.indices() {
            let bytes = partition.range(chunk);
            arithmetic.finish(&mut buffer[bytes.start / size_of::<T>()..bytes.end / size_of::<T>()]);
        }
        run(schedule.sums_complete..end, buffer)
    }
}

/// Returns the size of the pieces in which other ranks' memory is summed. If the kernel copies the bytes, larger
/// pieces need fewer system calls, and the copied bytes still fit into the second-level cache. If the bytes are read
/// in place, the sums stay in the first-level cache until they are written to all ranks.
const fn piece_bytes(ownership: Ownership) -> usize {
    match ownership {
        Ownership::Allocated => 16 << 10,
        _ => 128 << 10,
    }
}

//! Calls that the library below the transport executes, such as MPI.

use bytemuck::Pod;
use dist_algos::direct::DirectCollective;
use dist_transport::LazyDeadline;
use dist_transport::native::{
    NativeCollective, NativeElement, NativeMemory, NativeOp, NativeOperation, NativeParts, NativeReduction,
};

use super::Engine;
use super::memory::CallOperands;
use super::plan_cache::{CallKey, Collective, CompiledCall, PlanId, Preferences, Program};
use super::rank_layout::RankLayout;
use crate::{Call, DType, Error, ReduceKind, ReductionOrder, Result};

impl Engine {
    /// Compiles a call that the library below the transport executes; `None` if it is executed as messages. The call has
    /// no algorithm of this crate.
    pub(super) fn compile_native(&mut self, key: &CallKey, preferences: Preferences) -> Option<CompiledCall> {
        if self.world_size() == 1 || preferences.forced.is_some() {
            return None;
        }
        let operation = native_operation(key, preferences.order, self.world_size())?;
        let collective = NativeCollective { operation, bytes: key.bytes };
        if !self.transport.native()?.supports(&collective) {
            return None;
        }
        let call = self.call_of(key.collective.kind().into(), key, preferences.order);
        Some(CompiledCall::new(*key, preferences, Program::Native(collective), call, self.algorithms))
    }

    /// Executes a call that the library below the transport executes. Returns this rank's part of the memory.
    pub(super) fn run_native<'a, T: Pod>(
        &mut self,
        plan: PlanId,
        memory: CallOperands<'a, T>,
        due: &LazyDeadline<'_>,
    ) -> Result<&'a mut [T]> {
        let compiled = self.plan_cache.get(plan);
        let (call, collective) = (compiled.call, compiled.native());
        let (layout, unit) = (memory.layout, memory.unit);
        let parts = has_uneven_parts(collective.operation).then(|| memory.sizes_of_all());
        let parts = parts.as_deref().map(NativeParts::of_all);
        let buffer = self.execute_native(&call, collective, memory, parts, due)?;
        let own = layout.map_or(0..buffer.len(), |layout| layout.range_in(self.rank.index(), unit));
        Ok(&mut buffer[own])
    }

    /// Returns `true` if the library below the transport executes an all_to_all of parts of different sizes. `bytes` is the
    /// mean of the ranks.
    pub(super) fn is_native_all_to_all_v(&mut self, bytes: usize) -> bool {
        let collective = NativeCollective { operation: NativeOperation::AllToAllV, bytes };
        self.transport.native().is_some_and(|native| native.supports(&collective))
    }

    /// Lets the library execute an all_to_all of parts of different sizes. The numbers are the mean of the ranks, and the
    /// largest part of all, in bytes.
    pub(super) fn native_all_to_all_v(
        &mut self,
        call: &Call,
        (bytes, largest): (usize, usize),
        memory: CallOperands<'_, u8>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let sizes =
            |layout: Option<&RankLayout>| layout.map_or_else(Vec::new, |all| all.sizes_in(memory.unit));
        let (sent, received) = (sizes(memory.input.map(|(_, layout)| layout)), sizes(memory.layout));
        let parts = NativeParts { sent: &sent, received: &received, largest };
        let collective = NativeCollective { operation: NativeOperation::AllToAllV, bytes };
        self.execute_native(call, collective, memory, Some(parts), due).map(|_| ())
    }

    /// Lets the library execute a call. Returns the buffer.
    fn execute_native<'a, T: Pod>(
        &mut self,
        call: &Call,
        collective: NativeCollective,
        memory: CallOperands<'a, T>,
        parts: Option<NativeParts<'_>>,
        due: &LazyDeadline<'_>,
    ) -> Result<&'a mut [T]> {
        let Some(native) = self.transport.native() else { return Err(Error::Native) };
        let buffer = memory.buffer.into_elements();
        let bytes = NativeMemory {
            input: memory.input.map(|(input, _)| bytemuck::cast_slice(input)),
            buffer: bytemuck::cast_slice_mut(buffer),
            parts,
        };
        native.execute(&collective, bytes, due).map_err(|source| Error::in_call(*call, source))?;
        Ok(buffer)
    }
}

impl<T: Pod> CallOperands<'_, T> {
    /// Returns the sizes of the parts of all ranks in bytes. The buffer or the input has all parts.
    fn sizes_of_all(&self) -> Vec<usize> {
        let layouts = [self.layout, self.input.map(|(_, layout)| layout)];
        let whole = layouts.into_iter().flatten().find(|layout| layout.is_whole());
        whole.map_or_else(Vec::new, |layout| layout.sizes_in(self.unit * size_of::<T>()))
    }
}

/// Returns the operation as a library executes it; `None` if libraries have no such operation, or keep no such order.
fn native_operation(key: &CallKey, order: ReductionOrder, world_size: usize) -> Option<NativeOperation> {
    let reduction = || native_reduction(key).filter(|_| order == ReductionOrder::Any);
    let Collective::Direct(collective) = key.collective else { return None };
    Some(match collective {
        DirectCollective::AllReduce => NativeOperation::AllReduce(reduction()?),
        DirectCollective::Reduce { root } => NativeOperation::Reduce { reduction: reduction()?, root },
        DirectCollective::ReduceScatter { .. } => {
            let reduction = reduction()?;
            match has_even_parts(key, reduction.element.size(), world_size) {
                true => NativeOperation::ReduceScatter(reduction),
                false => NativeOperation::ReduceScatterV(reduction),
            }
        }
        DirectCollective::Broadcast { root } => NativeOperation::Broadcast { root },
        DirectCollective::AllGather { .. } => match has_even_parts(key, key.element?.size(), world_size) {
            true => NativeOperation::AllGather,
            false => NativeOperation::AllGatherV,
        },
        DirectCollective::AllToAll => NativeOperation::AllToAll,
        _ => return None,
    })
}

/// Returns the reduction of a call, if libraries have it. The quotient of a mean is computed here.
fn native_reduction(key: &CallKey) -> Option<NativeReduction> {
    let (kind, dtype) = (key.op?, key.element?.dtype()?);
    let op = match kind {
        ReduceKind::Sum | ReduceKind::Mean => NativeOp::Sum,
        ReduceKind::Product => NativeOp::Product,
        ReduceKind::Min => NativeOp::Min,
        ReduceKind::Max => NativeOp::Max,
        _ => return None,
    };
    let element = match kind.partial_dtype(dtype) {
        DType::F32 => NativeElement::F32,
        DType::F64 => NativeElement::F64,
        DType::I8 => NativeElement::I8,
        DType::I32 => NativeElement::I32,
        DType::I64 => NativeElement::I64,
        DType::U8 => NativeElement::U8,
        DType::U32 => NativeElement::U32,
        DType::U64 => NativeElement::U64,
        DType::ComplexF32 => NativeElement::ComplexF32,
        DType::ComplexF64 => NativeElement::ComplexF64,
        DType::F16 | DType::Bf16 => return None,
    };
    Some(NativeReduction { element, op })
}

const fn has_uneven_parts(operation: NativeOperation) -> bool {
    matches!(operation, NativeOperation::AllGatherV | NativeOperation::ReduceScatterV(_))
}

/// Returns `true` if all ranks have parts of the same size. If their sizes differ, `key.count` is the total of all parts.
const fn has_even_parts(key: &CallKey, element_size: usize, world_size: usize) -> bool {
    key.count.saturating_mul(world_size).saturating_mul(element_size) == key.bytes
}

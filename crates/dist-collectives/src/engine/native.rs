//! Calls that the library below the transport executes, such as MPI.

use bytemuck::Pod;
use dist_algos::direct::DirectCollective;
use dist_transport::LazyDeadline;
use dist_transport::native::{
    NativeCollective, NativeElement, NativeMemory, NativeOp, NativeOperation, NativeReduction,
};

use super::Engine;
use super::memory::CallOperands;
use super::plan_cache::{CallKey, Collective, CompiledCall, PlanId, Preferences, Program};
use crate::{DType, Error, ReduceKind, ReductionOrder, Result};

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
        let CallOperands { buffer, layout, input, unit } = memory;
        let buffer = buffer.into_elements();
        let Some(native) = self.transport.native() else { return Err(Error::Native) };
        let bytes = NativeMemory {
            input: input.map(|(input, _)| bytemuck::cast_slice(input)),
            buffer: bytemuck::cast_slice_mut(buffer),
        };
        native.execute(&collective, bytes, due).map_err(|source| Error::in_call(call, source))?;
        let own = layout.map_or(0..buffer.len(), |layout| layout.range_in(self.rank.index(), unit));
        Ok(&mut buffer[own])
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
            has_even_parts(key, reduction.element.size(), world_size)
                .then_some(NativeOperation::ReduceScatter(reduction))?
        }
        DirectCollective::Broadcast { root } => NativeOperation::Broadcast { root },
        DirectCollective::AllGather { .. } => {
            has_even_parts(key, key.element?.size(), world_size).then_some(NativeOperation::AllGather)?
        }
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
        _ => return None,
    };
    Some(NativeReduction { element, op })
}

/// Returns `true` if all ranks have parts of the same size. If their sizes differ, `key.count` is the total of all parts.
const fn has_even_parts(key: &CallKey, element_size: usize, world_size: usize) -> bool {
    key.count.saturating_mul(world_size).saturating_mul(element_size) == key.bytes
}

//! Reductions by operations of the user's own. They use messages only, because a panic must not unwind through a call
//! on shared memory.

use std::panic::{AssertUnwindSafe, catch_unwind};

use bytemuck::Pod;
use dist_algos::direct::DirectCollective;
use dist_algos::scan::Extent;
use dist_algos::{Algorithm, Reduce, Source};
use dist_transport::Cause;

use super::execute::MessageKernel;
use super::memory::CallOperands;
use super::plan_cache::{CallKey, Collective, PlanId};
use super::{CallOptions, Engine, partition};
use crate::{CustomOp, Error, Operation, ReduceKind, ReductionOrder, Result};

impl Engine {
    pub(crate) fn all_reduce_with<T: Pod, F: Fn(&mut [T], &[T])>(
        &mut self,
        buffer: &mut [T],
        op: &CustomOp<T, F>,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.reduce_whole(Collective::Direct(DirectCollective::AllReduce), buffer, op, options)
    }

    pub(crate) fn reduce_with<T: Pod, F: Fn(&mut [T], &[T])>(
        &mut self,
        buffer: &mut [T],
        op: &CustomOp<T, F>,
        root: usize,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.check_root(Operation::Reduce, root)?;
        self.reduce_whole(Collective::Direct(DirectCollective::Reduce { root }), buffer, op, options)
    }

    pub(crate) fn scan_with<T: Pod, F: Fn(&mut [T], &[T])>(
        &mut self,
        buffer: &mut [T],
        op: &CustomOp<T, F>,
        extent: Extent,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.reduce_whole(Collective::Scan(extent), buffer, op, options)
    }

    pub(crate) fn reduce_scatter_with<T: Pod, F: Fn(&mut [T], &[T])>(
        &mut self,
        input: &[T],
        output: &mut [T],
        op: &CustomOp<T, F>,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let whole = Some(("input", input.len()));
        let layout = &self.layout(Operation::ReduceScatter, None, ("output", output.len()), whole)?;
        let collective = Collective::Direct(DirectCollective::ReduceScatter { of: Source::Input });
        let key = CallKey::in_parts::<T>(collective, layout, options);
        let plan =
            self.compile_custom(key, op, |_| layout.partition(size_of::<T>()).chunk_bytes_max(), options)?;
        self.scatter_reduced(plan, (input, layout), output, |engine, memory| {
            engine.execute_custom(plan, memory, op, options)
        })
    }

    /// Reduces whole buffers in place.
    fn reduce_whole<T: Pod, F: Fn(&mut [T], &[T])>(
        &mut self,
        collective: Collective,
        buffer: &mut [T],
        op: &CustomOp<T, F>,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let (len, bytes) = (buffer.len(), size_of_val(buffer));
        let key = CallKey::of::<T>(collective, len, bytes, options.sizes);
        let largest = |parts| partition(len, size_of::<T>(), parts).chunk_bytes_max();
        let plan = self.compile_custom(key, op, largest, options)?;
        self.execute_custom(plan, CallOperands::of(buffer), op, options)
    }

    /// Compiles a call with this operation. It reduces in canonical order, unless the operation is commutative.
    fn compile_custom<T: Pod, F: Fn(&mut [T], &[T])>(
        &mut self,
        key: CallKey,
        op: &CustomOp<T, F>,
        part_bytes_max: impl Fn(usize) -> usize,
        options: &CallOptions<'_>,
    ) -> Result<PlanId> {
        if let Some(algorithm @ Algorithm::Direct(_)) = options.settings.forced(key.collective.kind().into())
        {
            return Err(Error::NeedsMessages { algorithm });
        }
        let mut settings = *options.settings;
        if !op.is_commutative() {
            settings.order = ReductionOrder::Canonical;
        }
        let options = &CallOptions { settings: &settings, ..options.clone() };
        let key = CallKey { op: Some(ReduceKind::Custom), sizes: op.digest(key.sizes), ..key };
        self.compile(&key, part_bytes_max, options)
    }

    /// Begins the next call of this plan and executes it. If the operation panics, the job is aborted.
    fn execute_custom<T: Pod, F: Fn(&mut [T], &[T])>(
        &mut self,
        plan: PlanId,
        memory: CallOperands<'_, T>,
        op: &CustomOp<T, F>,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.begin_compiled(plan);
        let kernel = MessageKernel { reduce: Reduce::Sided(&mut op.combine()), finish: None };
        // After a panic the job is over. The transport refuses all later calls.
        let run = AssertUnwindSafe(|| self.run_messages(plan, memory.into_bytes(), kernel, &options.due));
        catch_unwind(run).unwrap_or_else(|_| {
            self.transport.abort(Cause::Panicked);
            Err(Error::OperationPanicked { name: op.name() })
        })
    }
}

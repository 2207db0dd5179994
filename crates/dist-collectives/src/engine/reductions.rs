//! Operations that reduce elements of all ranks: all_reduce, reduce, reduce_scatter and scan.

use bytemuck::Pod;
use dist_algos::Source;
use dist_algos::direct::{DirectCollective, Ownership};
use dist_algos::scan::Extent;

use super::arithmetic::identity;
use super::memory::{CallBuffer, CallInput, CallOperands};
use super::plan_cache::{CallKey, Collective, PlanId};
use super::rank_layout::RankLayout;
use super::wide::widening;
use super::{CallOptions, Engine, copy, partition, reserve};
use crate::{Element, Error, Operation, ReduceOp, Result};

/// Bytes per rank of the blocks in which the ranks of one host reduce. Two ranks over TCP reduced 128 MiB fastest
/// in blocks of 1 MiB, and 16 MiB in blocks of 1 and 2 MiB. Four ranks were fastest with 1 and 2 MiB.
pub const BLOCK_BYTES_OF_RANK: usize = 512 << 10;

impl Engine {
    pub(crate) fn all_reduce<'a, T: Element>(
        &mut self,
        buffer: impl Into<CallBuffer<'a, T>>,
        op: ReduceOp,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        Self::check_op::<T>(op)?;
        let mut buffer = buffer.into();
        if let Some(widening) = widening::<T>(op) {
            let ownership = buffer.ownership();
            let mut wide = self.widened(widening, buffer.elements(), ownership)?;
            let done = self.all_reduce(wide.buffer(), op, &options.in_place_of::<T>());
            return self.narrowed(widening, wide, done.map(|()| 0), buffer.elements());
        }
        let (len, collective) = (buffer.elements().len(), Collective::Direct(DirectCollective::AllReduce));
        let key =
            CallKey::of::<T>(collective, len, len * size_of::<T>(), options.sizes).on(buffer.ownership());
        let key = key.reducing::<T>(op, options);
        let plan =
            self.compile(&key, |parts| partition(len, size_of::<T>(), parts).chunk_bytes_max(), options)?;
        self.execute(plan, CallOperands::of(buffer), op, options)
    }

    /// Returns how many bytes an operation's algorithm processes at a time.
    pub(super) fn bytes_at_once(&self, operation: Operation, bytes: usize) -> usize {
        bytes_at_once(operation, bytes, self.on_one_host.then_some(self.world_size()))
    }

    pub(crate) fn reduce<T: Element>(
        &mut self,
        buffer: &mut [T],
        op: ReduceOp,
        root: usize,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        self.check_root(Operation::Reduce, root)?;
        Self::check_op::<T>(op)?;
        if let Some(widening) = widening::<T>(op) {
            let mut wide = self.widened(widening, buffer, Ownership::Borrowed)?;
            let done = self.reduce(wide.elements(), op, root, &options.in_place_of::<T>());
            let result = if self.rank.index() == root { buffer } else { &mut [] };
            return self.narrowed(widening, wide, done.map(|()| 0), result);
        }
        let collective = Collective::Direct(DirectCollective::Reduce { root });
        let key = CallKey::of::<T>(collective, buffer.len(), size_of_val(buffer), options.sizes);
        let key = key.reducing::<T>(op, options);
        let largest = |parts| partition(buffer.len(), size_of::<T>(), parts).chunk_bytes_max();
        let plan = self.compile(&key, largest, options)?;
        self.execute(plan, CallOperands::of(buffer), op, options)
    }

    pub(crate) fn reduce_scatter<T: Element>(
        &mut self,
        input: CallInput<'_, T>,
        counts: Option<&[usize]>,
        output: &mut [T],
        op: ReduceOp,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let CallInput { elements: input, ownership } = input;
        let (operation, whole) = (Operation::ReduceScatter, Some(("input", input.len())));
        let layout = &self.layout(operation, counts, ("output", output.len()), whole)?;
        Self::check_op::<T>(op)?;
        if let Some(widening) = widening::<T>(op) {
            let mut wide = self.widened(widening, input, ownership)?;
            let start = layout.range(self.rank.index()).start;
            let done = self.reduce_scatter_in(wide.buffer(), layout, op, &options.in_place_of::<T>());
            let done = done.map(|_| start);
            return self.narrowed(widening, wide, done, output);
        }
        // Elements that must be scaled first are copied, because the input must not change.
        let (of, ownership) = match op {
            ReduceOp::PreMulSum(_) | ReduceOp::WeightedMean(_) => (Source::Buffer, Ownership::Borrowed),
            _ => (Source::Input, ownership),
        };
        let collective = Collective::Direct(DirectCollective::ReduceScatter { of });
        let key = CallKey::in_parts::<T>(collective, layout, options).on(ownership);
        let plan = self.compile_in_parts::<T>(&key.reducing::<T>(op, options), layout, options)?;
        self.scatter_reduced(plan, (input, layout), output, |engine, memory| {
            engine.execute(plan, memory, op, options)
        })
    }

    /// Runs a reduce_scatter, which gets its memory: this rank's part and the input, or a copy of the input.
    pub(super) fn scatter_reduced<T: Pod>(
        &mut self,
        plan: PlanId,
        (input, layout): (&[T], &RankLayout),
        output: &mut [T],
        run: impl FnOnce(&mut Self, CallOperands<'_, T>) -> Result<()>,
    ) -> Result<()> {
        if self.plan_cache.get(plan).reads_input() {
            let own = layout.of_rank(self.rank.index());
            return run(self, CallOperands::in_parts(output, &own).with_input(input, layout));
        }
        let mut memory = std::mem::take(&mut self.copy);
        let copied = reserve(&mut memory, input.len(), &mut *self.transport)?;
        copy(input, copied);
        let done = run(self, CallOperands::in_parts(&mut *copied, layout));
        let done = done.map(|()| copy(&copied[layout.range(self.rank.index())], output));
        self.copy = memory;
        done
    }

    /// Reduces parts in place. Returns this rank's part of the buffer, which holds the result.
    pub(crate) fn reduce_scatter_in_place<'a, T: Element>(
        &mut self,
        buffer: impl Into<CallBuffer<'a, T>>,
        op: ReduceOp,
        options: &CallOptions<'_>,
    ) -> Result<&'a mut [T]> {
        let mut buffer = buffer.into();
        let part = self.check_divisible(Operation::ReduceScatter, buffer.elements().len())?;
        Self::check_op::<T>(op)?;
        let layout = &RankLayout::even(part, self.world_size());
        let Some(widening) = widening::<T>(op) else {
            return self.reduce_scatter_in(buffer, layout, op, options);
        };
        let ownership = buffer.ownership();
        let mut wide = self.widened(widening, buffer.elements(), ownership)?;
        let range = layout.range(self.rank.index());
        let own = &mut buffer.into_elements()[range.clone()];
        let done = self.reduce_scatter_in(wide.buffer(), layout, op, &options.in_place_of::<T>());
        let done = done.map(|_| range.start);
        self.narrowed(widening, wide, done, own)?;
        Ok(own)
    }

    /// Reduces parts in place, in their own element type. Returns this rank's part of the buffer, which holds the
    /// result.
    fn reduce_scatter_in<'a, T: Element>(
        &mut self,
        buffer: CallBuffer<'a, T>,
        layout: &RankLayout,
        op: ReduceOp,
        options: &CallOptions<'_>,
    ) -> Result<&'a mut [T]> {
        let collective = Collective::Direct(DirectCollective::ReduceScatter { of: Source::Buffer });
        let key = CallKey::in_parts::<T>(collective, layout, options).on(buffer.ownership());
        let plan = self.compile_in_parts::<T>(&key.reducing::<T>(op, options), layout, options)?;
        let buffer = buffer.into_elements();
        self.execute(plan, CallOperands::in_parts(&mut *buffer, layout), op, options)?;
        Ok(&mut buffer[layout.range(self.rank.index())])
    }

    pub(crate) fn scan<T: Element>(
        &mut self,
        buffer: &mut [T],
        op: ReduceOp,
        extent: Extent,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        if matches!(op, ReduceOp::Mean | ReduceOp::WeightedMean(_)) {
            return Err(Error::NoScan { op: op.kind() });
        }
        Self::check_op::<T>(op)?;
        let key =
            CallKey::of::<T>(Collective::Scan(extent), buffer.len(), size_of_val(buffer), options.sizes);
        let plan = self.compile(&key.reducing::<T>(op, options), |_| 0, options)?;
        self.execute(plan, CallOperands::of(&mut *buffer), op, options)?;
        if extent == Extent::Exclusive && self.rank.index() == 0 {
            buffer.fill(identity(op));
        }
        Ok(())
    }
}

/// Returns how many bytes an operation's algorithm processes at a time. It is the whole buffer, except for an
/// all_reduce on one host. There a round costs little, and a block is sent, reduced and received again while it is
/// in the cache.
/// `on_one_host` is the number of ranks if all run on one host.
pub(crate) fn bytes_at_once(operation: Operation, bytes: usize, on_one_host: Option<usize>) -> usize {
    match (operation, on_one_host) {
        (Operation::AllReduce, Some(ranks)) => bytes.min(BLOCK_BYTES_OF_RANK * ranks),
        _ => bytes,
    }
}

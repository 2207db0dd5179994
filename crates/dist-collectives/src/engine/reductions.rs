//! Operations that combine elements of different ranks.

use dist_algos::Source;
use dist_algos::direct::{DirectCollective, Ownership};
use dist_algos::scan::Extent;
use dist_transport::LazyDeadline;

use super::arithmetic::{Arithmetic, identity};
use super::direct::{Input, ReductionBuffer};
use super::plan_cache::{CallKey, Collective, CompiledSchedule, ProgramKind};
use super::rank_layout::RankLayout;
use super::wide::widening;
use super::{CallOptions, Engine, copy, from_input, in_place, partition, room};
use crate::{Element, Error, Operation, ReduceOp, Result};

/// Bytes per rank of the blocks in which the ranks of one host reduce. Two ranks over TCP reduced 128 MiB fastest
/// in blocks of 1 MiB, and 16 MiB in blocks of 1 and 2 MiB. Four ranks were fastest with 1 and 2 MiB.
pub const BLOCK_BYTES_OF_RANK: usize = 512 << 10;

impl Engine {
    pub(crate) fn all_reduce<'a, T: Element>(
        &mut self,
        held: impl Into<ReductionBuffer<'a, T>>,
        op: ReduceOp,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        Self::check_op::<T>(op)?;
        let mut held = held.into();
        if let Some(widening) = widening::<T>(op) {
            let [ownership, _] = held.ownership();
            let mut wide = self.widened(widening, held.elements(), ownership)?;
            let done = self.all_reduce(wide.held(), op, &options.in_place_of::<T>());
            if done.is_ok() {
                (widening.narrow)(wide.elements(), held.elements());
            }
            self.wide.keep(wide);
            return done;
        }
        let (len, collective) = (held.len(), Collective::Direct(DirectCollective::AllReduce));
        let key = CallKey::of::<T>(collective, len, len * size_of::<T>(), options.sizes).on(held.ownership());
        let key = key.reducing::<T>(op, options);
        let largest = |parts| partition::<T>(len, parts).chunk_bytes_max();
        let program = self.begin_collective(&key, largest, options)?;
        let arithmetic = self.arithmetic::<T>(op, options)?;
        match program {
            ProgramKind::Direct { .. } => self.reduce_held(held, &arithmetic, &options.due),
            ProgramKind::Messages { chunks } => {
                self.reduce_by_messages(held.elements(), chunks, &arithmetic, &options.due)
            }
        }
    }

    fn reduce_by_messages<T: Element>(
        &mut self,
        buffer: &mut [T],
        chunks: usize,
        arithmetic: &Arithmetic,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        arithmetic.prepare(buffer);
        let at_once = self.bytes_at_once(Operation::AllReduce, size_of_val(buffer)) / size_of::<T>();
        let mut rest = buffer;
        loop {
            // Messages are sent even if there are no elements.
            let (block, later) = rest.split_at_mut(rest.len().min(at_once.max(1)));
            self.reduce_block(block, chunks, arithmetic, due)?;
            if later.is_empty() {
                return Ok(());
            }
            rest = later;
        }
    }

    fn reduce_block<T: Element>(
        &mut self,
        block: &mut [T],
        chunks: usize,
        arithmetic: &Arithmetic,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let partition = partition::<T>(block.len(), chunks);
        let combine = &mut arithmetic.combine::<T>();
        if !arithmetic.finishes() {
            return self.run_phase(CompiledSchedule::all, in_place(block, partition), combine, due);
        }
        self.run(in_place(block, partition), combine, due)?;
        for chunk in self.plan_cache.current().schedule().owned.indices() {
            let bytes = partition.range(chunk);
            arithmetic.finish(&mut block[bytes.start / size_of::<T>()..bytes.end / size_of::<T>()]);
        }
        self.run_phase(CompiledSchedule::gather, in_place(block, partition), combine, due)
    }

    /// Returns how many bytes an operation's algorithm processes at once. This is the whole buffer, except for an
    /// all_reduce of ranks that all run on one host. There rounds cost little, and a block is sent, reduced and
    /// received again while it is in the cache.
    pub(crate) fn bytes_at_once(&self, operation: Operation, bytes: usize) -> usize {
        match operation {
            Operation::AllReduce if self.on_one_host => bytes.min(BLOCK_BYTES_OF_RANK * self.world_size()),
            _ => bytes,
        }
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
            if done.is_ok() && self.rank.index() == root {
                (widening.narrow)(wide.elements(), buffer);
            }
            self.wide.keep(wide);
            return done;
        }
        let collective = Collective::Direct(DirectCollective::Reduce { root });
        let key = CallKey::of::<T>(collective, buffer.len(), size_of_val(buffer), options.sizes);
        let key = key.reducing::<T>(op, options);
        let largest = |parts| partition::<T>(buffer.len(), parts).chunk_bytes_max();
        let program = self.begin_collective(&key, largest, options)?;
        let arithmetic = self.arithmetic::<T>(op, options)?;
        arithmetic.prepare(buffer);
        match program {
            ProgramKind::Direct { parts } => {
                let partition = partition::<T>(buffer.len(), parts);
                self.run_directly((buffer, partition), None, &arithmetic, &options.due)
            }
            ProgramKind::Messages { chunks } => {
                let partition = partition::<T>(buffer.len(), chunks);
                self.run(in_place(buffer, partition), &mut arithmetic.combine::<T>(), &options.due)?;
                if self.rank.index() == root {
                    arithmetic.finish(buffer);
                }
                Ok(())
            }
        }
    }

    pub(crate) fn reduce_scatter<T: Element>(
        &mut self,
        input: Input<'_, T>,
        counts: Option<&[usize]>,
        output: &mut [T],
        op: ReduceOp,
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let (operation, whole) = (Operation::ReduceScatter, Some(("input", input.len())));
        let layout = &self.layout(operation, counts, ("output", output.len()), whole)?;
        Self::check_op::<T>(op)?;
        if let Some(widening) = widening::<T>(op) {
            let [ownership, _] = input.ownership();
            let mut wide = self.widened(widening, input.elements(), ownership)?;
            let options = &options.in_place_of::<T>();
            let done = self.reduce_scatter_held(wide.held(), layout, op, options);
            let done = done.map(|part| (widening.narrow)(part, output));
            self.wide.keep(wide);
            return done;
        }
        // Elements that are scaled first are copied, since the input must not change.
        let scales = matches!(op, ReduceOp::PreMulSum(_) | ReduceOp::WeightedMean(_));
        let (of, ownership) = match scales {
            true => (Source::Buffer, [Ownership::Borrowed; 2]),
            false => (Source::Input, input.ownership()),
        };
        let collective = Collective::Direct(DirectCollective::ReduceScatter { of });
        let program = self.begin_with_layout::<T>(collective, Some(op), ownership, layout, options)?;
        let input = input.elements();
        let arithmetic = self.arithmetic::<T>(op, options)?;
        let own = self.rank.index();
        let part = layout.of(own..own + 1);
        let (part, whole) = (part.partition::<T>(), layout.partition::<T>());
        match program {
            ProgramKind::Direct { .. } if !scales => {
                let input = Some((input, whole));
                return self.run_directly((output, part), input, &arithmetic, &options.due);
            }
            ProgramKind::Messages { .. } if self.plan_cache.current().schedule().of == Source::Input => {
                copy(&input[layout.range(own)], output);
                let memory = from_input((input, whole), (&mut *output, part));
                self.run(memory, &mut arithmetic.combine::<T>(), &options.due)?;
                arithmetic.finish(output);
                return Ok(());
            }
            _ => {}
        }
        let mut memory = std::mem::take(&mut self.copy);
        let worked_on = room(&mut memory, input.len(), &mut *self.transport)?;
        copy(input, worked_on);
        let done = self
            .reduce_scatter_in(program, layout, worked_on, &arithmetic, options)
            .map(|part| copy(part, output));
        self.copy = memory;
        done
    }

    /// Returns this rank's part of the buffer, which holds the result.
    pub(crate) fn reduce_scatter_in_place<'a, T: Element>(
        &mut self,
        held: impl Into<ReductionBuffer<'a, T>>,
        op: ReduceOp,
        options: &CallOptions<'_>,
    ) -> Result<&'a mut [T]> {
        let held = held.into();
        let part = self.check_divisible(Operation::ReduceScatter, held.len())?;
        Self::check_op::<T>(op)?;
        let layout = &RankLayout::even(part, self.world_size());
        let Some(widening) = widening::<T>(op) else {
            return self.reduce_scatter_held(held, layout, op, options);
        };
        let (buffer, [ownership, _]) = held.into_parts();
        let mut wide = self.widened(widening, buffer, ownership)?;
        let own = &mut buffer[layout.range(self.rank.index())];
        let done = self.reduce_scatter_held(wide.held(), layout, op, &options.in_place_of::<T>());
        let done = done.map(|part| (widening.narrow)(part, own));
        self.wide.keep(wide);
        done.map(|()| own)
    }

    /// Returns this rank's part of the memory, which holds the result.
    fn reduce_scatter_held<'a, T: Element>(
        &mut self,
        held: ReductionBuffer<'a, T>,
        layout: &RankLayout,
        op: ReduceOp,
        options: &CallOptions<'_>,
    ) -> Result<&'a mut [T]> {
        let (buffer, ownership) = held.into_parts();
        let collective = Collective::Direct(DirectCollective::ReduceScatter { of: Source::Buffer });
        let program = self.begin_with_layout::<T>(collective, Some(op), ownership, layout, options)?;
        let arithmetic = self.arithmetic::<T>(op, options)?;
        self.reduce_scatter_in(program, layout, buffer, &arithmetic, options)
    }

    fn reduce_scatter_in<'a, T: Element>(
        &mut self,
        program: ProgramKind,
        layout: &RankLayout,
        buffer: &'a mut [T],
        arithmetic: &Arithmetic,
        options: &CallOptions<'_>,
    ) -> Result<&'a mut [T]> {
        arithmetic.prepare(buffer);
        let own = layout.range(self.rank.index());
        let partition = layout.partition::<T>();
        match program {
            ProgramKind::Direct { .. } => {
                self.run_directly((&mut *buffer, partition), None, arithmetic, &options.due)?;
                Ok(&mut buffer[own])
            }
            ProgramKind::Messages { .. } => {
                self.run(in_place(buffer, partition), &mut arithmetic.combine::<T>(), &options.due)?;
                let own = &mut buffer[own];
                arithmetic.finish(own);
                Ok(own)
            }
        }
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
        let key = CallKey {
            op: Some(op.kind()),
            ..CallKey::of::<T>(Collective::Scan(extent), buffer.len(), size_of_val(buffer), options.sizes)
        };
        let chunks = self.begin_by_messages(&key, options)?;
        let arithmetic = self.arithmetic::<T>(op, options)?;
        arithmetic.prepare(buffer);
        let partition = partition::<T>(buffer.len(), chunks);
        self.run(in_place(buffer, partition), &mut arithmetic.combine::<T>(), &options.due)?;
        if extent == Extent::Exclusive && self.rank.index() == 0 {
            buffer.fill(identity(op));
        }
        Ok(())
    }
}

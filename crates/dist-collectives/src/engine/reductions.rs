//! Operations that combine elements of different ranks.

use std::ops::Range;

use dist_algos::direct::Task;
use dist_algos::scan::Extent;
use dist_algos::{Memory, Source, Step};

use super::arithmetic::identity;
use super::direct::{Held, Job};
use super::shares::Shares;
use super::{Engine, Manner, partition, room};
use crate::two_level::Chosen;
use crate::{AllReduce, Call, Element, Error, Operation, Reduce, ReduceOp, ReduceScatter, Result, Scan};

/// Bytes of each rank's part of what ranks of one host reduce at once. Two ranks over TCP reduced 128 MiB fastest by blocks
/// of 1 MiB, 16 MiB by 1 and 2; four ranks by 1 and 2 MiB.
pub const BLOCK_BYTES_OF_RANK: usize = 512 << 10;

impl Engine {
    pub(crate) fn all_reduce<'a, T: Element>(
        &mut self,
        held: impl Into<Held<'a, T>>,
        op: ReduceOp,
        manner: &Manner<'_>,
    ) -> Result<()> {
        Self::check_op::<T>(op)?;
        let world_size = self.world_size();
        let mut held = held.into();
        let (len, [ownership, here]) = (held.len(), held.ownership());
        let job = Job {
            op: Some(op.kind()),
            ownership,
            here,
            ..Job::of::<T>(Task::AllReduce, len, len * size_of::<T>(), manner.sizes)
        };
        let largest = |parts| partition::<T>(len, parts).chunk_bytes_max();
        if self.begin_directly::<AllReduce>(&job, largest, manner)?.is_some() {
            let arithmetic = self.arithmetic::<T>(Self::current_call, op, manner)?;
            return self.reduce_held(held, &arithmetic, &manner.due);
        }
        let buffer = held.elements();
        let at_once = self.bytes_at_once(Operation::AllReduce, size_of_val(buffer));
        let algorithm = self.choose::<AllReduce>(at_once, manner)?;
        let call = self.chosen::<T, _>(&algorithm, buffer.len(), manner);
        let call = self.begin(Self::reducing(call, op, manner));
        let arithmetic = self.arithmetic::<T>(|_| call, op, manner)?;
        arithmetic.prepare(buffer);
        for block in blocks(buffer.len(), at_once / size_of::<T>()) {
            let block = &mut buffer[block];
            let partition = partition::<T>(block.len(), algorithm.chunks(world_size));
            // Large, so they are lent and not moved.
            let (mut reduce, owned, mut gather) = algorithm.phases(self.rank());
            let combine = &mut arithmetic.combine::<T>();
            self.run(&call, &mut reduce, block, partition, combine, manner.deadline())?;
            for chunk in owned.indices() {
                let bytes = partition.range(chunk);
                arithmetic.finish(&mut block[bytes.start / size_of::<T>()..bytes.end / size_of::<T>()]);
            }
            self.run(&call, &mut gather, block, partition, combine, manner.deadline())?;
        }
        Ok(())
    }

    /// How many bytes of a buffer an operation's algorithm is run on at once, again and again: all of them, but in an
    /// all_reduce of ranks that all run on one host. There rounds cost little, and a block is sent, reduced and received
    /// again while caches hold it.
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
        manner: &Manner<'_>,
    ) -> Result<()> {
        self.check_root(Operation::Reduce, root)?;
        Self::check_op::<T>(op)?;
        let world_size = self.world_size();
        let job = Job {
            op: Some(op.kind()),
            ..Job::of::<T>(Task::Reduce { root }, buffer.len(), size_of_val(buffer), manner.sizes)
        };
        let largest = |parts| partition::<T>(buffer.len(), parts).chunk_bytes_max();
        if let Some(parts) = self.begin_directly::<Reduce>(&job, largest, manner)? {
            let arithmetic = self.arithmetic::<T>(Self::current_call, op, manner)?;
            arithmetic.prepare(buffer);
            let cut = partition::<T>(buffer.len(), parts);
            return self.run_directly((buffer, cut), None, Some(&arithmetic), &manner.due);
        }
        let algorithm = self.choose::<Reduce>(size_of_val(buffer), manner)?;
        let call = self.chosen::<T, _>(&algorithm, buffer.len(), manner);
        let call = self.begin(Call { root: Some(self.code(root)), ..Self::reducing(call, op, manner) });
        let arithmetic = self.arithmetic::<T>(|_| call, op, manner)?;
        arithmetic.prepare(buffer);
        let partition = partition::<T>(buffer.len(), algorithm.chunks(world_size));
        let rank = self.rank();
        let schedule = algorithm.steps(rank, root);
        self.run(&call, schedule, buffer, partition, &mut arithmetic.combine::<T>(), manner.deadline())?;
        if self.rank().index() == root {
            arithmetic.finish(buffer);
        }
        Ok(())
    }

    pub(crate) fn reduce_scatter<T: Element>(
        &mut self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
        manner: &Manner<'_>,
    ) -> Result<()> {
        self.check_parts(Operation::ReduceScatter, input.len(), output.len())?;
        self.reduce_scatter_shares(input, &Shares::even(output.len(), self.world_size()), output, op, manner)
    }

    pub(crate) fn reduce_scatter_v<T: Element>(
        &mut self,
        input: &[T],
        counts: &[usize],
        output: &mut [T],
        op: ReduceOp,
        manner: &Manner<'_>,
    ) -> Result<()> {
        let operation = Operation::ReduceScatter;
        let shares = Shares::counted(operation, counts, self.world_size())?;
        Self::check_length(operation, "input", shares.total(), input.len())?;
        Self::check_length(operation, "output", counts[self.rank().index()], output.len())?;
        self.reduce_scatter_shares(input, &shares, output, op, manner)
    }

    /// The own part of the buffer, which has the result.
    pub(crate) fn reduce_scatter_in_place<'a, T: Element>(
        &mut self,
        buffer: &'a mut [T],
        op: ReduceOp,
        manner: &Manner<'_>,
    ) -> Result<&'a mut [T]> {
        let part = self.check_divisible(Operation::ReduceScatter, buffer.len())?;
        self.reduce_scatter_in(&Shares::even(part, self.world_size()), buffer, op, manner)
    }

    fn reduce_scatter_shares<T: Element>(
        &mut self,
        input: &[T],
        shares: &Shares,
        output: &mut [T],
        op: ReduceOp,
        manner: &Manner<'_>,
    ) -> Result<()> {
        Self::check_op::<T>(op)?;
        // What has to be scaled first is copied, since the input stays as it is.
        let scales = matches!(op, ReduceOp::PreMulSum(_) | ReduceOp::WeightedMean(_));
        if !scales && self.begin_scatter::<T>(Source::Input, shares, op, manner)? {
            let arithmetic = self.arithmetic::<T>(Self::current_call, op, manner)?;
            let own = self.rank().index();
            let (part, whole) = (shares.of(own..own + 1), shares.partition::<T>());
            let (output, input) = ((output, part.partition::<T>()), Some((input, whole)));
            return self.run_directly(output, input, Some(&arithmetic), &manner.due);
        }
        if !scales && let Some(algorithm) = self.sends_no_sums(size_of_val(input), manner)? {
            return self.reduce_scatter_from(&algorithm, (input, shares), output, op, manner);
        }
        let mut memory = std::mem::take(&mut self.copy);
        let copy = room(&mut memory, input.len(), &mut *self.transport)?;
        copy.copy_from_slice(input);
        let done = self.reduce_scatter_in(shares, copy, op, manner).map(|part| output.copy_from_slice(part));
        self.copy = memory;
        done
    }

    /// The algorithm, if it works without a copy of the input.
    fn sends_no_sums(&mut self, bytes: usize, manner: &Manner<'_>) -> Result<Option<Chosen<ReduceScatter>>> {
        let (world_size, algorithm) = (self.world_size(), self.choose::<ReduceScatter>(bytes, manner)?);
        let serves = matches!(&algorithm, Chosen::Flat(flat) if flat.sends_no_sums(world_size));
        Ok(serves.then_some(algorithm))
    }

    /// Sends from the input, and reduces into the output.
    fn reduce_scatter_from<T: Element>(
        &mut self,
        algorithm: &Chosen<ReduceScatter>,
        (input, shares): (&[T], &Shares),
        output: &mut [T],
        op: ReduceOp,
        manner: &Manner<'_>,
    ) -> Result<()> {
        let call = self.begin(Self::reducing(self.shared::<T, _>(algorithm, shares, manner), op, manner));
        let arithmetic = self.arithmetic::<T>(|_| call, op, manner)?;
        let (rank, own) = (self.rank(), self.rank().index());
        output.copy_from_slice(&input[shares.range(own)]);
        let part = shares.of(own..own + 1);
        let memory = Memory {
            buffer: bytemuck::cast_slice_mut(output),
            cut: part.partition::<T>(),
            input: Some((bytemuck::cast_slice(input), shares.partition::<T>())),
        };
        let steps = algorithm.steps(rank, own).map(Step::from_input);
        self.run_in(&call, steps, memory, &mut arithmetic.combine::<T>(), manner.deadline())?;
        arithmetic.finish(output);
        Ok(())
    }

    fn reduce_scatter_in<'a, T: Element>(
        &mut self,
        shares: &Shares,
        buffer: &'a mut [T],
        op: ReduceOp,
        manner: &Manner<'_>,
    ) -> Result<&'a mut [T]> {
        Self::check_op::<T>(op)?;
        let rank = self.rank();
        if self.begin_scatter::<T>(Source::Buffer, shares, op, manner)? {
            let arithmetic = self.arithmetic::<T>(Self::current_call, op, manner)?;
            arithmetic.prepare(buffer);
            let memory = (&mut *buffer, shares.partition::<T>());
            self.run_directly(memory, None, Some(&arithmetic), &manner.due)?;
            return Ok(&mut buffer[shares.range(rank.index())]);
        }
        let algorithm = self.choose::<ReduceScatter>(size_of_val(buffer), manner)?;
        let schedule = algorithm.steps(rank, rank.index());
        let call = Self::reducing(self.shared::<T, _>(&algorithm, shares, manner), op, manner);
        let call = self.begin(call);
        let arithmetic = self.arithmetic::<T>(|_| call, op, manner)?;
        arithmetic.prepare(buffer);
        let combine = &mut arithmetic.combine::<T>();
        self.run(&call, schedule, buffer, shares.partition::<T>(), combine, manner.deadline())?;
        let own = &mut buffer[shares.range(rank.index())];
        arithmetic.finish(own);
        Ok(own)
    }

    /// Begins a reduce_scatter that is done directly; not, if it is done by messages.
    fn begin_scatter<T: Element>(
        &mut self,
        of: Source,
        shares: &Shares,
        op: ReduceOp,
        manner: &Manner<'_>,
    ) -> Result<bool> {
        let job = Job {
            op: Some(op.kind()),
            ..Job::of::<T>(
                Task::ReduceScatter { of },
                shares.count(),
                shares.total().saturating_mul(size_of::<T>()),
                shares.digest(manner.sizes),
            )
        };
        let largest = |_| shares.partition::<T>().chunk_bytes_max();
        Ok(self.begin_directly::<ReduceScatter>(&job, largest, manner)?.is_some())
    }

    pub(crate) fn scan<T: Element>(
        &mut self,
        buffer: &mut [T],
        op: ReduceOp,
        extent: Extent,
        manner: &Manner<'_>,
    ) -> Result<()> {
        if matches!(op, ReduceOp::Mean | ReduceOp::WeightedMean(_)) {
            return Err(Error::NoScan { op: op.kind() });
        }
        Self::check_op::<T>(op)?;
        let rank = self.rank();
        let algorithm = self.choose::<Scan>(size_of_val(buffer), manner)?;
        let operation = match extent {
            Extent::Inclusive => Operation::Scan,
            Extent::Exclusive => Operation::ExclusiveScan,
        };
        let call = self.chosen::<T, _>(&algorithm, buffer.len(), manner);
        let call = self.begin(Call { operation, ..Self::reducing(call, op, manner) });
        let algorithm = algorithm.flat();
        let arithmetic = self.arithmetic::<T>(|_| call, op, manner)?;
        arithmetic.prepare(buffer);
        let partition = partition::<T>(buffer.len(), algorithm.chunks(rank.world_size()));
        let combine = &mut arithmetic.combine::<T>();
        self.run(&call, algorithm.schedule(rank, extent), buffer, partition, combine, manner.deadline())?;
        if extent == Extent::Exclusive && rank.index() == 0 {
            buffer.fill(identity(op));
        }
        Ok(())
    }
}

/// So many elements in blocks of so many, at least one of them.
fn blocks(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let most = most.max(1);
    let blocks = len.div_ceil(most).max(1);
    (0..blocks).map(move |block| block * most..len.min((block + 1) * most))
}
